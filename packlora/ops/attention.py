"""Causal attention over packed samples, each isolated from the others; no mask of size T x T exists.

Two paths, chosen by what is given:

- varlen: one call of torch's flash attention over all samples, which are told apart by where they begin. For bfloat16 and
  float16 on a GPU, without a softcap. Its backward is deterministic under torch.use_deterministic_algorithms(True).
- by sample: each sample computed apart, so that its numbers are those it has alone, to the bit, and nothing of one sample,
  not even a NaN, can reach another. Everything else, and the whole CPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch built without it
    varlen_attn = None  # type: ignore[assignment]

VARLEN_HEAD = 256
"""Largest head dimension of flash attention; it must be a multiple of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleStarts:
    """Samples whose boundaries are on the device alone, for CUDA graphs. Only the varlen path takes them.

    starts: int32 [most + 1], where each sample begins, then T for all that are left. longest: no sample has more tokens.
    """

    starts: torch.Tensor
    longest: int


def packed_attention(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    lengths: Sequence[int] | SampleStarts,
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
        ValueError: the lengths do not add up to T; they are on the device, and this is not for the varlen path.
    """
    T = q_HTD.shape[1]
    if isinstance(lengths, SampleStarts):
        if not uses_varlen(q_HTD, v_hTD, window, softcap):
            raise ValueError(
                "attention is computed sample by sample here, and where samples begin is on the device alone"
            )
        return _varlen(
            q_HTD, k_hTD, v_hTD, lengths, scale, None if window is None or window >= lengths.longest else window
        )
    if sum(lengths) != T:
        raise ValueError(f"samples of {sum(lengths)} tokens in all, but {T} tokens were given")
    if window is not None and window >= max(lengths):
        window = None
    if uses_varlen(q_HTD, v_hTD, window, softcap):
        starts = SampleStarts(boundaries(tuple(lengths), q_HTD.device), max(lengths))
        return _varlen(q_HTD, k_hTD, v_hTD, starts, scale, window)
    return _by_sample(q_HTD, k_hTD, v_hTD, lengths, scale, window, softcap)


# --- one call for all samples ------------------------------------------------------------------------------------------


def uses_varlen(q_HTD: torch.Tensor, v_hTD: torch.Tensor, window: int | None, softcap: float | None) -> bool:
    """Whether packed_attention makes one call for all samples, or one for each."""
    D = q_HTD.shape[-1]
    return (
        q_HTD.is_cuda
        and softcap is None
        and D % 8 == 0
        and D <= VARLEN_HEAD
        and v_hTD.shape[-1] == D
        and (window is None or "window_size" in _varlen_arguments())
        and _varlen_takes(q_HTD.device, q_HTD.dtype, 1)
    )


def _varlen(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    samples: SampleStarts,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    groups = q_HTD.shape[0] // k_hTD.shape[0]
    if groups > 1 and not _varlen_takes(q_HTD.device, q_HTD.dtype, groups):
        k_hTD, v_hTD = k_hTD.repeat_interleave(groups, 0), v_hTD.repeat_interleave(groups, 0)
    q_THD, k_ThD, v_ThD = (_rows(tensor) for tensor in (q_HTD, k_hTD, v_hTD))
    return _call_varlen(q_THD, k_ThD, v_ThD, samples.starts, samples.longest, scale, window)


def _rows(tensor_HTD: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as flash attention reads it: in place, unless the last dimension is not contiguous."""
    tensor_THD = tensor_HTD.transpose(0, 1)
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()


def _call_varlen(
    q_THD: torch.Tensor,
    k_ThD: torch.Tensor,
    v_ThD: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    known, more = _varlen_arguments(), dict[str, Any]()
    if "window_size" in known:
        more["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        more["is_causal"] = True
    if "enable_gqa" in known and q_THD.shape[1] != k_ThD.shape[1]:
        more["enable_gqa"] = True
    out_THD = varlen_attn(q_THD, k_ThD, v_ThD, starts, starts, longest, longest, scale=scale, **more)
    assert isinstance(out_THD, torch.Tensor)
    return out_THD


@functools.cache
def _varlen_arguments() -> frozenset[str]:
    """torch 2.11 names causality is_causal or window_size, depending on the build, and knows no enable_gqa."""
    return frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else frozenset()


@functools.cache
def _varlen_takes(device: torch.device, dtype: torch.dtype, groups: int) -> bool:
    """Whether flash attention works here, with `groups` queries to a key: tried once, forward and backward, against
    attention by sample. Old GPUs have no flash attention, and old versions of torch do not say whether they group."""
    if dtype not in (torch.bfloat16, torch.float16) or "scale" not in _varlen_arguments():
        return False
    lengths = (5, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v = (
            torch.randn(heads, sum(lengths), 16, generator=generator).to(device, dtype).requires_grad_()
            for heads in (2 * groups, 2, 2)
        )
        want = _by_sample(q, k, v, lengths, 0.25, None, None)
        try:
            starts = boundaries(lengths, device)
            got = _call_varlen(_rows(q), _rows(k), _rows(v), starts, max(lengths), 0.25, None)
            pairs = zip(
                (got, *torch.autograd.grad(got.float().square().sum(), (q, k, v))),
                (want, *torch.autograd.grad(want.float().square().sum(), (q, k, v))),
                strict=True,
            )
            return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs)
        except (RuntimeError, TypeError, ValueError):
            return False


@functools.lru_cache(maxsize=16)
def boundaries(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where each sample begins, and T: int32 [samples + 1]. Made once per microbatch, for all layers and for backward."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    with torch.inference_mode(False):
        return torch.tensor(starts, dtype=torch.int32).to(device)


# --- one sample after another ------------------------------------------------------------------------------------------


def _by_sample(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    groups = q_HTD.shape[0] // k_hTD.shape[0]
    if groups > 1:
        k_hTD, v_hTD = k_hTD.repeat_interleave(groups, 0), v_hTD.repeat_interleave(groups, 0)
    stacks = list(_stacks(lengths, batch=q_HTD.device.type == "cpu" and softcap is None))
    out = []
    for (length, count), *parts in zip(
        stacks,
        *(tensor.split([length * count for length, count in stacks], 1) for tensor in (q_HTD, k_hTD, v_hTD)),
        strict=True,
    ):
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)  # [count, H, length, D]
        if softcap is not None:
            y = _capped(q, k, v, scale, window, softcap)
        elif window is None or length <= window:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = visible(length, window, q.device)
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


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: which keys (columns) a query (row) sees."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return mask if window is None else mask.triu_(1 - window)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Scores written out, because no fused attention takes a softcap everywhere; softmax in float32 as the models do."""
    scores = torch.tanh(q @ k.transpose(-2, -1) * scale / softcap) * softcap
    scores = scores.masked_fill(~visible(q.shape[-2], window, q.device), float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(q.dtype) @ v
