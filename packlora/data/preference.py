"""Rows of preferences to samples: a prompt with two completions, or with one that is judged.

A sample of two completions has two parts, which lie one behind the other and do not see each other: so both are always in one
microbatch, and a pair is placed as any sample is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packlora.config import BUILT_IN, DataConfig
from packlora.data.encode import Notes, Preference, Sample, encoded_rows, refuse
from packlora.data.rows import Row
from packlora.errors import InputError, quoted
from packlora.terminal import Told

if TYPE_CHECKING:
    from packlora.modality import ExtrasReader


def compared_rows(
    trainer: str,
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    job: str,
    skipped: list[str],
    told: Told,
    reader: ExtrasReader | None,
) -> Iterator[tuple[Row, list[Sample], Notes]]:
    """Encode rows for a trainer that compares: yield each row with the samples of its parts, and its notes once.

    Args:
        skipped: takes rows that are no samples, or not what the trainer takes, where on_bad_row is skip; else they are raised.
    """
    taken = [row for row in rows if _is_taken(row, trainer, data, job, skipped)]
    found, notes = _halves(taken, tokenizer, data, job, skipped, told, reader)
    for row in taken:
        halves = row.pair or (row,)
        if all(id(half) in found for half in halves):
            own = {what: told_of for half in reversed(halves) for what, told_of in notes[id(half)].items()}
            yield row, [found[id(half)] for half in halves], own


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
    own, problem = BUILT_IN[trainer], None
    if own.rows == "pairs" and row.pair is None:
        problem = f"train.trainer: {trainer} compares two completions; rows are {{prompt, chosen, rejected}}"
    if own.rows == "judged" and (row.pair is not None or not isinstance(row.label, bool)):
        found = "a pair" if row.pair is not None else f"label {quoted(row.label)}"
        problem = (
            f"train.trainer: {trainer} takes rows {{prompt, completion, label}} with a label of true or false; "
            f"found {found}"
        )
    if not own.takes_images and any(half.files for half in row.pair or (row,)):
        problem = f"the row has images, which train.trainer: {trainer} does not take in this version"
    if problem is not None:
        refuse(InputError(f"job {job!r}: {row.where}: {problem}"), data, job, skipped)
    return problem is None


def joined(parts: Sequence[Sample], row: Row, trainer: str, limit: int) -> Sample:
    """The parts of a sample as one. A trainer that learns prompts has the whole chosen part as labels."""
    ids, is_label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "is_label"))
    own, is_context = BUILT_IN[trainer], None
    if own.learns_prompt:
        is_context = np.zeros(len(ids), bool)
        is_context[1 : parts[0].num_tokens] = ~parts[0].is_label[1:]
        is_label = is_label | is_context
    desirable = bool(row.label) if own.rows == "judged" else True
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
