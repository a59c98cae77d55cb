"""The steps of a call by the Triton kernels, around base products of the library or with them inside. kernels/ has the kernels
with their launches; everything runs on the current stream, nothing waits. torch_path.py says what the steps are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.call import Call, Dropped, Gradients, Grads, Operands, Sums, Wanted
from packlora.ops.lora_linear.frozen import accumulator_dtype
from packlora.ops.lora_linear.kernels import backward_inputs, backward_outputs, forward, gemm, scales, sizes
from packlora.ops.lora_linear.kernels.config import sizes_for
from packlora.ops.lora_linear.kernels.forward import add_dropped, down, scale_rows
from packlora.ops.lora_linear.kernels.sizes import fusable
from packlora.ops.lora_linear.tables import SegmentTables
from packlora.ops.lora_linear.torch_path import base_and_low_rank, base_dx, stacked_dA
from packlora.ops.lora_linear.types import Segment, rows_of

__all__ = ["add_dropped", "down", "fusable", "grads", "inputs", "magnitude", "scale_rows", "segment_tables", "up"]
Optional = torch.Tensor | None


def segment_tables(
    segments: Sequence[Segment], T: int, device: torch.device, dtype: torch.dtype, numbers: tuple[int, ...],
    boundaries: Boundaries = ON_HOST,
) -> SegmentTables:  # fmt: skip
    """Tables of the segments for the kernels' block sizes, shared by all groups with the same adapters."""
    known = tuple(segment for segment in segments if segment.adapter in numbers)  # others are of other layers
    config = sizes_for(dtype, device)

    def make() -> SegmentTables:
        return SegmentTables(known, T, device, config.tokens, numbers, sizes.FUSED_M, boundaries.most, config)

    found: SegmentTables = boundaries.tables((T, device, config, numbers), known, make)
    return found


def up(
    call: Call, own: Operands, x_TK: torch.Tensor, dropped: Dropped, S: Optional, index: int, keep_z: bool
) -> tuple[torch.Tensor, Optional]:
    """y [T, N] of one layer, and z."""
    plan_up, composed = call.plan_up[index], index in call.composed
    assert S is not None
    if plan_up == "fused":
        return gemm.up(call, own, x_TK, S, index, composed, keep_z)
    if plan_up == "epilogue":
        return forward.up(call, own, S, index, own.frozen[index].matmul(x_TK), composed, keep_z)
    bias_N = None if composed else own.biases[index]
    if plan_up != "routed":
        z_TN = base_and_low_rank(call, own, x_TK, S, index, bias_N)
    elif call.dtype == torch.float32:  # a product rounds more when it accumulates onto something
        z_TN = own.frozen[index].matmul(x_TK, bias_N)
        z_TN += forward.up(call, own, S, index)[0]
    else:
        dtype = call.dtype if composed else accumulator_dtype(x_TK)
        z_TN = own.frozen[index].matmul(x_TK, bias_N, accumulate=forward.up(call, own, S, index, dtype=dtype)[0])
    if not composed:
        return z_TN, None
    y_TN = torch.empty_like(z_TN) if keep_z else z_TN
    forward.compose(call, own.scales[index], z_TN, y_TN)
    return y_TN, z_TN if keep_z else None


def magnitude(
    call: Call, own: Operands, index: int, d_TN: torch.Tensor, kept: Optional, wanted: Wanted
) -> tuple[torch.Tensor, dict[int, Sums]]:
    """e = g d of one layer, and the sums by adapter."""
    e_TN, totals = scales.scale(call, d_TN, index, _scaling(call, own, index, kept, wanted))
    return e_TN, {} if totals is None else _sums(call, index, totals, wanted)


def grads(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, S: Optional, d: Gradients, kept: Gradients,
    wanted: Wanted,
) -> Grads:  # fmt: skip
    """e, dS, dB and the sums: one kernel reads d once for all, where one block of ranks covers the layer's."""
    assert S is not None and call.segment_tables is not None
    layout, most = call.layout, call.segment_tables.config.grad_r
    dS = torch.empty(call.T, layout.width, dtype=call.dtype, device=call.device)
    for d_TN in d:
        if d_TN is None:
            dS.zero_()
            break
    e, sums = list(d), [dict[int, Sums]() for _ in d]
    dB: list[Optional] = [None] * len(d)
    rooms: dict[str, torch.Tensor] = {}
    for index, d_TN in enumerate(d):
        if d_TN is None:
            continue
        scaling = _scaling(call, own, index, kept[index], wanted) if index in call.composed else None
        if scaling is not None and not 0 < layout.max_padded[index] <= most:
            d_TN, sums[index] = magnitude(call, own, index, d_TN, kept[index], wanted)
            e[index], scaling = d_TN, None
        if layout.max_padded[index]:
            e[index], dB[index], totals = backward_outputs.grad(call, own, S, dS, d_TN, index, wanted.B, scaling, rooms)
            if totals is not None:
                sums[index] = _sums(call, index, totals, wanted)
    return Grads(e, dS, dB, sums)


def inputs(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, dS: Optional, e: Gradients, d: Gradients,
    wanted: Wanted,
) -> tuple[Optional, Optional]:  # fmt: skip
    """dx [T, K], or as x, and the stacked dA [rows, K] = dS' xd."""
    if not (wanted.x or wanted.A):  # B's alone are trained, for which no dS is needed
        return None, None
    assert dS is not None
    fused = call.plan.dx == "fused" and call.fused
    for e_TN in e:
        fused = fused and (e_TN is None or not e_TN.data_ptr() % 16)
    dx, dA = None, None
    assert call.segment_tables is not None
    if not fused or call.segment_tables.dropout or call.moving:
        dx, dA = backward_inputs.inputs(call, own, x_TK, keys_T2, dS, wanted.x and not fused, wanted.A)
    elif wanted.A:
        dA = stacked_dA(call, x_TK, keys_T2, dS)
    if not wanted.x:
        return None, dA
    if not fused:
        return base_dx(own, e, dx), dA
    for index, e_TN in enumerate(e):
        if e_TN is not None and dx is None:
            dx = gemm.dx(call, own, e_TN, dS, index, keys_T2)
        elif e_TN is not None and dx is not None:
            dx = own.frozen[index].matmul_t(rows_of(e_TN), rows_of(dx))
    return dx, dA


def _scaling(call: Call, own: Operands, index: int, kept: Optional, wanted: Wanted) -> scales.Scaling:
    return scales.Scaling(
        own.scales[index], kept, index in wanted.magnitudes, index in wanted.biases, call.from_y[index]
    )


def _sums(call: Call, index: int, totals: torch.Tensor, wanted: Wanted) -> dict[int, Sums]:
    """Sums of each adapter, taken from the result of scales.scale."""
    if totals.ndim == 1:  # the sum of one magnitude; views cost the host time
        return {call.layout.numbers[0]: Sums(totals)}
    sums, rows = dict[int, Sums](), totals.unbind()
    places = {number: place for place, number in enumerate(call.layout.numbers)}
    for segment, has_magnitude, has_bias in call.composed[index]:
        at = 2 * places[segment.adapter]
        dm = rows[at] if has_magnitude and index in wanted.magnitudes else None
        sums[segment.adapter] = Sums(dm, rows[at + 1] if has_bias else None)
    return sums
