"""A run on one process, which is all that a run on one device loads of this room: the same interfaces as over several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from packlora.adapters.attach import Adapter

T = TypeVar("T")
TIMEOUT = 600.0
"""Seconds after which a process that does not answer is given up."""


def world_size() -> int:
    """Processes that were started together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def was_restarted() -> bool:
    """Whether torchrun has started processes of this node again after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class OneProcess:
    """The mesh of a run on one device."""

    rank, size, is_first = 0, 1, True
    timeout = TIMEOUT
    """Seconds after which a process that does not answer is given up."""
    restarted = False
    """Whether torchrun has started the processes again after one of them, or a node, failed."""
    no_gpu: str | None = None
    """Why there is no GPU for this process, on a machine that has some."""

    def gather(self, value: Any) -> list[Any]:
        """Values that every process gives, by rank; plain values, as JSON holds them."""
        return [value]

    def barrier(self) -> None:
        """Wait for all processes."""

    def together(self, compute: Callable[[], T]) -> T:
        """Result of `compute`, once it has returned on every process.

        Raises:
            InputError: it found bad input on a process; on all of them, with the same words.
        """
        return compute()

    def same(self, found: Mapping[str, str]) -> None:
        """Make sure that every process found the same.

        Args:
            found: by what it is, its value in a word.

        Raises:
            InputError: a process differs from process 0; on all of them.
        """


class Alone:
    """One process with its jobs.

    rank, size: of this process's replica among the replicas, and how many there are. processes: of all replicas. leads: whether
    this process speaks for all of them. saves: whether it has a part of what is saved.

    model: the processes that hold slices of layers or experts together with this one, those of its replica; None where it holds
    all of them. layers: of these the ones that hold slices of layers together, where others share experts alone; else the same.
    is_repeated: whether some before these have the same slices. shards: those
    that hold the other rows of its weights, itself included, None where it holds all rows. base: those that hold the base model
    together with it, once; None where it is alone.

    is_first: whether the process is in the first stage of its replica, where that is a pipeline.
    """

    rank, size, processes, leads, saves, is_repeated = 0, 1, 1, True, True, False
    model: dist.ProcessGroup | None = None
    layers: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    base: dist.ProcessGroup | None = None
    holders: dist.ProcessGroup | None = None
    """Processes that hold the layers of this one together with it; None where it holds them alone."""

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

    def reached(self, owners: set[int], adapters: Iterable[int]) -> set[int]:
        """Adapters, out of all, to whose gradients a microbatch may add here.

        Args:
            owners: of tokens in this process's microbatch.
        """
        return owners

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the processes of the replica; not finite where it is not on one of them."""
        return tensor

    def told(self, value: Any) -> Any:
        """Value that the first process gives; plain values, as JSON holds them."""
        return value

    def whole(self, adapters: Sequence[Adapter]) -> Callable[[Adapter, Any], None]:
        """Function that makes the state of each of these adapters (engine.AdapterState) whole, of which processes have parts:
        one norm of the gradient, whole tensors for what is saved. All processes of the replica call both, before the values of
        the adapters are read."""
        return lambda adapter, state: None


ALONE = Alone()
