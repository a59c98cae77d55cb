"""Samples as batches that PEFT's models take: padded rows, or one row with all of them.

Shapes: B samples, S tokens of the longest, T of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.data.encode import Sample


def padded(samples: Sequence[Sample], pad: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels [B, S]; labels -100 on padding and where a token is none."""
    ids_BS = torch.full((len(samples), max(sample.num_tokens for sample in samples)), pad)
    labels_BS, mask_BS = torch.full_like(ids_BS, -100), torch.zeros_like(ids_BS)
    for row, sample in enumerate(samples):
        own = torch.from_numpy(sample.ids).long()
        ids_BS[row, : len(own)], mask_BS[row, : len(own)] = own, 1
        labels_BS[row, : len(own)] = torch.where(torch.from_numpy(sample.is_label), own, -100)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


def packed(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """input_ids, position_ids and labels [1, T]; positions begin at 0 in every sample."""
    ids_T = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples])
    is_label_T = torch.cat([torch.from_numpy(sample.is_label) for sample in samples])
    positions_T = torch.cat([torch.arange(sample.num_tokens) for sample in samples])
    labels_T = torch.where(is_label_T, ids_T, -100)
    return {"input_ids": ids_T[None], "position_ids": positions_T[None], "labels": labels_T[None]}
