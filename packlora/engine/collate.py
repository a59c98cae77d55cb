"""Parts of a microbatch to tensors: packed tokens, restarting positions, label rows, owners, and named columns.

Rows are padded to MIN_ROWS where a microbatch, or its labels, are tiny: so a token's numbers do not depend, to the bit, on
what shares its microbatch. Anything larger is never padded. What a column is for is not known here: objectives and terms give
its values for their rows (objectives/), and read them where they are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.data.encode import Sample
from packlora.engine.objective import Carried, RowsView, Term
from packlora.engine.parts import PackedPart, Part, Parts, num_tokens, rows_of
from packlora.engine.rows import NO_ADAPTER
from packlora.ops.dropout.keys import packed_token_keys
from packlora.ops.wide import wide_dtype

if TYPE_CHECKING:
    from packlora.modality import BatchExtras, Modality

IGNORE = -100
ALIGNED = 16
"""Words of 64 bits: tensors of a microbatch begin at multiples of 128 bytes, as those that torch allocates for itself."""
Name = str | tuple[int, str]
"""Name of a column of tokens or labels of all parts, or number of a part and name of a column of its objective."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch on the device. T tokens, L label rows; adapters count from 0, -1 owns nothing."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    sample_lengths: tuple[int, ...]
    rows_L: torch.Tensor
    """Row whose logits predict each label."""
    labels_L: torch.Tensor
    """Padding rows, which are the last part's, have the label IGNORE."""
    weights_L: torch.Tensor
    """Factor of each label's loss in the gradient, float64."""
    owners: TokenOwners
    parts: tuple[PackedPart, ...]
    """Parts that the labels belong to, in the order in which they lie."""
    num_tokens: Mapping[int, int]
    """Tokens by adapter, without padding."""
    num_samples: Mapping[int, int]
    labels: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns of labels that terms have, [L] each."""
    arguments: Mapping[str, torch.Tensor] | None = None
    """More of the model's keyword arguments, where samples have extras; positions may be [3, T] then."""
    carried: tuple[Carried, ...] = ()
    """Samples with a term that carries something through the layers."""


def collate(parts: Parts, device: torch.device, total: int = MIN_ROWS, modality: Modality | None = None) -> PackedBatch:
    """Pack the rows of parts into one row without padding between them. Nothing waits for the device.

    Args:
        parts: ordered by adapter.
        total: tokens that the row has at least; those without an adapter come last, in samples no longer than the others and of
            the first one's tokens: a model gives finite numbers for these if it does so for the data.
        modality: what the model reads beside texts; None where no sample has any of it.
    """
    extras = _extras(parts, modality, device)
    columns, counts = _tokens_and_labels(parts, total)
    lengths = tuple(map(len, columns["positions"]))
    total, few = sum(lengths), sum(map(len, columns["rows"])) - sum(map(sum, counts))
    tokens, labels = [num_tokens([part]) for part in parts], [sum(own) for own in counts]
    of_terms = dict(_columns_of_terms(parts, {"token": [*tokens, total - sum(tokens)], "label": [*labels, few]}))
    packed = [(part, part.objective.columns_of(part.rows)) for part in parts]
    columns |= {name: values for name, (_, values) in of_terms.items()}
    columns |= {(at, name): [own] for at, (_, found) in enumerate(packed) for name, own in found.items()}
    keys = columns["keys"]
    if extras is not None:
        columns["positions"] = extras.positions(total)
    sent = _send(columns, device)
    rows_L, positions_T = sent["rows"], sent["positions"]
    return PackedBatch(
        input_ids_T=sent["ids"],
        position_ids_T=positions_T if len(positions_T) == total else positions_T.view(3, total),
        sample_lengths=lengths,
        rows_L=rows_L,
        labels_L=sent["labels"],
        weights_L=sent["weights"],
        owners=TokenOwners(
            total,
            _segments(parts, tokens),
            _pairs(sent["keys"]) if keys else None,
            columns={name: sent[name] for name, (of, _) in of_terms.items() if of == "token"},
            label_rows=(_segments(parts, labels), rows_L),
            beside=None if extras is None else extras.owners,
        ),
        parts=tuple(_views(packed, counts, sent, few)),
        num_tokens=_by_adapter(parts, tokens),
        num_samples=_by_adapter(parts, [len(part.rows) for part in parts]),
        labels={name: sent[name] for name, (of, _) in of_terms.items() if of == "label"},
        arguments=None if extras is None else extras.arguments(total, device),
        carried=tuple(_carried(parts)),
    )


