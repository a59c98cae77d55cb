"""What is kept of a group's layers from call to call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from packlora.ops.lora_linear.layout import Layout, make_layout
from packlora.ops.lora_linear.packed import Packed
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.steps import Composition, Steps
from packlora.ops.lora_linear.tables import make_group_tables
from packlora.ops.lora_linear.types import Layer, LowRank, Segment, check_layers
from packlora.ops.recent import Recent

OUTSIDE = -1
"""Instead of the number of a backward pass where none is running."""
_backward_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: OUTSIDE)
"""Number of the backward pass that is running in this thread; what checkpointing recomputes belongs to it."""

_LAYOUTS: Recent[Layout] = Recent(4096)


_REFRESHING = threading.RLock()
"""Two threads that first use one layer must not both make its buffers."""


class GroupState:
    """What one caller keeps between its calls: packed operands and tables of the layers that it last passed.

    trusted: parameters change only in ways that the host can see (ops/stamp.py), so what is prepared from them is refreshed
    only then. Otherwise it is refreshed at every call.
    """

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self._prepared: dict[bool, Prepared] = {}
        self._plan: Plan | None = None
        self._kernels = False
        self.layers: tuple[Layer, ...] = ()
        """Those passed last; a caller that passes the same objects again is served faster."""

    def prepared(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], plan: Plan) -> Prepared:
        if plan is not self._plan:
            self._plan, self._kernels = plan, plan.needs_triton
        kernels = self._kernels
        self.layers = layers
        found = self._prepared.get(kernels)
        if found is None or not found.fits(x_TK, layers):
            with torch.inference_mode(False):  # what is kept is written to in training too
                found = self._prepared[kernels] = Prepared(x_TK, layers, kernels, self.trusted)
        return found


class Prepared:
    """Checked layers with their layout, packed operands and tables.

    A backward takes the packed operands and scales of its own forward. Where another forward has made them anew since, it takes
    those of the parameters as they are by then. So weights that are swapped through .data for another forward and swapped back,
    as by a mean teacher, make no difference. (What is not swapped back is a mixture, in PEFT of other parts.)
    """

    def __init__(self, x_TK: torch.Tensor, layers: tuple[Layer, ...], kernels: bool, trusted: bool) -> None:
        check_layers(x_TK, layers)
        self.layers, self.dtype, self.device, self.K = layers, x_TK.dtype, x_TK.device, x_TK.shape[1]
        self.kernels, self.trusted = kernels, trusted
        ranks = tuple(tuple((number, low.rank) for number, low in layer.adapters.items()) for layer in layers)
        sizes = tuple(len(layer.weight) for layer in layers)
        align = 16 if kernels else 1
        self.layout = _LAYOUTS.get(
            (ranks, sizes, align), lambda: make_layout([dict(own) for own in ranks], sizes, align)
        )
        self.packed = Packed(self.layout, self.K, x_TK.dtype, x_TK.device, trusted)
        self.slots = [
            (index, number, name)
            for index, layer in enumerate(layers)
            for number, low in layer.adapters.items()
            for name in low.operands()
        ]
        """Layer, adapter and name of every operand that gets a gradient; `flat` has the operands."""
        self.flat = tuple(layers[index].adapters[number].operands()[name] for index, number, name in self.slots)
        dtypes = {t.dtype for t in self.flat}
        self.wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
        """What kernels write gradients in: the parameters' dtype where all agree."""
        self.num_adapters = 1 + max(self.layout.rows, default=-1)
        self.compositions = {
            index: Composition(layer, self.num_adapters, x_TK.dtype, kernels)
            for index, layer in enumerate(layers)
            if not all(low.plain for low in layer.adapters.values())
        }
        """Of layers where an adapter has a magnitude or a bias of its own."""
        by_adapter: dict[int, set[float]] = {}
        for layer in layers:
            for number, low in layer.adapters.items():
                if low.rank:
                    by_adapter.setdefault(number, set()).add(low.scaling)
        self.scalings = {number: own.pop() if len(own) == 1 else None for number, own in by_adapter.items()}
        """Of each adapter, None where its layers scale differently."""
        self._steps: Recent[Steps] = Recent(4)
        self._last: tuple[tuple[Any, ...], Steps] | None = None
        """Key and value of the last call, which the next one is mostly like."""
        self.turn = 0
        """How often it was refreshed."""
        self._pass = OUTSIDE
        """The backward pass in which it was refreshed last."""
        if kernels:
            factors = {(n, j): low.scaling for j, layer in enumerate(layers) for n, low in layer.adapters.items()}
            self.tables = make_group_tables(self.layout, factors, self.num_adapters, self.device)

    def steps(self, x_TK: torch.Tensor, segments: tuple[Segment, ...], salt: int, plan: Plan) -> Steps:
        """Those of such a call; kept for the next one like it."""
        aligned = x_TK.is_contiguous() and x_TK.data_ptr() % 16 == 0
        key = (segments, x_TK.shape[0], salt, plan, aligned)
        last = self._last
        if last is not None and last[0][0] is segments and last[0][3] is plan and last[0] == key:
            return last[1]
        steps = self._steps.get(key, lambda: Steps(self, x_TK, segments, salt, plan))
        self._last = key, steps
        return steps

    def trains_magnitude(self) -> bool:
        """Whether a backward may need products of the forward beside S."""
        named = zip(self.slots, self.flat, strict=True)
        return any(name == "magnitude" and operand.requires_grad for (_, _, name), operand in named)

    def refresh(self) -> None:
        """Bring packed operands and scales up to date with the parameters."""
        with _REFRESHING:
            self.turn, self._pass = self.turn + 1, _backward_pass()
            self.packed.refresh(self.layers)
            for composition in self.compositions.values():
                composition.refresh(self.trusted)

    def serve(self, turn: int) -> None:
        """Be ready for a backward whose forward was at this turn."""
        if turn != self.turn and (self._pass == OUTSIDE or self._pass != _backward_pass()):
            self.refresh()

    def fits(self, x_TK: torch.Tensor, layers: tuple[Layer, ...]) -> bool:
        """Whether these are the layers that it was made for, the very objects."""
        if x_TK.dtype != self.dtype or x_TK.device != self.device or x_TK.shape[1] != self.K:
            return False
        if layers is self.layers:
            return True
        return len(layers) == len(self.layers) and all(
            new is old or _same_layer(new, old) for new, old in zip(layers, self.layers, strict=True)
        )


def _same_layer(new: Layer, old: Layer) -> bool:
    """The very same operands."""
    return (
        new.weight is old.weight and new.bias is old.bias and new.adapters.keys() == old.adapters.keys()
        and new.keep_output == old.keep_output and all(_same(low, old.adapters[n]) for n, low in new.adapters.items())
    )  # fmt: skip


def _same(new: LowRank, old: LowRank) -> bool:
    """The very same operands."""
    return new is old or (
        new.A is old.A and new.B is old.B and new.scaling == old.scaling and new.magnitude is old.magnitude
        and new.bias is old.bias and new.norm is old.norm
    )  # fmt: skip
