"""Cross entropy of a packed microbatch, by job.

A job's loss is the sum over its label tokens of a global batch divided by their number. Microbatches hold parts of global
batches, so each label token's gradient is weighted with 1 / (label tokens of its job's global batch), and the sums are
collected per job. Losses of different jobs are never added: a NaN of one job is no other job's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from packlora.data.collate import IGNORE, PackedBatch
from packlora.model import packed_logits


def token_losses(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """Cross entropy [L] of the label tokens, in float32 (float64 for a float64 model); 0 for padding rows.

    The router must be set to the batch's tokens.
    """
    logits_LV = packed_logits(model, batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L)
    wide = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    return F.cross_entropy(wide, batch.labels_L, reduction="none", ignore_index=IGNORE)


def sum_by_owner(losses_L: torch.Tensor, batch: PackedBatch, num_owners: int) -> torch.Tensor:
    """Sums [num_owners] in float64, on the device.

    One sum per owner over its own rows, in row order: index_add on a GPU would add in any order.
    """
    sums = torch.zeros(num_owners, dtype=torch.float64, device=losses_L.device)
    for owner in batch.num_tokens:
        sums[owner] = losses_L.detach()[batch.owners_L == owner].double().sum()
    return sums
