"""Cross entropy of a packed microbatch, by job.

A job's loss is the sum over its label tokens of a global batch divided by their number. Microbatches hold parts of global
batches, so each label token's gradient is weighted with 1 / (label tokens of its job's global batch), and the sums are
collected per job. Losses of different jobs are never added: a NaN of one job is no other job's.

The loss of a sample with a preference is a function of sums of such losses (objective.py). Its derivative by a sum is the
weight of each of that sum's tokens, and is known when the forward is done: the gradient of the hidden states, which is linear
in these weights, is multiplied with them row by row. So no logits are kept for it, and one pass is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from packlora.adapters.attach import AdaptedHead, trained_on
from packlora.base.packing import packed_hidden, packed_logits
from packlora.base.shape import plain_head
from packlora.ops.cross_entropy.chunked import chunked_cross_entropy
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.runtime.collate import IGNORE, Groups, PackedBatch
from packlora.runtime.objective import Objective, Scores


def token_losses(
    model: PreTrainedModel,
    batch: PackedBatch,
    weights_L: torch.Tensor | None = None,
    fused: bool = False,
    routed: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the label tokens. The owners of the batch must be active.

    Args:
        model: frozen, with adapters attached.
        batch: on the model's device.
        weights_L: of each label's loss in the total; None is 1 for each.
        fused: the logits are the output layer's alone (Base.fused_loss), so they need not exist all at once.
        routed: gets what routers give, see packed_logits.

    Returns:
        losses [L] without gradient, in float32 (float64 for a float64 model), 0 for padding rows; and the root for
        backward, whose gradient is each label's own weight. Its value mixes jobs, and is for nothing.
    """
    at = (batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L, batch.images)
    if fused and has_head_loss(model):
        return head_losses(model, packed_hidden(model, *at, routed), batch, weights_L)
    logits_LV = packed_logits(model, *at, routed)
    wide = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    losses_L = F.cross_entropy(wide, batch.labels_L, reduction="none", ignore_index=IGNORE)
    if batch.smoothing_L is not None:
        losses_L = losses_L + _smoothed(wide, batch.labels_L, batch.smoothing_L.to(wide))
    weighted_L = losses_L if weights_L is None else losses_L * weights_L.to(losses_L)
    factors_L = row_factors(losses_L, batch.groups)
    total = weighted_L.sum() if factors_L is None else (weighted_L * factors_L.to(losses_L)).sum()
    return losses_L.detach(), total


def _smoothed(logits_LV: torch.Tensor, labels_L: torch.Tensor, smoothing_L: torch.Tensor) -> torch.Tensor:
    """What smoothing adds to losses [L]: its share of the way from the label's logit to the mean of all."""
    at_label_L = logits_LV.gather(1, labels_L.clamp(0)[:, None])[:, 0]
    counts_L = (smoothing_L != 0) & (labels_L != IGNORE)
    return torch.where(counts_L, smoothing_L * (at_label_L - logits_LV.mean(1)), 0.0)


def has_head_loss(model: PreTrainedModel) -> bool:
    """Whether `head_losses` takes the output layer: it is a frozen linear layer, with or without what jobs train there."""
    head = model.get_output_embeddings()
    return plain_head(model) is not None or (isinstance(head, AdaptedHead) and type(head.base) is torch.nn.Linear)


