"""The load-balancing loss of routers, which keeps a job's tokens from all going to a few experts.

transformers takes it over all tokens of a forward: of E experts, E * sum over e of f_e * P_e, where f_e is how often expert e
is chosen and P_e its mean probability. That is not linear in tokens. So every sample has one of its own, as transformers
computes it for a batch of one, and a job's loss is that of its labels plus a coefficient times the mean over the samples of its
global batch. Who shares a microbatch changes nothing.

Shapes: T tokens of a row, E experts, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from packlora.engine.objective import Carried, CarriedSums, Facts, Term
from packlora.ops.wide import widened

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

    def carried_shape(self, samples: int, model: Any) -> tuple[int, ...]:
        """Counts and sums of probabilities of all experts [2, N, E]."""
        return 2, samples, model.num_experts

    def begin(
        self, carried: Sequence[Carried], routed: Sequence[torch.Tensor], below: torch.Tensor | None, model: Any,
        dtype: torch.dtype, device: torch.device,
    ) -> RouterSums:  # fmt: skip
        """See Term."""
        return RouterSums(routed, carried, below, model.num_experts, model.num_experts_per_tok, dtype, device)

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Mean over the samples of the global batch."""
        return {METRIC: sums[0] / facts["samples"]}


def router_sums(
    router_logits: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens of each span and all layers [N, E]: how often each expert is chosen, and the sum of its
    probabilities, which is differentiable; in float32 or wider.

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


def sums_by_adapter(losses_N: torch.Tensor, carried: Sequence[Carried]) -> dict[int, torch.Tensor]:
    """Sum [] of the losses of each adapter's samples, in float64, without gradient."""
    parts = losses_N.detach().split([len(one.spans) for one in carried])
    return {one.adapter: widened(part.sum()) for one, part in zip(carried, parts, strict=True)}


def _spans(carried: Sequence[Carried]) -> list[tuple[int, int]]:
    return [span for one in carried for span in one.spans]


def _weights(carried: Sequence[Carried], like: torch.Tensor) -> torch.Tensor:
    """[N] in the gradient."""
    return torch.cat([like.new_full((len(one.spans),), one.weight) for one in carried])


class RouterSums(CarriedSums):
    """The load-balancing losses of a microbatch, where its layers are or on one stage of a pipeline. Each is a product of two
    sums over the layers of all stages: these go up with the hidden states, and the losses' derivative comes down with the
    gradient of these.

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
        """Sum of the losses of each adapter's samples, on the last stage; leaves their gradient."""
        counts_NE, sums_NE = self.totals.unbind()
        self.gradient = slopes(counts_NE, self.top_k) * _weights(self.carried, counts_NE)[:, None]
        return sums_by_adapter(_losses(counts_NE, sums_NE, self.top_k), self.carried)

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors and their gradients, from which the backward starts."""
        assert self.gradient is not None
        return [] if self.sums is None or not self.sums.requires_grad else [(self.sums, self.gradient)]
