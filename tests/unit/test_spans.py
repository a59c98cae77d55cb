"""What is learnt of a conversation, letter by letter, through chat templates of every shape that models have."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from packlora.data import windows
from packlora.data.places import prompt_text
from packlora.data.spans import UNMASKED, Learnt, learn
from packlora.data.template import Template
from packlora.errors import InputError

Message = dict[str, Any]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*names: str, text: str = "", **arguments: Any) -> Message:
    functions = [{"name": name, "arguments": arguments} for name in names]
    return says(text, tool_calls=[{"type": "function", "function": function} for function in functions])


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


# Chat templates, each with the shape of a family of models.
CHATML = (  # shows contents alone: neither calls nor thoughts, and no developer
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_TURN = (  # Gemma 4: a call, its result and the answer are one turn of the model
    "{% set ns = namespace(open=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|result>{{ m.content }}<result|>"
    "{% else %}{% if not (ns.open and m.role == 'assistant') %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% endif %}{% set ns.open = false %}{{ m.content | trim }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|call>{{ c.function.name ~ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ v }}{% if not loop.last %},{% endif %}"
    "{% endfor %}{{ '}' }}<call|>"
    "{% endfor %}{% set ns.open = true %}{% else %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
ENDLESS = (  # GLM: nothing ends a turn but the next header, and thoughts of earlier turns are left out
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}[gMASK]{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'system' %}<|system|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|assistant|>{% set c = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set thought = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ '\n' }}<think>{{ thought.strip() if loop.index0 > ns.last else '' }}</think>"
    "{{ '\n' + c.strip() if c.strip() else '' }}"
    "{% for t in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ t.function.name }}"
    "{% for k, v in t.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}"
    "</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_ENDS = (  # Llama 3.1: a call ends a turn of its own, with another token; and the role goes by another name
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|header|>assistant<|/header|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom|>'
    "{% else %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
TWO_MARKERS = (  # Command R7B: two tokens end a turn, the second of any role
    "{% for m in messages %}<|turn|><|{{ m.role }}|>{% if m.role == 'assistant' %}<|start_response|>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end_response|>{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|><|assistant|><|start_response|>{% endif %}"
)
UNFLAGGED = (  # markers that the tokenizer does not know
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n### end\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
LAYS_OUT = (  # Qwen 3.5: thoughts of any spelling are laid out anew, the prompt opens one, and there must be a user
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% if ns.last < 0 %}{{ raise_exception('No user query found') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('Unexpected role') }}{% endif %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.role == 'assistant' %}"
    "{% set c = m.content | trim %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set thought = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}{{ c }}"
    "{% for t in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ t.function.name }} "
    "{{ t.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
REMEMBERS = (  # DeepSeek V3: arguments are texts, flags are never reset, and results are closed by the answer
    "{% set ns = namespace(called=false, tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}"
    "{% set ns.tool = true %}"
    "<|out|>{{ m.content }}<|/out|>{% elif m.tool_calls %}{% set ns.tool = false %}{% for t in m.tool_calls %}"
    "{% if not ns.called %}<|Assistant|>{{ m.content }}<|calls|>{% set ns.called = true %}{% endif %}"
    "<|call|>{{ t.function.name + '\n' + t.function.arguments }}<|/call|>{% endfor %}<|/calls|></s>"
    "{% elif ns.tool %}<|/outs|>{{ m.content }}</s>{% set ns.tool = false %}{% else %}<|Assistant|>"
    "{{ m.content }}</s>{% endif %}"
    "{% endfor %}{% if ns.tool %}<|/outs|>{% endif %}"
    "{% if add_generation_prompt and not ns.tool %}<|Assistant|><think>\n{% endif %}"
)
MASKED = (  # says itself what is learnt
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = {
    "chatml": CHATML, "in turn": IN_TURN, "endless": ENDLESS, "two ends": TWO_ENDS, "two markers": TWO_MARKERS,
    "unflagged": UNFLAGGED, "lays out": LAYS_OUT, "remembers": REMEMBERS, "masked": MASKED,
}  # fmt: skip
TOKENS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Any:
    def make(template: str, **more: Any) -> Template:
        made = copy.deepcopy(tokenizer)
        made.add_tokens(TOKENS)
        made.chat_template = template
        return Template(made, **more)

    return make


def spans(found: Learnt) -> list[str]:
    return [found.text[start:stop] for start, stop in found.spans]


def refusal(template: Template, *messages: Message) -> str:
    with pytest.raises(InputError) as caught:
        learn(template, messages)
    return str(caught.value)


# --- calls and their results -------------------------------------------------------------------------------------------

CALLED = [user("a dog?"), calls("look", city="Paris", at="noon"), result("sunny"), says("It barks.")]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("in turn", ["<|call>look{at:noon,city:Paris}<call|>", "It barks.<turn|>"]),
        (
            "endless",
            [
                "\n<think></think>\n<tool_call>look<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>at</arg_key>"
                "<arg_value>noon</arg_value></tool_call><|observation|>",
                "\n<think></think>\nIt barks.<|user|>",
            ],
        ),
        ("two ends", ['{"name": "look", "parameters": {"city": "Paris", "at": "noon"}}<|eom|>', "It barks.<|eot|>"]),
        (
            "lays out",
            [
                '\n</think>\n\n\n<tool_call>look {"city": "Paris", "at": "noon"}</tool_call><|im_end|>',
                "\n</think>\n\nIt barks.<|im_end|>",
            ],
        ),
        (
            "remembers",
            ['<|calls|><|call|>look\n{"city": "Paris", "at": "noon"}<|/call|><|/calls|></s>', "It barks.</s>"],
        ),
    ],
)
def test_calls_are_learnt_wherever_they_are_with_what_ends_them_and_results_are_not(
    make: Any, shape: str, wanted: list[str]
) -> None:
    found = learn(make(SHAPES[shape]), CALLED)
    assert spans(found) == wanted
    assert "sunny" in found.text and not found.notes


def test_arguments_as_json_texts_are_read_as_the_mappings_that_they_are(make: Any) -> None:
    as_text = copy.deepcopy(CALLED)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris", "at": "noon"}'
    for shape in ("in turn", "endless", "two ends", "lays out", "remembers"):
        template = make(SHAPES[shape])
        assert learn(template, as_text) == learn(template, CALLED)


@pytest.mark.parametrize("shape", ["chatml", "two markers", "unflagged", "masked"])
def test_calls_that_a_template_does_not_show_are_refused_by_message_and_key(make: Any, shape: str) -> None:
    said = refusal(make(SHAPES[shape]), *CALLED)
    assert said.startswith(
        "message 2 (assistant): the chat template does not show its tool_calls[0].name, so the model would"
    )


def test_an_empty_result_in_the_turn_is_not_learnt(make: Any) -> None:
    behind = (  # the results stand between the calls of a message and its content
        "{% for m in messages %}{% if m.role != 'tool' %}<|turn>{{ m.role }}\n{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}<|call>{{ c.function.name }}<call|>{% endfor %}{% for r in messages[loop.index:] %}"
        "{% if r.role == 'tool' and loop.index <= m.tool_calls | length %}<|result>{{ r.content }}<result|>{% endif %}"
        "{% endfor %}{% endif %}{{ m.content }}<turn|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
    )
    for results in (["sunny"], [""], ["", "rainy"], ["sunny", ""], ["", ""]):
        turns = [user("a"), calls("look", "seek", text="so"), *map(result, results), says("b")]
        *start, last = spans(learn(make(behind), turns))
        assert last == "b<turn|>"
        assert start == ["<|call>look<call|><|call>seek<call|>", "so<turn|>"]


def test_calls_that_cannot_be_written_are_refused_and_not_run_into(make: Any) -> None:
    deep: Any = "end"
    for _ in range(5000):
        deep = [deep]
    for value, reason in (
        (deep, "lists or mappings more than 100 deep in one another"), ("half \ud800", "cannot be written as JSON"),
        ({1, 2}, "cannot be written as JSON"),
    ):  # fmt: skip
        for shape in SHAPES:
            said = refusal(make(SHAPES[shape]), user("a"), calls("look", where=value), says("b"))
            assert said.startswith("message 2 (assistant): tool_calls[0] ") and reason in said


def test_arguments_are_found_whatever_their_names_and_values_are(make: Any) -> None:
    odd = {
        "a": "x",
        "ab": "y",
        "A": [],
        "n": [1, 2.5, None, True, ["<|call>"]],
        "": "z",
        "e": {},
        "<|turn>": "model",
        "t": "\n",
    }
    turns = [user("a"), says("", tool_calls=[{"function": {"name": "look", "arguments": odd}}]), result("r"), says("b")]
    for shape in ("in turn", "endless", "two ends", "lays out", "remembers"):
        found = learn(make(SHAPES[shape]), turns)
        assert len(found.spans) == 2 and all(str(value) in spans(found)[0] for value in ("x", "y", "z", "2.5", "model"))


# --- what a template does not show -------------------------------------------------------------------------------------


def test_a_developer_who_is_not_shown_is_refused_with_the_name_that_is(make: Any) -> None:
    said = refusal(make(CHATML), {"role": "developer", "content": "be brief"}, user("a"), says("b"))
    assert said == (
        "message 1 (developer): the chat template does not show its content, so the model would not see it; name the role "
        "system"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("shape", ["chatml", "in turn", "two markers", "remembers", "masked"])
def test_reasoning_that_is_not_shown_is_refused(make: Any, shape: str, key: str) -> None:
    said = refusal(make(SHAPES[shape]), user("a"), says("b", **{key: "let me see"}))
    assert said.startswith(
        f"message 2 (assistant): the chat template does not show its {key}, so the model would not learn"
    )


def test_a_system_message_in_the_middle_that_is_not_shown_is_refused(make: Any) -> None:
    first = CHATML.replace("{% if m.role in", "{% if (loop.first or m.role != 'system') and m.role in")
    turns = [{"role": "system", "content": "be brief"}, user("a"), says("b")]
    assert spans(learn(make(first), turns)) == ["b<|im_end|>"]
    assert refusal(make(first), *turns, turns[0], user("c"), says("d")).startswith(
        "message 4 (system): the chat template does"
    )


def test_tools_that_a_template_does_not_show_are_refused_and_others_may_be_shown_late(make: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert refusal(make(CHATML, tools=[tool]), user("a"), says("b")).startswith(
        "the chat template does not show the tools"
    )
    late = "{% if tools and messages | length > 2 %}{{ tools | tojson }}{% endif %}" + CHATML
    assert spans(learn(make(late, tools=[tool]), [user("a"), says("b"), user("c"), says("d")])) == [
        "b<|im_end|>",
        "d<|im_end|>",
    ]
    with pytest.raises(InputError, match="does not show the tools"):
        prompt_text(make(CHATML, tools=[tool]), [user("a")])


# --- thoughts ----------------------------------------------------------------------------------------------------------

THOUGHT = ["<think>\nlet me see\n</think>\n\nyes", "<think>let me see</think>yes", "<think>\n\nlet me see\n</think>yes"]


@pytest.mark.parametrize("text", THOUGHT)
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [("lays out", "let me see\n</think>\n\nyes<|im_end|>"), ("endless", "\n<think>let me see</think>\nyes<|user|>")],
)
def test_a_thought_in_the_content_is_learnt_as_the_template_lays_it_out(
    make: Any, shape: str, wanted: str, text: str
) -> None:
    assert spans(learn(make(SHAPES[shape]), [user("a"), says(text)])) == [wanted]
    assert spans(learn(make(SHAPES[shape]), [user("a"), says("yes", reasoning_content="let me see")])) == [wanted]


def test_a_thought_that_the_template_would_never_show_is_refused(make: Any) -> None:
    cuts = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    said = refusal(make(cuts), user("a"), says(THOUGHT[0]), user("b"), says("no"))
    assert said.startswith("message 2 (assistant): the chat template does not show its thought in content")


# --- where turns begin and end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "end"),
    [
        ("chatml", "<|im_end|>"), ("two markers", "<|end_response|><|eot|>"), ("unflagged", "\n### end"),
        ("in turn", "<turn|>"), ("two ends", "<|eot|>"), ("remembers", "</s>"), ("masked", "<|im_end|>"),
        ("lays out", "<|im_end|>"),
    ],
)  # fmt: skip
def test_of_every_turn_the_content_and_all_of_its_end_are_learnt(make: Any, shape: str, end: str) -> None:
    found = learn(make(SHAPES[shape]), [user("a"), says("one"), user("b"), says("two"), user("c")])
    assert [text.removeprefix("\n</think>\n\n") for text in spans(found)] == ["one" + end, "two" + end]


def test_where_nothing_ends_a_turn_the_token_of_the_next_header_is_learnt_and_written(make: Any) -> None:
    found = learn(make(ENDLESS), [user("a"), says("one"), user("b"), says("two")])
    assert spans(found) == ["\n<think></think>\none<|user|>", "\n<think></think>\ntwo<|user|>"]
    assert found.text.endswith("two<|user|>") and not found.notes
    found = learn(make(ENDLESS), [user("a"), calls("look", n="1")])
    assert found.text.endswith("</tool_call><|observation|>")


@pytest.mark.parametrize("shape", ["chatml", "endless", "masked", "in turn"])
def test_turns_of_weight_0_are_not_learnt(make: Any, shape: str) -> None:
    turns = [user("a"), says("one", weight=0), user("b"), says("two", weight=1)]
    (learnt,) = spans(learn(make(SHAPES[shape]), turns))
    assert "two" in learnt


# --- what a template says itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inside", "outside", "learnt", "noted"), [
    ("", "<|im_end|>", ["one", "two"], 2), ("<|im_end|>", "", ["one<|im_end|>", "two<|im_end|>"], 4),
])  # fmt: skip
def test_an_end_or_a_call_that_a_mask_leaves_out_of_an_answer_is_noted(
    make: Any, inside: str, outside: str, learnt: list[str], noted: int
) -> None:
    template = make(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + inside
        + "{% endgeneration %}" + outside + "{% for t in m.tool_calls or [] %}[{{ t.function.name }}]{% endfor %}"
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )  # fmt: skip
    called = says("two") | {"tool_calls": [{"function": {"name": "clock"}}]}
    found = learn(template, [user("a"), says("one"), user("b"), called])
    assert spans(found) == learnt
    assert found.notes == {UNMASKED: f"message {noted} (assistant)"}
    assert not learn(make(MASKED), [user("a"), says("one")]).notes


def test_a_header_is_not_learnt_where_the_prompt_opens_a_thought_that_the_text_has_not(make: Any) -> None:
    opens = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}"
        "{{ '' if loop.last and m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}"
    )
    template = make(opens)
    end = template.tokenizer.eos_token
    unlearnt = says("one") | {"weight": 0}
    assert spans(learn(template, [user("a"), unlearnt, says("two")])) == ["two" + end]
    assert spans(learn(template, [user("a"), says("one"), user("b"), says("two")])) == ["one" + end, "two" + end]


@pytest.mark.parametrize("response", ["{% if add_generation_prompt %}<|start_response|>{% endif %}", ""])
def test_a_header_that_is_written_behind_all_is_not_learnt_and_the_end_before_it_is(make: Any, response: str) -> None:
    """Command A: any rendering ends with the header of an answer, and one token ends the turns of all roles."""
    template = make(
        "<|turn|><|system|>preamble{{ eos_token }}{% for m in messages %}<|turn|><|{{ m.role }}|>"
        "{% if m.role == 'assistant' %}<|start_response|>{{ m.content }}<|end_response|>{% else %}{{ m.content }}{% endif %}"
        "{{ eos_token }}{% endfor %}<|turn|><|assistant|>" + response
    )
    end = "<|end_response|>" + template.tokenizer.eos_token
    start = "" if response else "<|start_response|>"
    found = learn(template, [user("a"), says("one"), user("b"), says("two")])
    assert spans(found) == [f"{start}one{end}", f"{start}two{end}"] and not found.notes


# --- templates that look at words --------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["m.content[:5]", "m.content | upper", "m.content | length", "m.content | first"])
def test_a_template_that_changes_words_is_refused(make: Any, look: str) -> None:
    template = make("{% for m in messages %}{{ m.role }}: {{ " + look + " }}<|im_end|>{% endfor %}")
    said = refusal(template, user("the first dog"), says("the second dog"))
    assert said.startswith("message 1 (user): ")


def test_a_template_that_compares_messages_is_followed(make: Any) -> None:
    once = (
        "{% for m in messages %}{% if not (m.role == 'system' and not loop.first and m.content == messages[0].content) %}"
        "<{{ m.role }}>{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    system = {"role": "system", "content": "be brief"}
    assert spans(learn(make(once), [system, user("a"), says("b")])) == ["b<end>"]
    assert refusal(make(once), system, system, user("a"), says("b")).startswith("message 1 (system): its place cannot")


# --- long conversations ------------------------------------------------------------------------------------------------


def rendered(make: Any, shape: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, Learnt]:
    """Characters that are rendered for a conversation of a shape that is new, for each of its text's."""
    turns: list[Message] = [{"role": "system", "content": "be brief"}]
    for number in range(rounds):
        turns += [
            user(f"question {number}"),
            says(f"answer {number} of some length {number}", reasoning_content=f"hm {number}"),
        ]
        turns += [
            user(" " * number + "look"),
            calls("look", n=number),
            result(f"result {number}"),
            says(f"seen {number}"),
        ]
    if shape in ("chatml", "two markers", "unflagged"):
        turns = [{"role": turn["role"], "content": turn["content"] or "called"} for turn in turns]
    elif shape in ("in turn", "two ends", "remembers"):
        turns = [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in turns]
    monkeypatch.setattr(windows, "_KNOWN", {})
    sizes, plain = [], Template.render

    def counted(self: Template, *arguments: Any, **more: Any) -> str:
        text = plain(self, *arguments, **more)
        sizes.append(len(text))
        return text

    with monkeypatch.context() as patched:
        patched.setattr(Template, "render", counted)
        found = learn(make(SHAPES[shape]), turns)
    return sum(sizes) / len(found.text), found


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in ("masked", "remembers")])
def test_what_is_rendered_grows_with_the_turns_of_a_new_shape_and_not_faster(
    make: Any, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, _ = rendered(make, shape, 10, monkeypatch)
    long, found = rendered(make, shape, 60, monkeypatch)
    assert long < 1.3 * short
    assert len(found.spans) == 180


def test_what_a_template_writes_around_an_answer_is_found_once_for_all_conversations(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, plain = [], windows.Windows.before_an_answer

    def counted(self: windows.Windows) -> str:
        looked.append(self)
        return plain(self)

    monkeypatch.setattr(windows.Windows, "before_an_answer", counted)
    source = "{# of this test #}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHATML
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    counts, found = [], []
    for template in (make(source), make(source, tools=[tool]), make(source.replace("im_end", "eot"))):
        for words in ("a", "other words"):
            found.append(spans(learn(template, [user(words), says("It barks.")])))
            counts.append(len(looked))
    assert counts == [1, 1, 2, 2, 3, 3]
    assert found == [["It barks.<|im_end|>"]] * 4 + [["It barks.<|eot|>"]] * 2


def test_the_tools_of_a_conversation_are_written_as_json_once_however_many_its_turns_are(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, plain = [], windows.json.dumps

    def counted(value: Any, **more: Any) -> str:
        written.append(value)
        return plain(value, **more)

    monkeypatch.setattr(windows.json, "dumps", counted)
    names = [f"look{number}" for number in range(9)]
    tools = [{"type": "function", "function": {"name": name, "description": name, "parameters": {}}} for name in names]
    turns = [
        turn for name in names for turn in (user(name), calls(name, at="noon"), result("sunny"), says("It barks."))
    ]
    found = learn(
        make(
            "{{ (tools or []) | map(attribute='function') | map(attribute='name') | join(' ') }}" + ENDLESS, tools=tools
        ),
        turns,
    )
    assert len(found.spans) == 18
    assert sum(value is tools or value == tools for value in written) == 1
