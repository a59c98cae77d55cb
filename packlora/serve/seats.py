"""Seats of models on a base: what its CUDA graphs hold, when models come and go.

A recording holds addresses. A model that leaves keeps its seat for a while: the next one of its kind takes it, with weights of
its own, and all recordings serve on. Else one that comes or leaves lets all be recorded anew.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from transformers import PreTrainedModel

from packlora.adapters.attach import Adapter, adapted_layers, write_first_values
from packlora.adapters.linear import Attached
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import AdapterWeights
from packlora.engine.adapters import AdapterState
from packlora.engine.graphs import GraphedDevice
from packlora.engine.recorded import LEAST_TOKENS
from packlora.runtime.cuda_graphs import buffers_of, has_two_products
from packlora.seeding import stable_hash
from packlora.serve.optimizer import FIRST

SEAT_SECONDS = 30.0
"""Seconds for which a seat without a model is kept."""
KEPT = 16
"""Models that work for each seat that is kept for longer, and one is: what is recorded anew costs all of them seconds."""


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
            _add_up_where(seat.state, state)
        else:
            self._follow()

    def leave(self, adapter: Adapter) -> bool:
        """A model owns no tokens any more. Returns whether its adapter stays on the base."""
        state = self._held.pop(adapter.number, None)
        if state is not None and adapter.number in self._graphs.adapters and _is_linear(adapter):
            empty = AdapterState(adapter, FIRST, 1)
            _add_up_where(state, empty)
            self._empty[adapter.number] = Seat(empty, time.monotonic())
        elif state is not None:
            self._follow()
        return adapter.number in self._empty

    def clear(self, seconds: float) -> list[Adapter]:
        """Give up all empty seats once one has been empty for so long, if there are more than are kept while models work.
        Returns their adapters, which are to leave the base.

        Args:
            seconds: 0 gives up all.
        """
        kept = max(1, len(self._held) // KEPT) if seconds and self._held else 0
        if len(self.empty) <= kept or not any(time.monotonic() - seat.since >= seconds for seat in self.empty):
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


def _is_linear(adapter: Adapter) -> bool:
    """Whether it is one of linear layers alone, which `restart` takes."""
    return all(isinstance(own, AdapterWeights) for own in adapter.weights.values())


def _add_up_where(before: AdapterState, state: AdapterState) -> None:
    """Let a state add up gradients in the buffers of another one of the same adapter, which is over."""
    before.discard()
    state.gradient, state.gradients = before.gradient, before.gradients


def restart(
    model: PreTrainedModel, attached: Attached, adapter: Adapter, name: str, spec: AdapterSpec, seed: int
) -> None:
    """Let an adapter be another model's, which starts as it would have at first: parameters stay where they are.

    Args:
        adapter: of linear layers alone.
        spec: of the same modules.
    """
    adapter.name, adapter.spec = name, spec
    adapter.flat.zero_()
    for path, own in adapter.weights.items():
        own.draw(stable_hash("start", seed, path))
    write_first_values(model, attached, adapted_layers(model), [adapter.number])
