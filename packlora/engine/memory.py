"""Memory while training: the token budget of a microbatch, less of it after memory ran out, and what a device has and holds."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from packlora.portable import peak_resident

ADVICE = "lower max_tokens_per_microbatch or set gradient_checkpointing: true"
UNKNOWN = 2**63
"""Room of a device that does not say it."""
T = TypeVar("T")


class TokenBudget:
    """Tokens of a microbatch, and what else can be done where memory runs out.

    Args:
        longest: tokens of the longest sample.
        is_auto: whether the budget may be lowered; else it is the user's.
        measures: values of gradient_checkpointing that may be taken where no lower budget is left, in their order.
        advice: what to do where nothing is left, by the tokens of the microbatch that did not fit.
    """

    def __init__(
        self, tokens: int, longest: int, is_auto: bool, device: torch.device, measures: Sequence[bool] = (),
        advice: Callable[[int], str] = lambda tokens: ADVICE,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.held_out = tokens
        """The same for evaluations, which may come in the middle of a window."""
        self.measures, self._advice = list(measures), advice
        self._longest, self._is_auto, self.device = longest, is_auto, device

    @property
    def settings(self) -> tuple[int, int]:
        """State for which windows are planned; it changes where memory has run out in training."""
        return self.tokens, len(self.measures)

    def take(self, longest: int) -> None:
        """There is a sample of so many tokens now."""
        self._longest = max(self._longest, longest)
        self.tokens = max(self.tokens, longest)

    def attempt(self, tokens: int, compute: Callable[[], T], trains: bool = False) -> T | None:
        """Result of `compute`, or None where a microbatch of so many tokens does not fit and the run can go on all the same.

        With None, nothing refers to the error any more, nor to what it held in memory.

        Args:
            trains: whether activations are kept for a backward, so that `measures` may help.

        Raises:
            MemoryError: out of memory, and there is nothing left that may be changed.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if self.can_lower(tokens) or (trains and self.measures):
                return None
            raise MemoryError(
                f"out of memory on {self.device} in a microbatch of {tokens} tokens; {self._advice(tokens)}"
            ) from error

    def can_lower(self, tokens: int) -> bool:
        """Whether a smaller microbatch may be tried after one of so many tokens did not fit."""
        return self._is_auto and self.below(tokens) < tokens

    def below(self, tokens: int) -> int:
        """The budget to try after a microbatch of so many tokens did not fit; no less than the longest sample."""
        return max(tokens * 3 // 4, self._longest)


def free_memory(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


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


def on_its_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host. The result gives the copy; it waits for it, not for what is launched later."""
    host, wait = on_host(tensor), launched(tensor.device)

    def read() -> torch.Tensor:
        wait()
        return host

    return read


def on_their_way(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Numbers as a list; see on_its_way."""
    read = on_its_way(numbers)
    return lambda: list(read().tolist())


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


def utilisation_now(device: torch.device) -> float | None:
    """Share of the last moments in which a GPU computed; None on a CPU, and where NVML cannot be asked (nvidia-ml-py)."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # NVML's errors are of a module that may be missing; a figure for the page must not cost the run
        return None


def memory_room(device: torch.device) -> int:
    """Bytes that the process may have on the device, what it has already included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        allowed = torch.cuda.get_per_process_memory_fraction(index) * total
        return min(free + torch.cuda.memory_reserved(device), int(allowed))
    if device.type == "mps":  # beyond it a Mac writes memory to its disk
        return torch.mps.recommended_max_memory()
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return UNKNOWN
