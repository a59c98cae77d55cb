"""Weights of labels in the gradient that objectives make of log-probabilities, where they are not known before the forward.

Shapes: L label rows, C those of a chunk, M metrics of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from packlora.engine.collate import PackedBatch
from packlora.engine.objective import Objective, RowsView
from packlora.ops.wide import widened


class Weighed(NamedTuple):
    """Sums of losses and metrics [1 + M], and factors [L], of the rows of an objective."""

    sums: torch.Tensor
    factors_L: torch.Tensor


def weighed(rows: Sequence[tuple[Objective, torch.Tensor, RowsView]]) -> list[Weighed]:
    """Weigh rows by their objectives, from their log-probabilities [L]. One pass of autograd for all: each takes the host a
    while."""
    factors = [objective.factors(view) for objective, _, view in rows]
    unknown = [at for at, own in enumerate(factors) if own is None]
    logps, losses, sums = [logp_L for _, logp_L, _ in rows], list[torch.Tensor](), list[torch.Tensor]()
    with torch.enable_grad():
        for at in unknown:
            logps[at] = logps[at].clone().requires_grad_()
        for (objective, _, view), logp_L in zip(rows, logps, strict=True):
            losses_L, metrics_M = objective.loss(logp_L, view)
            losses.append(losses_L.sum())
            loss = losses[-1].detach()[None]
            sums.append(torch.cat([loss, metrics_M.detach()]) if len(metrics_M) else loss)
        roots = [loss for loss in losses if loss.requires_grad]
        leaves = [logps[at] for at in unknown]
        found = torch.autograd.grad(roots, leaves, allow_unused=True) if roots else [None] * len(leaves)
    for at, gradient_L in zip(unknown, found, strict=True):
        factors[at] = torch.zeros_like(logps[at]) if gradient_L is None else -gradient_L
    return [Weighed(own, factors_L) for own, factors_L in zip(sums, factors, strict=True) if factors_L is not None]


def weigh_rows(losses_C: torch.Tensor, start: int, stop: int, batch: PackedBatch) -> torch.Tensor:
    """Factors [C] of label rows start to stop, where objectives know them by row."""
    logp_C, first = -widened(losses_C.detach()), 0
    factors_C, rows, places = torch.ones_like(logp_C), [], []
    for part in batch.parts:
        begin, end = max(start, first), min(stop, first + part.num_labels)
        if end > begin and part.objective.weights != "before":
            rows.append(
                (part.objective, logp_C[begin - start : end - start], part.view.labels(begin - first, end - first))
            )
            places.append(slice(begin - start, end - start))
        first += part.num_rows
    for place, own in zip(places, weighed(rows), strict=True):
        factors_C[place] = own.factors_L
    return factors_C
