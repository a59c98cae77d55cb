"""Magnitudes and biases of a call by torch, segment by segment: y = g z + bias and its backward. The base product of dropped
inputs, which PEFT's DoRA has, is made here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from packlora.ops.dropout.keys import dropout_factor
from packlora.ops.lora_linear.call import Call, Dropped, Gradients, Launches, Operands, Part, Stack, Sums, Wanted
from packlora.ops.lora_linear.products import write_mm
from packlora.ops.lora_linear.types import Segment, drops_base, rows_of

Optional = torch.Tensor | None


def parts_with_base(call: Call, index: int) -> tuple[Part, ...]:
    """Parts of a layer whose S B' is added to the base product. That of the others g scales apart from it: the sum, rounded,
    would be scaled back."""
    parts = call.parts[index]
    if not call.base_dropped:
        return parts
    apart = {segment for segment, *has in call.composed[index] if drops_base(segment, *has)}
    return tuple(part for part in parts if part.segment not in apart)


def compose_by_segment(
    call: Call, own: Operands, dropped: Dropped, S: torch.Tensor, index: int, y_TN: torch.Tensor, keep_z: bool
) -> tuple[torch.Tensor, Optional]:
    """y of the composed segments in the place of what `torch_path.up` has in y_TN, x W' + S B' or, where the base is dropped,
    x W'; and z."""
    scales, composed = own.scales[index], call.composed[index]
    assert call.scale_rows is not None and call.add_dropped is not None
    z_TN = torch.empty_like(y_TN) if keep_z or any(drops_base(*one) for one in composed) else None
    for segment, has_magnitude, has_bias in composed:
        y_tN = segment.of(y_TN)
        g_N = scales.g_rows[segment.adapter] if has_magnitude else None
        bias_N = scales.bias_rows[segment.adapter]
        if z_TN is not None and g_N is not None and drops_base(segment, has_magnitude, has_bias):
            z_tN = segment.of(z_TN)
            (part,) = (part for part in call.parts[index] if part.segment is segment)
            write_mm(z_tN, part.of_S(S), own.block(call.layout, segment.adapter, index)[1], 1.0)
            base_tN = own.frozen[index].matmul(dropped[segment], scale=dropout_factor(segment.dropout))
            call.add_dropped(call.launches, base_tN, z_tN, y_tN, g_N, bias_N)
        else:
            if z_TN is not None:
                segment.of(z_TN).copy_(y_tN)
            call.scale_rows(call.launches, y_tN, y_tN, g_N, bias_N, 0)
    return y_TN, z_TN


def scale_rows(
    launches: Launches, z_tN: torch.Tensor, y_tN: torch.Tensor, g_N: Optional, bias_N: Optional, minus: int
) -> None:
    """See call.ScaleRows."""
    value = z_tN if g_N is None else (g_N - minus) * z_tN
    y_tN.copy_(value if bias_N is None else value + bias_N)


def add_dropped(
    launches: Launches,
    base_tN: torch.Tensor,
    low_tN: torch.Tensor,
    y_tN: torch.Tensor,
    g_N: torch.Tensor,
    bias_N: Optional,
) -> None:
    """See call.AddDropped."""
    value = y_tN + ((g_N - 1) * base_tN + g_N * low_tN)
    y_tN.copy_(value if bias_N is None else value + bias_N)
    low_tN += base_tN


def magnitude(
    call: Call, own: Operands, index: int, d_TN: torch.Tensor, kept: Optional, wanted: Wanted
) -> tuple[torch.Tensor, dict[int, Sums]]:
    """e = g d of one layer, and the sums by adapter."""
    scales, d_TN = own.scales[index], rows_of(d_TN)
    e_TN, kept = d_TN, None if kept is None else rows_of(kept)
    sums: dict[int, Sums] = {}
    for segment, has_magnitude, has_bias in call.composed[index]:
        d_tN, total = segment.of(d_TN), sums.setdefault(segment.adapter, Sums())
        wide_tN = d_tN.to(scales.g.dtype)
        if has_magnitude:
            if e_TN is d_TN:
                e_TN = d_TN.clone()
            segment.of(e_TN).copy_(scales.g_rows[segment.adapter] * wide_tN)
            if index in wanted.magnitudes:
                assert kept is not None
                total.dm = _plus(total.dm, (wide_tN * segment.of(kept)).sum(0))
        if has_bias and index in wanted.biases:
            total.d = _plus(total.d, wide_tN.sum(0))
    for number, total in sums.items():
        if total.dm is not None:
            total.dm = scales.magnitude_grad(total.dm, number, call.from_y[index])
    return e_TN, sums


def base_gradients(call: Call, e: Gradients, d: Gradients) -> Gradients:
    """Gradients that the base products of all layers take, of which some are dropped."""
    return [_base_gradient(call, index, e[index], d[index]) for index in range(len(e))]


def _base_gradient(call: Call, index: int, e_TN: Optional, d_TN: Optional) -> Optional:
    """Gradient that the base product takes for all tokens: e, but d in the rows of base-dropped segments."""
    if e_TN is None or d_TN is None or e_TN is d_TN:
        return e_TN
    d_TN = rows_of(d_TN)
    composed = call.composed.get(index, ())
    dropped = [segment for segment, *has in composed if drops_base(segment, *has)]
    if len(dropped) == len(composed):  # e is d everywhere else
        return d_TN
    out = e_TN.clone()
    for segment in dropped:
        segment.of(out).copy_(segment.of(d_TN))
    return out


def scaled_low_rank_dx(
    call: Call, own: Operands, d: Gradients, low_rank_dx: Callable[[Stack], torch.Tensor]
) -> dict[Segment, torch.Tensor]:
    """dS A [t, K] of segments with dropout, before it is dropped, to which (g - 1) d c W of every layer is added whose base
    product is dropped. Of all segments at once: each layer's weight is read once for all.

    Args:
        low_rank_dx: gives dS A of a segment.
    """
    low = {stack.segment: low_rank_dx(stack) for stack in call.stacked if stack.segment.dropout}
    _add_scaled(call, own, low, d)
    return low


def _add_scaled(call: Call, own: Operands, low: Mapping[Segment, torch.Tensor], d: Gradients) -> None:
    assert call.scale_rows is not None
    for index, composed in call.composed.items():
        d_TN = None if (own_d := d[index]) is None else rows_of(own_d)
        for segment, has_magnitude, has_bias in composed if d_TN is not None else ():
            if segment in low and drops_base(segment, has_magnitude, has_bias):
                assert d_TN is not None
                d_tN, g_N = segment.of(d_TN), own.scales[index].g_rows[segment.adapter]
                scaled_tN = torch.empty_like(d_tN)
                call.scale_rows(call.launches, d_tN, scaled_tN, g_N, None, 1)
                own.frozen[index].matmul_t(scaled_tN, low[segment], dropout_factor(segment.dropout))


def _plus(total: Optional, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total + more
