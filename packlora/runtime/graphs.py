"""CUDA graphs of the decoder: the forward and the backward of a microbatch are two replays, which cost the host nothing.

A graph repeats the launches that were recorded, on the addresses that were recorded. What changes from microbatch to microbatch
lies in buffers that they read: tokens, positions, dropout keys, where samples begin and who owns which tokens. Microbatches of
one Shape share a graph; the last tokens of a row that is shorter are nobody's. Packed copies of the adapters, and DoRA's norms,
are brought up to date before a replay, where a job has stepped. The loss, a few launches, runs between the two replays without
a graph, so the number of labels is no part of a shape.

The first microbatch of a shape runs the same functions on the same buffers without a graph (`Body`), so a run has the same bits
whatever was recorded when. What cannot be recorded runs as SingleDevice runs it, and is told once.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from packlora.adapters.attach import adapted_layers
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import AdapterSpec
from packlora.base.mixers import mixing_functions
from packlora.base.model import Base
from packlora.base.packing import hidden_states
from packlora.base.shape import plain_head
from packlora.config import Run
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.heads import fused_losses
from packlora.engine.memory import free_memory
from packlora.engine.parts import Parts, rows_of
from packlora.engine.passes import Executor, MicrobatchResult, Pending, SingleDevice, one_error_for_memory
from packlora.errors import InputError
from packlora.ops import launcher
from packlora.ops.attention.blocks import BLOCK, SampleBlocks, most_blocks, table_of
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.runtime.job import Job

MOST = 32
"""Shapes whose graphs are kept; the one that was not used for longest goes."""
STEPS = 8
"""Numbers of tokens from a power of two to the next that have graphs of their own; below the budget they are as far apart as
just under it, for a shape costs more time than its last tokens do."""
TRIES = 3
"""How often memory may run out before a run goes on without graphs."""
LEAST_TOKENS, LEAST_SAMPLES = 256, 16
NO_GRAPHS = "no CUDA graphs, so the host may be what takes the time"
T = TypeVar("T")
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

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add those that are there, by as few launches as there can be."""
        found = [(buffer, grad) for buffer, grad in zip(self._buffers, grads, strict=True) if grad is not None]
        for alike in (True, False):  # one that lies otherwise would make a launch of each
            pairs = [pair for pair in found if (pair[0].stride() == pair[1].stride()) == alike]
            if pairs:
                into, added = zip(*pairs, strict=True)
                torch._foreach_add_(into, added)

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
        """Hidden states [T, D] of what was loaded, without history."""
        if self._forward is not None:
            self._forward()
        else:
            self._run_forward()
        assert self._hidden_TD is not None
        return self._hidden_TD.detach()

    def backward(self, d_TD: torch.Tensor, adapters: Collection[int]) -> None:
        """Add up the gradients of the forward that was just run, from that of its result. adapters: that own tokens of it."""
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
        if self._hidden_TD is not None:
            self._d_TD = self._room.of(self._hidden_TD)
        self._backward = recorder.record(lambda: self.gradients.add(self._run_backward()))
        if self._hidden_TD is not None:
            self._hidden_TD = self._hidden_TD.detach()  # its history has been recorded

    def forget(self) -> None:
        """Keep nothing of a forward whose backward will not be."""
        self._hidden_TD = self._d_TD = self._forward = self._backward = None

    def _run_forward(self) -> None:
        with self._attached.active(self._owners), torch.enable_grad():
            self._hidden_TD = hidden_states(self._model, self._ids_T, self._positions_T, self._samples)

    def _run_backward(self) -> tuple[torch.Tensor | None, ...]:
        assert self._hidden_TD is not None and self._d_TD is not None
        with self._attached.active(self._owners):
            return torch.autograd.grad(self._hidden_TD, self.gradients.parameters, self._d_TD, allow_unused=True)


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


