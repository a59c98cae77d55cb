"""Replicas of the model that train the same jobs: each runs its own microbatches, and at a job's step they add up its gradient.

All of them hold the same adapters and optimizers, and take the same steps: what they decide by, they have agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from packlora.parallel.mesh import Mesh, as_bytes, from_bytes


class Alone:
    """One process with its jobs."""

    rank, size = 0, 1

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each that a process gives."""
        return list(numbers)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each over the processes, in place; all of them get the same bits."""

    def told(self, value: Any) -> Any:
        """What the first process gives; plain values, as JSON holds them."""
        return value


ALONE = Alone()


class Replicas(Alone):
    """Some processes of a mesh.

    Args:
        ranks: of the groups; each process takes part in one.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[Sequence[int]]) -> None:
        timeout = timedelta(seconds=mesh.timeout)
        for own in ranks:  # a group is made by all processes together
            control = dist.new_group(list(own), backend="gloo", timeout=timeout)
            sums = dist.new_group(list(own), timeout=timeout)
            if mesh.rank in own:
                self.rank, self.size = own.index(mesh.rank), len(own)
                self._control, self._sums, self._first = control, sums, own[0]
        self._mesh = mesh

    def most(self, numbers: Sequence[int]) -> list[int]:
        found = torch.tensor(list(numbers), dtype=torch.int64)
        with self._mesh.told():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return found.tolist()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._mesh.told():
            for tensor in tensors:
                dist.all_reduce(tensor, group=self._sums)

    def told(self, value: Any) -> Any:
        own = as_bytes(value if self.rank == 0 else None)
        size = torch.tensor([own.numel()])
        with self._mesh.told():
            dist.broadcast(size, self._first, group=self._control)
            text = own if self.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(text, self._first, group=self._control)
        return from_bytes(text)
