"""A planned microbatch to tensors: packed tokens, restarting positions, label rows, owners, dropout keys.

Rows are padded to MIN_ROWS where a microbatch, or its labels, are tiny: so a token's numbers do not depend, to the bit, on
what shares its microbatch. Anything larger is never padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from packlora.adapters.owners import MIN_ROWS, Noise, TokenOwners
from packlora.data.encode import Sample
from packlora.ops.dropout.keys import packed_token_keys
from packlora.runtime.balance import Balanced
from packlora.runtime.objective import Objective

if TYPE_CHECKING:
    from packlora.base.vision import Vision
    from packlora.runtime.images import BatchImages

IGNORE = -100
ALIGNED = 16
"""Words of 64 bits: tensors of a microbatch begin at multiples of 128 bytes, as those that torch allocates for itself."""


NOBODY = -1
"""Owner of tokens that see the base model alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What the loss of a sample with a preference needs beside the model's log-probabilities; see objective.Scores.

    reference: [3] float64.
    """

    objective: Objective
    reference: np.ndarray
    per_token: float
    divergence: float = 0.0


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A sample on its way into a microbatch. owner: number of its adapter, or NOBODY; dropout_key: None for no dropout;
    smoothing: of its labels; noise: key and alpha of NEFTune's, None for none; compared: of one with a preference, for
    training; balance: share of its load-balancing loss in the sum of its owner's losses, 0 for none."""

    owner: int
    sample: Sample
    number: int
    step: int
    dropout_key: int | None
    smoothing: float = 0.0
    noise: tuple[int, float] | None = None
    compared: Compared | None = None
    balance: float = 0.0


@dataclass(frozen=True, slots=True)
class Groups:
    """Label rows of samples with preferences, N samples, by the three columns of objective.Scores.

    splits: numbers of consecutive rows that cover all rows. places: of the groups among them, N times three. index_L: by row,
    its group, 3 N for rows of none. given_N9: float64, reference (3), tokens (3), per_token, desirable, divergence; None where
    nothing was given.
    objectives: (owner, objective, first, stop) of consecutive samples.
    """

    splits: tuple[int, ...]
    places: tuple[int, ...]
    index_L: torch.Tensor
    given_N9: torch.Tensor | None
    objectives: tuple[tuple[int, Objective, int, int], ...]


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
    groups: Groups | None = None
    """Where samples have preferences."""
    images: Mapping[str, torch.Tensor] | None = None
    """More of the model's keyword arguments, where samples have images; positions may be [3, T] then."""
    balanced: tuple[Balanced, ...] = ()
    """Samples with a load-balancing loss, by owner."""


def collate(
    samples: Sequence[PackedSample], device: torch.device, weights: np.ndarray | None = None, total: int = MIN_ROWS,
    vision: Vision | None = None,
) -> PackedBatch:  # fmt: skip
    """Pack samples, which come ordered by owner, into one row without padding between them. Nothing waits for the device.

    Args:
        weights: by owner, of each of its label tokens' losses in the gradient.
        total: tokens that the row has at least; those of nobody come last, in samples no longer than the others and of the
            first one's tokens: a model gives finite numbers for these if it does so for the data.
        vision: what the model is given for images; None where no sample has any.
    """
    images = _images(samples, vision, device)
    ids, positions, rows, labels = [], [], [], []
    lengths: list[int] = []
    start = 0
    for item in samples:
        at = _label_places(item.sample)
        ids.append(item.sample.ids)
        positions += [np.arange(part) for part in item.sample.part_lengths]
        lengths += item.sample.part_lengths
        rows.append(start + at - 1)
        labels.append(item.sample.ids[at])
        start += item.sample.num_tokens
    num_tokens = _by_owner(samples, [item.sample.num_tokens for item in samples])
    num_rows = _by_owner(samples, map(len, rows))
    for filler in _fillers(total - start, max(lengths)):
        ids.append(np.resize(_texts(samples[0].sample), filler))
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
    smoothings, grouped = _smoothings(samples, num_rows), _grouped(samples, sum(num_rows.values()))
    if images is not None:
        positions = images.positions(total)
    ids_T, positions_T, rows_L, labels_L, weights_L, keys_T, smoothing_L, noise_T, scale_T, index_L, given = _send(
        (ids, positions, rows, labels, of_rows, keys, smoothings, noise_keys, scales, grouped.index, grouped.given),
        device,
    )
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T if len(positions_T) == total else positions_T.view(3, total),
        sample_lengths=tuple(lengths),
        rows_L=rows_L,
        labels_L=labels_L,
        weights_L=None if weights is None else weights_L.view(torch.float64),
        owners=TokenOwners(
            total,
            _segments(num_tokens),
            _pairs(keys_T) if keys else None,
            noise=Noise(_pairs(noise_T), scale_T.view(torch.float64).float()) if scales else None,
            label_rows=(_segments(num_rows, max(few, 0)), rows_L),
            images=None if images is None else images.owners,
        ),
        smoothing_L=smoothing_L.view(torch.float64) if smoothings else None,
        num_tokens=num_tokens,
        num_samples=_by_owner(samples, itertools.repeat(1)),
        num_rows=num_rows,
        groups=grouped.sent(index_L, given),
        images=None if images is None else images.arguments(total, device),
        balanced=_balanced(samples, weights),
    )


