"""Cache of a group's layers from call to call: the only cache of the operator, with one rule of staleness.

`GroupState` is the caller's handle; `Prepared` is the cache for the layers passed last: their layout, the operands in the
layout that products read, and the calls that were settled. Layers are the same where their operands are the same objects. A
result that was computed from an operand is valid while the operand's stamp is unchanged (ops/stamp.py); where the caller does
not state that the version counts all writes, copies are made anew at every call. Operands that already have the right layout
(one adapter, no padding, the compute dtype) are used in place. Caches of launches (ops/launcher.py) know addresses only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType

import torch

from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.layout import Layout, Place, make_layout
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.settle import settle
from packlora.ops.lora_linear.types import Layer, LowRank, Segment, check_layers
from packlora.ops.recent import Recent
from packlora.ops.stamp import stamp

if TYPE_CHECKING:
    from packlora.ops.lora_linear.tables import GroupTables

OUTSIDE = -1
"""Instead of the number of a backward pass where none is running."""
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: OUTSIDE)
"""Number of the backward pass that is running in this thread; what checkpointing recomputes belongs to it."""
_LAYOUTS: Recent[Layout] = Recent(512)
"""Layouts by adapters and ranks: the same for layers of a kind, and new ones where adapters come and go."""
_REFRESHING = threading.RLock()
"""Lock that keeps two threads that first use a layer from both making its buffers."""


class GroupState:
    """State that one caller keeps between its calls: packed operands and tables of the layers that it last passed.

    version_counted: parameters change only in ways that the host can see (ops/stamp.py), so what is prepared from them is
    refreshed only then. Otherwise it is refreshed at every call.
    """

    def __init__(self, version_counted: bool = False) -> None:
        self.version_counted = version_counted
        self._prepared: dict[bool, Prepared] = {}
        """Caches with and without ranks padded for the kernels."""
        self.layers: tuple[Layer, ...] = ()
        """Layers passed last; a caller that passes the same objects again is served faster."""

    def prepared(self, x: torch.Tensor, layers: tuple[Layer, ...], plan: Plan, padded: bool = False) -> Prepared:
        """Cache for calls on these layers, checked; `refresh` brings it up to date. padded: ranks are, whatever the plan."""
        self.layers, kernels = layers, padded or plan.needs_triton
        found = self._prepared.get(kernels)
        if found is None or not found.fits(x, layers):
            with torch.inference_mode(False):  # cached tensors are written to in training too
                found = self._prepared[kernels] = Prepared(x, layers, kernels, self.version_counted)
        return found


class _Source(NamedTuple):
    """A or B of the group, its destination, and whether it is the only operand there."""

    operand: torch.Tensor
    name: str
    number: int
    layer: int
    place: Place
    undivided: bool


class Prepared:
    """Checked layers with their layout, operands, tables and settled calls.

    A backward takes the operands of its own forward. Where another forward has made them anew since, it takes those of the
    parameters as they are by then. So weights that are swapped through .data for another forward and swapped back, as by a mean
    teacher, make no difference. (What is not swapped back is a mixture, in PEFT of other parts.)
    """

    def __init__(self, x: torch.Tensor, layers: tuple[Layer, ...], kernels: bool, version_counted: bool) -> None:
        check_layers(x, layers)
        self.layers, self.version_counted = layers, version_counted
        self.dtype, self.device, self.K = x.dtype, x.device, x.shape[-1]
        ranks = tuple(tuple((number, low.rank) for number, low in layer.adapters.items()) for layer in layers)
        sizes, align = tuple(layer.frozen.shape[0] for layer in layers), 16 if kernels else 1
        self.layout = _LAYOUTS.get(
            (ranks, sizes, align), lambda: make_layout([dict(own) for own in ranks], sizes, align)
        )
        self.slots = [
            (index, number, name)
            for index, layer in enumerate(layers)
            for number, low in layer.adapters.items()
            for name in low.operands()
        ]
        """Layer, adapter and name of every operand that may get a gradient; `flat` has the operands."""
        self.flat = tuple(layers[index].adapters[number].operands()[name] for index, number, name in self.slots)
        dtypes = {t.dtype for t in self.flat}
        self.wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
        """Dtype of the gradients that kernels write: the parameters' dtype where all agree, otherwise float32."""
        self.operands = Operands(
            tuple(layer.frozen for layer in layers), tuple(layer.bias for layer in layers), x.new_empty(0),
            [None] * len(layers), {},
        )  # fmt: skip
        self._sources = tuple(self._sources_of(layers))
        self._of_adapter: dict[int, list[int]] = {}
        """Sources of each adapter."""
        for at, source in enumerate(self._sources):
            self._of_adapter.setdefault(source.number, []).append(at)
        self._seen: list[tuple[int, int] | None] = [None] * len(self._sources)
        """Stamp of each source when it was copied; None where that is to be done at the next call."""
        self._copies: dict[int, torch.Tensor] = {}
        """Copy of each source, by its index; a source without a copy is used in place."""
        self._addresses: list[int | None] = [None] * len(self._sources)
        """Address of each source that is used in place: no write to it makes a copy necessary."""
        self._owned: set[str | int] = set()
        """Buffers that were allocated here: "A", and the B's by layer."""
        self._composed = []
        for index, layer in enumerate(layers):
            if not all(low.plain for low in layer.adapters.values()):
                from packlora.ops.lora_linear.layer_scales import LayerScales

                made = LayerScales(layer, self.layout.numbers, x.dtype, kernels)
                self.operands.scales[index] = made.scales
                self._composed.append(made)
        self.tables: GroupTables | None = None
        if kernels:
            from packlora.ops.lora_linear.tables import make_group_tables

            factors = {(n, j): low.scaling for j, layer in enumerate(layers) for n, low in layer.adapters.items()}
            self.tables = make_group_tables(self.layout, factors, self.device)
        self._calls: Recent[Call] = Recent(4)
        self._last: tuple[tuple[Any, ...], Call] | None = None
        """Key and value of the last call, which the next one is mostly like."""
        self.turn = 0
        """Number of refreshes so far."""
        self._pass = OUTSIDE
        """The backward pass in which it was refreshed last."""

    def fits(self, x: torch.Tensor, layers: tuple[Layer, ...]) -> bool:
        """Whether these are the layers that it was made for, the very objects."""
        if x.dtype != self.dtype or x.device != self.device or x.shape[-1] != self.K:
            return False
        if layers is self.layers:
            return True
        return len(layers) == len(self.layers) and all(map(same_layer, layers, self.layers))

    def call(
        self, x: torch.Tensor, segments: tuple[Segment, ...], salt: int, plan: Plan, boundaries: Boundaries = ON_HOST
    ) -> Call:  # fmt: skip
        """Call for such tokens, cached for the next one like it. boundaries: of the segments, as a call is settled for."""
        # boundaries that move keep this: with a reference back, both would wait for Python's collector of cycles
        whose = boundaries if boundaries is ON_HOST else ReferenceType(boundaries)
        key = (segments, x.shape[:-1], salt, plan, x.is_contiguous() and x.data_ptr() % 16 == 0, whose)
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        call = self._calls.get(key, lambda: settle(
            self.layers, self.layout, self.slots, self.tables, self.wide, x, segments, salt, plan, boundaries
        ))  # fmt: skip
        self._last = key, call
        return call

    def owned(self, call: Call) -> tuple[torch.Tensor, ...]:
        """The operands of the adapters that own tokens of a call."""
        return tuple(self.flat[slot.source] for slot in call.slots)

    def refresh(self, call: Call | None = None) -> None:
        """Bring the operands up to date with the parameters. call: once all have been made, those that it reads, where the
        others' changes are counted and so seen later."""
        with _REFRESHING:
            sources: Iterable[int] = range(len(self._sources))
            if call is not None and self.turn and self.version_counted:
                numbers = dict.fromkeys(segment.adapter for segment in call.segments)
                sources = [at for number in numbers for at in self._of_adapter.get(number, ())]
            self.turn, self._pass = self.turn + 1, _backward_pass()
            self._pack(sources)
            self.refresh_scales()

    def refresh_scales(self) -> None:
        """Refresh the scales of layers whose adapters have magnitudes or biases."""
        for made in self._composed:
            made.refresh(self.version_counted)

    def copies(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Adapter, place and source of every operand that is copied to where products read it."""
        return [(self._sources[at].number, into, self._sources[at].operand) for at, into in self._copies.items()]

    def serve(self, turn: int, call: Call) -> None:
        """Be ready for the backward of a call whose forward was at this turn."""
        if turn != self.turn and (self._pass == OUTSIDE or self._pass != _backward_pass()):
            self.refresh(call)

    # --- A's and B's -----------------------------------------------------------------------------------------------------

    def _sources_of(self, layers: tuple[Layer, ...]) -> list[_Source]:
        found = []
        for (number, index), place in self.layout.places.items():
            low = layers[index].adapters[number]
            assert low.A is not None and low.B is not None
            only = self.layout.b_sizes[index] == low.B.shape[0] * place.padded
            found.append(_Source(low.A, "A", number, index, place, len(self.layout.places) == 1))
            found.append(_Source(low.B, "B", number, index, place, only))
        return found

    def _pack(self, sources: Iterable[int]) -> None:
        """Copy what has changed of these sources into the buffers, by one call for all."""
        changed: dict[int, tuple[int, int] | None] = {}
        for at in sources:
            source = self._sources[at]
            address = source.operand.data_ptr()
            if self._addresses[at] == address:
                continue
            now = stamp(source.operand) if self.version_counted else None
            if now is not None and now == self._seen[at]:
                continue
            if self._lies_as_it_should(source):
                self._use_in_place(at, source)
                self._addresses[at] = address
                continue
            self._addresses[at] = self._seen[at] = None  # until it is copied
            if at not in self._copies:
                with torch.inference_mode(False):
                    self._copies[at] = self._make_room(source)
            changed[at] = now
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._copies[at] for at in changed], [self._sources[at].operand for at in changed]
                )
            for at, now in changed.items():
                self._seen[at] = now

    def _lies_as_it_should(self, source: _Source) -> bool:
        return (
            source.undivided and source.place.rank == source.place.padded and source.operand.dtype == self.dtype
            and source.operand.is_contiguous() and source.operand.data_ptr() % 16 == 0
        )  # fmt: skip

    def _use_in_place(self, at: int, source: _Source) -> None:
        self._copies.pop(at, None)
        self.operands.views.clear()
        if source.name == "A":
            self.operands.A_RK = source.operand.detach()
            self._owned.discard("A")
        else:
            self.operands.B[source.layer] = source.operand.detach()
            self._owned.discard(source.layer)

    def _make_room(self, source: _Source) -> torch.Tensor:
        """Destination of an operand's copy: a part of a buffer that is zero around it."""
        own, place, layout = self.operands, source.place, self.layout
        buffer: str | int = "A" if source.name == "A" else source.layer
        if buffer not in self._owned:
            own.views.clear()
            self._owned.add(buffer)
            if source.name == "A":
                own.A_RK = torch.zeros(layout.num_rows, self.K, dtype=self.dtype, device=self.device)
            else:
                own.B[source.layer] = torch.zeros(layout.b_shapes[source.layer], dtype=self.dtype, device=self.device)
        if source.name == "A":
            first = layout.rows[source.number][0] + place.column
            return own.A_RK[first : first + place.rank]
        return own.block(layout, source.number, source.layer)[0][:, : place.rank]


def same_layer(new: Layer, old: Layer) -> bool:
    """Whether two layers have the very same operands."""
    return new is old or (
        new.frozen == old.frozen and new.bias is old.bias and new.adapters.keys() == old.adapters.keys()
        and new.keep_output == old.keep_output and all(_same(low, old.adapters[n]) for n, low in new.adapters.items())
    )  # fmt: skip


def _same(new: LowRank, old: LowRank) -> bool:
    """The very same operands. A method that gives a norm is another object each time."""
    return new is old or (
        new.A is old.A and new.B is old.B and new.scaling == old.scaling and new.magnitude is old.magnitude
        and new.bias is old.bias and (new.norm is old.norm or (callable(new.norm) and new.norm == old.norm))
    )  # fmt: skip
