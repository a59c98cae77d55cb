"""Forward and backward of one microbatch: what training repeats, the profiler measures and benchmarks time.

An Executor runs them, as two calls: a pipeline runs other microbatches between the two, and steps of jobs that have no tokens
in this one. Gradients are left in the parameters of the jobs, losses are handed back by job. What a job does with them is
job.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS
from packlora.base.model import Base
from packlora.runtime.balance import with_balance
from packlora.runtime.collate import PackedBatch, PackedSample, collate
from packlora.runtime.loss import logps_of, sum_by_owner, token_losses, told_of

NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""How libraries and drivers say it that do not raise torch's own error."""


@dataclass(frozen=True, slots=True)
class MicrobatchResult:
    """Results by owner that took part. sums: of the losses of label tokens, or of samples with preferences, [] float64 on the
    device. tokens, samples: how many. logps: of samples with preferences, in their order, [N, 3] as of objective.Scores; None
    where there are none. told: of those in training, see Objective.told. balance: of owners with a load-balancing loss, its
    sum over samples, [] float64; in `sums` with its share."""

    sums: Mapping[int, torch.Tensor]
    tokens: Mapping[int, int]
    samples: Mapping[int, int]
    logps: torch.Tensor | None = None
    told: Mapping[int, torch.Tensor] = field(default_factory=dict)
    balance: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Executor(Protocol):
    """Runs microbatches. All calls raise torch.OutOfMemoryError where memory runs out; owners' gradients may then hold a part.

    samples: ordered by owner.
    """

    def forward(self, samples: Sequence[PackedSample], weights: np.ndarray) -> Any:
        """Run samples through the model; the result goes to `backward`, after any number of other calls.

        Between the two no job with tokens here may step.

        Args:
            weights: by owner, of each of its label tokens' losses in the gradient.
        """

    def prepare(self, samples: Sequence[PackedSample], weights: np.ndarray) -> None:
        """The next `forward` will be given these objects: what it needs of them may be made while the device works."""

    def backward(self, pending: Any) -> MicrobatchResult:
        """Add the gradients of what `forward` returned to the parameters of its owners."""

    def evaluate(self, samples: Sequence[PackedSample]) -> MicrobatchResult:
        """Losses alone, without gradients."""

    def idle(self, backward: bool) -> None:
        """A process of several runs this while others run a microbatch, forward alone or backward too, and it has none."""

    def plans(self) -> list[dict[str, Any]]:
        """How layers were computed, for run.json."""


def run_microbatch(executor: Executor, samples: Sequence[PackedSample], weights: np.ndarray) -> MicrobatchResult:
    """Forward and backward, one after the other."""
    return executor.backward(executor.forward(samples, weights))


@dataclass(frozen=True, slots=True)
class Pending:
    """A forward that waits for its backward. losses_L, total: of token_losses, the total with the load-balancing losses, which
    are `balance`, see MicrobatchResult."""

    batch: PackedBatch
    losses_L: torch.Tensor
    total: torch.Tensor
    balance: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def result(self) -> MicrobatchResult:
        batch, groups = self.batch, self.batch.groups
        sums = sum_by_owner(self.losses_L, batch)
        for one in batch.balanced:
            sums[one.owner] += one.share * self.balance[one.owner]
        if groups is None:
            return MicrobatchResult(sums, batch.num_tokens, batch.num_samples, balance=self.balance)
        logps, told = logps_of(self.losses_L, groups), told_of(self.losses_L, groups)
        return MicrobatchResult(sums, batch.num_tokens, batch.num_samples, logps, told, self.balance)


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """The Executor of a model that is on one device, or cut over several.

    attached: what its adapted layers share. multiple: of which the numbers of tokens are, with tokens of nobody.
    """

    base: Base
    attached: Attached
    multiple: int = 1

    def prepare(self, samples: Sequence[PackedSample], weights: np.ndarray) -> None:
        """Nothing."""

    def forward(self, samples: Sequence[PackedSample], weights: np.ndarray) -> Pending:
        with one_error_for_memory():
            batch = collate(samples, self.base.device, weights, self._total(samples), self.base.vision)
            # Each label's own weight is its gradient; the total is for backward alone, whatever NaN is in it.
            model, routed = self.base.model, list[torch.Tensor]() if batch.balanced else None
            with self.attached.active(batch.owners):
                losses_L, total = token_losses(model, batch, batch.weights_L, self.base.fused_loss, routed)
            if routed is None:
                return Pending(batch, losses_L, total)
            total, balance = with_balance(total, routed, batch.balanced, model.num_experts_per_tok)
            return Pending(batch, losses_L, total, balance)

    def backward(self, pending: Pending) -> MicrobatchResult:
        with one_error_for_memory():
            if pending.total.requires_grad:  # else no adapter takes part in the output, which its job will notice
                with self.attached.active(pending.batch.owners):
                    pending.total.backward()
            return pending.result()

    @torch.no_grad()
    def evaluate(self, samples: Sequence[PackedSample]) -> MicrobatchResult:
        with one_error_for_memory():
            batch = collate(samples, self.base.device, total=self._total(samples), vision=self.base.vision)
            with self.attached.active(batch.owners):
                losses_L, total = token_losses(self.base.model, batch, fused=self.base.fused_loss)
            return Pending(batch, losses_L, total).result()

    def _total(self, samples: Sequence[PackedSample]) -> int:
        tokens = max(MIN_ROWS, sum(item.sample.num_tokens for item in samples))
        return -(-tokens // self.multiple) * self.multiple

    def idle(self, backward: bool) -> None:
        self.base.storage.idle(self.attached, backward)

    def plans(self) -> list[dict[str, Any]]:
        return [line for chooser in self.attached.choosers for line in chooser.record()]


@contextmanager
def one_error_for_memory() -> Iterator[None]:
    """Turns what other libraries raise where memory runs out into torch.OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in NO_MEMORY):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
