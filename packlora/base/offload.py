"""Checkpoints of layers in the memory of the host: gradient checkpointing whose kept inputs leave the GPU.

The copies run on a stream of their own, behind the compute: the input of a layer goes out while the layer runs, and comes back
while the layer after it runs its backward. A backward sees the bits that the forward had. On a CPU nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

LEAST_BYTES = 2**16
"""Smaller tensors stay where they are."""
Wait = Callable[[], None]
"""Lets the stream of the compute wait for a copy; the host does not wait."""


class Copies(Protocol):
    """Copies between a GPU and its host, which are launched and not waited for."""

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """A copy in the memory of the host. x is kept unchanged until it is waited for."""

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]:
        """A copy on the device, to be read once it is waited for."""


class SideStream:
    """Copies on a stream of their own, from and to pinned memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """See Copies."""
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        return host, self._copy(host, x, x.device)

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]:
        """See Copies."""
        x = torch.empty_like(host, device=device)  # in memory of the compute's stream, which uses it
        return x, self._copy(x, host, device)

    def _copy(self, into: torch.Tensor, source: torch.Tensor, device: torch.device) -> Wait:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream, compute = self._streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(done)


class _Held:
    """Input of a layer between its forward and its backward.

    before: the one that was held last before it, while a backward will ask for that.
    """

    def __init__(self, x: torch.Tensor, copies: Copies, before: _Held | None) -> None:
        self._copies, self._device = copies, x.device
        self._here: torch.Tensor | None = x
        self._host, self._wait = copies.out(x)
        self.before = None if before is None else weakref.ref(before)

    def leave(self) -> None:
        """Give up the tensor on the device, once its copy is complete."""
        if self._here is not None:
            self._wait()
            self._here = None

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._here is None:
            self._here, self._wait = self._copies.back(self._host, self._device)

    def take(self) -> torch.Tensor:
        """The tensor on the device; the one before is on its way then."""
        self.fetch()
        self._wait()
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        found, self._here = self._here, None
        assert found is not None
        return found


class HostCheckpoints:
    """Function for gradient checkpointing: it runs layers, and holds their inputs in the memory of the host.

    Args:
        copies: None leaves tensors of a CPU where they are.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies, self._always = copies or SideStream(), copies is not None
        self._last: weakref.ref[_Held] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer. The hooks see what the checkpoint keeps, and nothing that is kept inside of it."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, _give_back):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _keep(self, x: torch.Tensor) -> _Held | torch.Tensor:
        if not (x.is_cuda or self._always) or x.nbytes < LEAST_BYTES:
            return x.detach()
        last = None if self._last is None else self._last()
        if last is not None:  # its copy has had a layer's time, so nothing waits here
            last.leave()
        held = _Held(x.detach(), self._copies, last)
        self._last = weakref.ref(held)
        return held


def _give_back(kept: _Held | torch.Tensor) -> torch.Tensor:
    return kept.take() if isinstance(kept, _Held) else kept
