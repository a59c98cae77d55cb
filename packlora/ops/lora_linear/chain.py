"""The plain chain: the operator of reference.py by ordinary matrix products, with its own backward. Any device.

Saved for backward: x (shared with whatever else uses it), S = dropout(x) A' and, for DoRA segments alone, z, the product
that the magnitude's gradient needs. No mask, no dropped copy of x: both are recomputed from the counters.

Base-layer products run over all tokens at once; low-rank products run per segment, so nothing of one segment, not even a
NaN, can reach another, and a segment's numbers do not depend on its neighbours.

Shapes: T tokens, t tokens of a segment, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from packlora.ops.dropout import dropout
from packlora.ops.lora_linear.reference import Segment

OPERANDS = ("A", "B", "magnitude", "bias")
"""Of each segment, in the order in which they are passed to autograd."""


def lora_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    segments: Sequence[Segment],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
) -> torch.Tensor:
    """As reference.lora_linear, y [T, N] in the dtype of x. Segment operands may be of a wider dtype than x: they are
    cast to x's for the products, x is never cast, and their gradients come back in their own dtype.

    Raises:
        ValueError: an operand's shape does not fit, or segments overlap or leave the tokens.
    """
    _check(x_TK, weight_NK, segments, keys_T2)
    flat = [getattr(seg, name) for seg in segments for name in OPERANDS]
    y_TN: torch.Tensor = _Chain.apply(x_TK, weight_NK, bias_N, tuple(segments), keys_T2, salt, *flat)
    return y_TN


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        segments: tuple[Segment, ...],
        keys_T2: torch.Tensor | None,
        salt: int,
        *operands: torch.Tensor | None,
    ) -> torch.Tensor:
        y_TN = x_TK @ weight_NK.T
        saved: list[torch.Tensor | None] = []
        for seg in segments:
            rows = slice(seg.start, seg.stop)
            S_tr = z_tN = None
            if seg.A is not None and seg.B is not None:
                A_rK, B_Nr = seg.A.to(x_TK.dtype), seg.B.to(x_TK.dtype)
                xd_tK = _dropped(x_TK, seg, keys_T2, salt)
                S_tr = xd_tK @ A_rK.T
                if seg.magnitude is None:
                    y_TN[rows].addmm_(S_tr, B_Nr.T, alpha=seg.scaling)
                elif not seg.dropout:
                    z_tN = torch.addmm(y_TN[rows], S_tr, B_Nr.T, alpha=seg.scaling)
                    y_TN[rows] = _g(seg) * z_tN
                else:
                    base_tN, low_rank_tN = xd_tK @ weight_NK.T, _scaled_mm(S_tr, B_Nr.T, seg.scaling)
                    g_N = _g(seg)
                    y_TN[rows] += (g_N - 1) * base_tN + g_N * low_rank_tN
                    z_tN = base_tN.add_(low_rank_tN)
            bias = seg.bias if seg.bias is not None else bias_N
            if bias is not None:
                y_TN[rows] += bias.to(y_TN.dtype)
            saved += [S_tr, z_tN]
        for start, stop in _gaps(segments, len(x_TK)):
            if bias_N is not None:
                y_TN[start:stop] += bias_N
        ctx.save_for_backward(x_TK, weight_NK, keys_T2, *operands, *saved)
        ctx.segments, ctx.salt = [_bare(seg) for seg in segments], salt
        ctx.norms = [seg.norm for seg in segments]
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_TN,) = grad_outputs
        x_TK, weight_NK, keys_T2, *tensors = ctx.saved_tensors
        count = len(ctx.segments)
        segments = [
            Segment(
                bare.start, bare.stop, bare.scaling, bare.dropout, norm=norm,
                **dict(zip(OPERANDS, tensors[len(OPERANDS) * index : len(OPERANDS) * (index + 1)], strict=True)),
            )
            for index, (bare, norm) in enumerate(zip(ctx.segments, ctx.norms, strict=True))
        ]  # fmt: skip
        saved = tensors[len(OPERANDS) * count :]
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]

        # 1. The gradient through the base layer, for all tokens in one product. Rows of DoRA segments without dropout
        #    are scaled by g first: e = g d.
        e_TN = d_TN
        if any(seg.magnitude is not None and not seg.dropout for seg in segments):
            e_TN = d_TN.clone()
            for seg in segments:
                if seg.magnitude is not None and not seg.dropout:
                    e_TN[seg.start : seg.stop] = _g(seg) * d_TN[seg.start : seg.stop]
        dx_TK = e_TN @ weight_NK if need_x else None

        # 2. Each segment's own gradients.
        grads: list[torch.Tensor | None] = []
        for index, seg in enumerate(segments):
            rows = slice(seg.start, seg.stop)
            need_A, need_B, need_m, need_bias = need[len(OPERANDS) * index : len(OPERANDS) * (index + 1)]
            dA = dB = dm = db = None
            if seg.A is not None and seg.B is not None:
                S_tr, z_tN = saved[2 * index], saved[2 * index + 1]
                A_rK, B_Nr = seg.A.to(x_TK.dtype), seg.B.to(x_TK.dtype)
                d_tN = d_TN[rows]
                if seg.magnitude is None or not seg.dropout:
                    e_tN = e_TN[rows]
                else:
                    e_tN = (_g(seg) * d_tN).to(d_tN.dtype)
                dS_tr = _scaled_mm(e_tN, B_Nr, seg.scaling)
                if need_A:
                    dA = (dS_tr.T @ _dropped(x_TK, seg, keys_T2, ctx.salt)).to(seg.A.dtype)
                if need_B:
                    dB = _scaled_mm(e_tN.T, S_tr, seg.scaling).to(seg.B.dtype)
                if need_m and seg.magnitude is not None:
                    assert seg.norm is not None
                    dm = (d_tN.to(seg.norm.dtype) * z_tN).sum(0) / seg.norm
                if dx_TK is not None:
                    if not seg.dropout:
                        dx_TK[rows].addmm_(dS_tr, A_rK)
                    else:
                        dxd_tK = dS_tr @ A_rK
                        if seg.magnitude is not None:
                            # (g - 1) d, not e - d: near g = 1 the difference of rounded numbers would be nothing
                            dxd_tK += ((_g(seg) - 1) * d_tN).to(d_tN.dtype) @ weight_NK
                        assert keys_T2 is not None
                        dx_TK[rows] += dropout(dxd_tK, keys_T2[rows], ctx.salt, seg.dropout)
            if need_bias and seg.bias is not None:
                db = d_TN[rows].to(seg.bias.dtype).sum(0)
            grads += [dA, dB, dm, db]
        return (dx_TK, None, None, None, None, None, *grads)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a @ b, rounded once."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _g(seg: Segment) -> torch.Tensor:
    """DoRA's scale m / norm, [N], in their own (wide) dtype."""
    assert seg.magnitude is not None and seg.norm is not None
    return seg.magnitude / seg.norm


