"""Passes of a microbatch on one stage of a pipeline, which needs what its neighbours send, and the time that they take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.model import Base
from packlora.base.packing import hidden_states
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.heads import Losses, token_losses
from packlora.engine.objective import CarriedSums
from packlora.engine.parts import Parts, num_tokens
from packlora.engine.passes import MicrobatchResult, one_error_for_memory, with_carried
from packlora.pipeline.stages import Stage


@dataclass(slots=True)
class StagePending:
    """A forward that waits for its backward.

    incoming: hidden states of the stage below. root: what the backward begins at, the hidden states for the stage above or, on
    the last stage, the total of the losses. gradient: [1, T, D] of the hidden states; before the backward
    from the stage above, after it for the stage below. carrying: where samples have a term that carries
    something.
    """

    batch: PackedBatch
    incoming: torch.Tensor | None
    root: torch.Tensor
    losses: Losses | None
    gradient: torch.Tensor | None = None
    carrying: CarriedSums | None = None
    carried: dict[int, torch.Tensor] = field(default_factory=dict)
    """Sum by adapter, over its samples, of what `carrying` makes; nothing where the losses are on another stage."""

    def result(self) -> MicrobatchResult:
        """Results of the microbatch; numbers are zeros where the losses are on another stage."""
        batch = self.batch
        if self.losses is not None:
            sums = with_carried(self.losses.sums, batch.carried, self.carried)
            losses_L = self.losses.losses_L
        else:
            sizes = {part.adapter: 1 + len(part.objective.metrics) for part in batch.parts}
            for one in batch.carried:
                sizes[one.adapter] += 1
            nothing = torch.zeros(1, dtype=torch.float64, device=self.root.device)
            sums = {adapter: nothing.repeat(size) for adapter, size in sizes.items()}
            losses_L = nothing.repeat(len(batch.labels_L))
        return MicrobatchResult(sums, batch.num_tokens, batch.num_samples, losses_L)

    def gradients(self) -> list[torch.Tensor]:
        """After the backward, for the stage below: of the hidden states [1, T, D], and that of `carrying`."""
        of_carried = None if self.carrying is None else self.carrying.gradient
        return [own for own in (self.gradient, of_carried) if own is not None]


Span = tuple[str, int, float, float]
"""forward or backward; its number among those; start and end in seconds since the epoch, alike on stages of one machine."""


class StageClock:
    """Times of forwards and backwards. A GPU times them by events, and is not waited for until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self._spans: list[tuple[str, int, Any, Any]] = []
        self._counts: dict[str, int] = {}
        self._began = 0.0
        self._base: Any = None

    def begin(self) -> None:
        """Begin to time, while nothing runs."""
        self._spans.clear()
        self._counts.clear()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self._base = self._now()
            self._began = time.time()

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        start = self._now()
        yield
        self._spans.append((kind, number, start, self._now()))

    def taken(self) -> list[Span]:
        """Spans that have run since it began, in order; the device is waited for."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return [(kind, number, self._seconds(start), self._seconds(end)) for kind, number, start, end in self._spans]

    def _now(self) -> Any:
        if not self.cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self.cuda:
            return float(moment)
        return self._began + float(self._base.elapsed_time(moment)) / 1e3


class StageDevice:
    """The Executor of a stage: `forward` and `backward` receive what the neighbours send, and send on what they make.

    Args:
        multiple: divisor of the numbers of tokens, which tokens of no adapter fill up.
    """

    def __init__(self, base: Base, attached: Attached, stage: Stage, multiple: int = 1) -> None:
        self.base, self.attached, self.stage, self.multiple = base, attached, stage, multiple
        self.clock = StageClock(base.device)

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape of hidden states and their gradient, of a microbatch of so many tokens of samples."""
        return 1, -(-max(MIN_ROWS, num_tokens) // self.multiple) * self.multiple, self.stage.width

    def _shape(self, parts: Parts) -> tuple[int, int, int]:
        return self.shape(num_tokens(parts))

    def prepare(self, parts: Parts) -> None:
        """Nothing."""

    # --- what passes between stages ----------------------------------------------------------------------------------------

    @property
    def _wide(self) -> torch.dtype:
        """Type of what CarriedSums send."""
        return torch.promote_types(self.stage.dtype, torch.float32)

    def _receive_up(self, parts: Parts) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Receive from the stage below, before the forward here: hidden states [1, T, D] in the model's dtype, and, where
        samples have a term that carries something, CarriedSums' totals in float32 or wider. None and None on the first stage.
        """
        if self.stage.links.is_first:
            return None, None
        up = self.stage.links.up
        incoming = up.receive(self._shape(parts), self.stage.dtype)
        carrying = [(len(part.rows), term) for part in parts for term in part.terms if term.carries]
        if not carrying:
            return incoming, None
        shape = carrying[0][1].carried_shape(sum(samples for samples, _ in carrying), self.base.model)
        return incoming, up.receive(shape, self._wide)

    def _send_up(self, pending: StagePending) -> None:
        """Send what _receive_up receives on the stage above."""
        if self.stage.links.is_last:
            return
        up = self.stage.links.up
        up.send(pending.root.detach(), self._shape_of(pending), self.stage.dtype)
        if (carrying := pending.carrying) is not None:
            up.send(carrying.totals, carrying.totals.shape, self._wide)

    def _receive_down(self, pending: StagePending) -> None:
        """Receive from the stage above, before the backward here, into pending: the gradient [1, T, D] of the hidden states
        that were sent, then, where samples have something to carry, that of CarriedSums' sums, which the last stage has made
        and all others pass on."""
        if self.stage.links.is_last:
            return
        down = self.stage.links.down
        pending.gradient = down.receive(self._shape_of(pending), self.stage.dtype)
        if (carrying := pending.carrying) is not None:
            carrying.gradient = down.receive(carrying.totals.shape[1:], self._wide)

    def _send_down(self, pending: StagePending) -> None:
        """Send what _receive_down receives on the stage below."""
        if self.stage.links.is_first:
            return
        of_hidden, *of_carried = pending.gradients()
        self.stage.links.down.send(of_hidden, self._shape_of(pending), self.stage.dtype)
        for own in of_carried:
            self.stage.links.down.send(own, own.shape, self._wide)

    def _shape_of(self, pending: StagePending) -> tuple[int, int, int]:
        return 1, len(pending.batch.input_ids_T), self.stage.width

    # --- forward and backward ----------------------------------------------------------------------------------------------

    def forward(self, parts: Parts) -> StagePending:
        """See Executor."""
        incoming, below = self._receive_up(parts)
        with self.clock.span("forward"), one_error_for_memory():
            batch = collate(parts, self.base.device, self._shape(parts)[1])
            pending = self._run(batch, incoming, below)
        self._send_up(pending)
        return pending

    def backward(self, pending: StagePending) -> MicrobatchResult:
        """See Executor. Losses are those of the last stage, zeros elsewhere."""
        self._receive_down(pending)
        with self.clock.span("backward"), one_error_for_memory():
            self._back(pending)
            result = pending.result()
        self._send_down(pending)
        return result

    def _run(
        self, batch: PackedBatch, incoming: torch.Tensor | None, below: torch.Tensor | None = None
    ) -> StagePending:
        if incoming is not None and torch.is_grad_enabled():
            incoming.requires_grad_()
        model, losses = self.base.model, None
        routed = list[torch.Tensor]() if batch.carried and self.stage.routes else None
        with self.attached.active(batch.owners), self.stage.given(incoming):
            if self.stage.links.is_last:
                losses = token_losses(model, batch, batch.weights_L, self.base.fused_loss, routed)
                root = losses.total
            else:
                hidden_states(model, batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, routed=routed)
                assert self.stage.outgoing is not None
                root, self.stage.outgoing = self.stage.outgoing.contiguous(), None
        pending = StagePending(batch, incoming, root, losses)
        if batch.carried:
            pending.carrying = batch.carried[0].term.begin(
                batch.carried, routed or [], below, self.base.model, self._wide, self.base.device
            )
            if self.stage.links.is_last:
                pending.carried = pending.carrying.losses()
        return pending

    def _back(self, pending: StagePending) -> None:
        """Gradients go to the parameters, and to pending.gradient."""
        batch, incoming, gradient = pending.batch, pending.incoming, pending.gradient
        pending.gradient = None
        roots = [(pending.root, gradient)] if pending.root.requires_grad else []
        if pending.carrying is not None:
            roots += pending.carrying.roots()
        if roots:
            with self.attached.active(batch.owners):
                torch.autograd.backward([root for root, _ in roots], [own for _, own in roots])
        if incoming is not None:
            back = torch.zeros_like(incoming) if incoming.grad is None else incoming.grad
            pending.gradient = back.contiguous()

    @torch.no_grad()
    def evaluate(self, parts: Parts, by_graph: bool = False) -> MicrobatchResult:
        """All stages call it for the same microbatches."""
        links, shape = self.stage.links, self._shape(parts)
        incoming = None if links.is_first else links.up.receive(shape, self.stage.dtype)
        with one_error_for_memory():
            batch = collate(parts, self.base.device, shape[1])
            pending = self._run(batch, incoming)
        if not links.is_last:
            links.up.send(pending.root, shape, self.stage.dtype)
        return pending.result()

    def logits(
        self, owners: TokenOwners, ids_T: torch.Tensor, positions_T: torch.Tensor, lengths: Sequence[int],
        rows_L: torch.Tensor,
    ) -> torch.Tensor | None:  # fmt: skip
        """See SingleDevice. All stages call it; microbatches may be on their way."""
        with self.attached.active(owners):
            return self.stage.logits(self.base.model, ids_T, positions_T, lengths, rows_L)

    def idle(self, backward: bool) -> None:
        """Nothing: the stages have the same microbatches."""

    def checkpointed(self) -> None:
        """Nothing."""

    def free(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""

    def plans(self) -> list[dict[str, Any]]:
        return [line for chooser in self.attached.choosers for line in chooser.record()]
