"""Causal attention over packed samples, each isolated from the others by being computed apart.

No mask of size T x T exists, so a sample's numbers are those it has alone, to the bit, and nothing of one sample, not
even a NaN, can reach another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def packed_attention(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of each sample to itself.

    Args:
        q_HTD: queries [H, T, D], positions already encoded.
        k_hTD, v_hTD: keys and values [h, T, D], h dividing H (grouped-query attention).
        lengths: tokens of each sample, in order; they add up to T.
        scale: of the scores, before softcap.
        window: a token sees itself and the window - 1 tokens before it; None sees all before it.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.

    Returns:
        [T, H, D]

    Raises:
        ValueError: the lengths do not add up to T.
    """
    H, T, _ = q_HTD.shape
    if sum(lengths) != T:
        raise ValueError(f"samples of {sum(lengths)} tokens in all, but {T} tokens were given")
    groups = H // k_hTD.shape[0]
    if groups > 1:
        k_hTD, v_hTD = k_hTD.repeat_interleave(groups, 0), v_hTD.repeat_interleave(groups, 0)
    out = []
    for q, k, v in zip(*(tensor.split(list(lengths), 1) for tensor in (q_HTD, k_hTD, v_hTD)), strict=True):
        length = q.shape[1]
        if softcap is not None:
            out.append(_capped(q, k, v, scale, window, softcap))
        elif window is None or length <= window:
            out.append(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0])
        else:
            mask = visible(length, window, q.device)
            out.append(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0])
    return torch.cat(out, 1).transpose(0, 1)


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: which keys (columns) a query (row) sees."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return mask if window is None else mask.triu_(1 - window)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Scores written out, because no fused attention takes a softcap everywhere; softmax in float32 as the models do."""
    scores = torch.tanh(q @ k.transpose(1, 2) * scale / softcap) * softcap
    scores = scores.masked_fill(~visible(q.shape[1], window, q.device), float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v
