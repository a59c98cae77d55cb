"""A pipeline of processes: what passes between two stages, and who its neighbours are. engine/engine.py says when.

Two directions are two channels. In each, messages are received in the order in which they were sent. A stage receives when it
needs what comes, and a send does not wait for that: so every order of actions that a single process could take ends.

Where several pipelines share their jobs, each runs its own microbatch of a slot, or none; before a job's sums they add up its
gradient, each stage with the same stage of the others. The processes of a stage that is cut have the same microbatches and the
same sums. What they decide by is made one on the first stage, before the totals go up.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import FlatLayout
from packlora.parallel.adapter import joined
from packlora.parallel.collectives import answered
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.parallel.replicas import Replicas


class Channel:
    """Messages in one direction between neighbours. All stages make it together.

    Args:
        group: of a chain; while microbatches pass through the stages no other messages go through it.
        before, after: ranks that this one receives from and sends to; None at an end.
        keep: messages that may be on their way at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, before: int | None, after: int | None, device: torch.device, keep: int
    ) -> None:
        self.group, self.before, self.after, self.device, self.keep = group, before, after, device, keep
        self._sent: deque[tuple[torch.Tensor, list[Any]]] = deque()
        with answered():
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # a group's first message takes all of them

    def send(self, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Does not wait for the receiver, but for that of `keep` messages before. shape, dtype: what the receiver expects."""
        found = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
        wanted = (tuple(shape), dtype, self.device.type)
        assert found == wanted and tensor.is_contiguous(), f"{found} to be sent, {wanted} expected"
        assert self.after is not None
        with answered():
            work = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, self.after, self.group)])
        self._sent.append((tensor, work))
        self.drain(self.keep)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self.before is not None
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with answered():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, self.before, self.group)]):
                work.wait()
        return tensor

    def drain(self, keep: int = 0) -> None:
        """Wait until no more than so many messages are on their way."""
        with answered():
            while len(self._sent) > keep:
                for work in self._sent.popleft()[1]:
                    work.wait()


class Links(Replicas):
    """The processes of a group whose replicas are pipelines.

    A stage is one process, or several that hold its layers together (tensor.py) or experts (experts/cut.py). Each of these
    sends to the one in its own place in the next stage: these are a chain.

    stage: of this process. part: its place in the stage. beside: the processes of its stage, None where it is one.

    Args:
        mesh: of all processes.
        layout: its groups.
        device: of the tensors that pass between stages.
    """

    beside: dist.ProcessGroup | None = None

    def __init__(self, mesh: Mesh, layout: Layout, device: torch.device) -> None:
        super().__init__(mesh, layout)
        self.stages, self.device, self._told = layout.pipeline, device, 0
        each = layout.devices_per_replica
        width = each // layout.pipeline
        self._ends: dist.ProcessGroup | None = None
        for number in range(len(layout.groups)):  # a group is made by all processes together
            every = layout.ranks(number)
            for replica in [every[at : at + each] for at in range(0, len(every), each)]:
                for part in range(width):
                    self._chain(mesh, replica[part::width], part)
                for stage in [list(replica[at : at + width]) for at in range(0, each, width)] if width > 1 else []:
                    beside = mesh.new_group(stage)
                    if mesh.rank in stage:
                        self.beside = beside
            ends = [rank for rank in every if every.index(rank) % each < width]
            first = mesh.new_group(ends) if len(ends) > 1 else None
            if mesh.rank in ends:
                self._ends = first
            for part in range(width):
                losses = mesh.new_group(every[part::width], "gloo")
                if mesh.rank in every[part::width]:
                    self._losses = losses
        keep = 3 * (self.stages + 1)
        self.up = Channel(self._groups[0], self._below, self._above, device, keep)
        self.down = Channel(self._groups[1], self._above, self._below, device, keep)

    def _chain(self, mesh: Mesh, ranks: Sequence[int], part: int) -> None:
        """Make the groups of a chain, which has these ranks."""
        groups = tuple(mesh.new_group(ranks) for _ in range(2))
        among = mesh.new_group(ranks, "gloo")
        if mesh.rank not in ranks:
            return
        self.stage, self.part, self._groups, self._among, self._ranks = (
            ranks.index(mesh.rank),
            part,
            groups,
            among,
            ranks,
        )
        self._below = ranks[self.stage - 1] if self.stage else None
        self._above = ranks[self.stage + 1] if self.stage < len(ranks) - 1 else None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        self.up.drain()
        self.down.drain()

    def of_last(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Tensor of the last stage, on all stages; any floating-point tensor of three dimensions, as float64."""
        size, last = torch.zeros(3, dtype=torch.int64, device=self.device), self._ranks[-1]
        if tensor is not None:
            size = torch.tensor(tensor.shape, device=self.device)
        with answered():
            dist.broadcast(size, last, group=self.up.group)
            found = torch.zeros(size.tolist(), dtype=torch.float64, device=self.device)
            if tensor is not None:
                found = tensor.double().contiguous()
            dist.broadcast(found, last, group=self.up.group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Values that the processes of this one's chain give, by stage; plain values, as JSON holds them."""
        return self._mesh.gather_in(self._among, value)

    def told(self, value: Any) -> Any:
        """See Alone. The first process does not wait for the others to hear it."""
        key, store = f"told/{self.number}/{self._told}", self._mesh.store
        self._told += 1
        if self.leads:
            store.set(key, json.dumps(value))
            return value
        with self._mesh.told():
            text = self._mesh.awaited(key, self._first)
            if store.add(f"{key}/heard", 1) == self.processes - 1:
                store.delete_key(key)
                store.delete_key(f"{key}/heard")
        return json.loads(text)

    def largest_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the processes; NaN where it is so on one of them. On the CPU."""
        told = self._mesh.gather_in(self._control, numbers.tolist())
        return torch.stack([torch.tensor(own, dtype=torch.float64) for own in told]).amax(0)

    def agreed(self, totals: torch.Tensor) -> torch.Tensor:
        """Largest of each element, on the first stage, over its processes in all replicas."""
        return totals if self._ends is None else self._largest(totals, self._ends)

    def add_losses(self, losses: torch.Tensor) -> None:
        with self._mesh.told():
            dist.all_reduce(losses, group=self._losses)

    def found_by_one(self, found: Sequence[int]) -> list[int]:
        """The largest of each number over the processes in this one's place in all replicas."""
        most = torch.tensor(list(found), dtype=torch.int64)
        with self._mesh.told():
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._sums)
        return most.tolist()

    def flats(self, flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Gather on the first stage the tensors of one dimension of all stages, on the CPU; on the others their own. All of a
        chain call it.

        Args:
            sizes: by stage, the elements of its tensor.
        """
        own = flat.detach().cpu()
        with self._mesh.told():
            if not self.is_first:
                dist.send(own, self._ranks[0], group=self._among)
                return [own]
            out = [own, *(torch.empty(size, dtype=own.dtype) for size in sizes[1:])]
            for rank, others in zip(self._ranks[1:], out[1:], strict=True):
                dist.recv(others, rank, group=self._among)
        return out

    @property
    def holders(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        return self.beside

    def whole(self, adapters: Sequence[Adapter]) -> Callable[[Adapter, Any], None]:
        told = self.gather([adapter.whole_shapes for adapter in adapters])
        across = {
            adapter.name: AcrossStages(adapter, self, [own[number] for own in told])
            for number, adapter in enumerate(adapters)
        }
        within = super().whole(adapters)

        def make(adapter: Adapter, state: Any) -> None:
            within(adapter, state)
            state.whole_of, state.everywhere = across[adapter.name].whole, across[adapter.name].everywhere

        return make


class AcrossStages:
    """An adapter over the stages of a pipeline: what is saved of it.

    Args:
        shapes: by stage, those of its whole parameters by name.
    """

    def __init__(self, adapter: Adapter, links: Links, shapes: Sequence[Mapping[str, Sequence[int]]]) -> None:
        self.adapter, self.links = adapter, links
        self.layouts = [FlatLayout({name: tuple(shape) for name, shape in own.items()}) for own in shapes]
        adapter.elsewhere = {
            name: tuple(shape)
            for stage, own in enumerate(shapes)
            if stage != links.stage
            for name, shape in own.items()
        }

    def whole(self, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """See AdapterState.whole_of; on the first process alone."""
        here = self.layouts[self.links.stage]
        own = self.adapter.layout.views(flat.cpu())
        if self.links.beside is not None:
            own = joined(self.adapter, self.links.beside, flat)
        if self.links.part:
            return {}
        lined_up = torch.zeros(here.size, dtype=flat.dtype)
        for name, view in here.views(lined_up).items():
            view.copy_(own[name])
        if not self.links.is_first:
            self.links.flats(lined_up, ())
            return {}
        flats = self.links.flats(lined_up, [layout.size for layout in self.layouts])
        return {
            name: tensor
            for layout, found in zip(self.layouts, flats, strict=True)
            for name, tensor in layout.views(found).items()
        }

    def everywhere(self, own: Mapping[str, int]) -> Mapping[str, int]:
        """See AdapterState.everywhere."""
        return {name: number for numbers in self.links.gather(dict(own)) for name, number in numbers.items()}
