"""Keys by which other tools say what is learnt, shown or called: honoured, or refused by name; none is passed over."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from packlora.config import DataConfig
from packlora.data.encode import Sample
from packlora.data.messages import FLAGS
from packlora.data.readers import read_data
from packlora.data.rows import check_row
from packlora.data.samples import encode_rows
from packlora.errors import InputError

CALLS = (
    "{% if tools is defined and tools is not none %}tools:{% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% if mood is defined %}mood {{ mood }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}<|call|>{{ c.function.name }} "
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows whatever is not none, and knows one variable of its own."""
TOOL = {"type": "function", "function": {"name": "dog", "parameters": {"type": "object", "properties": {}}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "the"}, {"role": "assistant", "content": "quick"}, {"role": "user", "content": "brown"},
    {"role": "assistant", "content": "fox"},
]  # fmt: skip


@pytest.fixture(scope="module")
def calls(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_tokens([AddedToken("<|call|>", special=True)], special_tokens=False)
    made.chat_template = CALLS
    return made


def encode(row: dict[str, Any], tokenizer: Any) -> Sample:
    (sample,) = encode_rows([check_row(row, "row 1", "first")], tokenizer, DataConfig(path="-"), 4096, "first").samples
    return sample


def refusal(row: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        check_row(row, "row 1", "first")
    text = str(caught.value)
    assert text.startswith("job 'first': row 1: ") and text.isprintable()
    return text


def learnt(sample: Sample, tokenizer: Any) -> list[str]:
    marked = zip(sample.ids.tolist(), sample.is_label.tolist(), strict=True)
    groups = itertools.groupby(marked, key=lambda item: item[1])
    return [tokenizer.decode([token for token, _ in group]) for is_label, group in groups if is_label]


def turns(**of_first_answer: Any) -> list[dict[str, Any]]:
    first = TURNS[1] | of_first_answer
    return [TURNS[0], first, *TURNS[2:]]


# --- which turns are learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, 0, 0.0])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_turn_that_a_flag_says_is_not_learnt_is_read_alone(flag: str, value: Any, calls: Any) -> None:
    plain = encode({"messages": TURNS}, calls)
    assert learnt(plain, calls) == ["quick<|im_end|>", "fox<|im_end|>"]
    sample = encode({"messages": turns(**{flag: value})}, calls)
    assert learnt(sample, calls) == ["fox<|im_end|>"]
    assert sample.ids.tolist() == plain.ids.tolist(), "no template sees the flag"
    for said in (True, 1, 1.0, None):
        assert learnt(encode({"messages": turns(**{flag: said})}, calls), calls) == learnt(plain, calls)
    shared = [{"from": "human", "value": "the"}, {"from": "gpt", "value": "quick", flag: value}]
    shared += [{"from": "human", "value": "brown"}, {"from": "gpt", "value": "fox", flag: True}]
    assert learnt(encode({"conversations": shared}, calls), calls) == ["fox<|im_end|>"]
    parts = {"prompt": TURNS[:1], "completion": turns(**{flag: value})[1:]}
    assert learnt(encode(parts, calls), calls) == ["fox<|im_end|>"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"loss": 0.5}, "message 2 (assistant) has the loss 0.5; only true and false, or 1 and 0, are accepted"),
        ({"train": "no"}, "message 2 (assistant) has the train 'no'; only true and false"),
        ({"loss_mask": [0, 1]}, "message 2 (assistant) has the loss_mask [0, 1]; only true"),
        ({"loss_scale": 2}, "message 2 (assistant) has the loss_scale 2; only true"),
        ({"train": True, "weight": 0}, "message 2 (assistant) has weight 0 and train True, of which one says that it is"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, "has 'train_detail', which is not read"),
        ({"mask": True}, "message 2 (assistant) has 'mask', which is not read; say by weight: 0 that a turn is not learnt"),
        ({"masked": True}, "message 2 (assistant) has 'masked', which is not read; say by weight: 0 that a turn is not learnt"),
        ({"channel": "analysis"}, "has 'channel', which is not read; write thoughts as reasoning_content"),
        ({"content": [{"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}]},
         "message 2 has a block with the train False; which parts of a turn are learnt cannot be said here"),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, "message 2 has a block with the weight 0; which parts"),
        ({"refusal": "I cannot"}, "message 2 (assistant) has 'refusal', which is not read; write what the assistant says"),
        ({"audio": {"id": "audio_1"}}, "message 2 (assistant) has 'audio', which is not read"),
        ({"images": ["a.png"]}, "message 2 (assistant) has 'images', which is not read; write images as blocks"),
    ],
)  # fmt: skip
def test_a_flag_that_cannot_be_honoured_is_refused_with_its_message(flags: dict[str, Any], said: str) -> None:
    assert said in refusal({"messages": turns(**flags)})


def test_a_flag_says_of_others_than_the_assistant_only_that_they_are_not_learnt() -> None:
    row = {"messages": [TURNS[0] | {"train": False, "loss": 0}, TURNS[1]]}
    assert (check_row(row, "row 1", "first").messages or [])[0] == TURNS[0] | {"weight": 0}
    said = refusal({"messages": [TURNS[0] | {"loss": True}, TURNS[1]]})
    assert "message 1 (user) has the loss True, but only turns of the assistant are learnt" in said
    said = refusal({"prompt": [TURNS[0] | {"train": True}], "completion": TURNS[1:2]})
    assert "message 1 of 'prompt' has the train True, but a prompt is not learnt" in said


def test_of_a_row_with_mask_history_the_last_answer_alone_is_learnt(calls: Any) -> None:
    assert learnt(encode({"messages": TURNS, "mask_history": True}, calls), calls) == ["fox<|im_end|>"]
    assert len(learnt(encode({"messages": TURNS, "mask_history": False}, calls), calls)) == 2
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2
    assert learnt(encode({"conversations": said, "mask_history": True}, calls), calls) == ["b<|im_end|>"]
    assert "'mask_history' is true or false, found 'last'" in refusal({"messages": TURNS, "mask_history": "last"})
    assert "'mask_history' goes with a prompt or messages" in refusal({"text": "a", "mask_history": True})


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks", "loss_mask"])
def test_of_token_ids_those_are_learnt_that_a_mask_has(mask: str, calls: Any) -> None:
    row = check_row({"input_ids": [5, 6, 7, 8], mask: [0, 1, 0, 1]}, "row 1", "first")
    assert row.is_label is not None
    assert row.is_label.tolist() == [False, True, False, True]
    row = check_row({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], mask: [0, 1, 0, 1]}, "row 1", "first")
    assert row.is_label is not None
    assert row.is_label.tolist() == [False, False, False, True]
    said = f"{mask!r} must have 2 numbers, 1 for each of the 'input_ids' that is learnt"
    assert said in refusal({"input_ids": [5, 6], mask: [1]}) and said in refusal({"input_ids": [5, 6], mask: [1, 2]})
    assert f"{mask!r} goes with 'input_ids'" in refusal({"messages": TURNS, mask: [1, 0]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"weight": 0.5}, "the row has the weight 0.5, but all rows count alike"),
        ({"sample_weight": 0}, "the row has the sample_weight 0, but all rows"),
        ({"videos": ["a.mp4"]}, "the row has 'videos', which is not read; of texts and images alone a model is trained"),
        ({"audio": {"path": "a.wav"}}, "the row has 'audio', which is not read"),
        ({"objects": {"bbox": [[1, 2, 3, 4]]}}, "the row has 'objects', which is not read; boxes are not read"),
        ({"train_on_inputs": True}, "the row has 'train_on_inputs', which is not read; prompts are not learnt here"),
        ({"kto_tag": True}, "the row has 'kto_tag', which is not read; write it as label"),
        ({"rejected_response": "a"}, "the row has 'rejected_response', which is not read; write preferences as prompt"),
        ({"chat_template": "{{ x }}"}, "the row has 'chat_template', which is not read; the chat template is that of"),
        ({"enable_thinking": True}, "'enable_thinking', which is not read; write it into chat_template_kwargs"),
        ({"documents": [{"title": "a"}]}, "'documents', which is not read; write it into chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be a mapping, found a list"),
        ({"chat_template_kwargs": {"messages": []}}, "has 'messages', which is no variable of a chat template"),
        ({"chat_template_kwargs": "{"}, "the text in 'chat_template_kwargs': not valid JSON"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, *TURNS]}, "and a message of the system that says"),
        ({"parallel_tool_calls": "no"}, "'parallel_tool_calls' is true or false, found 'no'"),
    ],
)  # fmt: skip
def test_what_a_row_says_and_is_not_honoured_is_refused_by_name(row: dict[str, Any], said: str) -> None:
    assert said in refusal({"messages": TURNS} | row)


