"""`packlora preview`: rows as training encodes them, with what is learnt marked.

It needs config.json and the tokenizer of the base model, neither weights nor PEFT. Ids and labels are those of the Sample that
training gets, their text is what the same functions make of the row.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from packlora.base.demo_model import base_path
from packlora.base.load import load_tokenizer, read_config, vocabulary_of
from packlora.base.shape import context_of
from packlora.config import JobConfig, Run
from packlora.data import encode
from packlora.data.encode import Encoded, Sample, text_of
from packlora.data.preference import ComparedSample
from packlora.data.readers import read_data, rows_of
from packlora.data.rows import Row
from packlora.data.samples import encode_rows
from packlora.data.template import set_clock, templated
from packlora.data.tokens import check_vocabulary, tokens_and_offsets
from packlora.errors import InputError, shown, spelt_out
from packlora.modality import ExtrasReader, plugin
from packlora.report.screen import Screen
from packlora.run_file import load_run, run_from
from packlora.terminal import Activity, Told, say, show, silent, standard_output

LEARNT, OPEN, CLOSE = "black on green", "⟦", "⟧"
"""Style of what is learnt on a terminal, and the marks around it elsewhere."""
PARTS = ("chosen", "rejected")
SHOWN_TARGETS = 5
"""Soft targets of a token that are shown."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a sample's text that is learnt as a whole, or not at all.

    part: chosen or rejected, of a pair; None of other samples. images: number of its tokens that stand for images; they are all
    of its tokens, or none.
    """

    text: str
    learnt: bool
    part: str | None = None
    images: int = 0

    def to_json(self) -> dict[str, Any]:
        more = {"part": self.part, "images": self.images}
        return {"text": self.text, "learnt": self.learnt} | {key: value for key, value in more.items() if value}


@dataclass(frozen=True, slots=True)
class Preview:
    """One sample of a job.

    row: number of its row, or line, in the file, from 1. pieces: their texts joined are its text up to the last label, special
    tokens included; of a pair that of the chosen part and then that of the rejected one. tokens, labels: numbers of its tokens
    and of those that are learnt. where: file and line. notes: what was cut, and what of the row may surprise its author.
    desirable: label of a judged completion, None of other samples.
    """

    job: str
    row: int
    pieces: tuple[Piece, ...]
    tokens: int
    labels: int
    where: str = ""
    notes: tuple[str, ...] = ()
    desirable: bool | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"job": self.job, "row": self.row, "pieces": [piece.to_json() for piece in self.pieces]}
        out |= {"tokens": self.tokens, "labels": self.labels}
        return out if self.desirable is None else out | {"desirable": self.desirable}


def preview(run: str | Path | Mapping[str, Any] | Run, rows: int | None = None) -> list[Preview]:
    """The samples of a run as training encodes them. Nothing is written; the base model needs no weights.

    Args:
        run: a run file, a mapping of its keys, or a Run.
        rows: rows that are read of each job, the first ones; None: all.

    Returns:
        The samples of all jobs, in order of their rows, also those that `eval_split` will hold out. What training leaves out
        (truncate: drop, on_bad_row: skip) is not among them.

    Raises:
        InputError: what training would refuse of these rows, in the same words.
    """
    return [sample for job in previews(run, rows) for sample in job.samples]


@dataclass(frozen=True, slots=True)
class JobPreview:
    """The samples of one job, and its rows that are left out, each with its place and why."""

    samples: list[Preview]
    left_out: list[str]


def previews(
    run: str | Path | Mapping[str, Any] | Run, rows: int | None = None, told: Told = silent
) -> Iterator[JobPreview]:
    """Previews of each job of a run; arguments and errors as of preview."""
    if rows is not None and rows < 1:
        raise InputError(f"rows: {rows}; at least 1 is shown")
    whole = run if isinstance(run, Run) else run_from(run) if isinstance(run, Mapping) else load_run(run)
    read = {job.name: _read(job, rows, told) for job in whole.jobs}
    told(f"reading the tokenizer of {whole.base_model}")
    encoder = _Encoder.of(whole, [row for own, _ in read.values() for row in own], rows)
    for job in whole.jobs:
        own, left_out = read[job.name]
        yield encoder.job(job, own, left_out, told)


def _read(job: JobConfig, rows: int | None, told: Told) -> tuple[list[Row], list[str]]:
    """Rows of a job, and those that are no samples, each with what is wrong with it."""
    out, skipped = list[Row](), list[str]()
    if job.rollout is not None:
        return out, skipped
    for source in job.data.train_sources:
        left = None if rows is None else rows - len(out)
        if left == 0:
            break
        if job.data.streaming:
            next(rows_of(source, job.name), None)  # refuses what cannot be streamed
        most = min((limit for limit in (left, source.max_samples) if limit is not None), default=None)
        limited = source.model_copy(update={"max_samples": most})
        found = read_data(limited, job.name, told, job.data.on_bad_row, pairs=job.train.declared.rows == "pairs")
        out += found.rows
        skipped += found.skipped
    return out, skipped


# --- samples ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Makes previews of rows. reader: of what rows have beside texts; None where no row has any. context: of the model.
    vocabulary: its embeddings, None where its configuration does not say. rows: most of each job; None: all."""

    run: Run
    tokenizer: Any
    context: int
    vocabulary: int | None
    reader: ExtrasReader | None
    rows: int | None

    @staticmethod
    def of(run: Run, rows: Sequence[Row], most: int | None) -> _Encoder:
        path = base_path(run.base_model)
        config, tokenizer, reader = read_config(path, run.revision, run.trust_remote_code), load_tokenizer(run), None
        set_clock(tokenizer, datetime.now())
        if any(half.files for row in rows for half in row.pair or (row,)):
            modality = plugin().modality(path, run.revision, config)
            tokenizer = templated(tokenizer, modality.chat_template)
            reader = modality.reader
        return _Encoder(run, tokenizer, context_of(config), vocabulary_of(config), reader, most)

    def job(self, job: JobConfig, rows: Sequence[Row], left_out: list[str], told: Told) -> JobPreview:
        tokenizer = self.tokenizer
        if job.data.chat_template is not None:
            from packlora.data.chat_templates import with_template

            tokenizer = with_template(tokenizer, job.data.chat_template, job.name)
        if job.rollout is not None:
            return self._prompts(job, tokenizer, told)
        out = JobPreview([], list(left_out))
        for number, row in enumerate(rows):
            told(f"job {job.name}: encoding samples", number, len(rows))
            self._add(job, row, tokenizer, out)
        return out

    def _prompts(self, job: JobConfig, tokenizer: Any, told: Told) -> JobPreview:
        """Prompts of a job that learns from what it generates."""
        longest = min(job.data.max_length, self.context) - job.rollout.max_new_tokens
        found, notes = import_module("packlora.rl.prompts").read_prompts(job, tokenizer, longest, told, self.rows)
        return JobPreview([
            Preview(
                job.name, number, (Piece(str(tokenizer.decode(prompt.ids)), False),), len(prompt.ids), 0, prompt.where,
                (f"up to {job.rollout.max_new_tokens} tokens are generated and learnt",),
            )
            for number, prompt in enumerate(found, 1)
        ], notes)  # fmt: skip

    def _add(self, job: JobConfig, row: Row, tokenizer: Any, out: JobPreview) -> None:
        """Encode a row alone, as training does, and say what became of it."""
        encoded = self._encoded(job, row, tokenizer, job.data.truncate)
        out.left_out.extend(encoded.skipped)
        if encoded.dropped:
            out.left_out.append(f"{row.where}: truncate: {job.data.truncate}: {self._too_long(job, row, tokenizer)}")
        for sample in encoded.samples:
            if self.vocabulary is not None:
                check_vocabulary(job.name, [sample.ids], self.vocabulary, tokenizer)
            texts = [text_of(half, tokenizer, job.data, job.name, self._reader(job)) for half in row.pair or (row,)]
            pieces = _pieces_of(sample, texts, tokenizer)
            notes = [f"{where} {what}" for what, (_, where) in encoded.notes.items()]
            notes += _targets_shown(sample, tokenizer) if row.targets is not None else []
            if encoded.truncated:
                notes.append(f"cut: {self._too_long(job, row, tokenizer)}")
            number = re.search(r"(\d+)$", row.where)
            desirable = None
            if isinstance(sample, ComparedSample) and job.train.declared.rows == "judged":
                desirable = sample.desirable
            out.samples.append(
                Preview(
                    job.name, int(number[1]) if number else 0, tuple(pieces), sample.num_tokens, sample.num_learnt,
                    row.where, tuple(notes), desirable,
                )
            )  # fmt: skip

    def _encoded(self, job: JobConfig, row: Row, tokenizer: Any, truncate: str) -> Encoded:
        asked, data = self.run.max_tokens_per_microbatch, job.data
        if truncate != data.truncate:
            data = data.model_copy(update={"truncate": truncate})
        limits = asked if isinstance(asked, int) else 2**31, job.name, self.context
        how: dict[str, Any] = {"reader": self._reader(job), "trainer": job.train.trainer, "may_be_empty": True}
        how["target_vocabulary"] = self.vocabulary
        return encode_rows([row], tokenizer, data, *limits, **how)

    def _reader(self, job: JobConfig) -> ExtrasReader | None:
        return None if job.data.streaming else self.reader

    def _too_long(self, job: JobConfig, row: Row, tokenizer: Any) -> str:
        """Words by which training would refuse a row that is too long."""
        try:
            self._encoded(job, row, tokenizer, "error")
        except InputError as error:
            return str(error).removeprefix(f"job {job.name!r}: {row.where}: ").partition(";")[0]
        return "after the cut nothing is left to learn"


