"""Gradients and sums of losses of adapters that are about to step, added up over replicas of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from packlora.engine.adapters import AdapterState
from packlora.parallel.alone import Alone

if TYPE_CHECKING:
    from packlora.parallel.adapter import SharedGradient


class ReplicaSums:
    """Sums over the replicas of a group of processes."""

    def __init__(self, group: Alone) -> None:
        self.group = group
        self._shared: dict[int, SharedGradient] = {}
        """Shared gradients by adapter, where replicas hold experts together."""

    def follow(self, adapters: Collection[int]) -> None:
        """These adapters may step now."""
        self._shared = {adapter: own for adapter, own in self._shared.items() if adapter in adapters}

    def add_up(self, states: Sequence[AdapterState]) -> None:
        """Add up in place. All replicas call it for the same adapters, and get the same bits."""
        if self.group.size == 1:
            return
        gradients, sums = zip(*(state.partial() for state in states), strict=True)
        summed = torch.cat(sums)
        if self.group.exchanges:
            for state, gradient in zip(states, gradients, strict=True):
                self._shared_gradient(state).add_up(gradient, self.group.add)
            self.group.add([summed])
        else:
            self.group.add([*gradients, summed])
        for state, own in zip(states, summed.split([len(own) for own in sums]), strict=True):
            state.sums = own

    def _shared_gradient(self, state: AdapterState) -> SharedGradient:
        from packlora.parallel.adapter import SharedGradient

        number = state.adapter.number
        if number not in self._shared:
            self._shared[number] = SharedGradient(state.adapter, self.group.alike)
        return self._shared[number]


def join_found(states: Sequence[AdapterState], found: Sequence[int]) -> None:
    """Let adapters know of parameters that have got a gradient on another replica alone. found: by parameter of each."""
    most = iter(found)
    for state in states:
        state.without = {name for name in state.parameters if not next(most)}
