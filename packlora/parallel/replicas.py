"""Replicas of the model that train the same jobs: each runs its own microbatches, and at a job's step they add up its gradient.

A replica is one process, or several that hold the model together (tensor.py, packlora/pipeline/). All replicas hold the same
adapters and optimizers, and take the same steps: what the processes decide by, they have agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.parallel.adapter import WholeGradient, joined
from packlora.parallel.alone import Alone
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh, as_bytes, from_bytes


class Replicas(Alone):
    """Some processes of a mesh.

    Args:
        layout: its groups; each process takes part in one.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        each = layout.devices_per_replica
        self.size, self.processes = layout.split, layout.devices_per_job
        for number in range(len(layout.groups)):  # a group is made by all processes together
            every = layout.ranks(number)
            control = mesh.new_group(every, "gloo")
            replicas = [every[at : at + each] for at in range(0, len(every), each)]
            models = self._models(mesh, layout, every, replicas)
            n, layers = layout.tensor, list[dist.ProcessGroup]()
            if n > 1 and layout.expert > 1:
                layers = [mesh.new_group(every[at : at + n]) for at in range(0, len(every), n)]
            sums = [mesh.new_group(every[at::each]) for at in range(each)]
            bases = _bases(every, layout, mesh)
            if mesh.rank in every:
                self.number = number
                at = every.index(mesh.rank)
                self.rank, part = divmod(at, each)
                self.leads, self.model = mesh.rank == every[0], models[self.rank]
                self.base, self.shards = self.model, None
                self.layers, self.is_repeated = self.model, False
                if layers:
                    self.layers, self.is_repeated = layers[at // n], at % (n * layout.expert) >= n
                if bases:
                    self.base, rows = bases[at // layout.devices_per_base]
                    self.shards = rows[at % layout.slices]
                self._control, self._sums, self._first = control, sums[part], every[0]
                self.saves = self.rank == 0
        self._mesh = mesh

    def _models(
        self, mesh: Mesh, layout: Layout, every: Sequence[int], replicas: Sequence[Sequence[int]]
    ) -> Sequence[dist.ProcessGroup | None]:
        """The processes that hold a model together, by replica. All processes call it.

        Args:
            every: ranks of a group; replicas: the same by replica.
        """
        return [mesh.new_group(own) if len(own) > 1 else None for own in replicas]

    def most(self, numbers: Sequence[int]) -> list[int]:
        found = torch.tensor(list(numbers), dtype=torch.int64)
        with self._mesh.told():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return found.tolist()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._mesh.told():
            for tensor in tensors:
                dist.all_reduce(tensor, group=self._sums)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.model is None else self._largest(tensor, self.model)

    @property
    def holders(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        return self.model

    def whole(self, adapters: Sequence[Adapter]) -> Callable[[Adapter, Any], None]:
        holders = self.holders

        def make(adapter: Adapter, state: Any) -> None:
            if holders is not None:
                state.norm_of = WholeGradient(adapter, holders, self.is_repeated).norm
                state.whole_of = partial(joined, adapter, holders)

        return make

    def _largest(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        found = tensor.nan_to_num(math.inf, math.inf, -math.inf).contiguous()
        with self._mesh.told():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return torch.where(tensor.isnan(), tensor, found)

    def told(self, value: Any) -> Any:
        own = as_bytes(value if self.leads else None)
        size = torch.tensor([own.numel()])
        with self._mesh.told():
            dist.broadcast(size, self._first, group=self._control)
            text = own if self.leads else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(text, self._first, group=self._control)
        return from_bytes(text)


def _bases(every: range, layout: Layout, mesh: Mesh) -> list[tuple[dist.ProcessGroup, list[dist.ProcessGroup]]]:
    """Groups of the processes that hold a base model together, and of these, by slice, those that share its rows.
    None where each holds all rows."""
    each, together = layout.slices, layout.devices_per_base
    if not layout.sharded:
        return []
    out = []
    for own in (every[at : at + together] for at in range(0, len(every), together)):
        rows = [mesh.new_group(own[place::each]) for place in range(each)]
        out.append((mesh.new_group(own) if each > 1 else rows[0], rows))
    return out
