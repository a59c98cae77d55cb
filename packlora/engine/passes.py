"""Forward and backward of one microbatch: what training repeats, the profiler measures and benchmarks time.

An Executor runs them, as two calls: a pipeline runs other microbatches between the two, and steps of jobs that have no tokens
in this one. Gradients are left in the parameters of the jobs, losses are handed back by job. What is done with them is
engine.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.model import Base
from packlora.base.packing import packed_logits
from packlora.engine.collate import PackedBatch, collate
from packlora.engine.heads import Losses, token_losses
from packlora.engine.memory import free_memory
from packlora.engine.objective import Carried, CarriedSums
from packlora.engine.parts import Parts, num_tokens

T = TypeVar("T")
NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""How libraries and drivers say it that do not raise torch's own error."""


@dataclass(frozen=True, slots=True)
class MicrobatchResult:
    """Results by adapter that took part.

    sums: its sum of losses, then those of the metrics of its objective and its terms, [1 + M] float64 on the device. tokens,
    samples: how many. losses_L: cross entropy of all labels, padding included. added: names of parameters whose gradients were
    added up where those of the global batch are, and are left in no parameter.
    """

    sums: Mapping[int, torch.Tensor]
    tokens: Mapping[int, int]
    samples: Mapping[int, int]
    losses_L: torch.Tensor
    added: Mapping[int, frozenset[str]] = field(default_factory=dict)


class Executor(Protocol):
    """Runs microbatches. All calls raise torch.OutOfMemoryError where memory runs out; owners' gradients may then hold a part.

    parts: ordered by adapter.
    """

    def forward(self, parts: Parts) -> Any:
        """Run parts through the model; the result goes to `backward`, after any number of other calls.

        Between the two no job with tokens here may step.
        """

    def prepare(self, parts: Parts) -> None:
        """The next `forward` will be given this object: what it needs of it may be made while the device works."""

    def backward(self, pending: Any) -> MicrobatchResult:
        """Add the gradients of what `forward` returned to the parameters of its owners, or where the result says."""

    def evaluate(self, parts: Parts, by_graph: bool = False) -> MicrobatchResult:
        """Losses alone, without gradients. by_graph: whatever was recorded may run them, which depends on what has run before,
        and so do the last bits."""

    def idle(self, backward: bool) -> None:
        """A process of several runs this while others run a microbatch, forward alone or backward too, and it has none."""

    def checkpointed(self) -> None:
        """The layers of the model are computed again in the backward from now on. Between two microbatches."""

    def free(self) -> None:
        """Memory is short: free what is kept from microbatch to microbatch and can be made anew. Between a backward and the
        next forward."""

    def release(self) -> None:
        """Nothing is run any more: free what is kept from microbatch to microbatch."""

    def plans(self) -> list[dict[str, Any]]:
        """How layers were computed, for run.json."""


class Passes(Executor, Protocol):
    """The Executor of a model: `SingleDevice`, or StageDevice of a stage of a pipeline. attached: what its adapted layers
    share."""

    @property
    def base(self) -> Base: ...

    @property
    def attached(self) -> Attached: ...

    def logits(
        self, owners: TokenOwners, ids_T: torch.Tensor, positions_T: torch.Tensor, lengths: Sequence[int],
        rows_L: torch.Tensor,
    ) -> torch.Tensor | None:  # fmt: skip
        """Logits [L, V] of rows of packed texts, without dropout; None on a stage of a pipeline that has no output layer."""


def run_microbatch(executor: Executor, parts: Parts) -> MicrobatchResult:
    """Forward and backward, one after the other."""
    return executor.backward(executor.forward(parts))


