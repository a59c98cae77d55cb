"""Forward, backward and evaluation of a microbatch on one stage of a pipeline, which needs what its neighbours send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS
from packlora.base.model import Base
from packlora.base.packing import hidden_states
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.heads import Losses, token_losses
from packlora.engine.objectives import CarriedSums
from packlora.engine.parts import Parts, num_tokens
from packlora.parallel.stages import Stage
from packlora.runtime.microbatch import MicrobatchResult, one_error_for_memory, with_carried


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
        """After the backward, for the stage below: of the hidden states, and that of `carrying`."""
        of_carried = None if self.carrying is None else self.carrying.gradient
        return [own for own in (self.gradient, of_carried) if own is not None]


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The Executor of a stage; `forward` and `backward` are given what the neighbours send, `evaluate` receives it itself."""

    base: Base
    attached: Attached
    stage: Stage
    multiple: int = 1
    """Divisor of the numbers of tokens, which tokens of no adapter fill up."""

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape of hidden states and their gradient, of a microbatch of so many tokens of samples."""
        return 1, -(-max(MIN_ROWS, num_tokens) // self.multiple) * self.multiple, self.stage.width

    def _total(self, parts: Parts) -> int:
        return self.shape(num_tokens(parts))[1]

    def prepare(self, parts: Parts) -> None:
        """Nothing."""

    # --- what passes between stages; shape: as `shape` gives it ------------------------------------------------------------

    def receive_totals(self, parts: Parts) -> torch.Tensor | None:
        """Receive from the stage below, before the forward here: CarriedSums' totals in float32 or wider, of N samples with a
        term that carries something. They follow the hidden states, which send_up there sends first. None where no sample has
        such a term. Not for the first stage, which has none below."""
        carrying = [(len(part.rows), term) for part in parts for term in part.terms if term.carries]
        if not carrying:
            return None
        shape = carrying[0][1].carried_shape(sum(samples for samples, _ in carrying), self.base.model)
        return self.stage.links.up.receive(shape, self._wide)

    def send_up(self, pending: StagePending, shape: tuple[int, int, int]) -> None:
        """Send to the stage above, after the forward here: hidden states [1, T, D] in the model's dtype, then, where samples
        have something to carry, CarriedSums' totals over the layers here and below. Not for the last stage."""
        up = self.stage.links.up
        up.send(pending.root.detach(), shape, self.stage.dtype)
        if (carrying := pending.carrying) is not None:
            up.send(carrying.totals, carrying.totals.shape, self._wide)

    def receive_down(self, pending: StagePending, shape: tuple[int, int, int]) -> None:
        """Receive from the stage above, before the backward here, into pending: the gradient [1, T, D] of what send_up sent,
        then, where samples have something to carry, that of CarriedSums' sums, which the last stage has made and all others
        pass on. Not for the last stage."""
        down = self.stage.links.down
        pending.gradient = down.receive(shape, self.stage.dtype)
        if (carrying := pending.carrying) is not None:
            carrying.gradient = down.receive(carrying.totals.shape[1:], self._wide)

    def send_down(self, gradients: Sequence[torch.Tensor], shape: tuple[int, int, int]) -> None:
        """Send to the stage below, after the backward here, what its receive_down takes. gradients: of the hidden states
        [1, T, D] that came from there, then, where there is one, CarriedSums': StagePending.gradients. Not for the first."""
        of_hidden, *of_carried = gradients
        self.stage.links.down.send(of_hidden, shape, self.stage.dtype)
        for own in of_carried:
            self.stage.links.down.send(own, own.shape, self._wide)

    # --- forward and backward ----------------------------------------------------------------------------------------------

    @property
    def _wide(self) -> torch.dtype:
        """Type of what CarriedSums send."""
        return torch.promote_types(self.stage.dtype, torch.float32)

    def forward(
        self, parts: Parts, incoming: torch.Tensor | None = None, below: torch.Tensor | None = None
    ) -> StagePending:
        """incoming: hidden states [1, T, D] of the stage below; None on the first stage. below: see CarriedSums."""
        with one_error_for_memory():
            batch = collate(parts, self.base.device, self._total(parts))
            return self._run(batch, incoming, below)

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

    def backward(self, pending: StagePending) -> MicrobatchResult:
        """Gradients go to the parameters, and to pending.gradient. Losses are those of the last stage, zeros elsewhere."""
        batch, incoming, gradient = pending.batch, pending.incoming, pending.gradient
        pending.gradient = None
        with one_error_for_memory():
            roots = [(pending.root, gradient)] if pending.root.requires_grad else []
            if pending.carrying is not None:
                roots += pending.carrying.roots()
            if roots:
                with self.attached.active(batch.owners):
                    torch.autograd.backward([root for root, _ in roots], [own for _, own in roots])
            if incoming is not None:
                back = torch.zeros_like(incoming) if incoming.grad is None else incoming.grad
                pending.gradient = back.contiguous()
            return pending.result()

    @torch.no_grad()
    def evaluate(self, parts: Parts) -> MicrobatchResult:
        """All stages call it for the same microbatches."""
        links, shape = self.stage.links, self.shape(num_tokens(parts))
        incoming = None if links.is_first else links.up.receive(shape, self.stage.dtype)
        with one_error_for_memory():
            batch = collate(parts, self.base.device, self._total(parts))
            pending = self._run(batch, incoming)
        if not links.is_last:
            links.up.send(pending.root, shape, self.stage.dtype)
        return pending.result()

    def idle(self, backward: bool) -> None:
        """Nothing: the stages have the same microbatches."""

    def plans(self) -> list[dict[str, Any]]:
        return [line for chooser in self.attached.choosers for line in chooser.record()]