def _tokens_and_labels(parts: Parts, total: int) -> tuple[dict[Name, list[np.ndarray]], list[list[int]]]:
    """Columns that every microbatch has, each in pieces, padding included; and labels of each sample by part. total: as of
    collate."""
    ids, positions, rows, labels, weights = [], [], [], [], []
    counts: list[list[int]] = []
    start = 0
    for part in parts:
        counts.append([])
        for row in part.rows:
            counts[-1].append(row.sample.num_labels)
            ids.append(row.sample.ids)
            positions += [np.arange(length) for length in row.sample.part_lengths]
            rows.append(start + row.sample.predicting)
            labels.append(row.sample.labels)
            start += row.sample.num_tokens
        weights.append(np.full(sum(counts[-1]), part.weight))
    for filler in fillers(total - start, max(map(len, positions))):
        ids.append(np.resize(_texts(parts[0].rows[0].sample), filler))
        positions.append(np.arange(filler))
    few = MIN_ROWS - sum(map(len, rows))
    if few > 0:
        rows.append(np.zeros(few, np.int64))
        labels.append(np.full(few, IGNORE))
        weights.append(np.full(few, parts[-1].weight))
    keys = _keys(parts, sum(map(len, positions)))
    found: dict[Name, list[np.ndarray]] = {"ids": ids, "positions": positions, "rows": rows}
    return found | {"labels": labels, "weights": weights, "keys": keys}, counts


def _columns_of_terms(
    parts: Parts, sizes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[str, list[np.ndarray]]]]:
    """Columns of terms by name: whether one is of tokens or of labels, and its values, 0 for parts without it and for padding.

    Args:
        sizes: tokens and labels of each part, and at the end of the padding.
    """
    found: dict[str, tuple[str, dict[int, np.ndarray]]] = {}
    for at, part in enumerate(parts):
        for term in part.terms:
            for name, values in term.columns_of(part.rows).items() if term.columns else ():
                found.setdefault(name, (term.columns[name].of, {}))[1][at] = values
    for name, (of, given) in found.items():
        dtype = next(iter(given.values())).dtype
        yield name, (of, [given.get(at, np.zeros(size, dtype)) for at, size in enumerate(sizes[of])])


def _views(
    packed: Sequence[tuple[Part, Mapping[str, np.ndarray]]], counts: Sequence[Sequence[int]],
    sent: Mapping[Name, torch.Tensor], few: int,
) -> Iterator[PackedPart]:  # fmt: skip
    """Parts as their objectives see them. counts: labels of each sample by part. few: label rows of padding."""
    for at, (part, host) in enumerate(packed):
        tensors = {name: sent[at, name].view(values.shape) for name, values in host.items()}
        view = RowsView(tuple(counts[at]), part.facts, host, tensors)
        yield PackedPart(part.adapter, part.objective, view, few if at == len(packed) - 1 else 0)


def _carried(parts: Parts) -> Iterator[Carried]:
    """Samples with terms that carry something."""
    start = 0
    for part in parts:
        stops = list(itertools.accumulate([row.sample.num_tokens for row in part.rows], initial=start))
        start = stops[-1]
        for term in _carrying(part):
            share = term.share(part.facts)
            yield Carried(part.adapter, term, share, share * part.weight, tuple(itertools.pairwise(stops)))


