"""Losses of completions that are desirable or not, by how far the model is from its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.data.preference import ComparedSample, compared, mismatched
from packlora.engine.objective import Evaluate, Facts, Objective
from packlora.engine.objectives.preference import CHOSEN, PreferenceObjective, Scores, by_group


def objective(train: Any) -> Objective:
    """Objective of a job."""
    kind = Kto if train.loss_types == ("kto",) else Unpaired
    return kind(train.beta or 0.1, train.desirable_weight or 1.0, train.undesirable_weight or 1.0)


class Unpaired(PreferenceObjective):
    """Loss apo_zero_unpaired: completions are compared with the reference alone."""

    name = "kto"
    compares = False

    def __init__(self, beta: float, desirable: float, undesirable: float) -> None:
        super().__init__(beta)
        self.desirable, self.undesirable = desirable, undesirable

    def losses_of(self, scores: Scores) -> torch.Tensor:
        """See PreferenceObjective."""
        ratio_N = self.beta * (scores.ratios_N3[:, CHOSEN] - scores.divergence)
        desirable_N = self.desirable * (1 - torch.sigmoid(ratio_N))
        return torch.where(scores.desirable_N > 0, desirable_N, self.undesirable * torch.sigmoid(ratio_N))


class Kto(Unpaired):
    """Loss kto: log-ratios are compared with the model's divergence from the reference, which other completions estimate."""

    has_estimate = True
    _held_out: Sequence[Sample] = ()
    _pairs: Sequence[ComparedSample] = ()
    """Held-out samples with one another's completions."""

    def why_not(self, samples: Sequence[Sample]) -> str | None:
        """Reason for a refusal of one sample: it has no other completion to be compared with."""
        if len(samples) != 1:
            return None
        return (
            "is 1 sample; loss_type kto compares with the completions of other samples and takes at least 2; "
            "apo_zero_unpaired takes 1"
        )

    def doubts(self, samples: int, train: TrainConfig) -> list[str]:
        """A global batch of one sample is compared with itself."""
        if train.drop_last or samples % train.global_batch_size != 1:
            return []
        return [
            "an epoch's last global batch is one sample, which loss_type kto compares with its own completion; set drop_last, "
            "or another global_batch_size"
        ]

    def longest_of(self, samples: Sequence[Sample]) -> int:
        """Tokens that a prompt with another sample's completion may have."""
        own = compared(samples)
        if not own:
            return 0
        starts = [int(np.argmax(sample.is_label)) for sample in own]
        ends = [sample.num_tokens - start for sample, start in zip(own, starts, strict=True)]
        return min(max(starts) + max(ends), *(sample.limit for sample in own))

    def learn(self, samples: Sequence[Sample], held_out: Sequence[Sample], evaluate: Evaluate) -> bool:
        """The reference is asked for the mismatched held-out samples too."""
        if self._references is None:
            self._held_out, self._pairs = held_out, mismatched(compared(held_out))
        return super().learn(samples, [*held_out, *self._pairs], evaluate)

    def estimate(self, batch: Sequence[Sample], evaluate: Evaluate) -> Facts | None:
        """`divergence`: how far the model is from its reference, as the loss takes it.

        TRL's estimate: the prompt of each sample with the completion of the one before, the first one's with that of the last;
        the mean over them of the model's log-probability less the reference's, at least 0, and a constant for the gradient.
        Completions are mismatched within a global batch in its order, whatever microbatches it is in, and within all held-out
        samples. So it is found before the first microbatch, by forwards without a gradient and without dropout.
        """
        if batch is self._held_out and self._references is not None:
            pairs, reference_N3 = self._pairs, np.stack([self._references[id(pair)] for pair in self._pairs])
        else:
            pairs = mismatched(compared(batch))
            if (found := evaluate.reference(pairs)) is None:
                return None
            reference_N3 = by_group(found, pairs)
        if (own := evaluate.own(pairs)) is None:
            return None
        mean = float((by_group(own, pairs) - reference_N3)[:, CHOSEN].mean())
        return {"divergence": mean if mean != mean else max(mean, 0.0)}

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Metrics by TRL's names, and the divergence."""
        return super().report(sums, facts) | {"kl": facts.get("divergence", 0.0)}
