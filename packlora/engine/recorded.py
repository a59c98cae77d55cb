"""Functions over a microbatch on buffers at fixed addresses, which CUDA graphs repeat: see graphs.py.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from packlora.adapters.owners import TokenOwners
from packlora.base.packing import hidden_states
from packlora.engine.collate import PackedBatch
from packlora.engine.passes import SingleDevice
from packlora.ops import launcher
from packlora.ops.attention.blocks import BLOCK, SampleBlocks, most_blocks, table_of
from packlora.ops.lora_linear.moving import MovingSegments

STEPS = 8
"""Numbers of tokens from a power of two to the next that have graphs of their own; below the budget they are as far apart as
just under it, for a shape costs more time than its last tokens do."""
LEAST_TOKENS, LEAST_SAMPLES = 256, 16
Buffers = Mapping[int, Sequence[tuple[torch.nn.Parameter, torch.Tensor]]]


class Shape(NamedTuple):
    """Sizes, rounded up, of the microbatches that share a graph."""

    tokens: int
    samples: int

    @staticmethod
    def of(lengths: Sequence[int], budget: int) -> Shape:
        """Shape of samples of so many tokens. budget: most tokens that microbatches are planned with."""
        tokens = sum(lengths)
        step = max(_power(max(tokens, budget)) // (2 * STEPS), LEAST_TOKENS // STEPS)
        total = max(-(-tokens // step) * step, LEAST_TOKENS)
        more = -(-(total - tokens) // max(lengths))  # samples of nobody's tokens
        return Shape(total, max(_power(len(lengths) + more), _power(total // BLOCK), LEAST_SAMPLES))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class Gradients:
    """Buffers at fixed addresses in which the gradients of parameters are added up.

    Args:
        buffers: by adapter, pairs of a parameter and the tensor that its gradients are added to.
    """

    def __init__(self, buffers: Buffers) -> None:
        pairs = [pair for own in buffers.values() for pair in own]
        self.parameters = [parameter for parameter, _ in pairs]
        self._buffers = [buffer for _, buffer in pairs]
        self._numbers = [number for number, own in buffers.items() for _ in own]
        self._places = {id(parameter): at for at, parameter in enumerate(self.parameters)}

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add those that are there, by as few launches as there can be."""
        found = [(buffer, grad) for buffer, grad in zip(self._buffers, grads, strict=True) if grad is not None]
        for alike in (True, False):  # one that lies otherwise would make a launch of each
            pairs = [pair for pair in found if (pair[0].stride() == pair[1].stride()) == alike]
            if pairs:
                into, added = zip(*pairs, strict=True)
                torch._foreach_add_(into, added)

    def take(self, parameters: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of some parameters, and leave the buffers in those that have one."""
        found = {self._places[id(one)]: own for one, own in zip(parameters, grads, strict=True) if own is not None}
        self.add([found.get(at) for at in range(len(self.parameters))])
        for at in found:
            self.parameters[at].grad = self._buffers[at]

    def leave(self, reached: Sequence[bool], adapters: Collection[int]) -> None:
        """Leave the buffers in the parameters of these adapters which the backward has reached: so their jobs know."""
        for parameter, buffer, number, found in zip(
            self.parameters, self._buffers, self._numbers, reached, strict=True
        ):
            if found and number in adapters:
                parameter.grad = buffer


class Room:
    """Buffer for the gradient of the hidden states, for all shapes: one microbatch runs at a time."""

    def __init__(self) -> None:
        self.storage: torch.Tensor | None = None

    def of(self, d_TD: torch.Tensor) -> torch.Tensor:
        """Room for it. It is the last one's where that is large enough, else new."""
        if self.storage is None or self.storage.numel() < d_TD.numel() or self.storage.dtype != d_TD.dtype:
            self.storage = torch.empty_like(d_TD).view(-1)
        return self.storage[: d_TD.numel()].view(d_TD.shape)

    def clear(self) -> None:
        self.storage = None


class Body:
    """The decoder for microbatches of one shape: its buffers, and graphs where they are recorded.

    Args:
        adapters: numbers of all that may own tokens.
        dropout: whether one of them has it.
        columns: types of the columns of tokens that some of them have.
    """

    def __init__(
        self, device: SingleDevice, shape: Shape, adapters: Sequence[int], dropout: bool, gradients: Gradients, room: Room,
        columns: Mapping[str, torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.gradients, self._room = shape, gradients, room
        self._model, self._attached, where = device.base.model, device.attached, device.base.device
        T = shape.tokens
        self._ids_T = torch.zeros(T, dtype=torch.int64, device=where)
        self._positions_T = torch.zeros(T, dtype=torch.int64, device=where)
        self._samples = SampleBlocks(torch.zeros(2, 3, most_blocks(T, shape.samples), dtype=torch.int32, device=where))
        self._keys_T2 = torch.zeros(T, 2, dtype=torch.int32, device=where) if dropout else None
        self._columns = {name: torch.zeros(T, dtype=own, device=where) for name, own in (columns or {}).items()}
        self._moving = MovingSegments(T, adapters)
        self._owners = TokenOwners(T, self._moving.nominal, self._keys_T2, self._moving, self._columns)
        self._hidden_TD: torch.Tensor | None = None
        self._d_TD: torch.Tensor | None = None
        self._forward: Callable[[], None] | None = None
        self._backward: Callable[[], None] | None = None
        self._reached: list[bool] = []
        """Parameters that the backward reaches."""
        self.trains = True
        """Whether the hidden states depend on a parameter: not where all that is trained comes after them."""
        self.ran = False
        """Both have run, so whatever is made at first calls is there."""

    @property
    def recorded(self) -> bool:
        return self._backward is not None

    def load(self, batch: PackedBatch) -> None:
        """A microbatch of this shape."""
        self._ids_T.copy_(batch.input_ids_T)
        self._positions_T.copy_(batch.position_ids_T)
        table = torch.from_numpy(table_of(batch.sample_lengths, self._samples.table.shape[2]))
        self._samples.table.copy_(table.pin_memory() if self._ids_T.is_cuda else table, non_blocking=True)
        if self._keys_T2 is not None and batch.owners.keys_T2 is not None:
            self._keys_T2.copy_(batch.owners.keys_T2)
        for name, column in self._columns.items():
            if (own := batch.owners.columns.get(name)) is not None:
                column.copy_(own)
            else:
                column.zero_()
        self._moving.write(batch.owners.segments)
        self._moving.refresh()

    def forward(self) -> torch.Tensor:
        """Hidden states [T, D] of what was loaded, a leaf."""
        if self._forward is not None:
            self._forward()
        else:
            self._run_forward()
        assert self._hidden_TD is not None
        return self._hidden_TD.detach().requires_grad_(self.trains)

    def backward(self, d_TD: torch.Tensor | None, adapters: Collection[int]) -> None:
        """Add up the gradients of the forward that was just run, from that of its result. adapters: that own tokens of it."""
        if d_TD is not None:
            if self._d_TD is None:
                self._d_TD = self._room.of(d_TD)
            self._d_TD.copy_(d_TD)
        if self._backward is None:
            grads = self._run_backward()
            self._reached = [grad is not None for grad in grads]
            self.gradients.leave(self._reached, adapters)
            self.gradients.add(grads)
            self._hidden_TD, self._d_TD, self.ran = None, None, True
        else:
            self.gradients.leave(self._reached, adapters)
            self._backward()

    def rehearse(self) -> None:
        """Compile what both launch, side by side where they would compile one kernel after the other. Nothing is kept."""
        try:
            with launcher.rehearsal():
                self._run_forward()
                assert self._hidden_TD is not None
                self._d_TD = self._hidden_TD.detach()
                self._run_backward()
        finally:
            self.forget()

    def record(self, recorder: Recorder) -> None:
        """Record both for all microbatches of the shape; after one that has run without.

        No history of the parameters may be alive: nodes of autograd that add up their gradients remember the stream that they
        were made on.
        """
        self._forward = recorder.record(self._run_forward)
        if self._hidden_TD is not None and self.trains:
            self._d_TD = self._room.of(self._hidden_TD)
        self._backward = recorder.record(lambda: self.gradients.add(self._run_backward())) if self.trains else _nothing
        if self._hidden_TD is not None:
            self._hidden_TD = self._hidden_TD.detach()  # its history has been recorded

    def forget(self) -> None:
        """Keep nothing of a forward whose backward will not be."""
        self._hidden_TD = self._d_TD = self._forward = self._backward = None

    def _run_forward(self) -> None:
        with self._attached.active(self._owners), torch.enable_grad():
            self._hidden_TD = hidden_states(self._model, self._ids_T, self._positions_T, self._samples)
        self.trains = self._hidden_TD.requires_grad

    def _run_backward(self) -> tuple[torch.Tensor | None, ...]:
        if not self.trains:
            return (None,) * len(self.gradients.parameters)
        assert self._hidden_TD is not None and self._d_TD is not None
        with self._attached.active(self._owners):
            return torch.autograd.grad(self._hidden_TD, self.gradients.parameters, self._d_TD, allow_unused=True)


def _nothing() -> None:
    """The backward of hidden states that depend on no parameter."""


class Recorder:
    """Records functions as CUDA graphs, on one stream, in one pool of memory: their replays follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that replays its launches. Nothing runs now.

        torch.cuda.graph would give pinned memory back as well, which the next checkpoint would pin again.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph.replay
