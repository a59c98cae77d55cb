"""Rows to token ids and label masks, of any length.

Owns the chat template, and where labels begin and end; what `truncate` does is samples.py's. A token is a label when the loss
is taken on predicting it: completions and their end token, assistant turns and their end tokens, or all of a plain text.

Tokens after the last label cannot change any loss and are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from packlora.config import DataConfig
from packlora.config.trainers import trainers
from packlora.data.rows import Row, with_system
from packlora.data.template import EndlessTemplateError, Spans, Template
from packlora.data.tokens import ended, tokens_and_offsets
from packlora.errors import InputError, quoted
from packlora.terminal import Told

if TYPE_CHECKING:
    from packlora.modality import Extras, ExtrasReader

ENCODE_BATCH = 1000
"""Rows tokenized in one call: enough to use the tokenizer's threads, little enough to keep memory flat."""


NO_COLUMNS: Mapping[str, np.ndarray] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """One encoded sample. ids [T] int32; is_label [T] bool, False at 0, and where a part begins, because nothing predicts the
    first token."""

    ids: np.ndarray
    is_label: np.ndarray
    extras: Extras | None = None
    """Content beside the tokens, such as images."""
    structure: ClassVar[bytes] = b""
    """What a class of samples has beside, for the hash of data."""
    columns: Mapping[str, np.ndarray] = field(default_factory=lambda: NO_COLUMNS)
    """Numbers of its row, float64: [] for all of its labels, or one for each [l]."""

    def first(self, limit: int) -> Sample:
        """Cut a sample of one part to at most `limit` tokens and the extras that are whole among them."""
        extras, labels = self.extras, self.num_labels if self.columns else 0
        if extras is not None:
            limit, extras = extras.cut(self.ids, limit)
        is_label = self.is_label[:limit]
        columns = {name: own[: is_label.sum()] if own.shape == (labels,) else own for name, own in self.columns.items()}
        return Sample(self.ids[:limit], is_label, extras=extras, columns=columns)

    def with_fields(self, fields: Mapping[str, Any]) -> Sample:
        """The sample with the fields of its row that are numbers, or lists of numbers, as columns."""
        found = {name: _numbers(value) for name, value in fields.items()}
        return replace(self, columns={**self.columns, **{name: own for name, own in found.items() if own is not None}})

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_labels(self) -> int:
        return int(self.is_label.sum())

    @property
    def num_learnt(self) -> int:
        """Tokens that are learnt, over which a loss of tokens is a mean."""
        return self.num_labels

    @property
    def label_places(self) -> np.ndarray:
        """Places of its label tokens; those of a group lie together."""
        return np.flatnonzero(self.is_label)

    @property
    def predicting(self) -> np.ndarray:
        """Places [l] of the tokens whose logits predict the labels."""
        return self.label_places - 1

    @property
    def labels(self) -> np.ndarray:
        """Token ids [l] of the labels."""
        labels: np.ndarray = self.ids[self.label_places]
        return labels

    @property
    def label_groups(self) -> np.ndarray | None:
        """Group [l] of each label; None of a sample without groups."""
        return None

    @property
    def part_lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of the sample's parts, which do not attend to each other."""
        return (len(self.ids),)

    def parts(self) -> list[Sample]:
        """Its parts as samples of their own, with their extras."""
        return [self]


def _numbers(value: Any) -> np.ndarray | None:
    """A number or a list of numbers, float64; None: it is something else, or not finite."""
    try:
        found = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim < 2 and np.isfinite(found).all() else None


