"""What a chat template does not show is refused in prompts and in what stands before rows, by the name that it was given by."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packlora.answers import talk
from packlora.config import DataConfig, TrainConfig
from packlora.data.encode import Encoded
from packlora.data.prompts import encode_prompts, prompt_ids
from packlora.data.rows import Row, check_row
from packlora.data.samples import encode_rows, joined
from packlora.data.stream import Stream, StreamData
from packlora.errors import InputError
from packlora.runtime.encoder import _cut_samples

NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALLS = (  # a call ends with a token of its own, which the tokenizer does not flag as special
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def make(tokenizer: Any) -> Any:
    def make(template: str | None) -> Any:
        made = copy.deepcopy(tokenizer)
        made.add_tokens(["<|call|>", "<|next|>"])
        made.chat_template = template
        return made

    return make


def said(tokenizer: Any, row: dict[str, Any], **data: Any) -> str:
    with pytest.raises(InputError) as caught:
        encode_rows([check_row(row, "line 1", "first")], tokenizer, DataConfig(path="-", **data), 99, "first")
    return str(caught.value)


# --- the system's message ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [ROW, {"prompt": "a", "completion": "b"}, {"conversations": [{"from": "gpt", "value": "b"}]}]
)
def test_a_system_message_of_the_settings_that_is_not_shown_is_refused_by_its_key(
    make: Any, row: dict[str, Any]
) -> None:
    assert said(make(NO_SYSTEM), row, system="be brief") == (
        "job 'first': line 1: data.system: the chat template does not show its content, so the model would not see it; leave "
        "it out, or use a model whose template shows it"
    )


def test_a_system_message_of_a_row_is_refused_by_its_key_and_messages_keep_their_numbers(make: Any) -> None:
    assert said(make(NO_SYSTEM), ROW | {"system": "be brief"}).startswith(
        "job 'first': line 1: 'system': the chat template"
    )
    own = [{"role": "system", "content": "be brief"}, *ROW["messages"]]
    assert said(make(NO_SYSTEM), {"messages": own}).startswith(
        "job 'first': line 1: message 1 (system): the chat template"
    )
    reasoning = [ROW["messages"][0], ROW["messages"][1] | {"reasoning_content": "hm"}]
    for system in ({"system": "be brief"}, {}):  # the message is the second one of the row, whatever stands before it
        assert "line 1: message 2 (assistant): the" in said(make(CALLS), {"messages": reasoning} | system)


def test_in_sample_prompts_the_system_message_is_shown_or_refused(make: Any) -> None:
    data = DataConfig(path="-", system="be brief")
    shown = "data.system: the chat template does not show its content"
    for template, reason in (
        (NO_SYSTEM, shown),
        (None, "data.system goes by a chat template, and the tokenizer has none"),
    ):
        with pytest.raises(InputError, match=rf"job 'first': sample_prompts\.0: {reason}"):
            encode_prompts(["a dog"], make(template), data, 1, 99, "first")
    (prompt,) = encode_prompts(["a dog"], make(CALLS), data, 1, 99, "first")
    assert "be brief" in make(CALLS).decode(prompt.ids)


def test_a_template_that_looks_at_words_is_no_reason_to_refuse_a_prompt(make: Any) -> None:
    tokenizer = make("{% for m in messages %}{{ m.content[:3] }}{% endfor %}")
    assert tokenizer.decode(prompt_ids([{"role": "user", "content": "the dog"}], tokenizer)) == "the"


def test_chat_refuses_a_system_message_that_is_not_shown_before_anybody_types(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> Iterator[str]:
        raise AssertionError("a line was read")
        yield ""

    own = {"tokenizer_of": lambda name: make(NO_SYSTEM), "variables_of": lambda name: {}}
    speakers = SimpleNamespace(adapters=["one"], **own)
    monkeypatch.setattr(talk, "load_speakers", lambda *arguments: speakers)
    with pytest.raises(InputError, match=r"message 1 \(system\): the chat template does not show its content"):
        talk.chat([], False, "be brief", talk.Sampling(), lines=lines())


# --- notes -------------------------------------------------------------------------------------------------------------


def test_what_is_not_learnt_is_noted_once_for_all_rows_with_the_first_of_them(make: Any) -> None:
    cut = NO_SYSTEM.replace(
        "m.content.split('</think>')[-1]", "m.content if loop.last else m.content.split('</think>')[-1]"
    )
    thought = {"role": "assistant", "content": "<think>hm</think>b"}
    forgets = Row("line 2", messages=[*ROW["messages"][:1], thought, *ROW["messages"]])
    empty = Row("line 3", messages=[*ROW["messages"], ROW["messages"][0], {"role": "assistant", "content": ""}])
    plain = Row("line 1", messages=ROW["messages"])
    out = encode_rows([plain, forgets, empty, forgets, plain], make(cut), DataConfig(path="-"), 99, "first")
    assert out.notes == {
        "have earlier thoughts that the chat template leaves out, so they are not learnt": (
            2,
            "line 2, message 2 (assistant)",
        ),
        "have empty answers, which are not learnt": (1, "line 3, message 4 (assistant)"),
    }


def test_a_stream_has_the_notes_of_its_rows(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    empty = {"messages": [*ROW["messages"], ROW["messages"][0], {"role": "assistant", "content": ""}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, empty, ROW)))
    tokenizer, data = make(CALLS), DataConfig(path=str(path), streaming=True, truncate="drop", on_bad_row="skip")

    def encode(rows: Any) -> Encoded:
        return encode_rows(rows, tokenizer, data, 999, "first", may_be_empty=True)

    stream = Stream("first", [str(path)], 0, 0, encode, 4, 3)
    told = StreamData("first", stream, TrainConfig(max_steps=2, global_batch_size=1), 0).notes()
    where = f"{path}, line 2, message 4 (assistant)"
    assert told == [
        f"job 'first': of the stream, over all passes, 1 row has empty answers, which are not learnt, the first: {where}"
    ]


def test_a_job_is_told_of_its_rows_in_one_line_for_each_thing() -> None:
    notes = {"have empty answers, which are not learnt": (3, "line 2, message 4 (assistant)")}
    assert _cut_samples("first", Encoded([]), Encoded([], notes=notes)) == [
        "job 'first': 3 held-out rows have empty answers, which are not learnt, the first: line 2, message 4 (assistant)"
    ]
    both = joined([Encoded([], notes=notes), Encoded([], notes={**notes, "are odd": (1, "line 9")})])
    assert both.notes == {next(iter(notes)): (6, "line 2, message 4 (assistant)"), "are odd": (1, "line 9")}