def with_carried(
    sums: Mapping[int, torch.Tensor], carried: Sequence[Carried], found: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Sums of MicrobatchResult with those of a term that carries something. found: by adapter, its sum over samples [] float64,
    which takes part in the losses with the adapter's share."""
    out = dict(sums)
    for one in carried:
        loss, *metrics = out[one.adapter].split(1)
        out[one.adapter] = torch.cat([loss + one.share * found[one.adapter], *metrics, found[one.adapter][None]])
    return out


@dataclass(frozen=True, slots=True)
class Pending:
    """A forward that waits for its backward. carrying: where terms carry something; `carried` is its sum by adapter."""

    batch: PackedBatch
    losses: Losses
    carrying: CarriedSums | None = None
    carried: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Tensors that a backward starts from, and their gradients; none where no adapter takes part in the output."""
        carried = [] if self.carrying is None else self.carrying.roots()
        roots, gradients = [root for root, _ in carried], [own for _, own in carried]
        total = [self.losses.total] if self.losses.total.requires_grad else []
        return [*roots, *total], [*gradients, *(None for _ in total)]

    def backward(self) -> None:
        """Run it from all roots."""
        roots, gradients = self.roots()
        if roots:
            torch.autograd.backward(roots, gradients)

    def result(self) -> MicrobatchResult:
        """Results that are known once the forward has run."""
        sums = with_carried(self.losses.sums, self.batch.carried, self.carried)
        return MicrobatchResult(sums, self.batch.num_tokens, self.batch.num_samples, self.losses.losses_L)


def pending_of(base: Base, batch: PackedBatch, losses: Losses, routed: Sequence[torch.Tensor] | None) -> Pending:
    """A forward that waits for its backward. routed: what routers give; used where samples have a term that carries it."""
    if not batch.carried:
        return Pending(batch, losses)
    wide = torch.promote_types(base.model.dtype, torch.float32)
    carrying = batch.carried[0].term.begin(batch.carried, routed or (), None, base.model, wide, base.device)
    return Pending(batch, losses, carrying, carrying.losses())


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """The Executor of a model that is on one device, or cut over several.

    attached: what its adapted layers share. multiple: of which the numbers of tokens are, with tokens of nobody.
    """

    base: Base
    attached: Attached
    multiple: int = 1

    def prepare(self, parts: Parts) -> None:
        """Nothing."""

    def forward(self, parts: Parts) -> Pending:
        """See Executor."""
        with one_error_for_memory():
            batch = collate(parts, self.base.device, self._total(parts), self.base.modality)
            # a label's gradient is its own weight, whatever the total is: a loss that is not finite reaches no other adapter
            model, routed = self.base.model, list[torch.Tensor]() if batch.carried else None
            with self.attached.active(batch.owners):
                losses = token_losses(model, batch, batch.weights_L, self.base.fused_loss, routed)
            return pending_of(self.base, batch, losses, routed)

    def backward(self, pending: Pending) -> MicrobatchResult:
        """See Executor."""
        with one_error_for_memory():
            with self.attached.active(pending.batch.owners):
                pending.backward()
            return pending.result()

    @torch.no_grad()
    def evaluate(self, parts: Parts, by_graph: bool = False) -> MicrobatchResult:
        """See Executor."""
        with one_error_for_memory():
            batch = collate(parts, self.base.device, self._total(parts), self.base.modality)
            with self.attached.active(batch.owners):
                losses = token_losses(self.base.model, batch, fused=self.base.fused_loss)
            return Pending(batch, losses).result()

    @torch.no_grad()
    def logits(
        self, owners: TokenOwners, ids_T: torch.Tensor, positions_T: torch.Tensor, lengths: Sequence[int],
        rows_L: torch.Tensor,
    ) -> torch.Tensor | None:  # fmt: skip
        """See Passes."""
        with self.attached.active(owners):
            return packed_logits(self.base.model, ids_T, positions_T, lengths, rows_L)

    def _total(self, parts: Parts) -> int:
        return -(-max(MIN_ROWS, num_tokens(parts)) // self.multiple) * self.multiple

    def idle(self, backward: bool) -> None:
        self.base.storage.idle(self.attached, backward)

    def checkpointed(self) -> None:
        """Nothing."""

    def free(self) -> None:
        free_memory(self.base.device)

    def release(self) -> None:
        """Nothing."""

    def plans(self) -> list[dict[str, Any]]:
        return [line for chooser in self.attached.choosers for line in chooser.record()]


def insist(executor: Executor, compute: Callable[[], T]) -> T:
    """Result of `compute`, which leaves nothing half done where memory runs out; then it is tried once more."""
    try:
        with one_error_for_memory():
            return compute()
    except torch.OutOfMemoryError:
        pass
    executor.free()  # when nothing refers to the error any more, nor to what it held in memory
    with one_error_for_memory():
        return compute()


@contextmanager
def one_error_for_memory() -> Iterator[None]:
    """Turns what other libraries raise where memory runs out into torch.OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in NO_MEMORY):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
