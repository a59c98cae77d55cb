"""Where the loss falls: the label tokens of every kind of row, through chat templates of the shapes that real models have."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, processors

from packlora.config import DataConfig
from packlora.data.encode import Encoded, Sample
from packlora.data.rows import Row
from packlora.data.samples import encode_rows
from packlora.errors import InputError

# Chat templates, each with the shape of a family of models: what it inserts, drops, strips, renames and refuses.
CHATML = (  # a default system message
    "{% if not messages or messages[0]['role'] != 'system' %}<|im_start|>system\nBe of help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # writes the first special token, strips contents
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # no headers and no generation prompt; the system message joins the first user turn
    "{{ bos_token }}{% set lead = '' %}{% if messages and messages[0]['role'] == 'system' %}"
    "{% set lead = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ lead if loop.first else '' }}{{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA = (  # the assistant is called model; no system messages
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (  # thinking is taken out of the turns before the last user message, and shown, even if empty, in the last turn
    "{% set ns = namespace(last_user=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last_user and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ content }}"
    "{% for call in m.get('tool_calls') or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (  # the generation prompt opens a thought that finished turns do not have; thinking is dropped everywhere
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
VICUNA = (  # turns without special tokens; only the last one is ended
    "{{ bos_token }}{% for m in messages %}{{ 'ASSISTANT' if m['role'] == 'assistant' else m['role'] | upper }}: "
    "{{ m['content'] }} {% if loop.last and m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# by name: the template, and what comes before and after the content of an assistant turn that is learnt
TEMPLATES: dict[str, tuple[str, str, str]] = {
    "chatml": (CHATML, "", "<|im_end|>"), "llama3": (LLAMA3, "", "<|eot_id|>"), "mistral": (MISTRAL, " ", "</s>"),
    "gemma": (GEMMA, "", "<end_of_turn>"), "r1": (R1, "", "</s>"),
}  # fmt: skip
MARKERS = [
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
]
OPEN = DataConfig(path="rows.jsonl")


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Any:
    """(template, trim) -> tokenizer. The markers of the families are special tokens without a role, as in Gemma 3."""

    def make(template: str | None, trim: bool = False) -> Any:
        made = copy.deepcopy(tokenizer)
        made.add_tokens([AddedToken(text, special=True) for text in MARKERS], special_tokens=False)
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


CONVERSATION = [
    ("user", "the quick fox"), ("assistant", "yes, the fox"), ("user", "and\nthen?"),
    ("assistant", "    more:\n\n        of\tit"), ("user", "the quick fox"), ("assistant", "yes, the fox"),
]  # fmt: skip
TRIMS = pytest.mark.parametrize("trim", [False, True], ids=["whole offsets", "offsets without spaces"])


# --- which tokens are labels -------------------------------------------------------------------------------------------


@TRIMS
@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_prompt_and_completion_the_completion_and_its_end_token_are_learnt(
    make: Any, name: str, trim: bool
) -> None:
    template, before, after = TEMPLATES[name]
    tokenizer = make(template, trim)
    (sample,) = encode(tokenizer, pair("say: the dog", "if the:\n    dog jumps\n\nover")).samples
    assert learnt(tokenizer, sample) == [f"{before}if the:\n    dog jumps\n\nover{after}"]
    wanted = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "say: the dog"},
            {"role": "assistant", "content": "if the:\n    dog jumps\n\nover"},
        ],
        tokenize=False,
    )
    assert tokenizer.decode(sample.ids.tolist()) == wanted[: wanted.rindex(after) + len(after)]


@TRIMS
@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_conversation_exactly_the_assistant_turns_and_their_end_tokens_are_learnt(
    make: Any, name: str, trim: bool
) -> None:
    template, before, after = TEMPLATES[name]
    tokenizer = make(template, trim)
    turns = CONVERSATION if name in ("gemma", "r1") else [("system", "the fox is quick"), *CONVERSATION]
    (sample,) = encode(tokenizer, chat(*turns)).samples
    contents = [content for role, content in turns if role == "assistant"]
    if name in ("llama3", "gemma"):
        contents = [content.strip() for content in contents]
    assert learnt(tokenizer, sample) == [before + content + after for content in contents]


def test_a_template_without_end_tokens_never_leads_to_labels_in_another_turn(make: Any) -> None:
    tokenizer = make(VICUNA)
    for question in ("and then?", "", "S"):
        row = chat(("user", "hi"), ("assistant", "the dog"), ("user", question), ("assistant", "the fox"))
        assert learnt(tokenizer, encode(tokenizer, row).samples[0]) == [" the dog", " the fox </s>"]


def test_thinking_that_the_template_drops_from_earlier_turns_is_not_learnt_and_the_last_turn_is_learnt_whole(
    make: Any,
) -> None:
    tokenizer = make(QWEN3)
    turns = [("user", "a"), ("assistant", "<think>\nthe fox\n</think>\n\nthe dog"), ("user", "b")]
    (sample,) = encode(tokenizer, chat(*turns, ("assistant", "over"))).samples
    assert learnt(tokenizer, sample) == ["the dog<|im_end|>", "<think>\n\n</think>\n\nover<|im_end|>"]
    (sample,) = encode(tokenizer, chat(*turns, ("assistant", "<think>\nsome\n</think>\n\nmore"))).samples
    assert learnt(tokenizer, sample) == ["the dog<|im_end|>", "<think>\nsome\n</think>\n\nmore<|im_end|>"]
    (sample,) = encode(tokenizer, pair("the fox", "over")).samples
    assert learnt(tokenizer, sample) == ["<think>\n\n</think>\n\nover<|im_end|>"]


def test_a_turn_that_only_calls_a_tool_is_learnt(make: Any) -> None:
    tokenizer = make(QWEN3)
    messages = chat(("user", "a"), ("assistant", ""), ("tool", "l"), ("assistant", "the dog")).messages
    assert messages is not None
    messages[1]["tool_calls"] = [{"name": "lazy"}]
    (sample,) = encode(tokenizer, Row("rows.jsonl, line 1", messages=messages)).samples
    assert learnt(tokenizer, sample) == [
        '<tool_call>{"name": "lazy"}</tool_call><|im_end|>', "<think>\n\n</think>\n\nthe dog<|im_end|>",
    ]  # fmt: skip


def test_thinking_that_the_template_would_drop_from_the_last_turn_is_refused_not_lost(make: Any) -> None:
    message = refusal(make(R1), pair("a", "<think>the fox</think>the dog"))
    assert "line 1: message 2 (assistant): the chat template does not show its thought in content, so" in message


def test_a_message_that_the_template_does_not_render_is_refused(make: Any) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ '' if m['role'] == 'assistant' else m['content'] }}\n{% endfor %}"
    )
    said = refusal(make(template), pair("the dog", "the dog"))
    assert "message 2 (assistant): the chat template does not show its content, so the model would not learn it" in said


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_that_contains_the_completion_does_not_shift_the_labels(make: Any, name: str) -> None:
    template, before, after = TEMPLATES[name]
    tokenizer = make(template)
    for prompt, completion in (
        ("the dog", "the dog"),
        ("say: the dog\nthe dog", "dog"),
        ("a", "a"),
        ("assistant", "s"),
    ):
        (sample,) = encode(tokenizer, pair(prompt, completion)).samples
        assert learnt(tokenizer, sample) == [before + completion + after], (prompt, completion)


def test_special_tokens_within_the_content_do_not_end_the_turn(make: Any) -> None:
    tokenizer = make(CHATML)
    (sample,) = encode(tokenizer, pair("a", "the <|eot_id|> ends")).samples
    assert learnt(tokenizer, sample) == ["the <|eot_id|> ends<|im_end|>"]


def test_a_conversation_that_the_assistant_opens_is_learnt_without_its_header(make: Any) -> None:
    tokenizer = make(LLAMA3)
    (sample,) = encode(tokenizer, chat(("assistant", "the fox"), ("user", "the"), ("assistant", "dog"))).samples
    assert learnt(tokenizer, sample) == ["the fox<|eot_id|>", "dog<|eot_id|>"]


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


@TRIMS
@pytest.mark.parametrize("end", ["", "</s>"])
@pytest.mark.parametrize("template", [None, CHATML])
def test_of_a_text_everything_is_learnt_but_its_first_token_which_nothing_predicts(
    make: Any, template: str | None, end: str, trim: bool
) -> None:
    tokenizer = make(template, trim)
    (sample,) = encode(tokenizer, Row("line 1", text="the    quick\n\n  fox" + end)).samples
    assert tokenizer.decode(sample.ids.tolist()) == "the    quick\n\n  fox</s>"
    assert sample.is_label.tolist() == [False] + [True] * (len(sample.ids) - 1)


@TRIMS
def test_special_tokens_that_the_tokenizer_adds_are_kept_in_front_and_never_learnt(make: Any, trim: bool) -> None:
    tokenizer = make(None)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim),
            processors.TemplateProcessing(single="<s> $A <|eot_id|>", special_tokens=[
                (name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|eot_id|>")
            ]),
        ]
    )  # fmt: skip
    rows = [Row("line 1", text="the fox"), pair("the", " fox"), pair("", "fox  dog")]
    text, both, alone = encode(tokenizer, *rows).samples
    assert [tokenizer.decode(s.ids.tolist()) for s in (text, both, alone)] == [
        "<s>the fox</s>", "<s>the fox</s>", "<s>fox  dog</s>",
    ]  # fmt: skip
    assert [learnt(tokenizer, s) for s in (text, both, alone)] == [["the fox</s>"], [" fox</s>"], ["fox  dog</s>"]]
    tokenizer.chat_template = LLAMA3  # writes its own
    (sample,) = encode(tokenizer, pair("a", "b")).samples
    assert tokenizer.decode(sample.ids.tolist()).count("<s>") == 1


def test_nothing_after_the_last_label_is_kept(make: Any) -> None:
    tokenizer = make(CHATML)
    (sample,) = encode(tokenizer, chat(("user", "a"), ("assistant", "the dog"), ("user", "the quick fox"))).samples
    assert sample.is_label[-1]
    assert tokenizer.decode(sample.ids.tolist()).endswith("<|im_start|>assistant\nthe dog<|im_end|>")


def test_rows_of_all_kinds_in_one_file_keep_their_order(make: Any) -> None:
    tokenizer = make(CHATML)
    rows = [
        Row("1", text="the fox"),
        pair("a", "dog"),
        chat(("user", "b"), ("assistant", "over")),
        Row("4", text="lazy dog"),
    ]
    samples = encode(tokenizer, *(rows * 300)).samples  # more than are tokenized at once
    wanted = [["the fox</s>"], ["dog<|im_end|>"], ["over<|im_end|>"], ["lazy dog</s>"]]
    tails = [learnt(tokenizer, sample)[-1] for sample in samples]
    assert len(tails) == 1200
    assert all(want[0].endswith(tail) for want, tail in zip(wanted * 300, tails, strict=True))


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        pair("the fox", ""), pair("the fox", " \n"), Row("rows.jsonl, line 1", text=""), chat(("user", "the fox")),
        chat(("user", "the fox"), ("assistant", "  ")),
    ],
)  # fmt: skip
def test_a_row_without_label_tokens_is_refused_with_its_line(make: Any, row: Row) -> None:
    message = refusal(make(CHATML), Row("rows.jsonl, line 0", text="good"), row)
    assert message.startswith(
        "job 'first': rows.jsonl, line 1: the sample has no label tokens, so nothing to learn from"
    )


def test_an_empty_completion_is_refused_without_a_chat_template_too(make: Any) -> None:
    assert "line 1: the sample has no label tokens" in refusal(make(None), pair("the fox", ""))


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (GEMMA, chat(("system", "s"), ("user", "u"), ("assistant", "a")), "System role not supported"),
        (MISTRAL, chat(("user", "u"), ("user", "u"), ("assistant", "a")), "roles must alternate user and assistant"),
    ],
)
def test_what_the_template_refuses_is_refused_with_its_own_words(
    make: Any, template: str, row: Row, reason: str
) -> None:
    assert refusal(make(template), row) == (
        f"job 'first': rows.jsonl, line 1: the chat template refuses the messages: {reason}"
    )


def test_messages_without_a_chat_template_are_refused_with_their_line(make: Any) -> None:
    assert "line 1: a messages row needs a chat template and the tokenizer has none" in refusal(
        make(None), chat(("user", "u"), ("assistant", "a"))
    )


def test_a_slow_tokenizer_is_refused() -> None:
    assert "the tokenizer object gives no offsets; a fast one is needed" in refusal(object(), pair("a", "b"))


# --- truncate ----------------------------------------------------------------------------------------------------------

LONG = Row("rows.jsonl, line 7", prompt="the quick brown fox", completion="jumps over the lazy dog and then some more")


@pytest.mark.parametrize(
    ("max_length", "budget", "named"), [(9, 4096, "max_length 9"), (99, 9, "max_tokens_per_microbatch 9")]
)
def test_a_sample_over_the_limit_is_refused_with_its_line_its_length_and_the_limit(
    make: Any, max_length: int, budget: int, named: str
) -> None:
    tokenizer = make(None)
    whole = encode(tokenizer, LONG).samples[0].num_tokens
    assert whole > 9
    message = refusal(tokenizer, LONG, data=DataConfig(path="p", max_length=max_length), budget=budget)
    assert f"rows.jsonl, line 7: the sample has {whole} tokens, over {named}; " in message


def test_a_sample_exactly_at_the_limit_is_kept_and_one_token_less_is_too_little(make: Any) -> None:
    tokenizer = make(None)
    whole = encode(tokenizer, LONG).samples[0].num_tokens
    kept = encode(tokenizer, LONG, data=DataConfig(path="p", max_length=whole), budget=whole)
    assert (len(kept.samples), kept.truncated, kept.dropped) == (1, 0, 0)
    refusal(tokenizer, LONG, data=DataConfig(path="p", max_length=whole - 1))
    refusal(tokenizer, LONG, budget=whole - 1)


def test_the_limit_does_not_count_what_follows_the_last_label(make: Any) -> None:
    tokenizer = make(CHATML)
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


def test_the_templates_here_are_what_they_are_said_to_be(make: Any) -> None:
    """Rendered once by hand, so that the tests above do not agree with a template that does nothing."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    wanted = {
        CHATML: "<|im_start|>system\nBe of help.<|im_end|>\n"
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
        LLAMA3: "<s><|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>",
        MISTRAL: "<s>[INST] u [/INST] a</s>",
        GEMMA: "<s><start_of_turn>user\nu<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n",
        QWEN3: "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n",
        R1: "<s><|User|>u<|Assistant|>a</s>",
        VICUNA: "<s>USER: u ASSISTANT: a </s>",
    }
    for template, text in wanted.items():
        assert make(template).apply_chat_template(messages, tokenize=False) == text, json.dumps(template)
