"""Sums that the stages of a pipeline need for steps: they go down from stage to stage, and up again as totals.

Columns of sums and totals, float64 [1 + steps, 4 + (1 + M)], M of the adapter with the most metrics. From LOSS on they are
AdapterState.sums. LARGEST and CHANGED are the largest of all stages, the others are added up. Row 0 says in column LARGEST
whether a process was asked for something; the others are of the steps, in their order. FOUND: parameters with a gradient.
LARGEST, CHANGED: of the adapter's step before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from packlora.engine.adapters import AdapterState
from packlora.engine.replicated import add_up, join_found
from packlora.pipeline.links import Links

SQUARE, FOUND, LOSS, LARGEST, CHANGED = 0, 1, 2, -2, -1


@dataclass(frozen=True, slots=True)
class Total:
    """Numbers of all stages for a step of an adapter.

    sums: of losses and metrics [1 + M] float64; loss: the first of them. norm: of the gradient [] float64, and norm_value.
    found: parameters with a gradient. before: the largest parameter after the adapter's step before, and 1 where that changed
    any; None where this was told already.
    """

    sums: torch.Tensor
    loss: float
    norm: torch.Tensor
    norm_value: float
    found: int
    before: tuple[float, float] | None


class StageSums:
    """Sums of one stage and its neighbours.

    Args:
        links: to the neighbours.
    """

    def __init__(self, links: Links, device: torch.device) -> None:
        self.links, self.device = links, device
        self.unconfirmed: dict[int, torch.Tensor] = {}
        """Columns LARGEST and CHANGED of this stage by adapter that has stepped."""

    def sums(self, states: Sequence[AdapterState], asked: bool) -> torch.Tensor:
        """Sums of the stages above, which are received, and this one; sent on down. After the backward that completes the
        adapters' global batches."""
        links, shape = self.links, _shape(states)
        above = None if links.is_last else links.down.receive(shape, torch.float64)
        if links.size > 1:
            join_found(states, links.found_by_one([int(own) for state in states for own in state.found().values()]))
            add_up(states, links)
        sums = self._own(states, asked)
        if above is not None:
            sums[:, :LARGEST] += above[:, :LARGEST]
            sums[:, LARGEST:] = torch.maximum(sums[:, LARGEST:], above[:, LARGEST:])
        if links.is_first:
            return links.agreed(sums)
        links.down.send(sums, shape, torch.float64)
        return sums

    def _own(self, states: Sequence[AdapterState], asked: bool) -> torch.Tensor:
        own = torch.zeros(_shape(states), dtype=torch.float64, device=self.device)
        own[0, LARGEST] = asked
        for row, state in zip(own[1:], states, strict=True):
            assert state.sums is not None
            row[SQUARE], row[FOUND] = state.square(), len(state.parameters) - len(state.without)
            row[LOSS : LOSS + len(state.sums)] = state.sums
            if (made := self.unconfirmed.get(state.adapter.number)) is not None:
                row[LARGEST:] = made
        return own

    def totals(self, states: Sequence[AdapterState], sums: torch.Tensor | None) -> tuple[bool, list[Total]]:
        """Totals from the stage below, sent on up: whether a process was asked for something, and of each adapter. Waits for
        the device.

        Args:
            sums: as `sums` gave them, which on the first stage are the totals.
        """
        links, shape, totals = self.links, _shape(states), sums
        if not links.is_first:
            totals = links.up.receive(shape, torch.float64)
        assert totals is not None
        if not links.is_last:
            links.up.send(totals, shape, torch.float64)
        asked, *rows = totals.tolist()
        out = []
        for state, total, row in zip(states, totals[1:], rows, strict=True):
            is_known = self.unconfirmed.pop(state.adapter.number, None) is None
            before = None if is_known else (row[LARGEST], row[CHANGED])
            own, norm = total[LOSS : LOSS + state.num_sums], total[SQUARE].sqrt()
            out.append(Total(own, row[LOSS], norm, math.sqrt(row[SQUARE]), int(row[FOUND]), before))
        return asked[LARGEST] > 0, out

    def dry(self) -> Iterator[tuple[int, float, float]]:
        """Wait until nothing is on its way, and tell of steps that were not told of: adapter, LARGEST and CHANGED."""
        self.links.drain()
        if not self.unconfirmed:
            return
        made = torch.stack(list(self.unconfirmed.values())).cpu()
        adapters, self.unconfirmed = list(self.unconfirmed), {}
        for adapter, (largest, changed) in zip(adapters, self.links.largest_of(made).tolist(), strict=True):
            yield adapter, largest, changed


def _shape(states: Sequence[AdapterState]) -> tuple[int, int]:
    return 1 + len(states), 4 + max(state.num_sums for state in states)
