"""distillation in run files: the cross entropy of soft targets, a teacher's probabilities of several tokens in one place."""

from __future__ import annotations

from typing import Any

from packlora.config.trainers import Declaration


def _check(train: Any) -> None:
    if train.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is for trainer sft; soft targets have the weights that rows give them")


DECLARATION = Declaration(
    rows="completions", learning_rate=2e-4, units=("nats per token",), check=_check, takes_targets=True
)
