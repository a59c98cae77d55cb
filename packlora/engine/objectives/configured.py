"""What a job of a run file learns: its objective, and the terms beside it."""

from __future__ import annotations

from packlora.config import TrainConfig
from packlora.engine.objectives import Objective, Term
from packlora.engine.objectives.balance import Balance
from packlora.engine.objectives.neftune import Neftune
from packlora.engine.objectives.preference import PreferenceObjective
from packlora.engine.objectives.sft import CROSS_ENTROPY
from packlora.engine.objectives.smoothing import LabelSmoothing
from packlora.seeding import stable_hash


def objective_of(train: TrainConfig) -> Objective:
    """An objective that knows nothing of samples yet; jobs do not share one that learns."""
    return CROSS_ENTROPY if train.trainer == "sft" else PreferenceObjective.of(train)


def terms_of(train: TrainConfig, seed: int, router_coefficient: float) -> tuple[Term, ...]:
    """Terms of a job. router_coefficient: of its load-balancing loss, 0 for none (balance.coefficient_of)."""
    found: list[Term] = []
    if train.label_smoothing_factor:
        found.append(LabelSmoothing(train.label_smoothing_factor))
    if train.neftune_noise_alpha is not None:
        found.append(Neftune(stable_hash("neftune", seed), train.neftune_noise_alpha))
    if router_coefficient:
        found.append(Balance(router_coefficient))
    return tuple(found)
