"""The steps of a group's forward and backward, each by the way that the plan names: torch products segment by segment, or a kernel.

    down       S = s c (drop(x) A')
    up         y = g (x W' + S B') + bias
    compose'   e = g d, and the sums over tokens that the magnitudes' and biases' gradients are made of
    grad       dS = s c (e B), dB = e' S
    inputs     dx = e W + drop(dS A), dA = dS' drop(x)

drop() puts dropped elements to 0 and does not scale: the scaling s and the survivors' factor c = 1 / (1 - p) are in S and dS
and nowhere else, so any way of one step goes with any way of the others. g is 1 for LoRA and m / norm for DoRA; layers where no
adapter has a magnitude or a bias of its own ("plain" ones) have no composition: there e is d.

A DoRA segment under dropout whose base product is that of the dropped x (Segment.base_dropped, PEFT's semantics) is a LoRA segment, and has

    y += (g - 1) (drop(x) c W' + S B'),    dx += drop((g - 1) d c W),    dS = s c g d B

added to it: two base products. (g - 1) is formed in g's dtype; the difference of rounded products would be nothing near g = 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from packlora.ops.dropout import masked
from packlora.ops.dropout.keys import dropout_factor
from packlora.ops.gpu import HAS_TRITON
from packlora.ops.lora_linear.dense import base_onto, low_dtype, sum_mm, write_mm
from packlora.ops.lora_linear.plan import Plan, Up, legal, ordered
from packlora.ops.lora_linear.tables import SegmentTables, gaps
from packlora.ops.lora_linear.types import Layer, LowRank, Segment, situation
from packlora.ops.recent import Recent
from packlora.ops.stamp import Stamps, stamps

if TYPE_CHECKING:
    from packlora.ops.lora_linear.prepared import Prepared

_SEGMENT_TABLES: Recent[SegmentTables] = Recent(64)


@dataclass(slots=True)
class Sums:
    """Over the tokens of one adapter on one layer, in a wide dtype, [N] each: the gradient of the magnitude, the sum of d z
    over w, and the sum of d. None where not wanted."""

    dm: torch.Tensor | None = None
    d: torch.Tensor | None = None


class Steps:
    """Calls over tokens x [T, K] that `segments` of the group's adapters own; `with_tokens` makes a call of it.

    Args:
        x_TK: some such tokens.
        plan: the ways; plain products take their place where it does not compute such calls (plan.legal).
    """

    x_TK: torch.Tensor
    keys_T2: torch.Tensor | None
    wanted: set[tuple[int, str]]
    """Layers and names of the operands whose gradients a backward is for; of magnitudes and biases it must be told."""

    def __init__(
        self, prepared: Prepared, x_TK: torch.Tensor, segments: tuple[Segment, ...], salt: int, plan: Plan
    ) -> None:
        self.prepared, self.packed, self.layers, self.layout = (
            prepared, prepared.packed, prepared.layers, prepared.layout,
        )  # fmt: skip
        self.T, self.dtype, self.device, self.salt = len(x_TK), x_TK.dtype, x_TK.device, salt
        self.every = segments
        present = {segment.adapter for segment in segments}
        self.owned = tuple(
            operand for (_, number, _), operand in zip(prepared.slots, prepared.flat, strict=True) if number in present
        )
        """Operands of the adapters that own tokens."""
        self.segments = [segment for segment in segments if self.layout.rows.get(segment.adapter, (0, 0))[1]]
        self.whole = len(segments) == 1 and (segments[0].start, segments[0].stop) == (0, self.T)
        """Whether one segment has all tokens."""
        self.single = x_TK.dtype == torch.float32
        self.composed: dict[int, list[Segment]] = {}
        """Layers where a segment has a magnitude or a bias of its own, and those segments."""
        for index in prepared.compositions:
            adapters = self.layers[index].adapters
            own = [
                segment for segment in segments if (low := adapters.get(segment.adapter)) is not None and not low.plain
            ]
            if own:
                self.composed[index] = own
        self.dropped = any(
            self._base_dropped(segment, index) for index, own in self.composed.items() for segment in own
        )
        self.plan = plan = ordered(legal(plan, situation(self.layers, segments, self.T)), x_TK.element_size())
        self.sums_dtype = prepared.wide if x_TK.is_cuda and prepared.wide == torch.float32 else x_TK.dtype
        """What products that sum over the tokens, dA and dB, are written in."""
        self.kernels = plan.needs_triton or bool(
            self.composed and not self.dropped and HAS_TRITON and x_TK.is_cuda and x_TK.dtype != torch.float64
        )
        if self.kernels:
            from packlora.ops.lora_linear import launch

            self.launch = launch
            self.fused = "fused" in (plan.up, plan.dx) and launch.fusable(x_TK, self.layers)
            self.alone = self._alone()
            self.tables = self.segment_tables()

    def _alone(self) -> Segment | None:
        """The segment that has all tokens and an adapter on every layer, if there is one."""
        if not self.whole:
            return None
        (segment,) = self.every
        return (
            segment
            if all((segment.adapter, index) in self.layout.places for index in range(len(self.layers)))
            else None
        )

    def segment_tables(self) -> SegmentTables:
        """Tables of the segments for the kernels' block sizes."""
        from packlora.ops.lora_linear import launch

        T, device, number = self.T, self.device, self.prepared.num_adapters
        known = tuple(segment for segment in self.every if segment.adapter < number)  # others are of other layers
        return _SEGMENT_TABLES.get(
            (known, T, device, self.single, number),
            lambda: SegmentTables(known, T, device, launch.sizes_for(self.dtype).tokens, number, launch.FUSED_M),
        )

    def with_tokens(self, x_TK: torch.Tensor, keys_T2: torch.Tensor | None) -> Steps:
        """A call over these tokens, which are like those that it was made for."""
        other = object.__new__(Steps)
        other.__dict__.update(self.__dict__, x_TK=x_TK, keys_T2=keys_T2)
        return other

    # --- parts -------------------------------------------------------------------------------------------------------

    def _base_dropped(self, segment: Segment, index: int) -> bool:
        low = self.layers[index].adapters.get(segment.adapter)
        return bool(segment.dropout and segment.base_dropped and low is not None and low.magnitude is not None)

    def _A(self, segment: Segment) -> torch.Tensor:
        """The adapter's stacked A, [R, K]."""
        first, padded = self.layout.rows[segment.adapter]
        return self.packed.A_RK if padded == self.layout.num_rows else self.packed.A_RK[first : first + padded]

    def _own(self, tensor: torch.Tensor, segment: Segment, columns: slice | None = None) -> torch.Tensor:
        """The segment's rows of a tensor [T, ...], and their columns where not all are meant. Views cost the host time."""
        if columns is not None and columns.stop - columns.start < tensor.shape[1]:
            return tensor[segment.rows, columns]
        return tensor if self.whole else tensor[segment.rows]

    def _drop(self, tokens: torch.Tensor, segment: Segment) -> torch.Tensor:
        if not segment.dropout:
            return tokens
        assert self.keys_T2 is not None
        return masked(tokens, self.keys_T2[segment.rows], self.salt, segment.dropout)

    def _of_layer(self, index: int) -> list[tuple[Segment, slice, torch.Tensor, float]]:
        """Per segment with an adapter on this layer: columns of S, B [N, padded], and s c."""
        layer, out = self.layers[index], []
        for segment in self.segments:
            place = self.layout.places.get((segment.adapter, index))
            if place is not None:
                B = self.packed.b_block(segment.adapter, index)
                factor = layer.adapters[segment.adapter].scaling * dropout_factor(segment.dropout)
                out.append((segment, slice(place.column, place.column + place.padded), B, factor))
        return out

    # --- down --------------------------------------------------------------------------------------------------------

    def down(self) -> torch.Tensor:
        """S [T, width]; rows without an adapter and columns past an adapter's rank are not written."""
        if self.plan.down == "routed":
            return self.launch.down(
                self.x_TK, self.packed, self.prepared.tables, self.tables, self.keys_T2, self.salt, self.alone
            )
        S = self.x_TK.new_empty(self.T, self.layout.width)
        for segment in self.segments:
            A_RK, xd, factor = (
                self._A(segment),
                self._drop(self._own(self.x_TK, segment), segment),
                dropout_factor(segment.dropout),
            )
            scaling = self.prepared.scalings[segment.adapter]
            if scaling is not None:
                write_mm(self._own(S, segment, slice(0, A_RK.shape[0])), xd, A_RK.T, scaling * factor)
                continue
            for index, layer in enumerate(self.layers):  # layers of one adapter that scale differently
                place = self.layout.places.get((segment.adapter, index))
                if place is not None:
                    columns = slice(place.column, place.column + place.padded)
                    own = layer.adapters[segment.adapter].scaling * factor
                    write_mm(S[segment.rows, columns], xd, A_RK[columns].T, own)
        return S

    # --- up ----------------------------------------------------------------------------------------------------------

    def up(self, S: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs y [T, N] of the layers, and what the backward of composed ones needs beside them: z [T, N], or y itself
        where the layer keeps its output, or None."""
        outputs: list[torch.Tensor] = []
        kept: list[torch.Tensor | None] = []
        for index, layer in enumerate(self.layers):
            if index not in self.composed:
                outputs.append(self._plain_up(S, index, layer))
                kept.append(None)
                continue
            lows = [layer.adapters[segment.adapter] for segment in self.composed[index]]
            needs_z = any(low.magnitude is not None and low.magnitude.requires_grad for low in lows)
            from_y = self._from_y(index)
            y_TN, z_TN = self._composed_up(S, index, layer, needs_z and not from_y)
            outputs.append(y_TN)
            kept.append(None if not needs_z else y_TN if from_y else z_TN)
        return outputs, kept

    def _way_up(self, index: int) -> Up:
        """The plan's; where no adapter of the layer has more than a bias, S B' is nothing and no kernel has a B to read."""
        return self.plan.up if self.layout.max_padded[index] else "after"

    def _plain_up(self, S: torch.Tensor, index: int, layer: Layer) -> torch.Tensor:
        """x W' + S B' + bias of the layer alone."""
        way = self._way_up(index)
        if way == "fused" and self.fused:
            return self.launch.up_fused(
                self.x_TK, S, self.packed, self.prepared.tables, self.tables, self.alone, index, layer
            )
        if way == "epilogue":
            y_TN = self.x_TK @ layer.weight.T
            return self.launch.up(S, self.packed, self.prepared.tables, self.tables, index, layer.bias, y_TN)
        if way in ("routed", "fused"):
            if self.single:  # a product rounds more when it accumulates onto something
                y_TN = linear(self.x_TK, layer.weight, layer.bias)
                y_TN += self.launch.up(S, self.packed, self.prepared.tables, self.tables, index, None)
                return y_TN
            y_TN = self.launch.up(S, self.packed, self.prepared.tables, self.tables, index, None)
            return base_onto(y_TN, self.x_TK, layer.weight, layer.bias)
        if way == "before":
            own = self._of_layer(index)
            dtype = self.dtype if index in self.composed else low_dtype(self.x_TK)
            y_TN = self.x_TK.new_empty(self.T, self.layout.sizes[index], dtype=dtype)
            for segment, columns, B, _ in own:
                sum_mm(self._own(y_TN, segment), self._own(S, segment, columns), B.T, False)
            for start, stop in () if self.whole and own else gaps([segment for segment, *_ in own], self.T):
                y_TN[start:stop] = 0
            return base_onto(y_TN, self.x_TK, layer.weight, layer.bias)
        y_TN = linear(self.x_TK, layer.weight, layer.bias)
        for segment, columns, B, _ in self._of_layer(index):
            y_TN[segment.rows].addmm_(S[segment.rows, columns], B.T)
        return y_TN

    def _composed_up(
        self, S: torch.Tensor, index: int, layer: Layer, keep_z: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y, and z = x W' + S B' where it is to be kept (of base-dropped segments that of the dropped x)."""
        composition, way = self.prepared.compositions[index], self._way_up(index)
        if way == "fused" and self.fused:
            return self.launch.up_fused_composed(
                self.x_TK, S, self.packed, self.prepared.tables, self.tables, self.alone, index, layer, composition, keep_z
            )  # fmt: skip
        if way == "epilogue":
            z_TN = self.x_TK @ layer.weight.T
            return self.launch.up_composed(
                S, self.packed, self.prepared.tables, self.tables, index, composition, z_TN, keep_z
            )
        z_TN = self._plain_up(S, index, Layer(layer.weight, None, layer.adapters))
        if self.kernels:
            y_TN = torch.empty_like(z_TN) if keep_z else z_TN
            self.launch.compose(z_TN, y_TN, self.tables, composition)
            return y_TN, z_TN if keep_z else None
        return self._composed_by_segment(S, index, layer, z_TN, keep_z)

    def _composed_by_segment(
        self, S: torch.Tensor, index: int, layer: Layer, y_TN: torch.Tensor, keep_z: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y in place of x W' + S B' in y_TN, segment by segment, and z."""
        composition, own = self.prepared.compositions[index], self.composed[index]
        dropped = [segment for segment in own if self._base_dropped(segment, index)]
        z_TN = torch.empty_like(y_TN) if dropped or keep_z else None
        for segment in own:
            low, y_tN = layer.adapters[segment.adapter], y_TN[segment.rows]
            g_N = None if low.magnitude is None else composition.g[segment.adapter]
            bias_N = None if composition.bias is None else composition.bias[segment.adapter]
            if segment in dropped:
                assert z_TN is not None
                z_tN, place = z_TN[segment.rows], self.layout.places[segment.adapter, index]
                B = self.packed.b_block(segment.adapter, index)
                S_tr = S[segment.rows, place.column : place.column + place.padded]
                xd_tK, factor = self._drop(self.x_TK[segment.rows], segment), dropout_factor(segment.dropout)
                if self.single:  # a product rounds more when it accumulates onto something
                    write_mm(z_tN, xd_tK, layer.weight.T, factor)
                    z_tN.addmm_(S_tr, B.T)
                else:
                    write_mm(z_tN, S_tr, B.T)
                    z_tN.addmm_(xd_tK, layer.weight.T, alpha=factor)
                self._compose_rows(z_tN, y_tN, g_N, bias_N, minus=1, add=True)
            else:
                if z_TN is not None:
                    z_TN[segment.rows] = y_tN
                self._compose_rows(y_tN, y_tN, g_N, bias_N)
        if layer.bias is not None:
            for start, stop in gaps(own, len(y_TN)):
                y_TN[start:stop] += layer.bias
        return y_TN, z_TN

    def _compose_rows(
        self, z_tN: torch.Tensor, y_tN: torch.Tensor, g_N: torch.Tensor | None, bias_N: torch.Tensor | None, minus: int = 0,
        add: bool = False,
    ) -> None:  # fmt: skip
        """y = (g - minus) z + bias, or y += that."""
        if z_tN.is_cuda and HAS_TRITON and z_tN.dtype != torch.float64:
            from packlora.ops.lora_linear import launch

            launch.compose_rows(z_tN, y_tN, g_N, bias_N, minus, add)
            return
        value = z_tN if g_N is None else (g_N - minus) * z_tN
        if bias_N is not None:
            value = value + bias_N
        y_tN.copy_(y_tN + value if add else value)

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self, d: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None], S: torch.Tensor, need_x: bool,
        need_A: bool, need_B: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor | None], list[dict[int, Sums]]]:  # fmt: skip
        """dx, the stacked dA, per layer the flat dB and, by adapter, the sums for magnitudes and biases."""
        sums: list[dict[int, Sums]] = [{} for _ in d]
        if self.plan.grad == "one-pass":
            e, dS, dB = self._one_pass(d, kept, S, need_B, sums)
        else:
            e = [self._scale(index, d_TN, kept[index], sums[index]) for index, d_TN in enumerate(d)]
            dS, dB = self._grad_products(e, S, need_B)
        base: Sequence[torch.Tensor | None] = e
        if self.dropped:  # the base product of all tokens takes d, not e, in those segments
            base = [self._undo_dropped(index, e_TN, d[index]) for index, e_TN in enumerate(e)]
        dx, dA = self._inputs(dS, base, need_x, need_A, d)
        return dx, dA, dB, sums

    def _from_y(self, index: int) -> bool:
        """Whether the backward reads y in the place of z: z = y / g. With a bias the difference would cost digits."""
        return self.layers[index].keep_output and self.prepared.compositions[index].bias is None and not self.dropped

    def _wants(self, index: int) -> tuple[bool, bool]:
        """Whether a magnitude's and whether a bias's gradient is wanted of a layer."""
        return (index, "magnitude") in self.wanted, (index, "bias") in self.wanted

    def _scale(
        self, index: int, d_TN: torch.Tensor | None, kept: torch.Tensor | None, sums: dict[int, Sums]
    ) -> torch.Tensor | None:
        """e = g d of one layer; fills in the sums."""
        if d_TN is None or index not in self.composed:
            return d_TN
        layer, composition = self.layers[index], self.prepared.compositions[index]
        need_m, need_bias = self._wants(index)
        if self.kernels:
            e_TN, parts = self.launch.scale(
                d_TN, kept, self.tables, composition, need_m, need_bias, self._from_y(index)
            )
            self._put(index, parts, sums)
            return e_TN
        if self.dropped and HAS_TRITON and d_TN.is_cuda and d_TN.dtype != torch.float64:
            from packlora.ops.lora_linear import launch

            e_TN, parts = launch.scale(
                d_TN, kept, self.segment_tables(), composition, need_m, need_bias, self._from_y(index)
            )
            self._put(index, parts, sums)
            return e_TN
        e_TN = d_TN
        for segment in self.composed[index]:
            low, d_tN = layer.adapters[segment.adapter], d_TN[segment.rows]
            own = sums.setdefault(segment.adapter, Sums())
            wide = d_tN.to(composition.g.dtype)
            if low.magnitude is not None:
                if e_TN is d_TN:
                    e_TN = d_TN.clone()
                e_TN[segment.rows] = composition.g[segment.adapter] * wide
                if need_m:
                    assert kept is not None
                    own.dm = _plus(own.dm, (wide * kept[segment.rows]).sum(0))
            if low.bias is not None and need_bias:
                own.d = _plus(own.d, wide.sum(0))
        for number, own in sums.items():
            own.dm = None if own.dm is None else composition.magnitude_grad(own.dm, number, self._from_y(index))
        return e_TN

    def _put(self, index: int, parts: torch.Tensor | None, sums: dict[int, Sums]) -> None:
        """Sums from what launch.scale gives, [adapters, 2, N]."""
        if parts is None:
            return
        need_m = self._wants(index)[0]
        for number in {segment.adapter for segment in self.composed[index]}:
            low = self.layers[index].adapters[number]
            dm = parts[number, 0] if need_m and low.magnitude is not None else None
            sums[number] = Sums(dm, parts[number, 1] if low.bias is not None else None)

    def _one_pass(
        self, d: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool,
        sums: list[dict[int, Sums]],
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, list[torch.Tensor | None]]:  # fmt: skip
        scales = {}
        for index in self.composed:
            need_m, need_bias = self._wants(index)
            scales[index] = (
                self.prepared.compositions[index], kept[index], need_m, need_bias, self._from_y(index),
            )  # fmt: skip
        e, dS, dB, parts = self.launch.grad(
            d, S, self.packed, self.prepared.tables, self.tables, self.prepared.wide, need_B, scales, self.alone
        )
        for index, part in parts.items():
            self._put(index, part, sums[index])
        return e, dS, dB

    def _grad_products(
        self, e: Sequence[torch.Tensor | None], S: torch.Tensor, need_B: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        dS, done = torch.empty(S.shape, dtype=S.dtype, device=S.device), set()
        out: list[torch.Tensor | None] = []
        for index, e_TN in enumerate(e):
            dB = None
            if e_TN is not None and need_B:
                dB = torch.empty(self.layout.b_sizes[index], dtype=self.sums_dtype, device=S.device)
            for segment, columns, B, factor in self._of_layer(index):
                own = self._own(dS, segment, columns)
                if e_TN is None:
                    own.zero_()
                    continue
                e_tN = self._own(e_TN, segment)
                torch.addmm(own, e_tN, B, beta=0, alpha=factor, out=own)
                if dB is not None:
                    block = self.layout.b_block(dB, segment.adapter, index)
                    sum_mm(block, e_tN.T, self._own(S, segment, columns), (segment.adapter, index) in done)
                    done.add((segment.adapter, index))
            out.append(dB)
        return dS, out

    def _inputs(
        self,
        dS: torch.Tensor,
        e: Sequence[torch.Tensor | None],
        need_x: bool,
        need_A: bool,
        d: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx = e W + drop(dS A) and the stacked dA."""
        way = self.plan.dx
        fused = way == "fused" and self.fused and all(e_TN is None or e_TN.data_ptr() % 16 == 0 for e_TN in e)
        dx = dA = None
        if way == "routed" or (way == "fused" and (not fused or any(segment.dropout for segment in self.segments))):
            dx, dA = self.launch.inputs(
                self.x_TK, dS, self.packed, self.prepared.tables, self.tables, self.keys_T2, self.salt, self.prepared.wide,
                need_x and not fused, need_A, self.alone,
            )  # fmt: skip
        elif need_A:
            rows, done = self.layout.num_rows, set()
            dA = torch.empty(rows, self.prepared.K, dtype=self.sums_dtype, device=self.device)
            for segment in self.segments:
                at, padded = self.layout.rows[segment.adapter]
                xd, dS_tR = self._drop(self._own(self.x_TK, segment), segment), self._own(dS, segment, slice(0, padded))
                sum_mm(dA if padded == rows else dA[at : at + padded], dS_tR.T, xd, segment.adapter in done)
                done.add(segment.adapter)
        if not need_x:
            return None, dA
        if way == "before":
            dx = torch.empty_like(self.x_TK)
            for segment in self.segments:
                A_RK = self._A(segment)
                low_rank = self._own(dS, segment, slice(0, A_RK.shape[0]))
                if segment.dropout:
                    dx[segment.rows] = self._drop(self._plus_dropped(low_rank @ A_RK, segment, d), segment)
                else:
                    torch.mm(low_rank, A_RK, out=self._own(dx, segment))
            for start, stop in () if self.whole and self.segments else gaps(self.segments, self.T):
                dx[start:stop] = 0
        for layer, e_TN in zip(self.layers, e, strict=True):
            if e_TN is None:
                continue
            if dx is not None:
                dx.addmm_(e_TN, layer.weight)
            elif fused:
                dx = self.launch.dx_fused(
                    e_TN, layer.weight, dS, self.packed, self.prepared.tables, self.tables, self.alone, self.keys_T2,
                    self.salt,
                )  # fmt: skip
            else:
                dx = e_TN @ layer.weight
        assert dx is not None
        if way == "after":
            for segment in self.segments:
                A_RK = self._A(segment)
                low_rank = self._own(dS, segment, slice(0, A_RK.shape[0]))
                if segment.dropout:
                    dx[segment.rows] += self._drop(self._plus_dropped(low_rank @ A_RK, segment, d), segment)
                else:
                    dx[segment.rows].addmm_(low_rank, A_RK)
        return dx, dA

    def _undo_dropped(self, index: int, e_TN: torch.Tensor | None, d_TN: torch.Tensor | None) -> torch.Tensor | None:
        """e with d in the rows of base-dropped segments."""
        if e_TN is None or d_TN is None or e_TN is d_TN:
            return e_TN
        dropped = [segment for segment in self.composed.get(index, ()) if self._base_dropped(segment, index)]
        if len(dropped) == len(self.composed[index]):  # e is d everywhere else
            return d_TN
        out = e_TN.clone()
        for segment in dropped:
            out[segment.rows] = d_TN[segment.rows]
        return out

    def _plus_dropped(self, low_tK: torch.Tensor, segment: Segment, d: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """dS A of one segment, plus (g - 1) d c W of every layer where its base product is dropped, before it is dropped."""
        for index in self.composed:
            d_TN = d[index]
            if d_TN is not None and self._base_dropped(segment, index):
                scaled = torch.empty_like(d_TN[segment.rows])
                self._compose_rows(
                    d_TN[segment.rows], scaled, self.prepared.compositions[index].g[segment.adapter], None, minus=1
                )
                low_tK.addmm_(scaled, self.layers[index].weight, alpha=dropout_factor(segment.dropout))
        return low_tK


class Composition:
    """Of one layer: by adapter (and last, for tokens without one) the norm w [N], the scale g [N] and the bias [N] of its
    outputs, in float32 (float64 for float64); refreshed when a magnitude, a norm or a bias has changed."""

    def __init__(self, layer: Layer, num_adapters: int, dtype: torch.dtype, kernels: bool) -> None:
        N, device, self.adapters = len(layer.weight), layer.weight.device, num_adapters
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.kernels = HAS_TRITON and wide == torch.float32 and (kernels or device.type == "cuda")
        self.g = torch.ones(num_adapters + 1, N, dtype=wide, device=device)
        self.w = torch.ones_like(self.g)
        self._rows = list(zip(self.g.unbind(), self.w.unbind(), strict=True))
        self._sites: dict[Hashable, Any] = {}
        """Launches that fill in rows, see launcher.py."""
        self.bias: torch.Tensor | None = None
        self.base_bias = layer.bias
        if layer.bias is not None or any(low.bias is not None for low in layer.adapters.values()):
            self.bias = torch.zeros(num_adapters + 1, N, dtype=wide, device=device)
        rows = [[number, which] for number in range(num_adapters) for which in (0, 1)]
        self.sum_rows = torch.tensor(rows, dtype=torch.int32).to(device)
        """Adapter and row of every pair of sums, as sum_rows_kernel takes them."""
        self.low_ranks: dict[int, LowRank] = dict(layer.adapters)
        self._seen: dict[int | None, tuple[list[torch.Tensor], Stamps]] = {}
        """What rows were made from last, by adapter; under None the base's bias, which is in all rows of `bias`."""

    def refresh(self, trusted: bool) -> None:
        """Make anew what has changed, or all where parameters are not trusted to show it."""
        with torch.no_grad():
            overwritten = False
            if self.bias is not None and self.base_bias is not None:
                overwritten = not trusted or self._changed(None, [self.base_bias])
                if overwritten:
                    self.bias.copy_(self.base_bias)
            for number, low in self.low_ranks.items():
                if low.plain:
                    continue
                norm = low.norm() if callable(low.norm) else low.norm
                parts = [t for t in (low.magnitude, norm, low.bias) if t is not None]
                if trusted and not self._changed(number, parts) and not overwritten:
                    continue
                if low.magnitude is not None:
                    assert norm is not None
                    self._divide(number, low.magnitude, norm)
                if low.bias is not None and self.bias is not None:
                    self.bias[number].copy_(low.bias)

    def _changed(self, key: int | None, parts: list[torch.Tensor]) -> bool:
        """Whether these are not those of the last time."""
        now, seen = stamps(parts), self._seen.get(key)
        self._seen[key] = parts, now  # the tensors too: a new norm may lie where an older one lay
        if now is None or seen is None or seen[1] != now:
            return True
        return any(new is not old for new, old in zip(parts, seen[0], strict=True))

    def _divide(self, number: int, magnitude_N: torch.Tensor, norm_N: torch.Tensor) -> None:
        g_N, w_N = self._rows[number]
        if self.kernels:
            from packlora.ops.lora_linear import launch

            launch.ratio(magnitude_N.contiguous(), norm_N.contiguous(), g_N, w_N, self._sites)
            return
        torch.div(magnitude_N, norm_N, out=g_N)
        w_N.copy_(norm_N)

    def magnitude_grad(self, sum_N: torch.Tensor, number: int, of_y: bool) -> torch.Tensor:
        """From the sum of d z, or of d y, where y = g z; 0 where g is 0, which z cannot be told from."""
        g_N, w_N = self._rows[number]
        if not of_y:
            return sum_N / w_N
        m_N = g_N * w_N
        return torch.where(m_N == 0, 0, sum_N / m_N)


def _plus(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total + more
