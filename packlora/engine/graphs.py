"""CUDA graphs of the decoder: the forward and the backward of a microbatch are two replays, which cost the host nothing.

A graph repeats the launches that were recorded, on the addresses that were recorded. What changes from microbatch to microbatch
lies in buffers that they read: tokens, positions, dropout keys, where samples begin and who owns which tokens. Microbatches of
one Shape share a graph; the last tokens of a row that is shorter are nobody's. Packed copies of the adapters, and DoRA's norms,
are brought up to date before a replay, where a job has stepped. The loss, a few launches, runs between the two replays without
a graph (between.py), so the number of labels is no part of a shape.

The first microbatches of a shape run the same functions on the same buffers without a graph (`Body`), so a run has the same
bits whatever was recorded when. What cannot be recorded runs as SingleDevice runs it, and is told once. So do microbatches with
tokens of an adapter that the graphs do not know.

Where each of several processes has a slice of every layer, their messages are recorded too. All of them record and replay at
the same microbatches, since whatever decides that is the same for all but memory: where that runs out, the run ends.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from packlora.adapters.attach import adapted_layers
from packlora.engine.between import Between
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.memory import free_memory
from packlora.engine.parts import Parts, rows_of
from packlora.engine.passes import MicrobatchResult, Pending, SingleDevice, one_error_for_memory
from packlora.engine.recorded import STEPS, TRIES, Body, Buffers, Gradients, Recorder, Room, Shape, with_added
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sizes import Sizes
from packlora.errors import ProcessError

MOST = 32
"""Shapes whose graphs are kept; the one that was not used for longest goes."""
NO_GRAPHS = "no CUDA graphs, so the host may be what takes the time"
SHORT = "memory has run out, and they need some of their own"
T = TypeVar("T")


class Waiting(NamedTuple):
    """A forward that waits for its backward. outputs: leaves, from which the loss was made."""

    pending: Pending
    outputs: list[torch.Tensor]
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
        columns, routes: as of Body.
        patience, lent: as of Sizes.
        steps: as of Shape.
    """

    def __init__(
        self, single: SingleDevice, buffers: Buffers, dropout: bool, budget: int,
        tell: Callable[[str], None] = lambda text: None, recorder: Callable[[torch.device], Any] = Recorder,
        columns: Mapping[str, torch.dtype] | None = None, routes: bool = False, patience: int = 1, steps: int = STEPS,
        lent: int = 0,
    ) -> None:  # fmt: skip
        self.single, self.tell = single, tell
        self._alone = single.base.storage.is_whole
        """No other process takes part in a forward."""
        self.why_not: str | None = None
        self._unfit: str | None = None
        """Why these adapters cannot have graphs."""
        self._shape_of = lambda lengths: Shape.of(lengths, budget, steps)
        self.sizes = Sizes(patience, lent)
        self._follow(buffers, dropout, columns, routes)
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
        if self._takes(parts):
            self._ready = None  # what it has loaded is written over, also where this fails
            with suppress(Exception) if self._alone else nullcontext():
                self._ready = self._load(parts)
                if self._ready.body.recorded:
                    self._ready = self._ready._replace(waiting=self._launch(self._ready))

    def forward(self, parts: Parts) -> Pending | Waiting:
        """See Executor. One forward at a time goes by a graph: what it keeps for its backward is in the graph's memory. No job
        may step before that, whether it has tokens here or not: operands of all are packed together."""
        if self._takes(parts) and (pending := self._attempt(lambda: self._forward(parts))) is not None:
            return pending
        return self.single.forward(parts)

    def _takes(self, parts: Parts) -> bool:
        """Whether a microbatch goes by a graph now. The base model's do beside several adapters alone (moving.py)."""
        known = self.adapters | {NO_ADAPTER} if len(self.adapters) > 1 else self.adapters
        return self.why_not is None and not self._waiting and all(part.adapter in known for part in parts)

    def _attempt(self, compute: Callable[[], T]) -> T | None:
        """Result of `compute`; None where that goes without graphs alone. Nothing refers to the error then, nor to what it
        held in memory."""
        try:
            with one_error_for_memory():
                return compute()
        except ProcessError:
            raise
        except torch.OutOfMemoryError:
            if not self._alone:
                raise
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
        if self.sizes.is_due(body.shape, body.runs) and not body.recorded and self._checked > 1:
            self._recorder = self._recorder or self._new_recorder(base.device)
            body.record(self._recorder)
            self.sizes.recorded += 1
        with _nothing_waits(base.device, self._checked == 1):
            outputs = body.forward()
        return Waiting(self._between.forward(batch, outputs), outputs, body, ready.parts)

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
        of_outputs, of_head = self._between.backward(pending.pending, pending.outputs)
        with _nothing_waits(self.single.base.device, self._checked == 1):
            pending.body.backward(of_outputs)
        head = self._gradients.take(self._between.parameters, of_head)
        self._checked += not pending.body.recorded
        return with_added(result, pending.body.reached, head)

    def evaluate(self, parts: Parts, by_graph: bool = False) -> MicrobatchResult:
        """See Executor. A graph is one of training: where no adapter has dropout its forward is the same."""
        if by_graph and not self._dropout and self._takes(parts) and (shapes := self._recorded(_lengths(parts))):
            result = self._attempt(lambda: self._evaluate(parts, self._bodies[min(shapes)]))
            if result is not None:
                return result
        try:
            return self.single.evaluate(parts)
        except torch.OutOfMemoryError:
            if not self._bodies or not self._alone:
                raise
        self._drop()  # when nothing refers to the error any more, nor to what it held in memory
        return self.single.evaluate(parts)

    @torch.no_grad()
    def _evaluate(self, parts: Parts, body: Body) -> MicrobatchResult:
        self._ready = None  # what it has loaded is written over
        return self._between.evaluate(_loaded(body, parts, self.single.base.device), body.forward())

    def idle(self, backward: bool) -> None:
        self.single.idle(backward)

    def checkpointed(self) -> None:
        """See Executor: what was recorded keeps activations, so its memory is freed; and memory is too short for more."""
        if self.why_not is None:
            self.why_not = SHORT
            self.tell(f"{NO_GRAPHS}: {SHORT}")
        self._drop()

    def free(self) -> None:
        """See Executor. It counts as a lack of memory in a graph. Other processes would go on with theirs."""
        if self._alone and self._bodies:
            self._attempt(_lack)
        self.single.free()

    def release(self) -> None:
        """See Executor. A process group does not end while graphs hold its messages; alone nothing waits for their end. The
        device may have failed, of which the run's own error tells; its frames may hold a body."""
        if not self._alone:
            with suppress(RuntimeError):
                for body in self._bodies.values():
                    body.forget()
                self._drop()

    def plans(self) -> list[dict[str, Any]]:
        return self.single.plans()

    def _load(self, parts: Parts) -> _Ready:
        body = self._body(self._shape_for(lengths := _lengths(parts)))
        self.sizes.padding += body.shape.tokens - sum(lengths)
        batch = _loaded(body, parts, self.single.base.device)
        is_first, self._is_first = self._is_first, False
        if is_first and self._can_rehearse():
            try:
                body.rehearse()
            except Exception:  # what it has half made is not used, and what fails will fail again
                self._drop()
                return self._load(parts)
        return _Ready(parts, body, batch)

    def _shape_for(self, lengths: Sequence[int]) -> Shape:
        """The shape by whose graphs samples of so many tokens run now."""
        own = self._shape_of(lengths)
        return own if own in self._bodies else self.sizes.choose(own, self._recorded(lengths), sum(lengths))

    def _recorded(self, lengths: Sequence[int]) -> list[Shape]:
        """Shapes whose graphs can run samples of so many tokens."""
        own = self._shape_of(lengths)
        return [
            shape for shape, body in self._bodies.items() if body.recorded and (shape == own or shape.holds(lengths))
        ]

    def _body(self, shape: Shape) -> Body:
        body = self._bodies.pop(shape, None)
        if body is None:
            body = self._new_body(shape)
            if len(self._bodies) >= MOST:
                del self._bodies[oldest := next(iter(self._bodies))]
                self.sizes.forget(oldest)
        self._bodies[shape] = body
        return body

    def change(
        self, buffers: Buffers, dropout: bool, why_not: str | None, columns: Mapping[str, torch.dtype] | None = None,
        routes: bool = False,
    ) -> None:  # fmt: skip
        """The adapters that may own tokens are others now: what was recorded is recorded anew. Between two microbatches.

        Args:
            buffers, dropout, columns: as at first.
            why_not: in words, where these adapters cannot have graphs.
        """
        if why_not is not None and why_not != self._unfit:
            self.tell(f"{NO_GRAPHS}: {why_not}")
        # what could not be recorded was perhaps of one that has left
        if self.why_not != SHORT and self._out_of_memory < TRIES:
            self.why_not = why_not
        self._unfit = why_not
        self._watch_anew()
        self._follow(buffers, dropout, columns, routes)
        if self._bodies:
            self._drop()

    def layers_changed(self) -> None:
        """Adapters that own no tokens have come onto the layers, or left them. Operands are packed anew, which a recording must
        not see."""
        self._watch_anew()
        self._bodies = {shape: body for shape, body in self._bodies.items() if body.recorded}

    def _watch_anew(self) -> None:
        """The next microbatch makes what a first one makes, for which the host may wait."""
        self._checked = 0 if self._checked == 1 else self._checked

    def _follow(self, buffers: Buffers, dropout: bool, columns: Mapping[str, torch.dtype] | None, routes: bool) -> None:
        """These adapters may own tokens."""
        self.adapters = frozenset(buffers)
        """Adapters that the graphs know."""
        self._dropout = dropout
        self._gradients = gradients = Gradients(buffers)
        self._between = Between(self.single, gradients.parameters)
        self._new_body: Callable[[Shape], Body] = lambda shape: Body(
            self.single, shape, tuple(buffers), dropout, gradients, self._room, columns, routes
        )

    def _can_rehearse(self) -> bool:
        """Not with DoRA's scales, which kernels make and which are kept; CPUs compile nothing."""
        layers = adapted_layers(self.single.base.model).values()
        dora = any(own.spec.use_dora for layer in layers for own in layer.adapters.values())
        return self.single.base.device.type == "cuda" and not dora

    def _drop(self) -> None:
        """Free the memory of all graphs."""
        self._waiting, self._ready, self._recorder = False, None, None
        for kept in (self._bodies, self.sizes, self._room):
            kept.clear()
        free_memory(self.single.base.device)


def _lack() -> None:
    raise torch.OutOfMemoryError("outside of a graph")


def _loaded(body: Body, parts: Parts, device: torch.device) -> PackedBatch:
    """A microbatch that lies in the buffers of a body."""
    batch = collate(parts, device, body.shape.tokens)
    body.load(batch)
    return batch


def _lengths(parts: Parts) -> list[int]:
    """Tokens of each sample, or of each of its parts that see nothing of one another."""
    return [length for row in rows_of(parts) for length in row.sample.part_lengths]


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
