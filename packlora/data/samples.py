"""Samples of a job's trainer, made of its rows: within max_length, the microbatch budget and the model's context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from packlora.config import BUILT_IN, DataConfig
from packlora.data.encode import Encoded, Notes, Sample, encoded_rows, noted, refuse
from packlora.data.rows import Row
from packlora.errors import InputError, plural
from packlora.terminal import Told, silent

if TYPE_CHECKING:
    from packlora.modality import ExtrasReader

ALIKE = "the chosen and the rejected completion are the same tokens, so there is no preference to learn"
JUDGED = "are labelled false, and learnt like the others; train.trainer kto reads labels"


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    budget: int,
    job: str,
    context: int = 2**31,
    told: Told = silent,
    reader: ExtrasReader | None = None,
    *,
    trainer: str = "sft",
    fields: bool = False,
    vocabulary: int | None = None,
    target_vocabulary: int | None = None,
    may_be_empty: bool = False,
) -> Encoded:
    """Tokenize rows and apply `max_length`, the microbatch budget and `truncate`.

    Of trainers that compare, pairs or judged completions, `max_length` and the model's context limit each part,
    the budget limits the sample, which is never split.

    Args:
        rows: from read_rows.
        tokenizer: a fast Hugging Face tokenizer.
        data: max_length and truncate of the job.
        budget: max_tokens_per_microbatch; no sample may be longer.
        job: name for messages.
        context: most positions that the model knows.
        told: hears how far it is.
        reader: of what rows have beside texts; None where no row has any.
        fields: whether fields of rows become columns of their samples.
        vocabulary: rows with tokens beyond it are no samples; None: not looked at.
        target_vocabulary: the same of rows of token ids and of soft targets, which are refused.
        may_be_empty: no sample is a result too.

    Raises:
        InputError: a row has no label tokens or is not what the trainer takes, its template cannot be followed, or it is too
            long and truncate is error.
    """
    is_one = BUILT_IN[trainer].rows == "completions"
    out, limits = Encoded([]), _Limits.of(data, budget, context, is_one)
    made: Iterable[tuple[Row, list[Sample], Notes]]
    if is_one:
        every = encoded_rows(rows, tokenizer, data, job, out.skipped, told, reader)
        made = ((row, [_with_fields(sample, row, fields)], notes) for row, sample, notes in every)
    else:
        from packlora.data.preference import compared_rows, joined

        made = compared_rows(trainer, rows, tokenizer, data, job, out.skipped, told, reader)
    for row, parts, notes in made:
        if vocabulary is not None and max(int(part.ids.max()) for part in parts) >= vocabulary:
            out.skipped.append(f"{row.where}: it has a token beyond the model's {vocabulary} embeddings")
            continue
        problem = ALIKE if _are_alike(parts) else None
        if row.ids is not None:
            problem, parts = _of_token_ids(row, parts, trainer, target_vocabulary)
        if problem is not None:
            refuse(InputError(f"job {job!r}: {row.where}: {problem}"), data, job, out.skipped)
            continue
        try:
            kept = limits.applied(parts)
        except InputError as error:
            raise InputError(f"job {job!r}: {row.where}: {error}") from None
        if (
            not kept or _are_alike(kept) or not all(part.num_labels for part in kept)
        ):  # a cut may take what was to be learnt
            out.dropped += 1
            continue
        out.truncated += kept is not parts
        whole = kept[0] if is_one else _with_fields(joined(kept, row, trainer, limits.part), row, fields)
        out.samples.append(whole)
        out.where += [row.where] * fields
        noted(out.notes, notes)
        if is_one and not fields and row.label is False:
            noted(out.notes, {JUDGED: (1, row.where)})
    if out.samples or may_be_empty:
        return out
    if len(out.skipped) >= len(rows):
        raise InputError(f"job {job!r}: none of {plural(len(rows), 'row')} is a sample, the first: {out.skipped[0]}")
    raise InputError(f"job {job!r}: truncate: {data.truncate} left no sample of {len(rows)} within {limits.described}")


def _of_token_ids(
    row: Row, parts: list[Sample], trainer: str, vocabulary: int | None
) -> tuple[str | None, list[Sample]]:
    """Problem of a row of token ids, None where there is none, and its sample, with soft targets if the row has some."""
    from packlora.data.token_ids import beyond

    if (problem := beyond(parts[0].ids, vocabulary)) is not None or row.targets is None:
        return problem, parts
    from packlora.data.targets import problem_of, with_targets

    return problem_of(row.targets, trainer, vocabulary), [with_targets(part, row.targets) for part in parts]


def _with_fields(sample: Sample, row: Row, fields: bool) -> Sample:
    """A sample with the columns of its row, which a cut shortens with it."""
    return sample.with_fields(row.fields) if fields else sample


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of samples, in tokens. part: most of a part; budget: most of a sample. named: what sets `part`, in words.
    is_asked: a key of the run file sets it. is_one: a sample has one part."""

    part: int
    budget: int
    named: str
    is_asked: bool
    is_one: bool
    truncate: str

    @staticmethod
    def of(data: DataConfig, budget: int, context: int, is_one: bool) -> _Limits:
        of_parts = {"max_length": data.max_length, "the model's context of": context}
        if is_one:
            of_parts["max_tokens_per_microbatch"] = budget
        name = min(of_parts, key=lambda key: of_parts[key])
        part = of_parts[name]
        return _Limits(part, budget, f"{name} {part}", name.startswith("max_"), is_one, data.truncate)

    @property
    def described(self) -> str:
        whole = f" and max_tokens_per_microbatch {self.budget}, into which a sample must fit whole"
        return self.named + whole * (not self.is_one and self.budget < 2**31)  # auto is no limit

    def applied(self, parts: list[Sample]) -> list[Sample]:
        """The parts of a sample; cut ones as a new list; empty where the sample is to be left out.

        Raises:
            InputError: it is too long, and truncate is error.
        """
        longest = max(parts, key=lambda part: part.num_tokens)
        if longest.num_tokens > self.part:
            if self.truncate == "error":
                raise InputError(self._too_long(longest))
            parts = [part.first(self.part) for part in parts] if self.truncate == "right" else []
        total = sum(part.num_tokens for part in parts)
        if total > self.budget and self.truncate == "error":
            raise InputError(
                f"the sample has {total} tokens, over max_tokens_per_microbatch {self.budget}; raise it, or set truncate to "
                "drop"
            )
        return parts if total <= self.budget else []

    def _too_long(self, part: Sample) -> str:
        what = "the sample" if self.is_one else "a prompt with its completion"
        seen, remedies = "", ["raise it"] * self.is_asked
        if part.extras is not None:
            seen = f", {part.extras.num_tokens} of them of {part.extras.kind}"
            remedies.append(f"use smaller {part.extras.kind}")
        remedy = ", ".join([*remedies, ("or " if remedies else "") + "set truncate to drop or right"])
        return f"{what} has {part.num_tokens} tokens{seen}, over {self.named}; {remedy}"


def _are_alike(parts: Sequence[Sample]) -> bool:
    """Whether two completions have the same tokens, which is possible when they differ only after a cut."""
    first, *others = parts
    return any(np.array_equal(first.ids, other.ids) for other in others)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """The samples of several sources, one after the other."""
    notes: Notes = {}
    for part in parts:
        noted(notes, part.notes)
    return Encoded(
        [sample for part in parts for sample in part.samples], sum(part.truncated for part in parts),
        sum(part.dropped for part in parts), [row for part in parts for row in part.skipped], notes,
    )  # fmt: skip
