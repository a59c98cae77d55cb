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

from packlora.adapters.owners import MIN_ROWS, Noise, TokenOwners
from packlora.data.encode import Sample
from packlora.ops.dropout.keys import packed_token_keys

IGNORE = -100
ALIGNED = 16
"""Words of 64 bits: tensors of a microbatch begin at multiples of 128 bytes, as those that torch allocates for itself."""


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A sample on its way into a microbatch. owner: number of its adapter; dropout_key: None for no dropout; smoothing: of its
    labels; noise: key and alpha of NEFTune's, None for none."""

    owner: int
    sample: Sample
    number: int
    step: int
    dropout_key: int | None
    smoothing: float = 0.0
    noise: tuple[int, float] | None = None


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
    smoothing_L: torch.Tensor | None
    """Of each label, float64; None where no job smooths its labels."""
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
    for filler in _fillers(total - start, max(lengths)):
        ids.append(np.resize(samples[0].sample.ids, filler))
        positions.append(np.arange(filler))
        lengths.append(filler)
    few = MIN_ROWS - sum(num_rows.values())
    if few > 0:
        rows.append(np.zeros(few, np.int64))
        labels.append(np.full(few, IGNORE))
        num_rows[samples[-1].owner] += few
    total = sum(lengths)
    keys, (noise_keys, scales) = _keys(samples, total), _noise(samples, total)
    of_rows = [] if weights is None else [np.full(count, weights[owner]) for owner, count in num_rows.items()]
    smoothings = _smoothings(samples, num_rows)
    ids_T, positions_T, rows_L, labels_L, weights_L, keys_T, smoothing_L, noise_T, scale_T = _send(
        (ids, positions, rows, labels, of_rows, keys, smoothings, noise_keys, scales), device
    )
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        sample_lengths=tuple(lengths),
        rows_L=rows_L,
        labels_L=labels_L,
        weights_L=None if weights is None else weights_L.view(torch.float64),
        owners=TokenOwners(
            total,
            tuple((owner, first, stop) for owner, first, stop in segments),
            _pairs(keys_T) if keys else None,
            noise=Noise(_pairs(noise_T), scale_T.view(torch.float64).float()) if scales else None,
            label_rows=(_segments(num_rows, max(few, 0)), rows_L),
        ),
        smoothing_L=smoothing_L.view(torch.float64) if smoothings else None,
        num_tokens=num_tokens,
        num_samples=num_samples,
        num_rows=num_rows,
    )


def _fillers(tokens: int, longest: int) -> list[int]:
    """Lengths of samples of nobody's tokens."""
    each = max(longest, MIN_ROWS)
    return [min(each, tokens - first) for first in range(0, tokens, each)]


def _pairs(words_T: torch.Tensor) -> torch.Tensor:
    """Words of 64 bits as keys, [T, 2] int32."""
    return words_T.view(torch.int32).view(-1, 2)


def _smoothings(samples: Sequence[PackedSample], num_rows: Mapping[int, int]) -> list[np.ndarray]:
    """That of each label, by owner; nothing where no job smooths its labels."""
    own = {item.owner: item.smoothing for item in samples}
    return [np.full(count, own[owner]) for owner, count in num_rows.items()] if any(own.values()) else []


def _segments(num_rows: Mapping[int, int], padding: int) -> tuple[tuple[int, int, int], ...]:
    """(owner, start, stop) of the label rows; those of padding, the last ones, are nobody's."""
    stops = list(itertools.accumulate(num_rows.values()))
    stops[-1] -= padding
    starts = [0, *stops[:-1]]
    return tuple(one for one in zip(num_rows, starts, stops, strict=True) if one[1] < one[2])


def _keys(samples: Sequence[PackedSample], total: int) -> list[np.ndarray]:
    """The two words of each token's key as one of 64 bits, 0 for tokens without dropout; nothing where no token has it."""
    return _token_keys([(item.dropout_key, item.step, item.number, item.sample.num_tokens) for item in samples], total)


def _noise(samples: Sequence[PackedSample], total: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The same for NEFTune's noise, and of each token its scale; nothing where no token has any."""
    keys = [None if item.noise is None else item.noise[0] for item in samples]
    lengths = [item.sample.num_tokens for item in samples]
    own = [(key, item.step, item.number, n) for key, item, n in zip(keys, samples, lengths, strict=True)]
    if not (words := _token_keys(own, total)):
        return [], []
    alphas = [0.0 if item.noise is None else item.noise[1] for item in samples]
    scales = np.repeat([alpha * n**-0.5 for alpha, n in zip(alphas, lengths, strict=True)], lengths)
    return words, [scales, np.zeros(total - len(scales))]


def _token_keys(own: Sequence[tuple[int | None, int, int, int]], total: int) -> list[np.ndarray]:
    """own: key, step, number and tokens of each sample."""
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
