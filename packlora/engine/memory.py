"""Memory while training: the token budget of a microbatch, less of it after memory ran out, and what a device has and holds."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from packlora.portable import peak_resident

T = TypeVar("T")


class TokenBudget:
    """Tokens of a microbatch."""

    def __init__(self, tokens: int, longest: int, is_auto: bool, device: torch.device) -> None:
        """longest: tokens of the longest sample. is_auto: whether the budget may be lowered; else it is the user's."""
        self.tokens = tokens
        self.held_out = tokens
        """The same for evaluations, which may come in the middle of a window."""
        self._longest, self._is_auto, self.device = longest, is_auto, device

    def take(self, longest: int) -> None:
        """There is a sample of so many tokens now."""
        self._longest = max(self._longest, longest)

    def attempt(self, tokens: int, compute: Callable[[], T]) -> T | None:
        """Result of `compute`, or None where a microbatch of so many tokens does not fit and a smaller one can be tried.

        With None, nothing refers to the error any more, nor to what it held in memory.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if self._is_auto and self.below(tokens) < tokens:
                return None
            raise MemoryError(
                f"out of memory on {self.device} in a microbatch of {tokens} tokens; lower "
                "max_tokens_per_microbatch or set gradient_checkpointing: true"
            ) from error

    def below(self, tokens: int) -> int:
        """The budget to try after a microbatch of so many tokens did not fit; no less than the longest sample."""
        return max(tokens * 3 // 4, self._longest)


def free_memory(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, which stays as it is. From a GPU it is on its way: see `launched`."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory can be pinned
        return tensor.cpu()
    return host.copy_(tensor, non_blocking=True)


def launched(device: torch.device) -> Callable[[], None]:
    """Function that waits for all that was launched until now, and for nothing that is launched later."""
    if device.type != "cuda":
        return lambda: None
    reached = torch.cuda.Event()
    reached.record(torch.cuda.current_stream(device))

    def wait() -> None:
        with torch.cuda.device(device):  # a thread begins on the first GPU, whose memory a wait there would take
            reached.synchronize()

    return wait


def on_their_way(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Begin to copy numbers to the host. The result gives them as a list; it waits for them, not for what is launched later."""
    host, wait = on_host(numbers), launched(numbers.device)

    def read() -> list[Any]:
        wait()
        return host.tolist()

    return read


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident()


def memory_now(device: torch.device) -> int:
    """Bytes that torch holds on the GPU, or that the process has resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return peak_memory(device)


def memory_room(device: torch.device) -> int:
    """Bytes that the process may have on the device, what it has already included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63
