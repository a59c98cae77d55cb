"""Rows that other tools train on without a word, as their users have reported: refused, or left out and counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from packlora.config import DataConfig
from packlora.data.encode import Encoded
from packlora.data.rows import check_row
from packlora.data.samples import encode_rows
from packlora.errors import InputError

CALL = {"type": "function", "function": {"name": "dog", "arguments": {"a": "x"}}}
TOOL = {"type": "function", "function": {"name": "dog", "description": "d"}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "name": "dog", "tool_call_id": "1", "content": "t"}, {"role": "assistant", "content": "z"},
    ],
    "tools": [TOOL], "chat_template_kwargs": {"mood": "m"},
}  # fmt: skip


def pairs(tokenizer: Any, row: dict[str, Any], trainer: str = "dpo", **data: Any) -> Encoded:
    rows = [check_row(row, "row 1", "j"), check_row({"prompt": "a", "chosen": "b", "rejected": "c"}, "row 2", "j")]
    return encode_rows(rows, tokenizer, DataConfig(path="-", **data), 4096, "j", 4096, trainer=trainer)


def refusal(row: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        check_row(row, "row 1", "j")
    return str(caught.value)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("trainer", ["dpo", "orpo"])
def test_a_pair_of_equal_completions_has_no_gradient_and_is_no_sample(trainer: str, tokenizer: Any) -> None:
    assert "'chosen' and 'rejected' are the same" in refusal({"prompt": "a", "chosen": "b", "rejected": "b"})
    same = {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("b") | {"id": 7}]}
    with pytest.raises(InputError, match="row 1: the chosen and the rejected completion are the same tokens"):
        pairs(tokenizer, same, trainer)
    skipped = pairs(tokenizer, same, trainer, on_bad_row="skip")
    assert len(skipped.samples) == 1 and len(skipped.skipped) == 1


@pytest.mark.parametrize("trainer", ["dpo", "orpo"])
def test_a_pair_whose_difference_is_cut_off_is_dropped_and_counted(trainer: str, tokenizer: Any) -> None:
    long = {"prompt": "the", "chosen": "lazy dog " * 20 + "x", "rejected": "lazy dog " * 20 + "y"}
    cut = pairs(tokenizer, long, trainer, max_length=30, truncate="right")
    assert (len(cut.samples), cut.dropped, cut.truncated) == (1, 1, 0)
    assert len(pairs(tokenizer, long, trainer).samples) == 2


def test_a_completion_that_begins_with_the_prompt_s_messages_is_refused() -> None:
    said = "the completion begins with the messages of the prompt, so the model would see them twice"
    assert said in refusal({"prompt": [user("q")], "completion": [user("q"), answer("a")]})
    pair = {"prompt": [user("q")], "chosen": [user("q"), answer("a")], "rejected": [user("q"), answer("b")]}
    assert "row 1, chosen: " + said in refusal(pair)
    whole = [{"role": "system", "content": "s"}, user("p"), answer("a"), user("q")]
    for count in range(1, 5):
        assert said in refusal({"prompt": whole, "completion": [*whole[-count:], answer("b")]})
    call = answer("") | {"tool_calls": [{"type": "function", "function": {"name": "poll", "arguments": {}}}]}
    asked = [user("q"), call, {"role": "tool", "content": "not yet"}]
    assert check_row(
        {"prompt": asked, "completion": [*asked[1:], answer("b")]}, "row 1", "j"
    ).messages  # asked once more
    for count in (1, 3):
        assert said in refusal({"prompt": asked, "completion": [*asked[-count:], answer("b")]})
    assert check_row(
        {"prompt": [user("q")], "completion": [answer("a"), user("q"), answer("b")]}, "row 1", "j"
    ).messages


def test_texts_of_a_pair_that_begin_with_the_prompt_are_refused_but_for_a_greeting() -> None:
    asked, said = (
        "What is the capital of France? ",
        "'chosen' and 'rejected' begin with the prompt, so the model would see it twice",
    )
    row = {"prompt": asked, "chosen": asked + "Paris.", "rejected": asked + "Lyon."}
    assert said in refusal(row) and said in refusal(row | {"prompt": asked.strip()})
    alone = check_row({key: row[key] for key in ("chosen", "rejected")}, "row 1", "j").pair
    assert alone is not None and alone[0].prompt == asked.rstrip() and alone[0].completion == " Paris."
    for kept in (
        {"prompt": "Good morning!", "chosen": "Good morning! What can I do?", "rejected": "Good morning! What now?"},
        {"prompt": asked, "chosen": asked + "Paris.", "rejected": "Lyon."},
        {key: [{"role": "user" if key == "prompt" else "assistant", "content": text}] for key, text in row.items()},
    ):
        assert check_row(kept, "row 1", "j").pair is not None


PLACES: list[tuple[Any, ...]] = [
    ("messages", 0, "content"), ("messages", 1, "reasoning_content"), ("messages", 2, "name"), ("messages", 2, "tool_call_id"),
    ("messages", 1, "tool_calls", 0, "function", "name"), ("messages", 1, "tool_calls", 0, "function", "arguments", "a"),
    ("tools", 0, "function", "name"), ("tools", 0, "function", "description"), ("chat_template_kwargs", "mood"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize(("value", "said"), [("\ud800", "half of a surrogate pair"), (float("nan"), "")])
def test_what_is_no_text_and_no_number_is_refused_wherever_it_stands(
    place: tuple[Any, ...], value: Any, said: str
) -> None:
    row = copy.deepcopy(ROW)
    owner: Any = row
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    assert said in refusal(row)


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}, True])
def test_reasoning_that_is_no_text_is_refused_with_its_message(value: Any) -> None:
    row = copy.deepcopy(ROW)
    row["messages"][1]["reasoning_content"] = value
    assert "the reasoning_content of message 2 (assistant) must be a text" in refusal(row)


def test_a_long_role_does_not_fill_the_terminal(tokenizer: Any) -> None:
    row = check_row({"messages": [{"role": "r" * 10**5, "content": "a"}, answer("b")]}, "row 1", "j")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError) as caught:
        encode_rows([row], tokenizer, DataConfig(path="-"), 4096, "j")
    assert "message 1 (rrr" in str(caught.value) and len(str(caught.value)) < 2000