def _dropped(x_TK: torch.Tensor, seg: Segment, keys_T2: torch.Tensor | None, salt: int) -> torch.Tensor:
    x_tK = x_TK[seg.start : seg.stop]
    if not seg.dropout:
        return x_tK
    assert keys_T2 is not None
    return dropout(x_tK, keys_T2[seg.start : seg.stop], salt, seg.dropout)


def _bare(seg: Segment) -> Segment:
    """The segment without its tensors, which autograd keeps."""
    return Segment(seg.start, seg.stop, seg.scaling, seg.dropout)


def _gaps(segments: Sequence[Segment], num_tokens: int) -> list[tuple[int, int]]:
    """Runs of tokens in no segment."""
    out, end = [], 0
    for seg in sorted(segments, key=lambda seg: seg.start):
        if seg.start > end:
            out.append((end, seg.start))
        end = seg.stop
    if end < num_tokens:
        out.append((end, num_tokens))
    return out


def _check(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, segments: Sequence[Segment], keys_T2: torch.Tensor | None
) -> None:
    if x_TK.ndim != 2 or weight_NK.ndim != 2 or x_TK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"x must be [T, K] and weight [N, K]; got {tuple(x_TK.shape)} and {tuple(weight_NK.shape)}")
    (num_tokens, K), N, end = x_TK.shape, weight_NK.shape[0], 0
    for seg in sorted(segments, key=lambda seg: seg.start):
        if not end <= seg.start < seg.stop <= num_tokens:
            raise ValueError(
                f"segment {seg.start}:{seg.stop} overlaps another, is empty or leaves the {num_tokens} tokens"
            )
        end = seg.stop
        if (seg.A is None) != (seg.B is None):
            raise ValueError("A and B come together or not at all")
        rank = seg.A.shape[0] if seg.A is not None else 0
        shapes = {"A": (rank, K), "B": (N, rank), "magnitude": (N,), "norm": (N,), "bias": (N,)}
        for name, shape in shapes.items():
            operand = getattr(seg, name)
            if operand is not None and tuple(operand.shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(operand.shape)}")
        if seg.magnitude is not None and (seg.norm is None or seg.A is None):
            raise ValueError("a magnitude needs A, B and the norm of W + s B A (weight_norm)")
        if seg.dropout and (keys_T2 is None or tuple(keys_T2.shape) != (num_tokens, 2)):
            raise ValueError(
                f"dropout needs keys [{num_tokens}, 2], got {None if keys_T2 is None else tuple(keys_T2.shape)}"
            )
