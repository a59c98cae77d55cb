"""Rows of preferences to samples: a prompt with two completions, or with one that is judged.

A sample of two completions has two parts, which lie one behind the other and do not see each other: so both are always in one
microbatch, and a pair is placed as any sample is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from packlora.config import BUILT_IN, DataConfig
from packlora.data.encode import Notes, Sample, encoded_rows, refuse
from packlora.data.rows import Row
from packlora.errors import InputError, quoted
from packlora.terminal import Told

if TYPE_CHECKING:
    from packlora.modality import ExtrasReader


@dataclass(frozen=True, slots=True)
class ComparedSample(Sample):
    """One or two completions of a prompt, which are compared or judged.

    lengths: tokens of its parts: the prompt with the chosen completion and the prompt with the rejected one, or the prompt with
    the only completion. desirable: label of an only completion. is_context: [T] bool, label tokens outside of completions; None
    where there are none. limit: most tokens of a part.
    """

    lengths: tuple[int, ...] = ()
    desirable: bool = True
    is_context: np.ndarray | None = None
    limit: int = 2**31

    @property
    def structure(self) -> bytes:  # type: ignore[override]
        """Lengths of the parts, the label, and what is context."""
        context = b"" if self.is_context is None else self.is_context.tobytes()
        return repr((self.lengths, self.desirable)).encode() + context

    @property
    def label_places(self) -> np.ndarray:
        """Places of its label tokens, group by group."""
        return np.concatenate(self.groups())

    @property
    def group_counts(self) -> list[int]:
        """Label tokens of its three groups, see `groups`."""
        return [len(places) for places in self.groups()]

    @property
    def label_groups(self) -> np.ndarray:
        """Group [l] of each label, 0 to 2 as in `groups`."""
        return np.repeat(np.arange(3.0), self.group_counts)

    @property
    def part_lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of the parts."""
        return self.lengths

    def parts(self) -> list[Sample]:
        """Its parts as samples of their own, with their extras."""
        stops = np.cumsum(self.lengths)[:-1]
        ids, is_label = np.split(self.ids, stops), np.split(self.is_label, stops)
        extras = [None] * len(ids) if self.extras is None else self.extras.split(ids)
        return [Sample(own, learnt, extras=more) for own, learnt, more in zip(ids, is_label, extras, strict=True)]

    def groups(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places of the label tokens: tokens outside of completions, tokens of the chosen or only completion, and tokens of the
        rejected one."""
        labels, context = np.flatnonzero(self.is_label), self.is_context
        is_context = np.zeros(len(labels), bool) if context is None else context[labels]
        own = labels[~is_context]
        is_first = own < self.lengths[0]
        return labels[is_context], own[is_first], own[~is_first]


def compared(samples: Sequence[Sample]) -> Sequence[ComparedSample]:
    """The samples of a job whose trainer compares, by their class."""
    return cast(Sequence[ComparedSample], samples)


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


def joined(parts: Sequence[Sample], row: Row, trainer: str, limit: int) -> ComparedSample:
    """The parts of a sample as one. A trainer that learns prompts has the whole chosen part as labels."""
    ids, is_label = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "is_label"))
    own, is_context = BUILT_IN[trainer], None
    if own.learns_prompt:
        is_context = np.zeros(len(ids), bool)
        is_context[1 : parts[0].num_tokens] = ~parts[0].is_label[1:]
        is_label = is_label | is_context
    desirable = bool(row.label) if own.rows == "judged" else True
    extras = [part.extras for part in parts if part.extras is not None]
    return ComparedSample(
        ids, is_label, extras[0].joined(extras[1:]) if extras else None,
        lengths=tuple(part.num_tokens for part in parts), desirable=desirable, is_context=is_context, limit=limit,
    )  # fmt: skip


def mismatched(samples: Sequence[ComparedSample]) -> list[ComparedSample]:
    """Judged samples with the completion of the one before, the first one with that of the last; what is too long is cut."""
    return [_with_completion(own, other) for own, other in zip(samples, [*samples[-1:], *samples[:-1]], strict=True)]


def _with_completion(own: ComparedSample, other: ComparedSample) -> ComparedSample:
    start, begin = (int(np.argmax(sample.is_label)) for sample in (own, other))
    ids = np.concatenate([own.ids[:start], other.ids[begin:]])[: own.limit]
    is_label = np.concatenate([own.is_label[:start], other.is_label[begin:]])[: own.limit]
    return ComparedSample(ids, is_label, lengths=(len(ids),), desirable=own.desirable, limit=own.limit)
