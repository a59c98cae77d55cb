"""Replicas of the model that train the same jobs: each runs its own microbatches, and at a job's step they add up its gradient.

A replica is one process, or several that hold the model together (tensor.py, pipeline.py). All replicas hold the same adapters
and optimizers, and take the same steps: what the processes decide by, they have agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh, as_bytes, from_bytes


class Alone:
    """One process with its jobs.

    rank, size: of this process's replica among the replicas, and how many there are. processes: of all replicas. leads: whether
    this process speaks for all of them. saves: whether it has a part of what is saved.

    model: the processes that hold slices of layers or experts together with this one, those of its replica; None where it holds
    all of them. layers: of these the ones that hold slices of layers together, where others share experts alone; else the same.
    is_repeated: whether some before these have the same slices. exchanges: whether those processes are several replicas, whose
    tokens go to one another's experts. alike: then, the processes with the same experts, None where it is one. shards: those
    that hold the other rows of its weights, itself included, None where it holds all rows. base: those that hold the base model
    together with it, once; None where it is alone.

    stages: of the pipeline that a replica is; 1: it is none. stage: of this process; is_first: whether it is the first. beside:
    the processes of its stage, None where it is one.
    """

    rank, size, processes, leads, saves, exchanges, is_repeated = 0, 1, 1, True, True, False, False
    stages, stage = 1, 0
    beside: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    layers: dist.ProcessGroup | None = None
    alike: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    base: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return True

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each that a process gives."""
        return list(numbers)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each over the replicas, in place; all of them get the same bits."""

    def add_losses(self, losses: torch.Tensor) -> None:
        """The same of losses, which a replica of several processes may have on some of them alone; on the CPU."""
        self.add([losses])

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the processes of the replica; not finite where it is not on one of them."""
        return tensor

    def told(self, value: Any) -> Any:
        """Value that the first process gives; plain values, as JSON holds them."""
        return value


ALONE = Alone()


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
            models = [mesh.new_group(own) if each > 1 else None for own in replicas]
            alike: list[dist.ProcessGroup | None] = [None]
            if layout.exchange:
                n = layout.slices
                sets = [mesh.new_group(every[at : at + n]) for at in range(0, len(every), n)]
                models = [one for one in sets for _ in range(layout.expert)]
                if len(sets) > 1:
                    alike = [mesh.new_group(every[at::n]) for at in range(n)]
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
                self.exchanges, self.alike = layout.exchange, alike[at % len(alike)]
                self.saves = self.rank < layout.expert if layout.exchange else self.rank == 0
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

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.model is None else self._largest(tensor, self.model)

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