# --- pieces ----------------------------------------------------------------------------------------------------------------


def _pieces_of(sample: Sample, texts: Sequence[encode.Text | None], tokenizer: Any) -> list[Piece]:
    """Pieces of a sample. texts: of its parts, as they were tokenized; None of token ids."""
    parts, out = sample.parts(), list[Piece]()
    names: Sequence[str | None] = PARTS if len(parts) > 1 else (None,)
    for part, text, name in zip(parts, texts, names, strict=True):
        whole, border = _decoded(part.ids, tokenizer) if text is None else _aligned(text, tokenizer)
        token = -1 if part.extras is None else part.extras.token_id
        flags, first, start = zip(part.is_label.tolist(), (part.ids == token).tolist(), strict=True), 0, 0
        for (learnt, is_image), group in itertools.groupby(flags):
            stop = first + len(list(group))
            end = max(start, border(stop))
            out.append(Piece(whole[start:end], learnt, name, (stop - first) * is_image))
            first, start = stop, end
    return out


def _targets_shown(sample: Sample, tokenizer: Any) -> list[str]:
    """Number of soft targets of a sample, and those of its first token that has some, the heaviest first."""
    places, counts = np.unique(sample.predicting, return_counts=True)
    weights = sample.columns["weights"][: counts[0]]
    heaviest = np.argsort(-weights, kind="stable")[:SHOWN_TARGETS].tolist()
    shown_ones = [f"{tokenizer.decode([int(sample.labels[at])])!r} {weights[at]:.4g}" for at in heaviest]
    more = ", ..." * (int(counts[0]) > len(heaviest))
    return [
        f"{sample.num_labels} soft targets, at most {counts.max()} of a token; of token {places[0] + 2}: "
        f"{', '.join(shown_ones)}{more}"
    ]


