"""Causal attention over packed samples, each isolated from the others; no mask of size T x T exists.

Two paths, chosen by what is given:

- kernels: one call for all samples, which are told apart by where they begin and end. For bfloat16 and float16 on a GPU. Its
  sums have one order, so its bits are the same every time.
- by sample: each sample computed apart. Everything else, and the whole CPU.

On both, the numbers of a sample are those it has alone, to the bit, and nothing of one sample, not even a NaN, can reach
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from packlora.ops.attention.blocks import SampleBlocks, blocks_of
from packlora.ops.attention.by_sample import by_sample
from packlora.ops.first_order import first_order
from packlora.ops.gpu import why_no_kernels

WIDEST = 256
"""Largest head dimension of the kernels."""


def packed_attention(
    q_HTD: torch.Tensor,
    k_hTD: torch.Tensor,
    v_hTD: torch.Tensor,
    samples: Sequence[int] | SampleBlocks,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    blocks_T: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sample to itself.

    Args:
        q_HTD: queries [H, T, D], positions already encoded.
        k_hTD, v_hTD: keys and values [h, T, D], h dividing H (grouped-query attention).
        samples: tokens of each sample, in order; they add up to T. Or their blocks, which are on the device.
        scale: of the scores, before softcap; above 0.
        window: a token sees itself and the window - 1 tokens before it; None sees all before it.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
        blocks_T: tokens with the same number, if it is not negative, see one another also where they come later (images in
            Gemma 3), within the window; not for the kernels.
        sinks_H: by head of queries a score [H] beside those of every token, of a key whose value is 0, as in GPT-OSS. They are
            frozen: no gradient goes to them.

    Returns:
        [T, H, D]

    Raises:
        ValueError: the lengths do not add up to T, or there are more keys; the scale is not above 0; the lengths are on the
            device, and this is not for the kernels.
    """
    T, kernels = q_HTD.shape[1], blocks_T is None and uses_kernels(q_HTD, v_hTD)
    if k_hTD.shape[1] != T:
        raise ValueError(f"{T} tokens are given with keys of {k_hTD.shape[1]}; packed samples see themselves alone")
    if not scale > 0:
        raise ValueError(f"attention's scores are scaled by {scale}; a scale must be above 0")
    if isinstance(samples, SampleBlocks):
        if not kernels:
            raise ValueError(
                "attention is computed sample by sample here, and where samples begin is on the device alone"
            )
        return _one_call(q_HTD, k_hTD, v_hTD, samples, scale, window, softcap, sinks_H)
    if sum(samples) != T:
        raise ValueError(f"samples of {sum(samples)} tokens in all, but {T} tokens were given")
    if window is not None and window >= max(samples):
        window = None
    if kernels:
        return _one_call(q_HTD, k_hTD, v_hTD, blocks_of(tuple(samples), q_HTD.device), scale, window, softcap, sinks_H)
    return by_sample(q_HTD, k_hTD, v_hTD, samples, scale, window, softcap, blocks_T, sinks_H)


def uses_kernels(q_HTD: torch.Tensor, v_hTD: torch.Tensor) -> bool:
    """Whether packed_attention makes one call for all samples, or one for each."""
    return (
        q_HTD.is_cuda
        and q_HTD.dtype in (torch.bfloat16, torch.float16)
        and v_hTD.shape[-1] == q_HTD.shape[-1] <= WIDEST
        and why_no_kernels(q_HTD.device) is None
    )


def _one_call(
    q_HTD: torch.Tensor, k_hTD: torch.Tensor, v_hTD: torch.Tensor, samples: SampleBlocks, scale: float, window: int | None,
    softcap: float | None, sinks_H: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    y_THD: torch.Tensor = _PackedAttention.apply(q_HTD, k_hTD, v_hTD, samples.table, scale, window, softcap, sinks_H)
    return y_THD


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_HTD: torch.Tensor, k_hTD: torch.Tensor, v_hTD: torch.Tensor, table: torch.Tensor, scale: float,
        window: int | None, softcap: float | None, sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        from packlora.ops.attention import triton_path

        y_THD, scores_HT = triton_path.forward(q_HTD, k_hTD, v_hTD, table, scale, window, softcap)
        if sinks_H is not None:  # one more score in every sum; with that sum the backward is the same
            y_THD, scores_HT = triton_path.with_sinks(y_THD, scores_HT, sinks_H)
        ctx.save_for_backward(q_HTD, k_hTD, v_hTD, y_THD, scores_HT, table)
        ctx.kind = scale, window, softcap
        return y_THD

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from packlora.ops.attention import triton_path

        q_HTD, k_hTD, v_hTD, y_THD, scores_HT, table = ctx.saved_tensors
        gradients = triton_path.backward(q_HTD, k_hTD, v_hTD, y_THD, scores_HT, table, grad_outputs[0], *ctx.kind)
        return (*gradients, None, None, None, None, None)
