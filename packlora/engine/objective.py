"""Protocol of objectives: the loss of a sample as a function of the log-probabilities of its labels.

A built-in one is a folder of objectives/, with a subclass of `Objective`; what is no function of log-probabilities is a `Term`.
The packing of rows (collate.py) knows none of them by name, the output layer (heads.py) label smoothing alone, which needs all
logits: an objective says which columns its rows have, collate carries them, and the derivative of the loss by each
log-probability is that label's weight in the gradient.

Shapes: N samples of a part, L their labels, T their tokens, M metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch

from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.engine.rows import Row

Facts = Mapping[str, float]
SMOOTHING = "smoothing"
"""Column of labels: the share of each that all words have in equal parts (objectives/smoothing.py)."""
COOLING = "cooling"
"""Column of labels: the factor of their logits, 1 / temperature, by which the output layer multiplies; 0: none."""


@dataclass(frozen=True, slots=True)
class Column:
    """A named column of rows. of: what there is one value for. width: numbers of each. dtype: float64, or int64."""

    of: Literal["token", "label", "sample"]
    width: int = 1
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True, slots=True, eq=False)
class RowsView:
    """Rows of a part as an objective sees them.

    lengths: labels of each sample, known on the host.
    facts: of the global batch, see parts.Part.
    host: columns as NumPy arrays: [L], or [N] or [N, width]. tensors: the same on the device.
    """

    lengths: tuple[int, ...]
    facts: Facts
    host: Mapping[str, np.ndarray]
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(objective: Objective, rows: Sequence[Row], facts: Facts) -> RowsView:
        """View of rows on the CPU that are in no microbatch."""
        host = objective.columns_of(rows)
        tensors = {name: torch.from_numpy(values) for name, values in host.items()}
        return RowsView(tuple(row.sample.num_labels for row in rows), facts, host, tensors)

    def labels(self, start: int, stop: int) -> RowsView:
        """View of some consecutive labels, as of one sample, for an objective whose columns are of labels alone."""
        return RowsView((stop - start,), self.facts, {}, {name: own[start:stop] for name, own in self.tensors.items()})

    def column(self, name: str) -> torch.Tensor:
        """Values of a column on the device: [L] by label, [N] or [N, width] by sample."""
        return self.tensors[name]

    def per_sample(self, values_L: torch.Tensor) -> torch.Tensor:
        """Sum of each sample's values [N]. The bits of a sum do not depend on the other samples."""
        return torch.stack([own.sum() for own in values_L.split(list(self.lengths))])

    def first(self, values_L: torch.Tensor) -> torch.Tensor:
        """Value of each sample's first label [N], as of a column with one number a sample."""
        return torch.stack([own[0] for own in values_L.split(list(self.lengths))])


