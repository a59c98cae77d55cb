"""A planned microbatch to tensors: packed tokens, restarting positions, label rows, owners, dropout keys.

Rows are padded to MIN_ROWS where a microbatch, or its labels, are tiny: so a token's numbers do not depend, to the bit, on
what shares its microbatch. Anything larger is never padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.data.encode import Sample
from packlora.ops.dropout.keys import token_keys

IGNORE = -100


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A sample on its way into a microbatch. owner: number of its adapter; key: of its dropout, None for no dropout."""

    owner: int
    sample: Sample
    number: int
    step: int
    dropout_key: int | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch on the device. T tokens, L label rows; owners count from 0, -1 owns nothing."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    sample_lengths: tuple[int, ...]
    rows_L: torch.Tensor
    """Row whose logits predict each label."""
    labels_L: torch.Tensor
    owners_L: torch.Tensor
    """Owner of each label; padding rows are the last owner's, with the label IGNORE."""
    owners: TokenOwners
    num_tokens: Mapping[int, int]
    """By owner, without padding."""
    num_samples: Mapping[int, int]


def collate(samples: Sequence[PackedSample], device: torch.device, total: int = MIN_ROWS) -> PackedBatch:
    """Pack samples, which come ordered by owner, into one row without padding between them.

    Args:
        total: tokens that the row has at least; those of nobody come last, in samples no longer than the others.
    """
    ids, positions, lengths, rows, labels, owners, keys = [], [], [], [], [], [], []
    segments: list[list[int]] = []
    num_tokens: dict[int, int] = {}
    num_samples: dict[int, int] = {}
    start = 0
    for item in samples:
        length = item.sample.num_tokens
        at = np.flatnonzero(item.sample.is_label)
        ids.append(item.sample.ids)
        positions.append(np.arange(length))
        lengths.append(length)
        rows.append(start + at - 1)
        labels.append(item.sample.ids[at])
        owners.append(np.full(len(at), item.owner))
        if item.dropout_key is None:
            keys.append(np.zeros((length, 2), np.int32))
        else:
            keys.append(token_keys(item.dropout_key, item.step, item.number, length))
        if segments and segments[-1][0] == item.owner:
            segments[-1][2] += length
        else:
            segments.append([item.owner, start, start + length])
        num_tokens[item.owner] = num_tokens.get(item.owner, 0) + length
        num_samples[item.owner] = num_samples.get(item.owner, 0) + 1
        start += length
    longest = max(lengths)
    while start < total:
        filler = min(total - start, max(longest, MIN_ROWS))
        start += filler
        ids.append(np.zeros(filler, np.int32))
        positions.append(np.arange(filler))
        lengths.append(filler)
        keys.append(np.zeros((filler, 2), np.int32))
    few = MIN_ROWS - sum(map(len, labels))
    if few > 0:
        rows.append(np.zeros(few, np.int64))
        labels.append(np.full(few, IGNORE))
        owners.append(np.full(few, samples[-1].owner))

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(dtype).to(device, non_blocking=True)

    needs_keys = any(item.dropout_key is not None for item in samples)
    return PackedBatch(
        input_ids_T=tensor(ids, torch.int64),
        position_ids_T=tensor(positions, torch.int64),
        sample_lengths=tuple(lengths),
        rows_L=tensor(rows, torch.int64),
        labels_L=tensor(labels, torch.int64),
        owners_L=tensor(owners, torch.int64),
        owners=TokenOwners(
            sum(lengths),
            tuple((owner, first, stop) for owner, first, stop in segments),
            tensor(keys, torch.int32) if needs_keys else None,
        ),
        num_tokens=num_tokens,
        num_samples=num_samples,
    )