def _balanced(samples: Sequence[PackedSample], weights: np.ndarray | None) -> tuple[Balanced, ...]:
    """Samples with a load-balancing loss, by owner; none where nothing is trained."""
    stops = list(itertools.accumulate(item.sample.num_tokens for item in samples))
    found: dict[tuple[int, float], list[tuple[int, int]]] = {}
    for item, stop in zip(samples, stops, strict=True):
        if item.balance and weights is not None:
            found.setdefault((item.owner, item.balance), []).append((stop - item.sample.num_tokens, stop))
    return tuple(
        Balanced(owner, share, share * float(weights[owner]), tuple(spans))
        for (owner, share), spans in found.items()
        if weights is not None
    )


def _fillers(tokens: int, longest: int) -> list[int]:
    """Lengths of samples of nobody's tokens."""
    each = max(longest, MIN_ROWS)
    return [min(each, tokens - first) for first in range(0, tokens, each)]


def _images(samples: Sequence[PackedSample], vision: Vision | None, device: torch.device) -> BatchImages | None:
    if vision is None:
        return None
    from packlora.runtime.images import in_batch

    draws = [None if item.dropout_key is None else (item.dropout_key, item.step, item.number) for item in samples]
    return in_batch([item.sample for item in samples], [item.owner for item in samples], draws, vision, device)


def _texts(sample: Sample) -> np.ndarray:
    """Its tokens without those of images, which would need images of their own."""
    return sample.ids if sample.images is None else sample.ids[sample.ids != sample.images.token_id]


def _pairs(words_T: torch.Tensor) -> torch.Tensor:
    """Words of 64 bits as keys, [T, 2] int32."""
    return words_T.view(torch.int32).view(-1, 2)


def _smoothings(samples: Sequence[PackedSample], num_rows: Mapping[int, int]) -> list[np.ndarray]:
    """That of each label, by owner; nothing where no job smooths its labels."""
    own = {item.owner: item.smoothing for item in samples}
    return [np.full(count, own[owner]) for owner, count in num_rows.items()] if any(own.values()) else []


def _by_owner(samples: Sequence[PackedSample], values: Iterable[int]) -> dict[int, int]:
    """Sums of a value of each sample."""
    out: dict[int, int] = {}
    for item, value in zip(samples, values, strict=False):
        out[item.owner] = out.get(item.owner, 0) + value
    return out


def _segments(counts: Mapping[int, int], padding: int = 0) -> tuple[tuple[int, int, int], ...]:
    """(owner, start, stop) of tokens or label rows, as TokenOwners has them; samples are ordered by owner, padding is the last
    owner's in counts and nobody's here."""
    stops = list(itertools.accumulate(counts.values()))
    stops[-1] -= padding
    starts = [0, *stops[:-1]]
    found = zip(counts, starts, stops, strict=True)
    return tuple(one for one in found if one[1] < one[2] and one[0] != NOBODY)


def _label_places(sample: Sample) -> np.ndarray:
    """Of its label tokens, those of a group together."""
    return np.flatnonzero(sample.is_label) if sample.preference is None else np.concatenate(sample.groups())


@dataclass(slots=True)
class _Grouped:
    """Groups before they are sent."""

    splits: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    index: list[np.ndarray] = field(default_factory=list)
    given: list[np.ndarray] = field(default_factory=list)
    objectives: list[tuple[int, Objective, int, int]] = field(default_factory=list)

    def sent(self, index_L: torch.Tensor, given: torch.Tensor) -> Groups | None:
        if not self.places:
            return None
        given_N9 = given.view(torch.float64).view(-1, 9) if self.given else None
        return Groups(tuple(self.splits), tuple(self.places), index_L, given_N9, tuple(self.objectives))


def _grouped(samples: Sequence[PackedSample], num_rows: int) -> _Grouped:
    """Groups of the label rows of those samples that have preferences. num_rows: of all samples, with padding."""
    out, number = _Grouped(), 0
    if all(item.sample.preference is None for item in samples):
        return out
    none = 3 * sum(item.sample.preference is not None for item in samples)
    for item in samples:
        if item.sample.preference is None:
            out.splits.append(item.sample.num_labels)
            out.index.append(np.full(item.sample.num_labels, none))
            continue
        counts = np.array([len(places) for places in item.sample.groups()])
        out.places += range(len(out.splits), len(out.splits) + 3)
        out.splits += counts.tolist()
        out.index.append(np.repeat(np.arange(3 * number, 3 * number + 3), counts))
        if (own := item.compared) is not None:
            more = [own.per_token, float(item.sample.preference.desirable), own.divergence]
            out.given.append(np.concatenate([own.reference, counts.astype(np.float64), more]))
            last = out.objectives.pop() if out.objectives and out.objectives[-1][0] == item.owner else None
            out.objectives.append((item.owner, own.objective, number if last is None else last[2], number + 1))
        number += 1
    out.splits.append(num_rows - sum(out.splits))
    out.index.append(np.full(out.splits[-1], none))
    return out


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
