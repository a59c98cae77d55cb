"""Rows without a chat template, rows that are too long, and what is refused. Labels of conversations: test_spans.py."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from conftest import CHAT
from tokenizers import processors

from packlora.config import DataConfig
from packlora.data.encode import Encoded, Sample
from packlora.data.rows import Row, check_row
from packlora.data.samples import encode_rows
from packlora.errors import InputError

OPEN = DataConfig(path="rows.jsonl")


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Any:
    """(template, trim) -> tokenizer."""

    def make(template: str | None, trim: bool = False) -> Any:
        made = copy.deepcopy(tokenizer)
        made.chat_template = template
        made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        return made

    return make


def encode(tokenizer: Any, *rows: Row, data: DataConfig = OPEN, budget: int = 4096) -> Encoded:
    return encode_rows(rows, tokenizer, data, budget, "first")


def pair(prompt: str, completion: str) -> Row:
    return Row("rows.jsonl, line 1", prompt=prompt, completion=completion)


def chat(*turns: tuple[str, str]) -> Row:
    return Row("rows.jsonl, line 1", messages=[{"role": role, "content": content} for role, content in turns])


def learnt(tokenizer: Any, sample: Sample) -> list[str]:
    """Decoded runs of label tokens."""
    groups = itertools.groupby(
        zip(sample.ids.tolist(), sample.is_label.tolist(), strict=True), key=lambda item: item[1]
    )
    return [tokenizer.decode([token for token, _ in group]) for is_label, group in groups if is_label]


def refusal(tokenizer: Any, *rows: Row, data: DataConfig = OPEN, budget: int = 4096) -> str:
    with pytest.raises(InputError) as caught:
        encode(tokenizer, *rows, data=data, budget=budget)
    assert str(caught.value).startswith("job 'first': ")
    return str(caught.value)


TRIMS = pytest.mark.parametrize("trim", [False, True], ids=["whole offsets", "offsets without spaces"])


# --- which tokens are labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "</s>"])
def test_without_a_chat_template_the_completion_and_one_end_token_are_learnt(make: Any, end: str) -> None:
    tokenizer = make(None)
    (sample,) = encode(tokenizer, pair("say: the dog,", " the dog   jumps" + end)).samples
    assert learnt(tokenizer, sample) == [" the dog   jumps</s>"]
    assert tokenizer.decode(sample.ids.tolist()) == "say: the dog, the dog   jumps</s>"


@TRIMS
def test_a_token_that_joins_the_end_of_the_prompt_and_the_completion_is_learnt(make: Any, trim: bool) -> None:
    tokenizer = make(None, trim)
    (sample,) = encode(tokenizer, pair("say: the ", "dog")).samples
    assert learnt(tokenizer, sample) == [" dog</s>"]


def test_nothing_after_the_last_label_is_kept(make: Any) -> None:
    tokenizer = make(CHAT)
    (sample,) = encode(tokenizer, chat(("user", "a"), ("assistant", "the dog"), ("user", "the quick fox"))).samples
    assert sample.is_label[-1]
    assert tokenizer.decode(sample.ids.tolist()).endswith("<|im_start|>assistant\nthe dog<|im_end|>")


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_an_empty_completion_is_refused_without_a_chat_template_too(make: Any) -> None:
    assert "line 1: the sample has no label tokens" in refusal(make(None), pair("the fox", ""))


def test_messages_without_a_chat_template_are_refused_with_their_line(make: Any) -> None:
    assert "line 1: a messages row needs a chat template and the tokenizer has none" in refusal(
        make(None), chat(("user", "u"), ("assistant", "a"))
    )


def test_a_slow_tokenizer_is_refused() -> None:
    assert "the tokenizer object gives no offsets; a fast one is needed" in refusal(object(), pair("a", "b"))


# --- truncate ----------------------------------------------------------------------------------------------------------

LONG = Row("rows.jsonl, line 7", prompt="the quick brown fox", completion="jumps over the lazy dog and then some more")


def test_a_sample_exactly_at_the_limit_is_kept_and_one_token_less_is_too_little(make: Any) -> None:
    tokenizer = make(None)
    whole = encode(tokenizer, LONG).samples[0].num_tokens
    kept = encode(tokenizer, LONG, data=DataConfig(path="p", max_length=whole), budget=whole)
    assert (len(kept.samples), kept.truncated, kept.dropped) == (1, 0, 0)
    refusal(tokenizer, LONG, data=DataConfig(path="p", max_length=whole - 1))
    refusal(tokenizer, LONG, budget=whole - 1)


def test_the_limit_does_not_count_what_follows_the_last_label(make: Any) -> None:
    tokenizer = make(CHAT)
    row, short = (
        chat(("user", "a"), ("assistant", "b"), ("user", "the quick fox " * 9)),
        chat(("user", "a"), ("assistant", "b")),
    )
    limit = encode(tokenizer, short).samples[0].num_tokens
    assert encode(tokenizer, row, data=DataConfig(path="p", max_length=limit)).samples[0].num_tokens == limit


def test_truncate_drop_leaves_long_samples_out_and_counts_them(make: Any) -> None:
    tokenizer = make(None)
    rows = [pair("a", " dog"), LONG, pair("the", " fox"), LONG]
    out = encode(tokenizer, *rows, data=DataConfig(path="p", max_length=9, truncate="drop"))
    assert [learnt(tokenizer, sample) for sample in out.samples] == [[" dog</s>"], [" fox</s>"]]
    assert (out.truncated, out.dropped) == (0, 2)


def test_truncate_right_keeps_the_first_tokens_and_drops_what_has_no_label_left(make: Any) -> None:
    tokenizer = make(None)
    (whole,) = encode(tokenizer, LONG).samples
    first_label = int(np.flatnonzero(whole.is_label)[0])
    for limit in (first_label + 1, first_label + 3):
        out = encode(tokenizer, LONG, pair("", "dog"), data=DataConfig(path="p", max_length=limit, truncate="right"))
        assert np.array_equal(out.samples[0].ids, whole.ids[:limit])
        assert np.array_equal(out.samples[0].is_label, whole.is_label[:limit])
        assert (len(out.samples), out.truncated, out.dropped) == (2, 1, 0)
    data = DataConfig(path="p", max_length=first_label, truncate="right")
    out = encode(tokenizer, LONG, pair("", "dog"), data=data)
    assert (len(out.samples), out.truncated, out.dropped) == (1, 0, 1)


@pytest.mark.parametrize("truncate", ["drop", "right"])
def test_a_truncation_that_leaves_no_sample_is_refused(make: Any, truncate: Any) -> None:
    data = DataConfig(path="p", max_length=3, truncate=truncate)
    assert f"truncate: {truncate} left no sample of 2 within max_length 3" in refusal(make(None), LONG, LONG, data=data)


def test_completions_that_are_labelled_false_are_learnt_with_a_note(make: Any) -> None:
    """Judged rows under a trainer that reads no labels."""
    rows = [{"prompt": "a", "completion": " b", "label": label} for label in (True, False, "false", False)]
    read = [check_row(row, f"line {number}", "first") for number, row in enumerate(rows, 1)]

    def told(**options: Any) -> Any:
        return encode_rows(read, make(None), DataConfig(path="-"), 99, "first", **options).notes

    assert told() == {"are labelled false, and learnt like the others; train.trainer kto reads labels": (2, "line 2")}
    assert told(fields=True) == {}, "a loss of the user's own may read them"
