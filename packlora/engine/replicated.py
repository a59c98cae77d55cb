"""Sums of gradients and losses over the replicas of a model, before adapters step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.engine.adapters import AdapterState
from packlora.parallel.alone import Alone


def add_up(states: Sequence[AdapterState], group: Alone) -> None:
    """Add up gradients, and sums of losses and metrics, over the replicas of a group, in place. All replicas call it for the
    same adapters, and get the same bits."""
    if group.size == 1:
        return
    gradients, sums = zip(*(state.partial() for state in states), strict=True)
    for state, gradient in zip(states, gradients, strict=True):
        state.add_up(gradient, group.add)
    group.add([summed := torch.cat(sums)])
    for state, own in zip(states, summed.split([len(own) for own in sums]), strict=True):
        state.sums = own


def join_found(states: Sequence[AdapterState], found: Sequence[int]) -> None:
    """Let adapters know of parameters that have got a gradient on another replica alone. found: by parameter of each."""
    most = iter(found)
    for state in states:
        state.without = {name for name in state.parameters if not next(most)}
