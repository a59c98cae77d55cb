"""Loss of a packed microbatch, by kind of output layer: cross entropy of labels, weighted by the objective.

Microbatches hold parts of global batches, so each label's gradient is weighted with the part's weight, and sums of losses are
collected by adapter. Losses of different adapters are never added: a NaN of one is no other's.

An objective is a function of log-probabilities. Its derivative by one of them is the weight of that label in the gradient, and
may be known only when the forward is done. After a frozen output layer the gradient of the hidden states, which is linear in
these weights, is multiplied with them row by row: no logits are kept, and one pass is enough. An output layer with adapters
adds up gradients of its parameters over rows, so a label's weight must be known where its row is: it is by an objective whose
weights are known before or by row; else they are found by a pass of their own.

Of terms the output layer knows label smoothing, whose column needs the mean of all logits, and temperature, which divides them.

Shapes: L label rows, C those of a chunk, D hidden size, V vocabulary, M metrics of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from packlora.adapters.linear import AdaptedModule
from packlora.base.packing import packed_hidden, packed_logits
from packlora.base.shape import plain_head
from packlora.engine.collate import IGNORE, PackedBatch
from packlora.engine.objective import COOLING, SMOOTHING
from packlora.engine.parts import PackedPart
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.wide import widened

if TYPE_CHECKING:
    from packlora.ops.cross_entropy.chunked import Weigh


class Judgement(NamedTuple):
    """Sums and factors that objectives make of log-probabilities.

    sums: by adapter, its sum of losses and those of its metrics, [1 + M] float64 on the device. factors_L: of the gradient of
    each label's cross entropy, float64; None: 1 for each.
    """

    sums: dict[int, torch.Tensor]
    factors_L: torch.Tensor | None


class Losses(NamedTuple):
    """Cross entropy of the labels [L] without gradient, in float32 (float64 for a float64 model), 0 for padding rows; the root
    for backward, whose gradient is each label's own weight and whose value mixes adapters, and is for nothing; and what
    objectives make of it, by adapter (Judgement.sums)."""

    losses_L: torch.Tensor
    total: torch.Tensor
    sums: Mapping[int, torch.Tensor]


def token_losses(
    model: PreTrainedModel,
    batch: PackedBatch,
    weights_L: torch.Tensor | None = None,
    fused: bool = False,
    routed: list[torch.Tensor] | None = None,
) -> Losses:
    """Losses of a microbatch. The owners of the batch must be active.

    Args:
        model: frozen, with adapters attached.
        batch: on the model's device.
        weights_L: of each label's loss in the total, batch.weights_L in training; None is 1 for each.
        fused: the logits are the output layer's alone (Base.fused_loss), so they need not exist all at once.
        routed: gets what routers give, see packed_logits.
    """
    at = (batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L, batch.arguments)
    factors_L = _cooling(batch)
    if fused and has_head_loss(model) and (factors_L is None or not has_bias(model)):
        return head_losses(model, packed_hidden(model, *at, routed), batch, weights_L)
    logits_LV = packed_logits(model, *at, routed)
    wide = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    if factors_L is not None:
        wide = wide * factors_L[:, None].to(wide)
    losses_L = F.cross_entropy(wide, batch.labels_L, reduction="none", ignore_index=IGNORE)
    if (smoothing_L := batch.labels.get(SMOOTHING)) is not None:
        losses_L = losses_L + _smoothed(wide, batch.labels_L, smoothing_L.to(wide))
    weighted_L = losses_L if weights_L is None else losses_L * weights_L.to(losses_L)
    sums, gains_L = judge(losses_L, batch)
    total = weighted_L.sum() if gains_L is None else (weighted_L * gains_L.to(losses_L)).sum()
    return Losses(losses_L.detach(), total, sums)


def judge(losses_L: torch.Tensor, batch: PackedBatch) -> Judgement:
    """Give each part's log-probabilities to its objective. Nothing waits for the device.

    One sum per part over its own rows, in row order: index_add on a GPU would add in any order.
    """
    logps = (-widened(losses_L.detach())).split([part.num_rows for part in batch.parts])
    own = [logp_L[: part.num_labels] for part, logp_L in zip(batch.parts, logps, strict=True)]
    found, sums = dict[int, Any](), dict[int, torch.Tensor]()
    if at := [number for number, part in enumerate(batch.parts) if part.objective.weights != "before"]:
        from packlora.engine.weighing import weighed

        rows = [(batch.parts[number].objective, own[number], batch.parts[number].view) for number in at]
        found = dict(zip(at, weighed(rows), strict=True))
    for number, part in enumerate(batch.parts):
        total = found[number].sums if number in found else _known_sums(part, own[number])
        sums[part.adapter] = total if part.adapter not in sums else sums[part.adapter] + total
    if not found:
        return Judgement(sums, None)
    factors = [
        _padded(found[number].factors_L, part.padding) if number in found else torch.ones_like(logp_L)
        for number, (part, logp_L) in enumerate(zip(batch.parts, logps, strict=True))
    ]
    return Judgement(sums, torch.cat(factors))


def _padded(factors_L: torch.Tensor, padding: int) -> torch.Tensor:
    """Factors of the labels and of so many rows behind them."""
    return F.pad(factors_L, (0, padding), value=1.0) if padding else factors_L


def _known_sums(part: PackedPart, logp_L: torch.Tensor) -> torch.Tensor:
    """Sums [1 + M] of a part whose weights were known before."""
    losses, metrics_M = part.objective.loss(logp_L, part.view)
    padded = F.pad(losses, (0, part.padding)) if part.padding else losses
    loss = padded.sum()[None]
    return torch.cat([loss, metrics_M]) if len(metrics_M) else loss


def _smoothed(logits_LV: torch.Tensor, labels_L: torch.Tensor, smoothing_L: torch.Tensor) -> torch.Tensor:
    """Addition of smoothing to losses [L]: its share of the way from the label's logit to the mean of all."""
    at_label_L = logits_LV.gather(1, labels_L.clamp(0)[:, None])[:, 0]
    counts_L = (smoothing_L != 0) & (labels_L != IGNORE)
    return torch.where(counts_L, smoothing_L * (at_label_L - logits_LV.mean(1)), 0.0)


