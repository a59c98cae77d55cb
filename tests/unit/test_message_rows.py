"""Rows of messages as other tools write them: weights, tools, calls, and forms that are refused with the way to mend them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken

from packlora.config import DataConfig
from packlora.data.encode import Sample
from packlora.data.readers import read_rows
from packlora.data.samples import encode_rows
from packlora.errors import InputError

WITH_TOOLS = (  # tools before the conversation; calls after the content, between special tokens
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}<|call|>{{ call['function']['name'] }}<|/call|>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "dog", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def knows_tools(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_tokens([AddedToken(text, special=True) for text in ("<|call|>", "<|/call|>")], special_tokens=False)
    made.chat_template = WITH_TOOLS
    return made


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def encode(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> Sample:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (sample,) = encode_rows(read_rows(str(path), "first"), tokenizer, DataConfig(path=str(path)), 4096, "first").samples
    return sample


def refusal(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        encode(tmp_path, tokenizer, row)
    text = str(caught.value)
    assert text.startswith(f"job 'first': {tmp_path}/rows.jsonl, line 1: ")
    return text


# --- weight ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [2, 0.5, -1, True, False, "0", [0], {}])
def test_a_weight_that_is_neither_0_nor_1_is_refused_with_its_line(tmp_path: Path, tokenizer: Any, weight: Any) -> None:
    row = {"messages": [message("user", "a"), message("assistant", "b", weight=weight)]}
    said = refusal(tmp_path, tokenizer, row)
    assert f"message 2 (assistant) has the weight {weight!r}; only 0 (not learnt) and 1 are accepted" in said


def test_weight_1_on_a_turn_that_is_never_learnt_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    row = {"messages": [message("user", "a", weight=1), message("assistant", "b")]}
    assert "message 1 (user) has the weight 1, but only turns of the assistant are learnt" in refusal(
        tmp_path, tokenizer, row
    )


def test_a_row_in_which_every_turn_has_weight_0_is_refused_with_the_reason(tmp_path: Path, tokenizer: Any) -> None:
    row = {"messages": [message("user", "a"), message("assistant", "b", weight=0)]}
    assert "no label tokens, so nothing to learn from: every turn of the assistant has the weight 0" in refusal(
        tmp_path, tokenizer, row
    )


# --- tools -------------------------------------------------------------------------------------------------------------


def test_tools_as_a_json_text_or_in_a_table_are_the_same_as_a_list(tmp_path: Path, knows_tools: Any) -> None:
    turns = [message("user", "the fox"), message("assistant", "over")]
    other = {"type": "function", "function": {"name": "fox", "strict": True}}  # a key that the first has not
    wanted = encode(tmp_path, knows_tools, {"messages": turns, "tools": [TOOL, other]}).ids.tolist()
    as_text = encode(tmp_path, knows_tools, {"messages": turns, "tools": json.dumps([TOOL, other])})
    assert as_text.ids.tolist() == wanted
    first = {"type": "function", "function": {"name": "dog", "parameters": {"type": "object"}}}
    wanted = encode(tmp_path, knows_tools, {"messages": turns, "tools": [first, other]}).ids.tolist()
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns, "tools": [first, other]}]), path)
    rows = read_rows(str(path), "first")
    assert rows[0].tools == [first, other]
    (sample,) = encode_rows(rows, knows_tools, DataConfig(path=str(path)), 4096, "first").samples
    assert sample.ids.tolist() == wanted


def test_tools_that_the_template_would_not_show_are_refused(tmp_path: Path, tokenizer: Any, knows_tools: Any) -> None:
    row = {"messages": [message("user", "a"), message("assistant", "b")], "tools": [TOOL]}
    said = refusal(tmp_path, tokenizer, row)
    assert "the chat template does not show the tools" in said and "or a data.chat_template that does" in said
    for nothing in ([], None, ""):
        assert encode(tmp_path, tokenizer, row | {"tools": nothing}).num_labels


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": {"name": "dog"}}, "'tools' must be a list of mappings"), ({"tools": ["dog"]}, "'tools' must be a list"),
        ({"tools": "dog"}, "the text in 'tools': not valid JSON"), ({"tools": "{}"}, "'tools' must be a list of mappings"),
        ({"tools": "[" * 10000}, "the text in 'tools': lists or mappings are nested too deep"),
        ({"messages": None, "text": "a", "tools": [TOOL]}, "'tools' goes with a prompt or messages"),
        ({"messages": None, "prompt": "a", "completion": "b", "tools": [TOOL]}, "'tools' go with messages"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_shown_are_refused_with_their_line(
    tmp_path: Path, knows_tools: Any, row: dict[str, Any], said: str
) -> None:
    turns = [message("user", "a"), message("assistant", "b")]
    assert said in refusal(tmp_path, knows_tools, {"messages": turns} | row)


# --- other people's forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversation": [{"from": "human", "value": "a"}]}, "ShareGPT's form has the turns in 'conversations'"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 1 has from and value, which is ShareGPT's form"),
        ({"messages": [message("human", "a"), message("gpt", "b")]}, "has the role 'human'; chat templates call it user"),
        ({"messages": [message("user", "a"), message("gpt", "b")]}, "has the role 'gpt'; chat templates call it assistant"),
        ({"messages": [message("User", "a"), message("assistant", "b")]}, "has the role 'User'; chat templates call it user"),
        ({"messages": [message("user", "a"), message("narrator", "b")]},
         "no message has the role assistant (roles are 'user', 'narrator')"),
        ({"prompt": "a", "completion": None}, "found prompt, completion, where completion is null"),
        ({"prompt": None, "completion": None}, "where prompt and completion is null"),
        ({"messages": [message("user", "a"), message("assistant", None)]}, "2 (assistant) must be a text, found nothing"),
    ],
)  # fmt: skip
def test_the_form_of_another_tool_is_refused_with_the_way_to_mend_it(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], said: str
) -> None:
    assert said in refusal(tmp_path, tokenizer, row)