class Evaluate(Protocol):
    """Forwards without gradients that an objective may ask for, of samples that need not be the job's.

    known: what objectives have found of the reference of the job, by the id of a sample; jobs with the same reference share it.
    Both calls return float64 arrays [l], the log-probabilities of each sample's labels; None where a stop was asked for.
    """

    known: dict[int, np.ndarray]

    def own(self, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        """Run the model with the job's adapter as it is."""

    def reference(self, samples: Sequence[Sample], keep: bool = False) -> list[np.ndarray] | None:
        """Run the model that the job is held to. keep: samples whose ids get into `known`, so that they must live on."""


class Objective:
    """Loss of samples, and its inputs beside log-probabilities. A job has one object of its own.

    name: as in the run file.
    unit: what the loss is a mean over, labels or samples of a global batch.
    weights: when a label's weight in the gradient is known: `before` the forward, where the losses are -logp; from the `row`'s
        own log-probability and columns of labels; or from all of its `sample`.
    columns: of its rows, by name.
    metrics: names of sums over samples that come with the loss.
    has_reference: whether the job is held to another model.
    has_estimate: whether `estimate` runs forwards of its own for each global batch.
    terms: that belong to it, as the temperature of its log-probabilities.
    why_zero: what it says of a job whose loss and gradient are exactly 0; {lr} is the learning rate.
    """

    name = ""
    unit: Literal["token", "sample"] = "token"
    weights: Literal["before", "row", "sample"] = "sample"
    columns: Mapping[str, Column] = MappingProxyType({})
    metrics: tuple[str, ...] = ()
    has_reference = False
    has_estimate = False
    terms: tuple[Term, ...] = ()
    why_zero = "there is nothing left to learn, or the learning rate, {lr:g}, is too high"

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Values of all columns: [L], or [N] or [N, width]."""
        return {}

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and sums of metrics, both float64, on the device of logp, which is not waited for.

        Args:
            logp_L: log-probabilities of the labels, float64 [L].

        Returns:
            Losses [L] or [N] by `unit`, differentiable by logp; sums of metrics [M].
        """
        raise NotImplementedError

    def factors(self, rows: RowsView) -> torch.Tensor | None:
        """Derivatives [L] of the sum of the losses by -logp where they are a column; None: autograd finds them."""
        return None

    def why_not(self, samples: Sequence[Sample]) -> str | None:
        """Reason why the objective does not take a job's samples (all of them are given); None where it does."""
        return None

    def doubts(self, samples: int, train: TrainConfig) -> list[str]:
        """Notes of settings that can be trained with so many samples, but are hardly meant."""
        return []

    def longest_of(self, samples: Sequence[Sample]) -> int:
        """Tokens of the longest sample that `estimate` makes of these; 0 where it makes none."""
        return 0

    def facts(self, batch: Sequence[Sample]) -> Facts:
        """Numbers of a global batch that its samples tell."""
        return {}

    def learn(self, samples: Sequence[Sample], held_out: Sequence[Sample], evaluate: Evaluate) -> bool:
        """Find out, once a session, what does not change while the job trains. False where a stop was asked for.

        Args:
            samples: all that the job may train on.
        """
        return True

    def estimate(self, batch: Sequence[Sample], evaluate: Evaluate) -> Facts | None:
        """Numbers of a global batch, or of all held-out samples, that are estimated with the present model. None: a stop was
        asked for."""
        return {}

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Metrics of a global batch, by the names that logs have."""
        return {}


@dataclass(frozen=True, slots=True)
class Carried:
    """Samples of a part with a term that carries something through the layers.

    share: factor of each sample's value in the sum of the adapter's losses. weight: in the gradient. spans: (start, stop) of
    the samples' tokens in the microbatch.
    """

    adapter: int
    term: Term
    share: float
    weight: float
    spans: tuple[tuple[int, int], ...]


class CarriedSums(Protocol):
    """Sums that the layers of a microbatch add up for such a term, on one device or on each stage of a pipeline in turn.

    totals: of the layers here and below, which go up with the hidden states. gradient: of the losses by the sums of any stage,
    which comes down with the gradient of the hidden states; None before `losses` or before it has come.
    """

    totals: torch.Tensor
    gradient: torch.Tensor | None

    def losses(self) -> dict[int, torch.Tensor]:
        """Sum over the samples of each adapter, [] float64, once all layers are in the totals. Leaves the gradient."""

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors and their gradients, for backward."""


class Term:
    """Addition to an objective that is no function of log-probabilities. It is used only in training.

    columns, metrics: as of Objective. A column that other parts of a microbatch lack is 0 there. Columns of labels go
        to the output layer, those of tokens to the code that runs the model's forward (owners.TokenOwners.columns).
    carries: whether it is computed from the routers' outputs in the forward; then it has `share`, `carried_shape` and `begin`.
    """

    columns: Mapping[str, Column] = MappingProxyType({})
    metrics: tuple[str, ...] = ()
    carries = False

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Values of all columns, [T] or [L]."""
        return {}

    def share(self, facts: Facts) -> float:
        """Factor of the carried loss in the sum of an adapter's losses."""
        raise NotImplementedError

    def carried_shape(self, samples: int, model: Any) -> tuple[int, ...]:
        """Shape of the totals of so many samples."""
        raise NotImplementedError

    def begin(
        self, carried: Sequence[Carried], routed: Sequence[torch.Tensor], below: torch.Tensor | None, model: Any,
        dtype: torch.dtype, device: torch.device,
    ) -> CarriedSums:  # fmt: skip
        """Add up the sums of the layers on this device, once they have run.

        Args:
            carried: all samples of the microbatch with such a term.
            routed: logits of each layer with a router, [T, E].
            below: totals of the stage below; None on the first one.
            dtype: of what passes between stages.
        """
        raise NotImplementedError

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Metrics of a global batch."""
        return {}
