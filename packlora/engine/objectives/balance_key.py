"""The coefficient of a job's load-balancing loss, and whether the model has such a loss that balance.py computes."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.demo_model import base_path
from packlora.config import JobConfig, Run
from packlora.errors import InputError

FUNCTION = "load_balancing_loss_func"
"""Function in a family's modeling file of transformers, where the family has a load balancing loss."""


def coefficient_of(run: Run, job: JobConfig, skeleton: PreTrainedModel) -> tuple[float, list[str]]:
    """Coefficient of a job's load-balancing loss (0 for none), and a note for the user. The job's key is not 0, and is set, or
    the model's configuration asks for router logits.

    Args:
        skeleton: the base model, which may be without weights.

    Raises:
        InputError: the model has no such loss, or one that is not computed here; or what is asked beside it does not serve it.
    """
    key, base = job.train.router_aux_loss_coef, f"base_model {base_path(run.base_model)!r}"
    if key is None and not _adds_one(skeleton):
        return 0.0, []
    if (why := _why_none(skeleton)) is not None:
        if key is None:
            raise InputError(
                f"job {job.name!r}: {base}: its config.json has output_router_logits: true, so transformers adds a "
                f"load-balancing loss, which is not computed here: {why}; set train.router_aux_loss_coef to 0 to train without"
            )
        raise InputError(
            f"job {job.name!r}: train.router_aux_loss_coef is {key:g}, but {base} has no load-balancing loss that is computed "
            f"here: {why}; leave it out"
        )
    coefficient = float(getattr(skeleton, "router_aux_loss_coef") if key is None else key)  # noqa: B009
    if key is None and coefficient:
        return coefficient, [
            f"job {job.name!r}: a load-balancing loss is added with {coefficient:g}, as the base model's config.json has "
            "output_router_logits: true and router_aux_loss_coef; train.router_aux_loss_coef sets another one, 0 none"
        ]
    return coefficient, []


def _adds_one(model: PreTrainedModel) -> bool:
    """Whether the model's own forward adds such a loss, by its configuration. Of code that is not transformers' it is assumed
    where the configuration has a coefficient."""
    text = model.config.get_text_config()
    own = not _is_native(model) and bool(getattr(text, "router_aux_loss_coef", None))
    return own or _own_function(model) is not None


def _own_function(model: PreTrainedModel) -> Any:
    return vars(sys.modules[type(model).__module__]).get(FUNCTION)


def _is_native(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.models.")


def _why_none(model: PreTrainedModel) -> str | None:
    """Reason why a model's load-balancing loss cannot be computed here; None where it can."""
    kind, own = model.config.model_type, _own_function(model)
    if not _is_native(model):
        return f"the code of a {kind} model is its own"
    if own is None:
        return f"a {kind} model has none in transformers"
    if model.config.get_text_config() is not model.config:
        return f"a {kind} model has a language model inside of another one"
    experts, top_k = getattr(model, "num_experts", 0), getattr(model, "num_experts_per_tok", 0)
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    if not experts or not top_k or not hasattr(model, "router_aux_loss_coef") or "router_logits" not in recorded:
        return f"a {kind} model does not say how it has experts and routers"
    if not _is_the_same(own, experts, top_k):
        return f"that of a {kind} model is another one"
    return None


def _is_the_same(function: Any, experts: int, top_k: int) -> bool:
    """Whether a family's function gives what `balance_losses` gives, on random logits of two layers."""
    from packlora.engine.objectives.balance import balance_losses

    tokens, generator = 9, torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(tokens, experts, generator=generator) for _ in range(2))
    try:
        theirs = float(function(logits, experts, top_k))
    except Exception:  # any code of a model
        return False
    return math.isclose(theirs, float(balance_losses(logits, [(0, tokens)], top_k)), rel_tol=1e-4)
