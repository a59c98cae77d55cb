"""Objective of a job of a run file, and the terms beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from packlora.config import JobConfig, Run, TrainConfig
from packlora.data.encode import Sample
from packlora.engine.objective import Objective, Term
from packlora.seeding import stable_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def objective_of(train: TrainConfig, samples: Sequence[Sample] = (), where: Sequence[str] = ()) -> Objective:
    """Objective of a job, which does not share it if it learns.

    Args:
        samples: that a user's own is tried on, see FunctionObjective.tried; none: it is not.
        where: file and line of each.

    Raises:
        InputError: a user's own objective cannot be used.
    """
    if train.objective is not None:
        from packlora.engine.objectives.function import FunctionObjective

        own = FunctionObjective(train.objective)
        return own.tried(samples, where) if samples else own
    own_loss = import_module(f"packlora.engine.objectives.{train.trainer}.loss")
    return own_loss.objective(train)  # type: ignore[no-any-return]


def change_of_embeddings(embedded: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Apply the changes of loss terms to embeddings [..., T, D] of tokens that have columns (adapters/embeddings.py)."""
    from packlora.engine.objectives.neftune import add_noise

    return add_noise(embedded, columns)


def router_coefficient(run: Run, job: JobConfig, skeleton: PreTrainedModel) -> tuple[float, list[str]]:
    """Coefficient of a job's load-balancing loss (0 for none), and a note for the user; see balance_key.py."""
    key = job.train.router_aux_loss_coef
    if key == 0 or (key is None and not getattr(skeleton.config.get_text_config(), "output_router_logits", False)):
        return 0.0, []
    from packlora.engine.objectives.balance_key import coefficient_of

    return coefficient_of(run, job, skeleton)


def terms_of(train: TrainConfig, seed: int, router_coefficient: float) -> tuple[Term, ...]:
    """Terms of a job. router_coefficient: of its load-balancing loss, 0 for none (balance_key.py)."""
    found: list[Term] = []
    if train.label_smoothing_factor:
        from packlora.engine.objectives.smoothing import LabelSmoothing

        found.append(LabelSmoothing(train.label_smoothing_factor))
    if train.neftune_noise_alpha is not None:
        from packlora.engine.objectives.neftune import Neftune

        found.append(Neftune(stable_hash("neftune", seed), train.neftune_noise_alpha))
    if router_coefficient:
        from packlora.engine.objectives.balance import Balance

        found.append(Balance(router_coefficient))
    return tuple(found)
