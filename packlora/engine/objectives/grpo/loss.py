"""Loss of policies of a job that learns from rewards; its other half comes with its data (rl/objective.py)."""

from __future__ import annotations

from typing import Any

from packlora.engine.objective import Objective
from packlora.engine.objectives.grpo import LOSSES
from packlora.engine.objectives.policy import BETA, PolicyObjective

MOST_CISPO = 5.0
"""Largest ratio of cispo where the run file does not say."""


def objective(train: Any) -> Objective:
    """Objective of a job whose completions are not known yet."""
    return PolicyObjective(**settings(train))


def settings(train: Any) -> dict[str, Any]:
    """Arguments of PolicyObjective for a job's keys."""
    (kind,) = train.loss_types
    name, over = LOSSES[kind]
    low = 0.2 if train.epsilon is None else train.epsilon
    high = low if train.epsilon_high is None else train.epsilon_high
    clip = (0.0, train.epsilon_high or MOST_CISPO) if kind == "cispo" else (1 - low, 1 + high)
    beta, kl = (BETA if train.beta is None else train.beta, 0.0) if kind == "dro" else (BETA, train.beta or 0.0)
    return {"name": name, "clip": clip, "beta": beta, "over": over, "kl": kl}