class Waiting(NamedTuple):
    """A forward that waits for its backward. hidden_TD: a leaf, from which the loss was made."""

    pending: Pending
    hidden_TD: torch.Tensor
    body: Body
    parts: Parts


class _Ready(NamedTuple):
    """A microbatch that lies in the buffers of its body. waiting: its forward, where it was launched ahead."""

    parts: Parts
    body: Body
    batch: PackedBatch
    waiting: Waiting | None = None


class GraphedDevice:
    """The Executor of a model on one GPU, by CUDA graphs where they can be.

    Args:
        single: runs what graphs do not.
        buffers: of the adapters that may own tokens, see Gradients.
        dropout: whether one of them has it.
        budget: most tokens that microbatches are planned with.
        tell: is told once why there are no graphs.
        columns: as of Body.
    """

    def __init__(
        self, single: SingleDevice, buffers: Buffers, dropout: bool, budget: int,
        tell: Callable[[str], None] = lambda text: None, recorder: Callable[[torch.device], Any] = Recorder,
        columns: Mapping[str, torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self.single, self.tell = single, tell
        self.why_not: str | None = None
        self._unfit: str | None = None
        """Why these adapters cannot have graphs."""
        self._adapters, self._dropout, self._budget, self._columns = tuple(buffers), dropout, budget, columns
        self._gradients = Gradients(buffers)
        self._new_recorder = recorder
        self._recorder: Any = None
        self._bodies: dict[Shape, Body] = {}
        """Bodies by shape, the one used last at the end."""
        self._checked = 0
        """Microbatches that have run without a graph; the second shows whether the host waits for the device anywhere."""
        self._waiting = False
        self._ready: _Ready | None = None
        self._out_of_memory = 0
        self._room = Room()
        self._is_first = True
        """The next microbatch is the first one, whose kernels may be yet to compile."""

    def prepare(self, parts: Parts) -> None:
        """See Executor. What fails does so again in the forward.

        A forward that is recorded is launched at once: so the device has work while the host reads the numbers of the steps
        that are being taken. Of a job that may not take its step it has the values of that step, which is as well: what the
        job computes is discarded.
        """
        if self.why_not is None and not self._waiting:
            self._ready = None  # what it has loaded is written over, also where this fails
            with suppress(Exception):
                self._ready = self._load(parts)
                if self._ready.body.recorded:
                    self._ready = self._ready._replace(waiting=self._launch(self._ready))

    def forward(self, parts: Parts) -> Pending | Waiting:
        """See Executor. One forward at a time goes by a graph: what it keeps for its backward is in the graph's memory. No job
        may step before that, whether it has tokens here or not: operands of all are packed together."""
        if self.why_not is None and not self._waiting:
            pending = self._attempt(lambda: self._forward(parts))
            if pending is not None:
                return pending
        return self.single.forward(parts)

    def _attempt(self, compute: Callable[[], T]) -> T | None:
        """Result of `compute`; None where that goes without graphs alone. Nothing refers to the error then, nor to what it
        held in memory."""
        try:
            with one_error_for_memory():
                return compute()
        except torch.OutOfMemoryError:
            self._out_of_memory += 1
            if self._out_of_memory >= TRIES:
                self.why_not = "they and microbatches without them do not fit into memory together"
        except Exception as error:  # of a model, a kernel or a library; without graphs it may be none
            self.why_not = _first_line(error)
        self._drop()
        if self.why_not is not None:
            self.tell(f"{NO_GRAPHS}: {self.why_not}")
        return None

    def _forward(self, parts: Parts) -> Waiting:
        ready, self._ready = self._ready, None
        if ready is None or ready.parts is not parts:
            ready = self._load(parts)
        waiting = ready.waiting or self._launch(ready)
        self._waiting = True
        return waiting

    def _launch(self, ready: _Ready) -> Waiting:
        base, body, batch = self.single.base, ready.body, ready.batch
        if body.ran and not body.recorded and self._checked > 1:
            self._recorder = self._recorder or self._new_recorder(base.device)
            body.record(self._recorder)
        with _nothing_waits(base.device, self._checked == 1):
            hidden_TD = body.forward().requires_grad_()
        head = plain_head(base.model)
        assert head is not None
        losses = fused_losses(hidden_TD[batch.rows_L], head, batch, batch.weights_L)
        return Waiting(Pending(batch, losses), hidden_TD, body, ready.parts)

    def backward(self, pending: Pending | Waiting) -> MicrobatchResult:
        if isinstance(pending, Pending):
            return self.single.backward(pending)
        self._waiting = False
        result = self._attempt(lambda: self._backward(pending))
        if result is None:  # nothing was added to a gradient yet
            pending.body.forget()
            return self.single.backward(self.single.forward(pending.parts))
        return result

    def _backward(self, pending: Waiting) -> MicrobatchResult:
        result = pending.pending.result()  # whatever fails does so before anything is added to a gradient
        pending.pending.backward()
        assert pending.hidden_TD.grad is not None
        with _nothing_waits(self.single.base.device, self._checked == 1):
            pending.body.backward(pending.hidden_TD.grad, pending.pending.batch.num_tokens)
        self._checked += not pending.body.recorded
        return result

    def evaluate(self, parts: Parts) -> MicrobatchResult:
        try:
            return self.single.evaluate(parts)
        except torch.OutOfMemoryError:
            if not self._bodies:
                raise
        self._drop()  # when nothing refers to the error any more, nor to what it held in memory
        return self.single.evaluate(parts)

    def idle(self, backward: bool) -> None:
        self.single.idle(backward)

    def plans(self) -> list[dict[str, Any]]:
        return self.single.plans()

    def _load(self, parts: Parts) -> _Ready:
        body = self._body(Shape.of([n for row in rows_of(parts) for n in row.sample.part_lengths], self._budget))
        batch = collate(parts, self.single.base.device, body.shape.tokens)
        body.load(batch)
        is_first, self._is_first = self._is_first, False
        if is_first and self._can_rehearse():
            try:
                body.rehearse()
            except Exception:  # what it has half made is not used, and what fails will fail again
                self._drop()
                return self._load(parts)
        return _Ready(parts, body, batch)

    def _body(self, shape: Shape) -> Body:
        body = self._bodies.pop(shape, None)
        if body is None:
            body = Body(self.single, shape, self._adapters, self._dropout, self._gradients, self._room, self._columns)
            if len(self._bodies) >= MOST:
                del self._bodies[next(iter(self._bodies))]
        self._bodies[shape] = body
        return body

    def change(
        self, buffers: Buffers, dropout: bool, why_not: str | None, columns: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """The adapters that may own tokens are others now: what was recorded is recorded anew. Between two microbatches.

        Args:
            buffers, dropout, columns: as at first.
            why_not: in words, where these adapters cannot have graphs.
        """
        if why_not is not None and why_not != self._unfit:
            self.tell(f"{NO_GRAPHS}: {why_not}")
        if self.why_not == self._unfit:
            self.why_not = why_not
        self._unfit = why_not
        self._adapters, self._dropout, self._gradients = tuple(buffers), dropout, Gradients(buffers)
        self._columns = columns
        self._drop()

    def _can_rehearse(self) -> bool:
        """Not with DoRA's scales, which kernels make and which are kept; CPUs compile nothing."""
        layers = [
            layer for layer in adapted_layers(self.single.base.model).values() if isinstance(layer, AdaptedLinear)
        ]
        dora = any(own.spec.use_dora for layer in layers for own in layer.adapters.values())
        return self.single.base.device.type == "cuda" and not dora

    def _drop(self) -> None:
        """Free the memory of all graphs."""
        self._waiting, self._ready, self._recorder = False, None, None
        self._bodies.clear()
        self._room.clear()
        gc.collect()
        free_memory(self.single.base.device)


def _first_line(error: BaseException) -> str:
    while error.__context__ is not None:  # what ended a recording; later errors say that there was one
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _nothing_waits(device: torch.device, checked: bool) -> Iterator[None]:
    """Raise, where it is checked, a RuntimeError for whatever lets the host wait for the device, which no graph can hold."""
    if not checked or device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def graphed(
    run: Run, base: Base, single: Executor, jobs: Sequence[Job], budget: int, tell: Callable[[str], None]
) -> Executor:
    """The executor that a run asks for by `cuda_graphs`. budget: most tokens that microbatches are planned with.

    Raises:
        InputError: it must have graphs, and cannot.
    """
    reason = why_no_graphs(run, base, jobs)
    if run.cuda_graphs is True and reason is not None:
        raise InputError(f"cuda_graphs: true cannot be met: {reason}")
    if run.cuda_graphs is False:
        return single
    if reason is not None:
        if base.device.type == "cuda":
            base.warnings.append(f"{NO_GRAPHS}: {reason}")
        return single
    assert isinstance(single, SingleDevice)
    dropout = any(job.dropout_key is not None for job in jobs)
    return GraphedDevice(single, buffers_of(jobs), dropout, budget, tell, columns=columns_of(jobs))


def buffers_of(jobs: Sequence[Job]) -> Buffers:
    """Buffers in which the gradients of jobs are added up, see Gradients."""
    return {
        job.adapter.number: [
            (job.state.parameters[name], buffer) for name, buffer in job.state.gradient_buffers().items()
        ]
        for job in jobs
    }


def columns_of(jobs: Sequence[Job]) -> dict[str, torch.dtype]:
    """Columns of tokens that jobs have, see Body."""
    terms = [term for job in jobs for term in job.learning.terms]
    return {name: own.dtype for term in terms for name, own in term.columns.items() if own.of == "token"}


def why_no_graphs(run: Run, base: Base, jobs: Sequence[Job]) -> str | None:
    """Reason against graphs that is known beforehand; None where microbatches are tried."""
    if base.device.type != "cuda":
        return f"there are none on {base.device.type}"
    if base.form is not None:
        return "the weights of quantised layers are made where they are read, by their libraries"
    if not base.storage.is_whole:
        return "the base model is in parts on several processes, which exchange what they compute from the host"
    if run.dtype not in ("bfloat16", "float16"):
        return f"attention over samples whose boundaries are on the device is for bfloat16 and float16, not for {run.dtype}"
    if not base.fused_loss or plain_head(base.model) is None:
        return "the loss of this model needs more than the hidden states and the output layer"
    if mixing_functions(base.model):
        return "linear attention is computed sample by sample, of which each microbatch has others"
    if base.modality is not None:
        return "microbatches have images, which the host decodes and of which each has a size of its own"
    if run.gradient_checkpointing:
        return "gradient_checkpointing recomputes activations from the host"
    if len(jobs) > LEAST_TOKENS:
        return f"{len(jobs)} jobs, more than {LEAST_TOKENS}"
    for job in jobs:
        if found := why_unfit(job.adapter.spec, job.router_coefficient):
            return f"job {job.name!r} {found}"
    for job in jobs if len(jobs) > 1 else ():
        if any(own.use_dora and own.dropout and own.base_dropped for own in job.adapter.spec.modules.values()):
            return f"job {job.name!r} is DoRA with dropout, whose two base products are made segment by segment"
    return None


def why_unfit(spec: AdapterSpec, router_coefficient: float) -> str | None:
    """Why a job has no graphs, whatever is beside it. router_coefficient: of its load-balancing loss, 0 for none."""
    if router_coefficient:
        return "has a load-balancing loss, made of what routers give inside of the decoder"
    if (path := spec.parameter) is not None:
        return f"adapts {path}, whose tokens are sorted by expert and job anew for every microbatch"
    found = next((path for path, own in spec.modules.items() if own.kind != "linear"), None)
    return None if found is None else f"trains {found} itself, token by token in an order that the host has"
