"""Steps of a call by torch's matrix products, segment by segment. Any device, any dtype; the plain chain computes every call.

    y  = x W' + S B' + bias = x (W + s B A)' + bias
    dA = dS' xd = s c B' (d' xd),    dB = d' S = s c (d' xd) A',    dS = s c d B
    dx = d W + drop(dS A) = d (W + s B A)

Which of them is formed is the plan's to say: `up`, `dx`, `dA`, `dB` of plan.Plan. A merged weight W + s B A is made where it is
used and kept by nobody; in a narrow dtype it loses what is under half an ulp of W. Two products through d' xd share that one.

Shapes: T tokens, K inputs, N outputs, r rank, R rank over all layers; xd = drop(x), e = g d.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

from packlora.ops.lora_linear.call import Call, Dropped, Gradients, Grads, Operands, Part, Stack, Sums, Wanted
from packlora.ops.lora_linear.frozen import accumulator_dtype
from packlora.ops.lora_linear.products import add_mm, by_itself, scaled_mm, sum_mm, summed_mm, write_mm
from packlora.ops.lora_linear.types import Segment, gaps, rows_of

__all__ = ["down", "grads", "inputs", "magnitude", "up"]

Optional = torch.Tensor | None


def down(call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, dropped: Dropped) -> torch.Tensor:
    """S [T, width]."""

    def drop(segment: Segment) -> torch.Tensor:
        return dropped[segment] if segment in dropped else call.drop(segment.of(x_TK), keys_T2, segment)

    if (whole := call.whole) is not None:
        _, A_KR = own.A(call.layout, whole.segment.adapter)
        return scaled_mm(call.unread, drop(whole.segment), A_KR, whole.all_layers.factor)
    S = x_TK.new_empty(call.T, call.layout.width)
    for segment, all_layers, by_layer, _ in call.stacked:
        xd_tK, (_, A_KR) = drop(segment), own.A(call.layout, segment.adapter)
        if not by_layer:
            write_mm(all_layers.of_S(S), xd_tK, A_KR, all_layers.factor)
        for part in by_layer:
            write_mm(part.of_S(S), xd_tK, A_KR if part.columns is None else A_KR[:, part.columns], part.factor)
    return S


def up(
    call: Call, own: Operands, x_TK: torch.Tensor, dropped: Dropped, S: Optional, index: int, keep_z: bool
) -> tuple[torch.Tensor, Optional]:
    """y [T, N] of one layer, and z."""
    if index not in call.composed:
        return base_and_low_rank(call, own, x_TK, S, index, own.biases[index]), None
    assert S is not None
    from packlora.ops.lora_linear.composed import compose_by_segment, parts_with_base  # of such calls alone

    sum_TN = base_and_low_rank(call, own, x_TK, S, index, None, parts_with_base(call, index))
    y_TN, z_TN = compose_by_segment(call, own, dropped, S, index, sum_TN, keep_z)
    others = gaps([segment for segment, _, _ in call.composed[index]], call.T)
    if (bias_N := own.biases[index]) is not None and others:
        # on a CPU a row's bits do not depend on its neighbours, and the sum begins with the bias where none is composed
        begun_TN = base_and_low_rank(call, own, x_TK, S, index, bias_N) if x_TK.device.type == "cpu" else None
        for start, stop in others:
            if begun_TN is None:
                y_TN[start:stop] += bias_N
            else:
                y_TN[start:stop] = begun_TN[start:stop]
    return y_TN, z_TN


def base_and_low_rank(
    call: Call, own: Operands, x_TK: torch.Tensor, S: Optional, index: int, bias_N: Optional,
    parts: tuple[Part, ...] | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W' + S B' + bias [T, N] of one layer, by torch's products. parts: those that add S B', all of the layer's if None."""
    frozen, plan_up = own.frozen[index], call.plan_up[index]
    parts = call.parts[index] if parts is None else parts
    if plan_up == "merged":
        return linear(x_TK, merged(call, own, index), bias_N) if parts else frozen.matmul(x_TK, bias_N)
    assert S is not None, "S is made by every plan that does not merge"
    if plan_up == "before" and parts:
        dtype = call.dtype if index in call.composed else accumulator_dtype(x_TK)
        y_TN = x_TK.new_empty(call.T, frozen.shape[0], dtype=dtype)
        for part in parts:
            sum_mm(part.of(y_TN), part.of_S(S), own.block(call.layout, part.segment.adapter, index)[1], False)
        for start, stop in uncovered(call, parts):
            y_TN[start:stop] = 0
        return frozen.matmul(x_TK, bias_N, accumulate=y_TN)
    y_TN = frozen.matmul(x_TK, bias_N)
    for part in parts:
        add_mm(part.of(y_TN), part.of_S(S), own.block(call.layout, part.segment.adapter, index)[1])
    return y_TN


