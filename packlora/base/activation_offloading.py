"""Inputs of checkpointed layers in the host's memory: `activation_offloading` of the run file.

With checkpoints a layer keeps its input alone for the backward. Here that is copied to pinned memory while the next layer is
computed, and back while the layer behind it is computed again. Copies run on a stream of their own, in order, so a buffer may
be filled again as soon as it has been asked for. Memory of the device is given back in the order of its own stream: a tensor
is let go when that stream waits for its copy. The last layer's input, which is wanted at once, stays where it is, and no copy
is under way when it is reached; so a CUDA graph of a forward holds all of its copies.

One forward with gradients is under way at a time. On a CPU tensors are copied to other tensors, without streams.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from packlora.errors import InputError

AHEAD = 1
"""Inputs that may still be on the device while they are copied."""


@dataclass(eq=False, slots=True)
class Kept:
    """An input of a layer.

    layer: its number. before: the input of the layer before it. form: an empty tensor that lies in memory as it does; torch
    chooses products by strides, also of sizes of 1. on_device: itself, while it is there or on its way there. buffer: of the
    host, as bytes, once it has been copied. copied: event at the end of the newest copy.
    """

    layer: int
    before: Kept | None
    form: torch.Tensor
    on_device: torch.Tensor | None
    buffer: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    def view(self) -> torch.Tensor:
        """The buffer as the input lies in it."""
        assert self.buffer is not None
        return self.buffer[: self.form.nbytes].view(self.form.dtype).as_strided(self.form.shape, self.form.stride())


class Offloading:
    """Keeps the inputs of a model's layers on the host. layers: how many there are."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._layers, self._device = layers, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[torch.Tensor] = []
        """Buffers that nothing is in."""
        self._leaving: deque[Kept] = deque()
        """Inputs that are being copied to the host, in order."""
        self._last: Kept | None = None

    def keep(self, x: torch.Tensor, layer: int) -> Kept:
        """Keep the input of a layer; what is before it in the same forward is known by its number."""
        last = self._last if self._last is not None and self._last.layer < layer else None
        if last is None:
            self._leaving.clear()  # of a forward that had no backward
        own = self._last = Kept(layer, last, torch.empty_like(x, device="meta"), x)
        if layer == self._layers - 1:
            self._let_go(0)
            self._last = None
            return own
        own.buffer = self._buffer(own.form.nbytes)
        self._copy(own, own.view(), x)
        self._leaving.append(own)
        self._let_go(AHEAD)
        return own

    def take(self, own: Kept) -> torch.Tensor:
        """A layer's input, on its device; that of the layer before it is on its way then."""
        if own.on_device is None:
            self._fetch(own)
        x = own.on_device
        assert x is not None
        self._wait(own)
        if own.buffer is not None:
            self._free.append(own.buffer)
        own.on_device = own.buffer = None
        if own.before is not None and own.before.on_device is None:
            self._fetch(own.before)
        own.before = None
        return x

    def _let_go(self, most: int) -> None:
        """Let at most so many inputs be on their way to the host; the device's memory of the others may be used again."""
        while len(self._leaving) > most:
            own = self._leaving.popleft()
            self._wait(own)
            own.on_device = None

    def _fetch(self, own: Kept) -> None:
        form = own.form
        x = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=self._device)
        self._copy(own, x, own.view())
        own.on_device = x

    def _copy(self, own: Kept, to: torch.Tensor, x: torch.Tensor) -> None:
        """Begin a copy once what was launched until now is done."""
        if self._side is None:
            to.copy_(x)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            to.copy_(x, non_blocking=True)
            own.copied = self._side.record_event()

    def _wait(self, own: Kept) -> None:
        """Let what is launched from now on run when the newest copy has ended."""
        if own.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(own.copied)
            own.copied = None

    def _buffer(self, size: int) -> torch.Tensor:
        """Pinned memory of at least so many bytes."""
        found = next((at for at, own in enumerate(self._free) if len(own) >= size), None)
        if found is not None:
            return self._free.pop(found)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._side is not None)


def offload_inputs(model: PreTrainedModel, device: torch.device, path: str, is_whole: bool) -> None:
    """Let the checkpointed layers of a model keep their inputs on the host. Call it after base/packing.checkpoint_layers.

    Args:
        path: of the model, for messages.
        is_whole: it lies on its device alone.

    Raises:
        InputError: it does not, or has no layers that transformers checkpoints.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not is_whole or not layers:
        reason = "its layers are in parts on several processes" if layers else "transformers checkpoints no layer of it"
        raise InputError(f"activation_offloading: true is not for base_model {path!r}: {reason}; leave it out")
    offloading = Offloading(device, len(layers))
    for number, layer in enumerate(layers):
        layer._gradient_checkpointing_func = _checkpointed(layer._gradient_checkpointing_func, offloading, number)


def _checkpointed(checkpoint: Callable[..., Any], offloading: Offloading, number: int) -> Callable[..., Any]:
    """A checkpoint that keeps its hidden states, the first of the arguments, on the host. What the layer itself saves is under
    the checkpoint's own hooks."""

    def run(function: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
        what = x.data_ptr(), x.shape  # hooks are given another tensor over the same memory, and must not hold this one

        def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
            return offloading.keep(tensor, number) if (tensor.data_ptr(), tensor.shape) == what else tensor

        def unpack(kept: torch.Tensor | Kept) -> torch.Tensor:
            return offloading.take(kept) if isinstance(kept, Kept) else kept

        with saved_tensors_hooks(pack, unpack) if torch.is_grad_enabled() else contextlib.nullcontext():
            return checkpoint(function, x, *args)

    return run