@pytest.mark.parametrize("key", ["tools", "images", "system", "chat_template_kwargs", "position_ids", "pixel_values"])
def test_what_token_ids_cannot_be_given_is_refused_by_name(key: str) -> None:
    value = {"tools": [TOOL], "images": ["a.png"], "system": "a", "chat_template_kwargs": {"a": 1}}.get(key, [0, 0])
    assert f"{key!r} " in refusal({"input_ids": [1, 2], key: value})


# --- what the chat template is given -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"mood": "lazy"}, '{"mood": "lazy"}'])
def test_a_row_s_chat_template_kwargs_reach_the_template(given: Any, calls: Any, tokenizer: Any) -> None:
    rows = [
        {"messages": TURNS[:2]}, {"prompt": "the", "completion": "quick"}, {"instruction": "the", "output": "quick"},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
    ]  # fmt: skip
    for row in rows:
        sample = encode(row | {"chat_template_kwargs": given}, calls)
        assert calls.decode(sample.ids.tolist()).startswith("mood lazy\n<|im_start|>user\nthe<|im_end|>")
        assert learnt(sample, calls) == ["quick<|im_end|>"]
        with pytest.raises(InputError, match="chat_template_kwargs has 'mood', which the chat template does not use"):
            encode(row | {"chat_template_kwargs": given}, tokenizer)
    pair = {"prompt": "the", "chosen": "quick", "rejected": "fox", "chat_template_kwargs": given}
    data = DataConfig(path="-")
    rows = [check_row(pair, "row 1", "first")]
    (sample,) = encode_rows(rows, calls, data, 4096, "first", 4096, trainer="dpo").samples
    assert [calls.decode(part.ids.tolist())[:9] for part in sample.parts()] == ["mood lazy"] * 2


