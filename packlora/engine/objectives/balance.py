"""The load-balancing loss of routers, which keeps a job's tokens from all going to a few experts.

transformers takes it over all tokens of a forward: of E experts, E * sum over e of f_e * P_e, where f_e is how often expert e
is chosen and P_e its mean probability. That is not linear in tokens. So every sample has one of its own, as transformers
computes it for a batch of one, and a job's loss is that of its labels plus a coefficient times the mean over the samples of its
global batch. Who shares a microbatch changes nothing.

Shapes: T tokens of a row, E experts, N samples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.demo_model import base_path
from packlora.config import JobConfig, Run
from packlora.engine.objectives import Facts, Term
from packlora.engine.parts import Carried
from packlora.errors import InputError

FUNCTION = "load_balancing_loss_func"
"""Of a family's file in transformers, where it has such a loss."""
METRIC = "aux_loss"
"""TRL's name for the mean over a global batch, without the coefficient."""


class Balance(Term):
    """The load-balancing loss of a job, added with a coefficient."""

    metrics = (METRIC,)
    carries = True

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def share(self, facts: Facts) -> float:
        """Factor of a sample's loss in a sum of losses that is divided by the units of the global batch."""
        return self.coefficient * facts["units"] / facts["samples"]

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Mean over the samples of the global batch."""
        return {METRIC: sums[0] / facts["samples"]}


def router_sums(
    router_logits: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the tokens of each span and all layers [N, E]: how often each expert is chosen, and the sum of its probabilities,
    which is differentiable; in float32 or wider.

    Each row has the same bits whatever other tokens there are.

    Args:
        router_logits: of each layer with a router, [T, E].
        top_k: experts that a token goes to.
    """
    counts_TE = sums_TE = None
    for logits in router_logits:
        wide_TE = logits.reshape(-1, logits.shape[-1])
        p_TE = wide_TE.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        with torch.no_grad():
            chosen_TE = torch.zeros_like(p_TE).scatter_(1, p_TE.topk(top_k, -1).indices, 1.0)
            counts_TE = chosen_TE if counts_TE is None else counts_TE.add_(chosen_TE)
        sums_TE = p_TE if sums_TE is None else sums_TE + p_TE
    assert counts_TE is not None and sums_TE is not None
    counts_NE, sums_NE = (
        torch.stack([own_TE[start:stop].sum(0) for start, stop in spans]) for own_TE in (counts_TE, sums_TE)
    )
    return counts_NE, sums_NE


def slopes(counts_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Derivative [N, E] of the load-balancing losses by the sums of probabilities, in which they are linear."""
    choices_N1 = counts_NE.sum(1, keepdim=True)  # layers * tokens * top_k
    return counts_NE * (counts_NE.shape[1] * top_k**2 / choices_N1**2)


def balance_losses(router_logits: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]], top_k: int) -> torch.Tensor:
    """Load-balancing losses [N] of the tokens of each span, over all layers. As router_sums."""
    return _losses(*router_sums(router_logits, spans, top_k), top_k)


def _losses(counts_NE: torch.Tensor, sums_NE: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.stack([row_E.sum() for row_E in slopes(counts_NE, top_k) * sums_NE])


def with_balance(
    total: torch.Tensor, router_logits: Sequence[torch.Tensor], carried: Sequence[Carried], top_k: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """A root for backward with the load-balancing losses of a microbatch's samples, and by owner their sum [] float64."""
    losses_N = balance_losses(router_logits, _spans(carried), top_k)
    found = sums_by_adapter(losses_N, carried)
    return total + (losses_N * _weights(carried, losses_N)).sum(), found


def sums_by_adapter(losses_N: torch.Tensor, carried: Sequence[Carried]) -> dict[int, torch.Tensor]:
    """By adapter, the sum [] of its samples' losses in float64, without gradient."""
    parts = losses_N.detach().split([len(one.spans) for one in carried])
    return {one.adapter: part.sum().double() for one, part in zip(carried, parts, strict=True)}


def _spans(carried: Sequence[Carried]) -> list[tuple[int, int]]:
    return [span for one in carried for span in one.spans]


def _weights(carried: Sequence[Carried], like: torch.Tensor) -> torch.Tensor:
    """[N] in the gradient."""
    return torch.cat([like.new_full((len(one.spans),), one.weight) for one in carried])


class StageRouting:
    """The load-balancing losses of a microbatch on one stage of a pipeline. Each is a product of two sums over the layers of
    all stages: these go up with the hidden states, and the losses' derivative comes down with the gradient of these.

    Args:
        router_logits: of the layers here; none where they have no routers.
        below: the totals of the stage below; None on the first stage.
        experts, top_k: of the model.
        dtype: of what passes between stages.
    """

    def __init__(
        self, router_logits: Sequence[torch.Tensor], carried: Sequence[Carried], below: torch.Tensor | None,
        experts: int, top_k: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        spans = _spans(carried)
        self.carried, self.top_k = carried, top_k
        self.sums: torch.Tensor | None = None
        """[N, E], sums of probabilities of the layers here, differentiable."""
        self.totals = torch.zeros(2, len(spans), experts, dtype=dtype, device=device) if below is None else below
        """[2, N, E], counts and sums of the layers here and below."""
        self.gradient: torch.Tensor | None = None
        """[N, E] of the losses by the sums of any stage; before the backward from the stage above or from `losses`."""
        if router_logits:
            counts_NE, sums_NE = router_sums(router_logits, spans, top_k)
            self.sums = sums_NE.to(dtype)
            self.totals = self.totals + torch.stack([counts_NE.to(dtype), self.sums.detach()])

    def losses(self) -> dict[int, torch.Tensor]:
        """On the last stage, by owner the sum of its samples' losses; leaves their gradient."""
        counts_NE, sums_NE = self.totals.unbind()
        self.gradient = slopes(counts_NE, self.top_k) * _weights(self.carried, counts_NE)[:, None]
        return sums_by_adapter(_losses(counts_NE, sums_NE, self.top_k), self.carried)

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For backward: tensors and their gradients."""
        assert self.gradient is not None
        return [] if self.sums is None or not self.sums.requires_grad else [(self.sums, self.gradient)]


def coefficient_of(run: Run, job: JobConfig, skeleton: PreTrainedModel) -> tuple[float, list[str]]:
    """The coefficient of a job's load-balancing loss, 0 for none, and what the user should know of it.

    Args:
        skeleton: the base model, which may be without weights.

    Raises:
        InputError: the model has no such loss, or one that is not computed here; or what is asked beside it does not serve it.
    """
    key, base = job.train.router_aux_loss_coef, f"base_model {base_path(run.base_model)!r}"
    if key == 0 or (key is None and not _adds_one(skeleton)):
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
    if not getattr(text, "output_router_logits", False):
        return False
    return _own_function(model) is not None or (
        not _is_native(model) and bool(getattr(text, "router_aux_loss_coef", None))
    )


def _own_function(model: PreTrainedModel) -> Any:
    return vars(sys.modules[type(model).__module__]).get(FUNCTION)


def _is_native(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.models.")


def _why_none(model: PreTrainedModel) -> str | None:
    """Why a model's load-balancing loss cannot be computed here; None where it can."""
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
    tokens, generator = 9, torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(tokens, experts, generator=generator) for _ in range(2))
    try:
        theirs = float(function(logits, experts, top_k))
    except Exception:  # any code of a model
        return False
    return math.isclose(theirs, float(balance_losses(logits, [(0, tokens)], top_k)), rel_tol=1e-4)