def samples_hash(samples: Sequence[Sample]) -> str:
    """Hash of all token ids, labels and boundaries, in order; it tells whether data has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(len(sample.ids).to_bytes(4, "little") + sample.ids.tobytes() + sample.is_label.tobytes())
        digest.update(sample.structure)
        if sample.extras is not None:
            digest.update(sample.extras.digest)
        for name, numbers in sorted(sample.columns.items()):
            digest.update(repr((name, numbers.shape)).encode() + numbers.tobytes())
    return digest.hexdigest()


Notes = dict[str, tuple[int, str]]
"""Notes about samples that may surprise their author: by kind, the number of rows and the place of the first one."""


@dataclass(slots=True)
class Encoded:
    """The samples of one data path, in file order, and what was altered on the way."""

    samples: list[Sample]
    truncated: int = 0
    dropped: int = 0
    skipped: list[str] = field(default_factory=list)
    """Rows that are no samples, each with its place and what is wrong with it, where on_bad_row is skip."""
    notes: Notes = field(default_factory=dict)
    where: list[str] = field(default_factory=list)
    """File and line of each sample, where fields were kept."""


def noted(into: Notes, notes: Notes) -> None:
    """Add the notes of some rows to those of others."""
    for what, (rows, where) in notes.items():
        before, first = into.get(what, (0, where))
        into[what] = before + rows, first


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a row before it is tokenized, with the character spans that are learnt.

    template: the text was rendered by a chat template. notes: by kind, the message that the note is about.
    """

    text: str
    spans: Spans
    template: bool
    extras: Extras | None = None
    notes: dict[str, str] = field(default_factory=dict)


def refuse(error: InputError, data: DataConfig, job: str, skipped: list[str]) -> None:
    """Raise the error of a row that is no sample; where on_bad_row is skip, add it to `skipped`."""
    if data.on_bad_row == "error" or isinstance(error, EndlessTemplateError):
        raise error
    skipped.append(str(error).removeprefix(f"job {job!r}: "))


