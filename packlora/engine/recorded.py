"""Functions over a microbatch on buffers at fixed addresses, which CUDA graphs repeat: see graphs.py.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from packlora.adapters.owners import TokenOwners
from packlora.base.packing import hidden_states
from packlora.engine.collate import PackedBatch
from packlora.engine.passes import MicrobatchResult, SingleDevice
from packlora.ops.attention.blocks import BLOCK, SampleBlocks, most_blocks, table_of
from packlora.ops.lora_linear.moving import MovingSegments

STEPS = 8
"""Numbers of tokens from a power of two to the next that have graphs of their own; below the budget they are as far apart as
just under it, for a shape costs more time than its last tokens do."""
LEAST_TOKENS, LEAST_SAMPLES = 256, 16
TRIES = 3
"""Times that memory may run out in graphs, which gives theirs back, before there are none."""
Buffers = Mapping[int, Mapping[str, tuple[torch.nn.Parameter, torch.Tensor]]]
Names = Mapping[int, frozenset[str]]
"""Names of parameters by adapter."""


class Shape(NamedTuple):
    """Sizes, rounded up, of the microbatches that share a graph."""

    tokens: int
    samples: int

    @staticmethod
    def of(lengths: Sequence[int], budget: int, steps: int = STEPS) -> Shape:
        """Shape of samples of so many tokens. budget: most tokens that microbatches are planned with, or 0. steps: as STEPS."""
        tokens = sum(lengths)
        step = max(_power(max(tokens, budget)) // (2 * steps), LEAST_TOKENS // steps)
        total = max(-(-tokens // step) * step, LEAST_TOKENS)
        more = -(-(total - tokens) // max(lengths))  # samples of nobody's tokens
        return Shape(total, max(_power(len(lengths) + more), _power(total // BLOCK), LEAST_SAMPLES))

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether a microbatch of these samples has room in it, and fills at least half of it."""
        more = -(-(self.tokens - sum(lengths)) // max(lengths))
        return self.tokens // 2 <= sum(lengths) <= self.tokens and len(lengths) + more <= self.samples


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class Gradients:
    """Buffers at fixed addresses in which the gradients of parameters are added up.

    Args:
        buffers: by adapter and name, a parameter and the tensor that its gradients are added to.
    """

    def __init__(self, buffers: Buffers) -> None:
        pairs = [pair for own in buffers.values() for pair in own.values()]
        self.parameters = [parameter for parameter, _ in pairs]
        self._buffers = [buffer for _, buffer in pairs]
        self._names = [(number, name) for number, own in buffers.items() for name in own]
        self._places = {id(parameter): at for at, parameter in enumerate(self.parameters)}

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add those that are there, by as few launches as there can be."""
        _add([(buffer, grad) for buffer, grad in zip(self._buffers, grads, strict=True) if grad is not None])

    def take(self, parameters: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor | None]) -> Names:
        """Add the gradients of some parameters. Returns the names of those that have one."""
        places = [self._places[id(parameter)] for parameter in parameters]
        found = [(at, grad) for at, grad in zip(places, grads, strict=True) if grad is not None]
        _add([(self._buffers[at], grad) for at, grad in found])
        return self._by_adapter(at for at, _ in found)

    def reached(self, grads: Sequence[torch.Tensor | None]) -> Names:
        """Names of the parameters that have a gradient."""
        return self._by_adapter(at for at, grad in enumerate(grads) if grad is not None)

    def _by_adapter(self, places: Iterable[int]) -> Names:
        out: dict[int, set[str]] = {}
        for at in places:
            number, name = self._names[at]
            out.setdefault(number, set()).add(name)
        return {number: frozenset(own) for number, own in out.items()}


def with_added(result: MicrobatchResult, *names: Names) -> MicrobatchResult:
    """A result where gradients of these parameters were added up, if their adapters own tokens."""
    none = frozenset[str]()
    added = {adapter: none.union(*(own.get(adapter, none) for own in names)) for adapter in result.tokens}
    return replace(result, added={adapter: own for adapter, own in added.items() if own})


def _add(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add gradients to their buffers. found: pairs of a buffer and a gradient."""
    for alike in (True, False):  # one that lies otherwise would make a launch of each
        pairs = [pair for pair in found if (pair[0].stride() == pair[1].stride()) == alike]
        if pairs:
            into, added = zip(*pairs, strict=True)
            torch._foreach_add_(into, added)


class Room:
    """Buffers for the gradients of what the decoder gives, for all shapes: one microbatch runs at a time."""

    def __init__(self) -> None:
        self.storage: dict[int, torch.Tensor] = {}

    def of(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for the gradient of each. It is the last ones' where that is large enough, else new."""
        return [self._of(at, output) for at, output in enumerate(outputs)]

    def _of(self, at: int, output: torch.Tensor) -> torch.Tensor:
        storage = self.storage.get(at)
        if storage is None or storage.numel() < output.numel() or storage.dtype != output.dtype:
            storage = self.storage[at] = torch.empty_like(output).view(-1)
        return storage[: output.numel()].view(output.shape)

    def clear(self) -> None:
        self.storage.clear()


class Body:
    """The decoder for microbatches of one shape: its buffers, and graphs where they are recorded.

    Args:
        adapters: numbers of all that may own tokens.
        dropout: whether one of them has it.
        columns: types of the columns of tokens that some of them have.
        routes: whether one of them has a term that is computed from what routers give.
    """

    def __init__(
        self, device: SingleDevice, shape: Shape, adapters: Sequence[int], dropout: bool, gradients: Gradients, room: Room,
        columns: Mapping[str, torch.dtype] | None = None, routes: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.gradients, self._room, self._routes = shape, gradients, room, routes
        self._model, self._attached, where = device.base.model, device.attached, device.base.device
        T = shape.tokens
        self._ids_T = torch.zeros(T, dtype=torch.int64, device=where)
        self._positions_T = torch.zeros(T, dtype=torch.int64, device=where)
        self._samples = SampleBlocks(torch.zeros(2, 3, most_blocks(T, shape.samples), dtype=torch.int32, device=where))
        self._keys_T2 = torch.zeros(T, 2, dtype=torch.int32, device=where) if dropout else None
        self._columns = {name: torch.zeros(T, dtype=own, device=where) for name, own in (columns or {}).items()}
        self._moving = MovingSegments(T, adapters)
        self._owners = TokenOwners(T, self._moving.nominal, self._keys_T2, self._moving, self._columns)
        self._outputs: list[torch.Tensor] = []
        """Hidden states [T, D], and what routers give, where that is wanted; none before a forward."""
        self._d: list[torch.Tensor] = []
        """Gradients of those outputs that are trained; none before a backward."""
        self.trained: list[bool] = []
        """Whether each output depends on a parameter: none does where all that is trained comes after them."""
        self._forward: Callable[[], None] | None = None
        self._backward: Callable[[], None] | None = None
        self.reached: Names = {}
        """Parameters that the backward reaches."""
        self.runs = 0
        """How often both have run without a graph; after the first time whatever is made at first calls is there."""

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

    def forward(self) -> list[torch.Tensor]:
        """Hidden states [T, D] of what was loaded, and what routers give where that is wanted, [T, E] each: leaves."""
        if self._forward is not None:
            self._forward()
        else:
            self._run_forward()
        return [own.detach().requires_grad_(found) for own, found in zip(self._outputs, self.trained, strict=True)]

    def backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add up the gradients of the forward that was just run. grads: of all that it gave; None for zeros."""
        self._d = self._d or self._room.of(self._trained())
        of_trained = [grad for grad, trained in zip(grads, self.trained, strict=True) if trained]
        for into, grad in zip(self._d, of_trained, strict=True):
            into.zero_() if grad is None else into.copy_(grad)
        if self._backward is None:
            found = self._run_backward()
            self.reached = self.gradients.reached(found)
            self.gradients.add(found)
            self._outputs, self._d, self.runs = [], [], self.runs + 1
        else:
            self._backward()

    def rehearse(self) -> None:
        """Compile what both launch, side by side where they would compile one kernel after the other. Nothing is kept."""
        from packlora.ops import launcher  # needs Triton

        try:
            with launcher.rehearsal():
                self._run_forward()
                self._d = [own.detach() for own in self._trained()]
                self._run_backward()
        finally:
            self.forget()

    def record(self, recorder: Recorder) -> None:
        """Record both for all microbatches of the shape; after one that has run without.

        No history of the parameters may be alive: nodes of autograd that add up their gradients remember the stream that they
        were made on.
        """
        self._forward = recorder.record(self._run_forward)
        if self._outputs:
            self._d = self._room.of(self._trained())
        own = recorder.record(lambda: self.gradients.add(self._run_backward())) if any(self.trained) else _nothing
        self._backward = own
        self._moving.record(recorder.record)
        self._outputs = [output.detach() for output in self._outputs]  # their history has been recorded

    def forget(self) -> None:
        """Keep nothing of a forward whose backward will not be."""
        self._outputs, self._d = [], []
        self._forward = self._backward = None
        self._moving.forget()

    def _run_forward(self) -> None:
        routed: list[torch.Tensor] = []
        wanted: dict[str, Any] = {"routed": routed} if self._routes else {}
        with self._attached.active(self._owners), torch.enable_grad():
            hidden_TD = hidden_states(self._model, self._ids_T, self._positions_T, self._samples, **wanted)
        self._outputs = [hidden_TD, *routed]
        self.trained = [own.requires_grad for own in self._outputs]

    def _trained(self) -> list[torch.Tensor]:
        return [own for own, trained in zip(self._outputs, self.trained, strict=True) if trained]

    def _run_backward(self) -> tuple[torch.Tensor | None, ...]:
        if not any(self.trained):
            return (None,) * len(self.gradients.parameters)
        assert self._outputs and self._d
        with self._attached.active(self._owners):
            return torch.autograd.grad(self._trained(), self.gradients.parameters, self._d, allow_unused=True)


def _nothing() -> None:
    """The backward of hidden states that depend on no parameter."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings. For each stream cuBLAS keeps workspaces till the process ends, 32 MiB each on an H100."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context without garbage collection: a CUDA graph that is destroyed while another one is recorded ends the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recorder:
    """Records functions as CUDA graphs, on one stream, in one pool of memory: their replays follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = _stream(device), torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that replays its launches. Nothing runs now.

        torch.cuda.graph would give pinned memory back as well, which the next checkpoint would pin again.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        with uncollected(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph.replay