# --- tools and calls, also as JSON in JSON -----------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "dog", "arguments": {"size": 3}}}
TEXT = {"id": "1", "type": "function", "function": {"name": "dog", "arguments": '{"size": 3}'}}
ASKED = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    "said",
    [
        {"tool_calls": [TEXT]}, {"tool_calls": json.dumps([CALL])}, {"tool_calls": [json.dumps(CALL)]},
        {"tool_calls": json.dumps([TEXT])}, {"tool_calls": [{"name": "dog", "arguments": {"size": 3}}]},
        {"function_call": {"name": "dog", "arguments": '{"size": 3}'}}, {"tool_calls": [CALL], "content": None},
        {"function_call": json.dumps({"name": "dog", "arguments": {"size": 3}}), "content": None, "tool_calls": []},
    ],
)  # fmt: skip
def test_calls_in_every_spelling_are_learnt_alike(said: dict[str, Any], calls: Any) -> None:
    sample = encode({"messages": ASKED}, calls)
    assert learnt(sample, calls) == ['<|call|>dog {"size": 3}<|im_end|>']
    assert encode({"messages": [ASKED[0], {"role": "assistant", "content": ""} | said]}, calls).ids.tolist() == (
        sample.ids.tolist()
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"tool_calls": {"name": "dog"}}, "the tool_calls of message 2 (assistant) must be a list, found a mapping"),
        ({"tool_calls": [3]}, "call 1 of message 2 (assistant) must be {function: {name, arguments}}"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "dog", "input": "a"}}]}, "call 1 of message 2 (assistant) must"),
        ({"tool_calls": [{"function": {"name": "", "arguments": {}}}]}, "with the name of the function"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": "{"}}]},
         "the arguments of call 1 of message 2 (assistant): not valid JSON"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": "3"}}]},
         "the arguments of call 1 of message 2 (assistant) must be a mapping or the JSON of one, found '3'"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": '{"a": 1, "a": 2}'}}]}, "the key 'a' stands twice"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": '{"a": NaN}'}}]},
         "the arguments of call 1 of message 2 (assistant) has the number nan, which JSON does not have"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": '{"a": [1e400]}'}}]}, "has the number inf"),
        ({"tool_calls": [{"function": {"name": "dog", "arguments": '{"a": "\\ud800"}'}}]}, "half of a surrogate pair"),
        ({"tool_calls": [{"name": "dog", "parameters": {"a": 1}}]},
         "call 1 of message 2 (assistant) has 'parameters' and no arguments beside its name"),
        ({"tool_calls": [{"name": "dog", "args": {"a": 1}, "id": "1"}]}, "has 'args' and no arguments"),
        ({"tool_calls": [{"function": {"name": "dog"}, "arguments": {"a": 1}}]}, "has 'arguments' and no arguments beside"),
        ({"tool_calls": "["}, "the text in the tool_calls of message 2 (assistant): not valid JSON"),
        ({"tool_calls": [CALL], "function_call": {"name": "dog"}}, "has function_call, an older form of tool_calls, and"),
        ({"role": "user", "tool_calls": [CALL]}, "message 2 (user) has tool_calls, but only the assistant calls tools"),
        ({"role": "tool_call"}, "has the role 'tool_call'; write it as a message of the assistant, with tool_calls"),
        ({"role": "observation"}, "message 2 has the role 'observation'; write it as a message of tool"),
    ],
)  # fmt: skip
def test_a_call_that_is_none_is_refused_with_its_place(message: dict[str, Any], said: str) -> None:
    assert said in refusal({"messages": [TURNS[0], {"role": "assistant", "content": "b"} | message]})