def magnitude(
    call: Call, own: Operands, index: int, d_TN: torch.Tensor, kept: Optional, wanted: Wanted
) -> tuple[torch.Tensor, dict[int, Sums]]:
    """e = g d of one layer, and the sums by adapter."""
    from packlora.ops.lora_linear import composed

    return composed.magnitude(call, own, index, d_TN, kept, wanted)


def grads(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, S: Optional, d: Gradients, kept: Gradients,
    wanted: Wanted,
) -> Grads:  # fmt: skip
    """e, dS, dB and the sums; dA where it goes through d' xd."""
    plan, layout = call.plan, call.layout
    e, sums = list(d), [dict[int, Sums]() for _ in d]
    for index, d_TN in enumerate(d):
        if d_TN is not None and index in call.composed:
            e[index], sums[index] = call.magnitude.magnitude(call, own, index, d_TN, kept[index], wanted)
        elif d_TN is not None:
            e[index] = rows_of(d_TN)
    needs_dS = (wanted.A and plan.dA == "dS") or (wanted.x and plan.dx != "merged")
    alone = call.whole is not None and len(e) == 1
    dS = x_TK.new_empty(call.T, layout.width) if needs_dS and not alone else None
    dA = x_TK.new_empty(layout.num_rows, call.K) if wanted.A and plan.dA == "xd" else None
    dB: list[Optional] = [None] * len(e)
    S_blocks = call.blocks(S) if wanted.B and plan.dB == "S" and S is not None else []
    dS_blocks = call.blocks(dS) if dS is not None else []
    for index, e_TN in enumerate(e):
        dB_flat, done = None, set[int]()
        undivided = plan.dB == "S" and len(layout.b_shapes[index]) == 2
        if e_TN is not None and wanted.B and not undivided:
            dtype = call.sums_dtype if plan.dB == "S" else call.dtype
            dB_flat = dB[index] = torch.empty(layout.b_shapes[index], dtype=dtype, device=call.device)
        for part in call.parts[index]:
            number = part.segment.adapter
            if e_TN is None:
                if dS is not None:
                    dS_blocks[part.stack][part.block].zero_()
                continue
            e_tN = e_TN if part.rows is None else e_TN[part.rows]
            if needs_dS:
                B_Nr = own.block(layout, number, index)[0]
                if alone:
                    dS = scaled_mm(call.unread, e_tN, B_Nr, part.factor)
                else:
                    write_mm(dS_blocks[part.stack][part.block], e_tN, B_Nr, part.factor)
            if plan.dA == "xd" or plan.dB == "xd":
                _through_xd(call, own, x_TK, keys_T2, index, part, e_TN, dA, dB_flat if plan.dB == "xd" else None)
            if wanted.B and plan.dB == "S":
                S_tr = S_blocks[part.stack][part.block]
                if dB_flat is None:
                    dB_flat = dB[index] = summed_mm(e_tN.t(), S_tr, call.sums_dtype)
                else:
                    sum_mm(layout.b_block(dB_flat, number, index), e_tN.t(), S_tr, number in done)
                done.add(number)
    return Grads(e, dS, dB, sums, dA)


def _through_xd(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, index: int, part: Part, e_TN: torch.Tensor,
    dA_RK: Optional, dB_flat: Optional,
) -> None:  # fmt: skip
    """One layer's rows of dA = s c B' (e' xd), and its dB = s c (e' xd) A'; neither where it is None."""
    if dA_RK is None and dB_flat is None:
        return
    number = part.segment.adapter
    first, place = call.layout.rows[number][0], call.layout.places[number, index]
    through_NK = by_itself(part.of(e_TN).t()) @ by_itself(call.drop(part.of(x_TK), keys_T2, part.segment))
    if dA_RK is not None:
        rows = slice(first + place.column, first + place.column + place.padded)
        write_mm(dA_RK[rows], own.block(call.layout, number, index)[1], through_NK, part.factor)
    if dB_flat is not None:
        A_Kr = own.A(call.layout, number)[1][:, place.column : place.column + place.padded]
        write_mm(call.layout.b_block(dB_flat, number, index), through_NK, A_Kr, part.factor)


