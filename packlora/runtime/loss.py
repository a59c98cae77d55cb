"""Cross entropy of a packed microbatch, by job.

A job's loss is the sum over its label tokens of a global batch divided by their number. Microbatches hold parts of global
batches, so each label token's gradient is weighted with 1 / (label tokens of its job's global batch), and the sums are
collected per job. Losses of different jobs are never added: a NaN of one job is no other job's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from packlora.adapters.attach import AdaptedHead, trained_on
from packlora.base.packing import packed_hidden, packed_logits
from packlora.base.shape import plain_head
from packlora.ops.cross_entropy.chunked import chunked_cross_entropy
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.runtime.collate import IGNORE, PackedBatch


def token_losses(
    model: PreTrainedModel,
    batch: PackedBatch,
    weights_L: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the label tokens. The owners of the batch must be active.

    Args:
        model: frozen, with adapters attached.
        batch: on the model's device.
        weights_L: of each label's loss in the total; None is 1 for each.
        fused: the logits are the output layer's alone (Base.fused_loss), so they need not exist all at once.

    Returns:
        losses [L] without gradient, in float32 (float64 for a float64 model), 0 for padding rows; and the root for
        backward, whose gradient is each label's own weight. Its value mixes jobs, and is for nothing.
    """
    at = (batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L)
    if fused and has_head_loss(model):
        return head_losses(model, packed_hidden(model, *at), batch, weights_L)
    logits_LV = packed_logits(model, *at)
    wide = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    losses_L = F.cross_entropy(wide, batch.labels_L, reduction="none", ignore_index=IGNORE)
    if batch.smoothing_L is not None:
        losses_L = losses_L + _smoothed(wide, batch.labels_L, batch.smoothing_L.to(wide))
    total = losses_L.sum() if weights_L is None else (losses_L * weights_L.to(losses_L)).sum()
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
        part = getattr(plain, "vocabulary", None)  # of one that is cut
        return linear_cross_entropy(
            hidden_LD, plain.weight, plain.bias, batch.labels_L, weights_L, part=part, smoothing_L=batch.smoothing_L
        )
    assert isinstance(head, AdaptedHead) and rows is not None

    def logits_of(hidden_CD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        with head.attached.among_rows(rows.part(start, stop)):
            logits: torch.Tensor = head(hidden_CD)
        return logits

    own = [weights for number, weights in on_head.items() if number in rows.adapters]
    parameters = [parameter for weights in own for parameter in weights.named_parameters().values()]
    return chunked_cross_entropy(
        hidden_LD,
        logits_of,
        parameters,
        len(head.base.weight),
        batch.labels_L,
        weights_L,
        smoothing_L=batch.smoothing_L,
    )


def sum_by_owner(losses_L: torch.Tensor, batch: PackedBatch, num_owners: int) -> torch.Tensor:
    """Sums [num_owners] in float64, on the device, which is not waited for.

    One sum per owner over its own rows, in row order: index_add on a GPU would add in any order.
    """
    parts = losses_L.detach().double().split(list(batch.num_rows.values()))
    own = dict(zip(batch.num_rows, parts, strict=True))
    nothing = losses_L.new_zeros((), dtype=torch.float64)
    return torch.stack([own[owner].sum() if owner in own else nothing for owner in range(num_owners)])
