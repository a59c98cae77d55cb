"""CUDA graphs of a service: a microbatch of any mix of its models is two replays, as those of a run are.

What is recorded holds all models that are on the base, at their addresses. A model that leaves keeps its seat for a while: the
next one of its kind takes it, whatever its weights are, and all recordings serve on. Else one that comes or leaves lets all be
recorded anew. That takes as long as several microbatches without, so the first ones of each size go without. Requests come in
any number of tokens: sizes are few, and a small one costs what small ones cost.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from packlora.adapters.attach import Adapter, can_restart
from packlora.adapters.spec import AdapterSpec
from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.adapters import AdapterState
from packlora.engine.graphs import NO_GRAPHS, GraphedDevice
from packlora.engine.passes import SingleDevice
from packlora.engine.recorded import LEAST_TOKENS
from packlora.errors import InputError
from packlora.runtime.cuda_graphs import buffers_of, has_two_products, why_base_has_none
from packlora.serve.logs import LOG
from packlora.serve.optimizer import FIRST

PATIENCE = 3
"""Microbatches of a size that run without a graph before it is recorded."""
SIZES = 4
"""Numbers of tokens from a power of two to the next that have graphs of their own."""
SEAT_SECONDS = 30.0
"""Seconds for which a seat without a model is kept."""


def graphs_of(run: Run, base: Base, single: SingleDevice) -> GraphedDevice | None:
    """The executor with graphs, of no model yet; None where there are none.

    Raises:
        InputError: the run must have graphs, and cannot.
    """
    reason = why_base_has_none(run, base)
    if run.cuda_graphs is True and reason is not None:
        raise InputError(f"cuda_graphs: true cannot be met: {reason}")
    if run.cuda_graphs is False or reason is not None:
        if reason is not None and base.device.type == "cuda":
            LOG.warning("%s: %s", NO_GRAPHS, reason)
        return None
    return GraphedDevice(single, {}, False, 0, LOG.warning, patience=PATIENCE, steps=SIZES)


class Seat(NamedTuple):
    """The place of a model that has left. state: of the gradient's buffers alone. since: seconds of a monotonic clock."""

    state: AdapterState
    since: float


class Seats:
    """Models that the graphs of a base hold, and seats of models that have left it."""

    def __init__(self, graphs: GraphedDevice) -> None:
        self._graphs = graphs
        self._held: dict[int, AdapterState] = {}
        self._empty: dict[int, Seat] = {}
        """By number of the adapter."""

    @property
    def empty(self) -> list[Seat]:
        """Seats without a model."""
        return [*self._empty.values()]

    def take(self, spec: AdapterSpec) -> Adapter | None:
        """An adapter on such modules that waits for a model; None where there is none."""
        adapters = [seat.state.adapter for seat in self.empty]
        return next((own for own in adapters if own.spec.modules == spec.modules), None)

    def hold(self, state: AdapterState) -> None:
        """A model may own tokens from now on."""
        number = state.adapter.number
        self._held[number] = state
        if (seat := self._empty.pop(number, None)) is not None:
            state.add_up_where(seat.state)
        else:
            self._follow()

    def leave(self, adapter: Adapter) -> bool:
        """A model owns no tokens any more. Returns whether its adapter stays on the base."""
        state = self._held.pop(adapter.number, None)
        if state is not None and adapter.number in self._graphs.adapters and can_restart(adapter):
            empty = AdapterState(adapter, FIRST, 1)
            empty.add_up_where(state)
            self._empty[adapter.number] = Seat(empty, time.monotonic())
        elif state is not None:
            self._follow()
        return adapter.number in self._empty

    def clear(self, seconds: float) -> list[Adapter]:
        """Give up all empty seats once one has been empty for so long. Returns their adapters, which are to leave the base."""
        if not any(time.monotonic() - seat.since >= seconds for seat in self.empty):
            return []
        left = [seat.state.adapter for seat in self.empty]
        self._empty.clear()
        self._follow()
        return left

    def _follow(self) -> None:
        """Record anew. A model that graphs cannot hold beside others runs without, and so do its microbatches."""
        states = [*self._held.values(), *(seat.state for seat in self.empty)]
        held = [own for own in states if len(states) == 1 or not has_two_products(own.adapter.spec)]
        dropout = any(module.dropout for own in held for module in own.adapter.spec.modules.values())
        many = f"{len(held)} models train at once, more than {LEAST_TOKENS}" if len(held) > LEAST_TOKENS else None
        self._graphs.change(buffers_of(held), dropout, many)
