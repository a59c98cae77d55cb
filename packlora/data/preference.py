"""Rows of preferences to samples: a prompt with two completions, or with one that is judged.

A sample of two completions has two parts, which lie one behind the other and do not see each other: so both are always in one
microbatch, and a pair is placed as any sample is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packlora.config import DataConfig
from packlora.data.encode import Encoded, Notes, Preference, Sample, encoded_rows, noted
from packlora.data.fields import OF_PAIRS
from packlora.data.rows import Row
from packlora.errors import InputError, quoted
from packlora.modality import ExtrasReader
from packlora.terminal import Told, silent

ALIKE = "the chosen and the rejected completion are the same tokens, so there is no preference to learn"


def encode_for(
    trainer: str,
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    budget: int,
    job: str,
    context: int,
    told: Told = silent,
    reader: ExtrasReader | None = None,
    fields: bool = False,
) -> Encoded:
    """Samples for a trainer that compares: dpo and orpo from pairs, kto from judged completions.

    `max_length` and the model's context limit each part; the budget limits the sample. fields: as of encode_rows.

    Raises:
        InputError: as encode_rows; or a row is not what the trainer takes.
    """
    out, within = encode_compared(trainer, rows, tokenizer, data, budget, job, context, told, reader, fields)
    if not out.samples and len(out.skipped) >= len(rows):
        raise InputError(f"job {job!r}: none of {len(rows)} rows is a sample, the first: {out.skipped[0]}")
    if not out.samples:
        raise InputError(f"job {job!r}: truncate: {data.truncate} left no sample of {len(rows)} within {within}")
    return out


def encode_compared(
    trainer: str,
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    budget: int,
    job: str,
    context: int,
    told: Told = silent,
    reader: ExtrasReader | None = None,
    fields: bool = False,
) -> tuple[Encoded, str]:
    """Samples as of encode_for for dpo, orpo and kto, perhaps none, and the limits that they are within, in words."""
    out = Encoded([])
    taken = [row for row in rows if _is_taken(row, trainer, data, job, out.skipped)]
    found, notes = _halves(taken, tokenizer, data, job, out.skipped, told, reader)
    limit, over_budget = min(data.max_length, context), False
    name = f"max_length {limit}" if limit == data.max_length else f"the model's context of {limit}"
    for row in taken:
        parts = [found[id(half)] for half in row.pair or (row,) if id(half) in found]
        if len(parts) < len(row.pair or (row,)):
            continue
        longest, total = max(part.num_tokens for part in parts), sum(part.num_tokens for part in parts)
        if longest > limit and data.truncate == "right":
            parts = [part.first(limit) for part in parts]
            total = sum(part.num_tokens for part in parts)
        elif longest > limit and data.truncate == "error":
            most, kind = max((part.extras.num_tokens, part.extras.kind) if part.extras else (0, "") for part in parts)
            raise InputError(
                f"job {job!r}: {row.where}: a prompt with its completion has {longest} tokens"
                f"{f', {most} of them of {kind}' if most else ''}, over {name}; "
                f"{'raise it, or ' if limit == data.max_length else ''}set truncate to drop or right"
            )
        if total > budget and data.truncate == "error":
            raise InputError(
                f"job {job!r}: {row.where}: the sample has {total} tokens, over max_tokens_per_microbatch {budget}; raise it, "
                "or set truncate to drop"
            )
        is_cut, alike = longest > limit and data.truncate == "right", _are_alike(parts)
        if alike and longest <= limit:
            _refuse(ALIKE, row, data, job, out.skipped)
            continue
        if (longest > limit and not is_cut) or total > budget or alike or not all(part.num_labels for part in parts):
            over_budget |= total > budget
            out.dropped += 1
            continue
        out.truncated += is_cut
        sample = _joined(parts, row, trainer, limit)
        out.samples.append(sample.with_fields(row.fields) if fields else sample)
        out.where += [row.where] * fields
        chosen, *rejected = (notes[id(half)] for half in row.pair or (row,))
        noted(out.notes, {what: own for other in rejected for what, own in other.items()} | chosen)  # once for a pair
    if over_budget:
        name += f" and max_tokens_per_microbatch {budget}, into which a sample must fit whole"
    return out, name


def _halves(
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    job: str,
    skipped: list[str],
    told: Told,
    reader: ExtrasReader | None,
) -> tuple[dict[int, Sample], dict[int, Notes]]:
    """Encode the halves of pairs, or rows that are no pairs; return the samples and the notes of each, by id(row)."""
    found, notes = dict[int, Sample](), dict[int, Notes]()
    for part in (0, 1):  # a row that is skipped for its first part is not skipped again
        left = [row.pair or (row,) for row in rows if part == 0 or (row.pair and id(row.pair[0]) in found)]
        some = [halves[part] for halves in left]
        for row, sample, own in encoded_rows(some, tokenizer, data, job, skipped, told, reader):
            found[id(row)], notes[id(row)] = sample, own
    return found, notes


def _is_taken(row: Row, trainer: str, data: DataConfig, job: str, skipped: list[str]) -> bool:
    """Whether the trainer takes a row; otherwise the row is skipped, or an error raised."""
    problem = None
    if trainer in OF_PAIRS and row.pair is None:
        problem = f"train.trainer: {trainer} compares two completions; rows are {{prompt, chosen, rejected}}"
    if trainer == "kto" and (row.pair is not None or not isinstance(row.label, bool)):
        found = "a pair" if row.pair is not None else f"label {quoted(row.label)}"
        problem = (
            f"train.trainer: kto takes rows {{prompt, completion, label}} with a label of true or false; found {found}"
        )
    if trainer != "dpo" and any(half.files for half in row.pair or (row,)):
        problem = f"the row has images, which train.trainer: {trainer} does not take in this version"
    if problem is not None:
        _refuse(problem, row, data, job, skipped)
    return problem is None


def _refuse(problem: str, row: Row, data: DataConfig, job: str, skipped: list[str]) -> None:
    """Skip a row, or raise its error."""
    if data.on_bad_row == "error":
        raise InputError(f"job {job!r}: {row.where}: {problem}")
    skipped.append(f"{row.where}: {problem}")


def _are_alike(parts: Sequence[Sample]) -> bool:
    """Whether two completions have the same tokens, which is possible when they differ only after a cut."""
    first, *others = parts
    return any(np.array_equal(first.ids, other.ids) for other in others)


def _joined(parts: Sequence[Sample], row: Row, trainer: str, limit: int) -> Sample:
    """The parts of a sample as one. ORPO takes the likelihood of the whole chosen part, its prompt included."""
    ids, is_label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "is_label"))
    is_context = None
    if trainer == "orpo":
        is_context = np.zeros(len(ids), bool)
        is_context[1 : parts[0].num_tokens] = ~parts[0].is_label[1:]
        is_label = is_label | is_context
    desirable = bool(row.label) if trainer == "kto" else True
    preference = Preference(tuple(part.num_tokens for part in parts), desirable, is_context, limit)
    extras = [part.extras for part in parts if part.extras is not None]
    return Sample(ids, is_label, preference, extras[0].joined(extras[1:]) if extras else None)


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Judged samples with the completion of the one before, the first one with that of the last; what is too long is cut."""
    return [_with_completion(own, other) for own, other in zip(samples, [*samples[-1:], *samples[:-1]], strict=True)]


def _with_completion(own: Sample, other: Sample) -> Sample:
    assert own.preference is not None
    (start, begin), limit = (int(np.argmax(sample.is_label)) for sample in (own, other)), own.preference.limit
    ids = np.concatenate([own.ids[:start], other.ids[begin:]])[:limit]
    is_label = np.concatenate([own.is_label[:start], other.is_label[begin:]])[:limit]
    return Sample(ids, is_label, Preference((len(ids),), own.preference.desirable, None, limit))