def head_losses(
    model: PreTrainedModel, hidden_LD: torch.Tensor, batch: PackedBatch, weights_L: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_losses of what the output layer is given for the label rows. The logits are never held all at once."""
    head, rows = model.get_output_embeddings(), batch.owners.rows
    plain: Any = plain_head(model)
    if isinstance(head, AdaptedHead) and (rows is None or rows.adapters.isdisjoint(on_head := trained_on(head))):
        plain = head.base
    if plain is not None:
        return fused_losses(hidden_LD, plain, batch, weights_L)
    assert isinstance(head, AdaptedHead) and rows is not None

    def logits_of(hidden_CD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        with head.attached.among_rows(rows.part(start, stop)):
            logits: torch.Tensor = head(hidden_CD)
        return logits

    own = [weights for number, weights in on_head.items() if number in rows.adapters]
    parameters = [parameter for weights in own for parameter in weights.named_parameters().values()]

    def losses(weights_L: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        words, smoothing = len(head.base.weight), batch.smoothing_L
        return chunked_cross_entropy(
            hidden_LD, logits_of, parameters, words, batch.labels_L, weights_L, smoothing_L=smoothing
        )

    if torch.is_grad_enabled() and batch.groups is not None:
        # the weights of a preference's labels are known after a forward, the layer's gradients are made in it: so there are two
        with torch.no_grad():
            factors_L = row_factors(losses(weights_L)[0], batch.groups)
        if factors_L is not None:
            weights_L = factors_L if weights_L is None else factors_L * weights_L
    return losses(weights_L)


def fused_losses(
    hidden_LD: torch.Tensor, head: Any, batch: PackedBatch, weights_L: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As token_losses, from what the output layer is given [L, D]. head: a frozen linear layer."""
    losses_L, total = linear_cross_entropy(
        hidden_LD, head.weight, head.bias, batch.labels_L, weights_L,
        part=getattr(head, "vocabulary", None), smoothing_L=batch.smoothing_L,
    )  # fmt: skip
    factors_L = row_factors(losses_L, batch.groups)
    if factors_L is not None and hidden_LD.requires_grad:
        wide = factors_L[:, None].to(torch.promote_types(hidden_LD.dtype, torch.float32))
        hidden_LD.register_hook(lambda gradient_LD: (gradient_LD * wide).to(gradient_LD.dtype))
    return losses_L, total


def logps_of(losses_L: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Log-probabilities [N, 3] of the groups of label tokens, float64."""
    parts = losses_L.detach().double().split(list(groups.splits))
    return -torch.stack([parts[place].sum() for place in groups.places]).view(-1, 3)


def preference_losses(logps_N3: torch.Tensor, groups: Groups) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """By owner, the losses [n] of its samples with preferences, and the derivative [n, 3] of their sum by log-probabilities."""
    assert groups.given_N9 is not None
    for owner, objective, first, stop in groups.objectives:
        yield owner, *_with_gradient(objective, logps_N3[first:stop], groups.given_N9[first:stop])


def told_of(losses_L: torch.Tensor, groups: Groups) -> dict[int, torch.Tensor]:
    """By owner, what is told of its samples with preferences, see Objective.told; nothing where nothing was given."""
    if groups.given_N9 is None:
        return {}
    logps_N3, given_N9 = logps_of(losses_L, groups), groups.given_N9
    return {
        owner: objective.told(_scores(logps_N3[first:stop], given_N9[first:stop]))
        for owner, objective, first, stop in groups.objectives
    }


def _scores(logps_n3: torch.Tensor, given_n9: torch.Tensor) -> Scores:
    return Scores(logps_n3, given_n9[:, :3], given_n9[:, 3:6], *given_n9[:, 6:].unbind(1))


def _with_gradient(
    objective: Objective, logps_n3: torch.Tensor, given_n9: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        leaf = logps_n3.detach().requires_grad_()
        losses_n = objective.losses_of(_scores(leaf, given_n9))
        (gradient_n3,) = torch.autograd.grad(losses_n.sum(), leaf)
    return losses_n.detach(), gradient_n3


def row_factors(losses_L: torch.Tensor, groups: Groups | None) -> torch.Tensor | None:
    """What the gradient of each label token's loss is multiplied with [L], float64: 1 without a preference; None: 1 for all."""
    if groups is None or groups.given_N9 is None:
        return None
    found = [-gradient_n3.reshape(-1) for _, _, gradient_n3 in preference_losses(logps_of(losses_L, groups), groups)]
    return torch.cat([*found, found[0].new_ones(1)])[groups.index_L]


def sum_by_owner(losses_L: torch.Tensor, batch: PackedBatch) -> dict[int, torch.Tensor]:
    """Sums [] in float64, on the device, which is not waited for: of label tokens, or of samples with preferences.

    One sum per owner over its own rows, in row order: index_add on a GPU would add in any order.
    """
    parts = losses_L.detach().double().split(list(batch.num_rows.values()))
    sums = {owner: part.sum() for owner, part in zip(batch.num_rows, parts, strict=True)}
    if (groups := batch.groups) is not None and groups.given_N9 is not None:
        sums |= {owner: losses_n.sum() for owner, losses_n, _ in preference_losses(logps_of(losses_L, groups), groups)}
    return sums