def encoded_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    data: DataConfig,
    job: str,
    skipped: list[str],
    told: Told,
    reader: ExtrasReader | None,
) -> Iterator[tuple[Row, Sample, Notes]]:
    """Encode rows, in order and of any length, and yield each row with its sample and notes for its author.

    Args:
        skipped: takes rows that are no samples where on_bad_row is skip; else they are raised.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"job {job!r}: the tokenizer {type(tokenizer).__name__} gives no offsets; a fast one is needed"
        )

    for start in range(0, len(rows), ENCODE_BATCH):
        texts: list[tuple[Row, Text | None]] = []
        for number, row in enumerate(rows[start : start + ENCODE_BATCH]):
            told(f"job {job}: encoding samples", start + number, len(rows))
            try:
                texts.append((row, text_of(row, tokenizer, data, job, reader)))
            except InputError as error:
                refuse(error, data, job, skipped)
        tokenized = iter(_tokenize([text for _, text in texts if text is not None], tokenizer))
        for row, text in texts:
            sample = next(tokenized) if text is not None else _given(row)
            problem = None if reader is None else reader.problem_of(sample.ids, sample.extras)
            if problem is None and not sample.num_labels:
                problem = f"the sample has no label tokens, {_why_no_labels(row)}"
            if problem is None:
                notes = text.notes if text is not None else {}
                yield row, _up_to_last_label(sample), {what: (1, f"{row.where}, {of}") for what, of in notes.items()}
            else:
                refuse(InputError(f"job {job!r}: {row.where}: {problem}"), data, job, skipped)


def text_of(row: Row, tokenizer: Any, data: DataConfig, job: str, reader: ExtrasReader | None = None) -> Text | None:
    """Text of a row, its learnt spans and its extras; None for a row of token ids.

    Raises:
        InputError: the row does not go with the job or the model.
    """
    where = f"job {job!r}: {row.where}"
    text = _without_extras(row, tokenizer, data, where)
    if not row.files:
        return text
    if reader is None:
        raise InputError(
            f"{where}: the row has images, which are not read under data.streaming, nor of a job that joins a run without any"
        )
    assert text is not None
    whole, spans, extras = reader.put_in(text.text, text.spans, row.files, where)
    return Text(whole, spans, text.template, extras, text.notes)


def _given(row: Row) -> Sample:
    """Sample of a row of token ids."""
    assert row.ids is not None and row.is_label is not None
    return _from_second(row.ids, row.is_label.copy())


def _why_no_labels(row: Row) -> str:
    turns = [message for message in row.messages or () if message["role"] == "assistant"]
    if row.messages and not turns:
        roles = ", ".join(dict.fromkeys(quoted(message["role"]) for message in row.messages[:9]))
        return f"so nothing to learn from: no message has the role assistant (roles are {roles})"
    if turns and not any(map(_is_learnt, turns)):
        return "so nothing to learn from: every turn of the assistant has the weight 0"
    return "so nothing to learn from"


def _tokenize(texts: list[Text], tokenizer: Any) -> list[Sample]:
    out: list[Sample | None] = [None] * len(texts)
    for template in (True, False):  # a template writes the special tokens itself
        chosen = [index for index, item in enumerate(texts) if item.template is template]
        if not chosen:
            continue
        tokens = tokens_and_offsets([texts[index].text for index in chosen], tokenizer, template)
        for index, (ids, offsets) in zip(chosen, tokens, strict=True):
            out[index] = _sample(ids, offsets, texts[index].spans, texts[index].extras)
    return [sample for sample in out if sample is not None]


def _sample(ids: np.ndarray, offsets: np.ndarray, spans: list[tuple[int, int]], extras: Extras | None) -> Sample:
    """Tokens that overlap a span are labels.

    An empty overlap counts: many byte-level tokenizers trim spaces from the offsets, so that a token of spaces alone has
    (its end, its end). Special tokens that the tokenizer added have (0, 0), and are not labels.
    """
    is_label = np.zeros(len(ids), bool)
    first, stop = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        is_label |= (stop > start) & (first < end)
    return _from_second(ids, is_label, extras)


def _from_second(ids: np.ndarray, is_label: np.ndarray, extras: Extras | None = None) -> Sample:
    is_label[:1] = False
    if extras is not None:
        is_label &= ids != extras.token_id
    return Sample(ids, is_label, extras=extras)


def _up_to_last_label(sample: Sample) -> Sample:
    return sample.first(int(np.flatnonzero(sample.is_label)[-1]) + 1)


def _without_extras(row: Row, tokenizer: Any, data: DataConfig, where: str) -> Text | None:
    """Text as in text_of, with marks in place of extras."""
    system, variables = data.system, data.chat_template_kwargs
    rendered = "data.system" if system is not None else "data.chat_template_kwargs" if variables else None
    if row.pair is not None:
        paired = " or ".join(trainers(lambda own: own.rows == "pairs"))
        raise InputError(
            f"{where}: 'chosen' and 'rejected' are compared by train.trainer: {paired}; here a loss is of one completion"
        )
    if (row.ids is not None or row.text is not None) and rendered is not None:
        raise InputError(f"{where}: {rendered} goes with prompts and messages; a plain text or token ids show none")
    if row.ids is not None:
        return None
    eos = tokenizer.eos_token or ""
    if row.text is not None:
        text = ended(row.text, eos)
        return Text(text, [(0, len(text))] if row.text else [], False)
    if not tokenizer.chat_template and (row.messages is not None or row.system is not None or rendered is not None):
        what = "a messages row" if row.messages is not None else "a message of the system"
        if row.messages is None and row.system is None and system is None:
            what = "data.chat_template_kwargs"
        raise InputError(
            f"{where}: {what} needs a chat template and the tokenizer has none; data.chat_template gives the job one"
        )
    if row.messages is None:
        assert row.prompt is not None
        if not row.completion:
            return Text(row.prompt, [], False)
        if not tokenizer.chat_template:
            text = row.prompt + ended(row.completion, eos)
            return Text(text, [(len(row.prompt), len(text))], False)
        messages = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.completion}]
    else:
        messages = row.messages
    from packlora.data.places import names_of

    whole = with_system(messages, row.system or system)
    names = ["'system'" if row.system else "data.system"] * (len(whole) - len(messages)) + names_of(messages)
    template = Template(tokenizer, row.tools or None, {**variables, **row.variables})
    return _conversation(whole, names, template, where, row.prompt)


def _conversation(
    messages: list[dict[str, Any]], names: list[str], template: Template, where: str, prompt: str | None
) -> Text:
    from packlora.data.places import check_variables
    from packlora.data.spans import learn

    try:
        check_variables(template)
        if prompt is not None:
            template.check_new(prompt, "give what a user says alone, or a row of token ids and labels")
        found = learn(template, messages, names)
    except InputError as error:
        raise type(error)(f"{where}: {error}") from None
    return Text(found.text, found.spans, True, None, found.notes)


def _is_learnt(message: dict[str, Any]) -> bool:
    return message.get("weight") != 0
