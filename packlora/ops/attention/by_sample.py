"""Causal attention over packed samples, each computed apart: its numbers are those it has alone, to the bit.

For every dtype and device, with a window and with a cap on the scores. Samples of equal length that follow one another are one
batch on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F


def by_sample(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    blocks_T: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute packed_attention sample by sample, for samples of these lengths."""
    groups = q_HTD.shape[0] // k_hTD.shape[0]
    if groups > 1:
        k_hTD, v_hTD = k_hTD.repeat_interleave(groups, 0), v_hTD.repeat_interleave(groups, 0)
    stacks = list(_stacks(lengths, batch=q_HTD.device.type == "cpu" and softcap is None and blocks_T is None))
    out: list[torch.Tensor] = []
    start = 0
    for (length, count), *parts in zip(
        stacks,
        *(tensor.split([length * count for length, count in stacks], 1) for tensor in (q_HTD, k_hTD, v_hTD)),
        strict=True,
    ):
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)  # [count, H, length, D]
        own = None if blocks_T is None else blocks_T[start : start + length]
        start += length * count
        if softcap is not None:
            y = _capped(q, k, v, scale, visible(length, window, q.device, own), softcap, sinks_H)
        elif sinks_H is not None:
            y = _beside_sinks(q, k, v, scale, visible(length, window, q.device, own), sinks_H)
        elif own is None and (window is None or length <= window):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = visible(length, window, q.device, own)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def _stacks(lengths: Sequence[int], batch: bool) -> Iterator[tuple[int, int]]:
    """(length, number) of the neighbours that are computed at once: if batch, those of equal length.

    On the CPU torch's fused attention gives each sample of a batch the bits that it has alone, at half the time for
    samples of 20 tokens and 0.8 of it for 160. Batched matrix products do not, nor does a GPU.
    """
    for length, run in groupby(lengths):
        number = len(list(run))
        yield from [(length, number)] if batch else [(length, 1)] * number


def visible(
    length: int, window: int | None, device: torch.device, blocks_T: torch.Tensor | None = None
) -> torch.Tensor:
    """bool [length, length]: which keys (columns) a query (row) sees. blocks_T: see packed_attention."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if blocks_T is not None:
        mask |= (blocks_T[:, None] == blocks_T) & (blocks_T >= 0)
    return mask if window is None else mask.triu_(1 - window)


def _beside_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """Attention to one token more, whose score is the head's own and whose value is 0."""
    H, length = q.shape[1], q.shape[2]
    sinks_HL1 = sinks_H.detach().to(q.dtype)[:, None, None].expand(H, length, 1)
    scores_HLL = q.new_zeros(H, length, length).masked_fill_(~mask, float("-inf"))
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.cat([scores_HLL, sinks_HL1], -1), scale=scale)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor, softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Scores written out, because no fused attention takes a softcap everywhere; softmax in float32 as the models do."""
    scores = torch.tanh(q @ k.transpose(-2, -1) * scale / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks_H is not None:
        sinks = sinks_H.detach().to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores.to(wide), sinks], -1), -1)[..., :-1].to(q.dtype) @ v
    return torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v