def _cooling(batch: PackedBatch) -> torch.Tensor | None:
    """Factors [L] of logits, see COOLING; None: 1 for all."""
    factors_L = batch.labels.get(COOLING)
    return None if factors_L is None else torch.where(factors_L == 0, 1.0, factors_L)


def has_bias(model: PreTrainedModel) -> bool:
    """Whether the output layer adds a bias."""
    head: Any = model.get_output_embeddings()
    return getattr(getattr(head, "base", head), "bias", None) is not None


def has_head_loss(model: PreTrainedModel) -> bool:
    """Whether `head_losses` takes the output layer: it is a frozen linear layer, with or without what jobs train there."""
    head = model.get_output_embeddings()
    return plain_head(model) is not None or (isinstance(head, AdaptedModule) and type(head.base) is torch.nn.Linear)


def head_losses(
    model: PreTrainedModel, hidden_LD: torch.Tensor, batch: PackedBatch, weights_L: torch.Tensor | None = None
) -> Losses:
    """Losses, as token_losses gives them, from the input of the output layer for the label rows. Logits are never held all at
    once."""
    head, rows = model.get_output_embeddings(), batch.owners.rows
    if (scales_L := _cooling(batch)) is not None:  # the layer is linear, and has no bias
        hidden_LD = (hidden_LD * scales_L[:, None].to(torch.promote_types(hidden_LD.dtype, torch.float32))).to(
            hidden_LD.dtype
        )
    plain: Any = plain_head(model)
    if isinstance(head, AdaptedModule) and (rows is None or rows.adapters.isdisjoint(on_head := head.trained())):
        plain = head.base
    if plain is not None:
        return fused_losses(hidden_LD, plain, batch, weights_L)
    assert isinstance(head, AdaptedModule) and rows is not None
    from packlora.ops.cross_entropy.chunked import chunked_cross_entropy

    def logits_of(hidden_CD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        with head.attached.among_rows(rows.part(start, stop)):
            logits: torch.Tensor = head(hidden_CD)
        return logits

    own = [weights for number, weights in on_head.items() if number in rows.adapters]
    parameters = [parameter for weights in own for parameter in weights.named_parameters().values()]
    # only on a CPU can an adapter have the same bits whoever else is there
    sizes = [stop - start for _, start, stop in rows.runs(rows.adapters)] if hidden_LD.device.type == "cpu" else None

    def losses(weights_L: torch.Tensor | None, weigh: Weigh | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_cross_entropy(
            hidden_LD, logits_of, parameters, len(head.base.weight), batch.labels_L, weights_L,
            smoothing_L=batch.labels.get(SMOOTHING), weigh=weigh, sizes=sizes,
        )  # fmt: skip

    known, weigh = {part.objective.weights for part in batch.parts if torch.is_grad_enabled()}, None
    if "sample" in known:
        # weights of labels are known after a forward, the layer's gradients are made in it: so there are two
        with torch.no_grad():
            factors_L = judge(losses(weights_L)[0], batch).factors_L
        assert factors_L is not None
        weigh = lambda _, start, stop: factors_L[start:stop]  # noqa: E731
    elif "row" in known:
        from packlora.engine.weighing import weigh_rows

        weigh = partial(weigh_rows, batch=batch)
    losses_L, total = losses(weights_L, weigh)
    return Losses(losses_L, total, judge(losses_L, batch).sums)


def fused_losses(hidden_LD: torch.Tensor, head: Any, batch: PackedBatch, weights_L: torch.Tensor | None) -> Losses:
    """Losses, as token_losses gives them, from the input of the output layer [L, D]. head: a frozen linear layer."""
    losses_L, total = linear_cross_entropy(
        hidden_LD, head.weight, head.bias, batch.labels_L, weights_L,
        part=getattr(head, "vocabulary", None), smoothing_L=batch.labels.get(SMOOTHING),
    )  # fmt: skip
    sums, factors_L = judge(losses_L, batch)
    if factors_L is not None and hidden_LD.requires_grad:
        wide = factors_L[:, None].to(torch.promote_types(hidden_LD.dtype, torch.float32))
        hidden_LD.register_hook(lambda gradient_LD: (gradient_LD * wide).to(gradient_LD.dtype))
    return Losses(losses_L, total, sums)