def schema(*names: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}, **more}
    return {"type": "function", "function": {"name": "dog", "description": "d", "parameters": parameters}}


@pytest.mark.parametrize("write", [dict, json.dumps])
def test_a_null_that_a_table_left_for_a_property_of_another_tool_is_refused(write: Any, calls: Any) -> None:
    def row(tool: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "dog", "arguments": write(arguments)}}
        return {"messages": [ASKED[0], ASKED[1] | {"tool_calls": [call]}], "tools": [tool]}

    said = refusal(row(schema("size"), size="3", city=None))
    assert (
        "message 2 (assistant) calls 'dog' with null for 'city', which the tool does not have; leave that out" in said
    )
    tool = schema("size", "city")
    tool["function"]["parameters"]["properties"]["city"] = None
    assert "the tool 'dog' has null for its property 'city'; leave that out" in refusal(row(tool, size="3"))
    for taken in (schema("size"), schema("city", additionalProperties=True)):
        assert learnt(encode(row(taken, size=None), calls), calls) == ['<|call|>dog {"size": null}<|im_end|>']


def test_a_row_without_parallel_calls_has_one_call_a_turn(calls: Any) -> None:
    row = {"messages": ASKED, "tools": [TOOL], "parallel_tool_calls": False}
    assert learnt(encode(row, calls), calls) == ['<|call|>dog {"size": 3}<|im_end|>']
    twice = {"messages": [ASKED[0], ASKED[1] | {"tool_calls": [CALL, CALL]}], "parallel_tool_calls": False}
    assert "message 2 (assistant) has 2 tool_calls, but the row says parallel_tool_calls: false" in refusal(twice)
    assert encode(twice | {"parallel_tool_calls": True}, calls).num_labels


def test_tools_and_functions_at_once_are_refused() -> None:
    said = refusal({"messages": TURNS, "tools": [TOOL], "functions": [TOOL]})
    assert "'functions' is an older form of 'tools'; give one of them" in said


def test_alpaca_s_rows_keep_what_stands_beside_them(tmp_path: Path) -> None:

    def said(**keys: Any) -> str:
        return refusal({"instruction": "a", "output": "b"} | keys)

    assert "'videos', which is not read" in said(videos=["a.mp4"])
    assert "is a relative path, which is looked up in the folder" in said(images=["a.png"])
    row = check_row({"instruction": "a", "output": "b", "system": "c", "label": True}, "row 1", "first")
    assert (row.prompt, row.completion, row.system, row.label) == ("a", "b", "c", True)
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"instruction": "a", "output": "b", "weight": 0}) + "\n" + json.dumps({"text": "a"}) + "\n"
    )
    read = read_data(str(path), "first", on_bad_row="skip")
    assert len(read.rows) == 1 and "has the weight 0, but all rows count alike" in read.skipped[0]


def test_a_tool_in_a_form_that_the_template_does_not_know_is_refused_by_name(calls: Any) -> None:
    made = copy.deepcopy(calls)
    made.chat_template = CALLS.replace("{{ t | tojson }}", "{{ (t.function or {}).name }}")
    assert encode({"messages": TURNS, "tools": [TOOL]}, made).num_labels
    with pytest.raises(InputError, match="the chat template does not show the tool 'dog'"):
        encode({"messages": TURNS, "tools": [TOOL["function"]]}, made)