def _carrying(part: Part) -> list[Term]:
    return [term for term in part.terms if term.carries]


def fillers(tokens: int, longest: int) -> list[int]:
    """Lengths of filler samples without an adapter."""
    each = max(longest, MIN_ROWS)
    return [min(each, tokens - first) for first in range(0, tokens, each)]


def _extras(parts: Parts, modality: Modality | None, device: torch.device) -> BatchExtras | None:
    if modality is None:
        return None
    owned = [(part.adapter, row) for part in parts for row in part.rows]
    draws = [None if row.draw is None or row.draw[0] is None else (row.draw[0], *row.draw[1:]) for _, row in owned]
    return modality.in_batch([row.sample for _, row in owned], [adapter for adapter, _ in owned], draws, device)


def _texts(sample: Sample) -> np.ndarray:
    """Tokens of a sample without those that stand for extras, which would need extras of their own."""
    return sample.ids if sample.extras is None else sample.ids[sample.ids != sample.extras.token_id]


def _pairs(words_T: torch.Tensor) -> torch.Tensor:
    """Words of 64 bits as keys, [T, 2] int32."""
    return words_T.view(torch.int32).view(-1, 2)


def _by_adapter(parts: Parts, values: Iterable[int]) -> dict[int, int]:
    """Sums of a value of each part."""
    out: dict[int, int] = {}
    for part, value in zip(parts, values, strict=True):
        out[part.adapter] = out.get(part.adapter, 0) + value
    return out


def _segments(parts: Parts, counts: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(adapter, start, stop) of tokens or label rows, as TokenOwners has them. counts: by part."""
    by_adapter = _by_adapter(parts, counts)
    stops = list(itertools.accumulate(by_adapter.values()))
    found = zip(by_adapter, [0, *stops[:-1]], stops, strict=True)
    return tuple(one for one in found if one[1] < one[2] and one[0] != NO_ADAPTER)


def _keys(parts: Parts, total: int) -> list[np.ndarray]:
    """The two words of each token's dropout key as one of 64 bits, 0 for tokens without; nothing where no token has one."""
    own = [(*(row.draw or (None, 0, 0)), row.sample.num_tokens) for row in rows_of(parts)]
    if all(key is None for key, *_ in own):
        return []
    job_keys, steps, numbers, lengths = zip(*own, strict=True)
    keys = packed_token_keys([key or 0 for key in job_keys], steps, numbers, lengths).view(np.int64)[:, 0]
    keys[np.repeat([key is None for key in job_keys], lengths)] = 0
    return [keys, np.zeros(total - len(keys), np.int64)]


def _send(columns: Mapping[Name, Sequence[np.ndarray]], device: torch.device) -> dict[Name, torch.Tensor]:
    """Columns on the device, each joined from its parts; by one copy, out of memory that the device reads by itself.

    Args:
        columns: int64 or narrower integers, which become int64, or float64.

    Returns:
        By name, tensors [length of the column].
    """
    sizes = [sum(part.size for part in parts) for parts in columns.values()]
    starts = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    host = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    words = host.numpy()
    for parts, start, size in zip(columns.values(), starts, sizes, strict=False):
        if size:
            bits = [part.reshape(-1).view(np.int64) if part.dtype == np.float64 else part.reshape(-1) for part in parts]
            np.concatenate(bits, out=words[start : start + size])
    sent, out = host.to(device, non_blocking=device.type == "cuda"), dict[Name, torch.Tensor]()
    wide = wide_dtype(device)
    for (name, parts), start, size in zip(columns.items(), starts, sizes, strict=False):
        own = sent[start : start + size]
        if not parts or parts[0].dtype != np.float64:
            out[name] = own
        elif wide == torch.float64:
            out[name] = own.view(wide)
        else:
            out[name] = torch.from_numpy(words[start : start + size].view(np.float64).astype(np.float32)).to(device)
    return out
