"""A planned microbatch to tensors: packed tokens, restarting positions, label rows, owners, dropout keys.

Rows are padded to MIN_ROWS where a microbatch, or its labels, are tiny: so a token's numbers do not depend, to the bit, on
what shares its microbatch. Anything larger is never padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.data.encode import Sample
from packlora.ops.dropout.keys import packed_token_keys

IGNORE = -100
ALIGNED = 16
"""Words of 64 bits: tensors of a microbatch begin at multiples of 128 bytes, as those that torch allocates for itself."""


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
    """Padding rows, which are the last owner's, have the label IGNORE."""
    weights_L: torch.Tensor | None
    """Of each label's loss in the gradient, float64; None where none were given."""
    owners: TokenOwners
    num_tokens: Mapping[int, int]
    """By owner, without padding."""
    num_samples: Mapping[int, int]
    num_rows: Mapping[int, int]
    """Label rows by owner, in the order in which they lie, with padding."""


def collate(
    samples: Sequence[PackedSample], device: torch.device, weights: np.ndarray | None = None, total: int = MIN_ROWS
) -> PackedBatch:
    """Pack samples, which come ordered by owner, into one row without padding between them. Nothing waits for the device.

    Args:
        weights: by owner, of each of its label tokens' losses in the gradient.
        total: tokens that the row has at least; those of nobody come last, in samples no longer than the others and of the
            first one's tokens: a model gives finite numbers for these if it does so for the data.
    """
    ids, positions, rows, labels = [], [], [], []
    lengths: list[int] = []
    segments: list[list[int]] = []
    num_tokens: dict[int, int] = {}
    num_samples: dict[int, int] = {}
    num_rows: dict[int, int] = {}
    start = 0
    for item in samples:
        owner, length = item.owner, item.sample.num_tokens
        at = np.flatnonzero(item.sample.is_label)
        ids.append(item.sample.ids)
        positions.append(np.arange(length))
        lengths.append(length)
        rows.append(start + at - 1)
        labels.append(item.sample.ids[at])
        if segments and segments[-1][0] == owner:
            segments[-1][2] += length
        else:
            segments.append([owner, start, start + length])
        num_tokens[owner] = num_tokens.get(owner, 0) + length
        num_samples[owner] = num_samples.get(owner, 0) + 1
        num_rows[owner] = num_rows.get(owner, 0) + len(at)
        start += length
    longest = max(lengths)
    while start < total:
        filler = min(total - start, max(longest, MIN_ROWS))
        start += filler
        ids.append(np.resize(samples[0].sample.ids, filler))
        positions.append(np.arange(filler))
        lengths.append(filler)
    few = MIN_ROWS - sum(num_rows.values())
    if few > 0:
        rows.append(np.zeros(few, np.int64))
        labels.append(np.full(few, IGNORE))
        num_rows[samples[-1].owner] += few
    keys = _keys(samples, sum(lengths))
    of_rows = [] if weights is None else [np.full(count, weights[owner]) for owner, count in num_rows.items()]
    ids_T, positions_T, rows_L, labels_L, weights_L, keys_T = _send(
        (ids, positions, rows, labels, of_rows, keys), device
    )
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        sample_lengths=tuple(lengths),
        rows_L=rows_L,
        labels_L=labels_L,
        weights_L=None if weights is None else weights_L.view(torch.float64),
        owners=TokenOwners(
            sum(lengths),
            tuple((owner, first, stop) for owner, first, stop in segments),
            keys_T.view(torch.int32).view(-1, 2) if keys else None,
            label_rows=(_segments(num_rows, max(few, 0)), rows_L),
        ),
        num_tokens=num_tokens,
        num_samples=num_samples,
        num_rows=num_rows,
    )


def _segments(num_rows: Mapping[int, int], padding: int) -> tuple[tuple[int, int, int], ...]:
    """(owner, start, stop) of the label rows; those of padding, the last ones, are nobody's."""
    stops = list(itertools.accumulate(num_rows.values()))
    stops[-1] -= padding
    starts = [0, *stops[:-1]]
    return tuple(one for one in zip(num_rows, starts, stops, strict=True) if one[1] < one[2])


def _keys(samples: Sequence[PackedSample], total: int) -> list[np.ndarray]:
    """The two words of each token's key as one of 64 bits, 0 for tokens without dropout; nothing where no token has it."""
    own = [(item.dropout_key, item.step, item.number, item.sample.num_tokens) for item in samples]
    if all(key is None for key, *_ in own):
        return []
    job_keys, steps, numbers, lengths = zip(*own, strict=True)
    keys = packed_token_keys([key or 0 for key in job_keys], steps, numbers, lengths).view(np.int64)[:, 0]
    keys[np.repeat([key is None for key in job_keys], lengths)] = 0
    return [keys, np.zeros(total - len(keys), np.int64)]


def _send(columns: Sequence[Sequence[np.ndarray]], device: torch.device) -> list[torch.Tensor]:
    """Parts of columns, joined by column, on the device; by one copy, out of memory that the device reads by itself.

    Args:
        columns: of int64, or narrower integers; float64 keeps its bits.

    Returns:
        int64 [length of the column].
    """
    sizes = [sum(map(len, parts)) for parts in columns]
    starts = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    host = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    words = host.numpy()
    for parts, start, size in zip(columns, starts, sizes, strict=False):
        if size:
            bits = [part.view(np.int64) if part.dtype == np.float64 else part for part in parts]
            np.concatenate(bits, out=words[start : start + size])
    sent = host.to(device, non_blocking=True)
    return [sent[start : start + size] for start, size in zip(starts, sizes, strict=False)]
