"""Gathers of sharded weights by the copy engines of the GPUs of one host.

NCCL gathers by a kernel, which takes multiprocessors from the products of the layer before. Here each process copies the parts
of the others out of memory that they share, which torch calls symmetric memory.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule

from packlora.parallel.collectives import all_of

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What tells hosts apart."""
PIECE = 1 << 27
"""Bytes of a part that a process shows the others at a time."""
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Copies:
    """The all-gather of FSDP2 (torch.distributed.fsdp.FSDPModule.set_custom_all_gather).

    Args:
        group: the processes, each with a GPU that reaches the memory of the others. One that does not come to a gather within
            the group's timeout ends the others by an error of CUDA.
        device: this process's.

    Raises:
        RuntimeError: the processes cannot share memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        os.environ.setdefault(MULTICAST, "1")  # copies need none, and setting it up may fail, or wait for ever
        self._shown = symmetric.empty(PIECE, dtype=torch.uint8, device=device)
        self._memory = symmetric.rendezvous(self._shown, group.group_name)
        self._done = torch.cuda.Event()
        answered: Any = group._get_backend(device)
        self._timeout_ms = min(int(answered.options._timeout.total_seconds() * 1000), 2**31 - 1)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that a gather fills."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Copy the parts of the others to their places.

        Args:
            output_tensor: [processes times n], of which this process's part is filled.
            input_tensor: [n], that part.
        """
        memory, stream = self._memory, torch.cuda.current_stream()
        whole, own = output_tensor.view(torch.uint8).view(memory.world_size, -1), input_tensor.view(torch.uint8)
        stream.wait_event(self._done)
        for start in range(0, own.numel(), PIECE):
            piece = own[start : start + PIECE]
            self._shown[: piece.numel()].copy_(piece)
            memory.barrier(timeout_ms=self._timeout_ms)  # all show their piece
            for step in range(1, memory.world_size):
                other = (memory.rank + step) % memory.world_size
                theirs = memory.get_buffer(other, piece.shape, torch.uint8)
                whole[other, start : start + piece.numel()].copy_(theirs)
            memory.barrier(timeout_ms=self._timeout_ms)  # nobody reads this one's any more
        self._done.record(stream)


def gather_by_copies(modules: Iterable[Any], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Let FSDP2 gather by copies, where all GPUs of the group reach one another's memory.

    Args:
        modules: FSDPModules.

    Returns:
        Whether they do.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1 or not hasattr(FSDPModule, "set_custom_all_gather"):
        return False
    copies = None
    if _reachable(group, device):
        with contextlib.suppress(RuntimeError):  # a container may forbid it
            copies = Copies(group, device)
    if not _agreed(copies is not None, group, device):
        return False
    for module in modules:
        module.set_custom_all_gather(copies)
    return True


def _reachable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the processes of a group are on one host, and their GPUs reach one another's memory."""
    own = torch.cuda.current_device() if device.index is None else device.index
    host = zlib.crc32(BOOT.read_bytes()) if BOOT.exists() else 0
    found = [(int(index), int(at)) for index, at in all_of(torch.tensor([own, host], device=device), group)]
    others = {index for index, _ in found} - {own}
    here = {at for _, at in found} == {host} != {0}  # a GPU of another host may have a number that none has here
    alone = len(others) == len(found) - 1
    reach = here and alone and all(torch.cuda.can_device_access_peer(own, other) for other in others)
    return _agreed(reach, group, device)


def _agreed(value: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a value holds on all processes of a group."""
    return all(bool(own) for own in all_of(torch.tensor([int(value)], device=device), group))
