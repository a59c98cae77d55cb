"""Settles a call: which plan carries it out, which path computes each step, and who owns which rows and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from packlora.ops.dropout.keys import dropout_factor, dropout_threshold, signed
from packlora.ops.gpu import why_no_kernels
from packlora.ops.lora_linear import torch_path
from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.call import AddDropped, Call, Part, Path, ScaleRows, Slot, Stack
from packlora.ops.lora_linear.layout import Layout
from packlora.ops.lora_linear.plan import Plan, Up, legal, ordered
from packlora.ops.lora_linear.types import Layer, Segment, composed_of, owns_all, situation

if TYPE_CHECKING:
    from packlora.ops.lora_linear.tables import GroupTables

TORCH: Path = torch_path


def settle(
    layers: tuple[Layer, ...], layout: Layout, slots: Sequence[tuple[int, int, str]], tables: GroupTables | None,
    wide: torch.dtype, x: torch.Tensor, segments: tuple[Segment, ...], salt: int, plan: Plan,
    boundaries: Boundaries = ON_HOST,
) -> Call:  # fmt: skip
    """The call over tokens like x that `segments` of the group's adapters own.

    Args:
        slots: layer, adapter and name of every operand that may get a gradient.
        wide: dtype of the parameters.
        plan: asked for; the plain chain takes its place where it does not compute such calls (plan.legal).
        boundaries: of the segments.
    """
    K, dtype, device = x.shape[-1], x.dtype, x.device
    T = x.numel() // K
    found = situation(layers, segments, T, boundaries.known)
    composed, apart = composed_of(layers, segments)
    if apart and not found.base_dropped:
        from packlora.ops.lora_linear.changes import by_change, without

        rest = settle(layers, layout, slots, tables, wide, x, without(segments), salt, plan, boundaries)
        return by_change(rest, apart)
    plan = ordered(legal(plan, found), x.element_size())
    single = _single(segments, T, layout, len(layers)) if boundaries.known else None
    plan_up: list[Up] = [plan.up if rank or plan.up == "merged" else "after" for rank in layout.max_padded]

    kernels: Path = TORCH
    segment_tables, fused = None, False
    if plan.needs_triton or (composed and dtype != torch.float64 and why_no_kernels(device) is None):
        from packlora.ops.lora_linear import triton_path

        kernels = triton_path
        segment_tables = triton_path.segment_tables(segments, T, device, dtype, layout.numbers, boundaries)
        fused = "fused" in (plan.up, plan.dx) and triton_path.fusable(x, layers)
        if not fused:
            plan_up = ["routed" if each == "fused" else each for each in plan_up]
    up = tuple(
        kernels if each in ("routed", "epilogue", "fused") or (index in composed and not apart) else TORCH
        for index, each in enumerate(plan_up)
    )
    scale_rows, add_dropped = _row_steps(composed, kernels, device)
    parts = tuple(_parts(layer, layout, segments, T, index) for index, layer in enumerate(layers))
    stacked = _stacked(layout, segments, T, parts)
    return Call(
        layout=layout, plan=plan, segments=segments, salt=salt, lead=x.shape[:-1], T=T, K=K, dtype=dtype, device=device,
        slots=_slots(layout, slots, segments), stacked=stacked, parts=parts, composed=composed, plan_up=tuple(plan_up),
        from_y=tuple(layer.keep_output and not _any_bias(layer) and not apart for layer in layers),
        base_dropped=apart,
        wide=wide,
        shape=(layout, K, dtype),
        sums_dtype=wide if device.type == "cuda" and wide == torch.float32 else dtype,
        down=kernels if plan.down == "routed" else TORCH,
        up=up,
        magnitude=kernels,
        grads=kernels if plan.grad == "one-pass" else TORCH,
        inputs=kernels if plan.dx in ("routed", "fused") else TORCH,
        scale_rows=scale_rows,
        add_dropped=add_dropped,
        fused=fused, word=signed(salt),
        single_adapter=single, threshold=0 if single is None else dropout_threshold(single.dropout),
        whole=_whole(stacked),
        unread=_one_element(dtype, device),
        tables=tables,
        segment_tables=segment_tables,
        moving=not boundaries.known,
    )  # fmt: skip


def _row_steps(
    composed: Mapping[int, Any], kernels: Path, device: torch.device
) -> tuple[ScaleRows | None, AddDropped | None]:
    """Call.scale_rows and Call.add_dropped."""
    if not composed:
        return None, None
    if kernels is not TORCH and device.type == "cuda":
        from packlora.ops.lora_linear import triton_path

        return triton_path.scale_rows, triton_path.add_dropped
    from packlora.ops.lora_linear.composed import add_dropped, scale_rows

    return scale_rows, add_dropped


def _single(segments: tuple[Segment, ...], T: int, layout: Layout, layers: int) -> Segment | None:
    """The segment of all tokens, whose adapter is on all layers; None where there is none."""
    if owns_all(segments, T) and all((segments[0].adapter, index) in layout.places for index in range(layers)):
        return segments[0]
    return None


def _any_bias(layer: Layer) -> bool:
    return layer.bias is not None or any(low.bias is not None for low in layer.adapters.values())


def _part(layout: Layout, segment: Segment, T: int, column: int, padded: int, factor: float) -> Part:
    columns = None if padded == layout.width else slice(column, column + padded)
    rows = None if (segment.start, segment.stop) == (0, T) else segment.rows
    return Part(segment, rows, columns, factor)


def _with_rank(layout: Layout, segments: Sequence[Segment]) -> list[Segment]:
    """Segments whose adapter has a rank on some layer of the group."""
    return [segment for segment in segments if layout.rows.get(segment.adapter, (0, 0))[1]]


def _block(layout: Layout, number: int, index: int) -> int:
    """Index of this layer among the layers that the adapter targets."""
    return sum((number, other) in layout.places for other in range(index))


def _parts(layer: Layer, layout: Layout, segments: Sequence[Segment], T: int, index: int) -> tuple[Part, ...]:
    found = []
    for stack, segment in enumerate(_with_rank(layout, segments)):
        place = layout.places.get((segment.adapter, index))
        if place is not None:
            factor = layer.adapters[segment.adapter].scaling * dropout_factor(segment.dropout)
            part = _part(layout, segment, T, place.column, place.padded, factor)
            found.append(part._replace(stack=stack, block=_block(layout, segment.adapter, index)))
    return tuple(found)


def _stacked(
    layout: Layout, segments: Sequence[Segment], T: int, parts: Sequence[tuple[Part, ...]]
) -> tuple[Stack, ...]:
    found = []
    for stack, segment in enumerate(_with_rank(layout, segments)):
        own = tuple(part for by_layer in parts for part in by_layer if part.stack == stack)
        widths, padded = layout.widths[segment.adapter], layout.rows[segment.adapter][1]
        left = (layout.width - padded,) if padded < layout.width else ()
        all_layers = _part(layout, segment, T, 0, padded, own[0].factor)
        by_layer = () if len({part.factor for part in own}) == 1 else own
        found.append(Stack(segment, all_layers, by_layer, (*widths, *left)))
    return tuple(found)


def _whole(stacked: Sequence[Stack]) -> Stack | None:
    """The stack that is all of S, by one factor."""
    if len(stacked) != 1:
        return None
    all_layers = stacked[0].all_layers
    return stacked[0] if all_layers.rows is None and all_layers.columns is None and not stacked[0].by_layer else None


def _one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # it is kept, and serves in training too
        return torch.empty((), dtype=dtype, device=device)


def _slots(layout: Layout, slots: Sequence[tuple[int, int, str]], segments: Sequence[Segment]) -> tuple[Slot, ...]:
    present, found = {segment.adapter for segment in segments}, list[Slot]()
    for source, (index, number, name) in enumerate(slots):
        if number in present:
            place = layout.places.get((number, index))
            found.append(Slot(len(found), index, number, name, place, _block(layout, number, index), source))
    return tuple(found)