Border = Callable[[int], int]
"""Function from a number of tokens to the number of characters that they spell."""


def _aligned(text: encode.Text, tokenizer: Any) -> tuple[str, Border]:
    """The text that was tokenized, behind tokens that the tokenizer puts before any, and where each token ends in it.

    White space that offsets leave out belongs to the token behind it, as byte-level tokenizers mean it. Tokens that share one
    letter end where the letter does.
    """
    ((ids, places),) = tokens_and_offsets([text.text], tokenizer, text.template)
    added = int(np.argmax(places[:, 1] > 0))
    before = [str(token) for token in tokenizer.convert_ids_to_tokens(ids[:added].tolist())]
    ends = np.maximum.accumulate(places[:, 1]) + sum(map(len, before))

    def border(number: int) -> int:
        return int(ends[number - 1]) if number > added else sum(map(len, before[:number]))

    return "".join([*before, text.text]), border


def _decoded(ids: np.ndarray, tokenizer: Any) -> tuple[str, Border]:
    """The text that ids [T] spell, and where each token ends in it; a letter of several tokens belongs to the last of them."""

    def spelt(some: np.ndarray) -> str:
        return str(tokenizer.decode(some.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    whole = spelt(ids)

    def border(number: int) -> int:
        return len(whole) if number == len(ids) else _alike(whole, spelt(ids[:number]))

    return whole, border


def _alike(one: str, other: str) -> int:
    """Number of letters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


# --- printing --------------------------------------------------------------------------------------------------------------


def print_preview(run: Run, rows: int, as_json: bool) -> None:
    """Print previews of a run: in colour on a terminal, with marks elsewhere, or as JSON, one sample a line."""
    console = Screen(file=standard_output(), highlight=False, soft_wrap=True)
    with Activity() as told:
        found = list(previews(run, rows, told))
    for job in found:
        for sample in job.samples:
            if as_json:
                show(json.dumps(sample.to_json()))  # ASCII, which every output takes
            else:
                console.print(_shown(sample, console.color_system is None or console.no_color))
        for why in job.left_out:
            say(f"left out: {why}") if as_json else console.print(Text(f"left out: {why}\n"))


def _shown(sample: Preview, has_marks: bool) -> Text:
    judged = {None: "", True: ", desirable", False: ", undesirable"}[sample.desirable]
    out = Text(
        f"job {sample.job}, {shown(sample.where, 300)}: {sample.tokens} tokens, {sample.labels} learnt{judged}\n",
        "bold",
    )
    out.style = ""
    for note in sample.notes:
        out.append(f"note: {note}\n")
    part = None
    for piece in sample.pieces:
        if piece.part != part:
            out.append(f"\n--- {piece.part}\n" if part else f"--- {piece.part}\n", "bold")
            part = piece.part
        text = spelt_out(f"[{piece.images} tokens of images]" if piece.images else piece.text)
        if piece.learnt:
            out.append(f"{OPEN}{text}{CLOSE}" if has_marks else text, LEARNT)
        else:
            out.append(text)
    return out.append("\n")