def inputs(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, dS: Optional, e: Gradients, d: Gradients,
    wanted: Wanted,
) -> tuple[Optional, Optional]:  # fmt: skip
    """dx [T, K] and the stacked dA [rows, K] = dS' xd."""
    plan_dx = call.plan.dx
    dA = stacked_dA(call, x_TK, keys_T2, dS) if wanted.A and call.plan.dA == "dS" and dS is not None else None
    if not wanted.x:
        return None, dA
    base: Gradients = e
    low: dict[Segment, torch.Tensor] = {}
    if call.base_dropped:
        from packlora.ops.lora_linear.composed import base_gradients, scaled_low_rank_dx

        base = base_gradients(call, e, d)
    if plan_dx == "merged":
        dx: Optional = None
        for index, d_TN in enumerate(base):
            if d_TN is not None and call.parts[index]:
                merged_NK = merged(call, own, index)
                dx = d_TN @ merged_NK if dx is None else dx.addmm_(d_TN, merged_NK)
            elif d_TN is not None:
                dx = own.frozen[index].matmul_t(d_TN, dx)
        return dx, dA
    assert dS is not None
    if call.base_dropped:
        low = scaled_low_rank_dx(call, own, d, partial(_low_rank_dx, call, own, dS))
    if plan_dx == "before" and (whole := call.whole) is not None:  # the base product accumulates onto what is dropped
        low_TK = low.pop(whole.segment) if whole.segment in low else _low_rank_dx(call, own, dS, whole)
        return base_dx(own, base, call.drop(low_TK, keys_T2, whole.segment)), dA
    dx = x_TK.new_empty(call.T, call.K) if plan_dx == "before" else base_dx(own, base, None)
    for stack in call.stacked:
        segment, all_layers, *_ = stack
        dS_tR, dx_tK, (A_RK, _) = all_layers.of_S(dS), all_layers.of(dx), own.A(call.layout, segment.adapter)
        if segment.dropout:
            low_tK = low.pop(segment) if segment in low else _low_rank_dx(call, own, dS, stack)
            low_tK = call.drop(low_tK, keys_T2, segment)
            if plan_dx == "before":
                dx_tK.copy_(low_tK)
            else:
                dx_tK += low_tK
        elif plan_dx == "before":
            write_mm(dx_tK, dS_tR, A_RK, 1.0)
        else:
            add_mm(dx_tK, dS_tR, A_RK)
    if plan_dx == "before":
        for start, stop in uncovered(call, [stack.all_layers for stack in call.stacked]):
            dx[start:stop] = 0
        dx = base_dx(own, base, dx)
    return dx, dA


def _low_rank_dx(call: Call, own: Operands, dS: torch.Tensor, stack: Stack) -> torch.Tensor:
    """dS A [t, K] of a segment, before it is dropped."""
    return by_itself(stack.all_layers.of_S(dS)) @ by_itself(own.A(call.layout, stack.segment.adapter)[0])


def base_dx(own: Operands, base: Gradients, dx: Optional) -> torch.Tensor:
    """dx + d W, summed over the layers, in place where dx is given."""
    for frozen, d_TN in zip(own.frozen, base, strict=True):
        if d_TN is not None:
            dx = frozen.matmul_t(d_TN if d_TN.ndim == 2 else rows_of(d_TN), dx)
    assert dx is not None
    return dx


def stacked_dA(call: Call, x_TK: torch.Tensor, keys_T2: Optional, dS: torch.Tensor) -> torch.Tensor:
    """dS' xd by adapter, [rows, K]."""
    num_rows, done = call.layout.num_rows, set[int]()
    if (whole := call.whole) is not None and call.layout.rows[whole.segment.adapter][1] == num_rows:
        return summed_mm(dS.t(), call.drop(x_TK, keys_T2, whole.segment), call.sums_dtype)
    dA = torch.empty(num_rows, call.K, dtype=call.sums_dtype, device=call.device)
    for segment, all_layers, *_ in call.stacked:
        at, padded = call.layout.rows[segment.adapter]
        xd_tK, rows = (
            call.drop(all_layers.of(x_TK), keys_T2, segment),
            dA if padded == num_rows else dA[at : at + padded],
        )
        sum_mm(rows, all_layers.of_S(dS).t(), xd_tK, segment.adapter in done)
        done.add(segment.adapter)
    return dA


def merged(call: Call, own: Operands, index: int) -> torch.Tensor:
    """W + s B A, [N, K], in W's dtype, of the adapter that owns all tokens."""
    (part,), weight_NK = call.parts[index], own.frozen[index].tensor()
    assert weight_NK is not None, "merged weights are not legal for a weight without a tensor"
    number = part.segment.adapter
    place = call.layout.places[number, index]
    A_rK = own.A(call.layout, number)[0][place.column : place.column + place.padded]
    return torch.addmm(weight_NK, own.block(call.layout, number, index)[0], A_rK, alpha=part.factor)


def uncovered(call: Call, parts: list[Part] | tuple[Part, ...]) -> list[tuple[int, int]]:
    """(start, stop) of the tokens that are in none of the parts."""
    return [] if parts and parts[0].rows is None else gaps([part.segment for part in parts], call.T)
