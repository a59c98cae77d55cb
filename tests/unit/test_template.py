"""The one way in which chat templates are rendered: as transformers does, with one clock, and never without an end."""

from __future__ import annotations

import copy
import re
from datetime import datetime
from typing import Any

import pytest

from packlora.config import DataConfig
from packlora.data import bounded
from packlora.data.rows import Row
from packlora.data.samples import encode_rows
from packlora.data.template import EndlessTemplateError, Template, clock_of, set_clock
from packlora.errors import InputError

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "dog", "parameters": {}}}

EVERYTHING = (  # each kind of statement that is counted, and of expression that is measured
    "    {% macro line(m, deep=2) %}{{ '<' ~ m.role ~ '>' + m['content'] * 2 }}{% if deep %}{{ line(m, deep - 1) }}{% endif %}"
    "{% endmacro %}\n"
    "{%- set ns = namespace(last='') -%}\n"
    "{% for m in messages if m.role != 'tool' recursive %}\n"
    "  {{ loop.index }}/{{ loop.length }}{{ line(m) }}{% set ns.last = ns.last ~ m.role %}\n"
    "{% if m.parts %}{{ loop(m.parts) }}{% endif %}{% if loop.last %}{% break %}{% endif %}\n"
    "{% else %}none{% endfor %}\n"
    "{% for key, value in (tools or [{}])[0] | dictsort %}{{ key }}={{ value | tojson }} {% endfor %}\n"
    "{{ ns.last }} {{ 2 ** 3 * 4 + 1 }} {{ [1] + [2] }} {{ 'a' 'b' }} {{ bos_token }} {{ '%s' % 3 }}{{ enable_thinking }}\n"
    "{% block end %}{{ eos_token }}{% endblock %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}\n"
)


@pytest.fixture
def make(tokenizer: Any) -> Any:
    def make(template: str) -> Any:
        made = copy.deepcopy(tokenizer)
        made.chat_template = template
        return made

    return make


def refusal(tokenizer: Any, messages: list[dict[str, Any]] = TURNS) -> str:
    with pytest.raises(EndlessTemplateError) as caught:
        Template(tokenizer).render(messages)
    return str(caught.value)


# --- as transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", ["", "\n", "  ", "{#- said -#}\n", "{{- '' }}"])
@pytest.mark.parametrize("generation", [False, True])
def test_a_rendering_is_that_of_transformers_letter_for_letter(make: Any, lead: str, generation: bool) -> None:
    tokenizer = make(lead + EVERYTHING)
    turns = [{"role": "user", "content": "a", "name": None, "parts": [{"role": "x", "content": "y"}]}, *TURNS[1:]]
    for tools in (None, [TOOL]):
        ours = Template(tokenizer, tools, {"enable_thinking": False}).render(turns, generation)
        assert ours == tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=generation, enable_thinking=False
        )
        assert "<user>aa" in ours and "3/" not in ours


def test_what_a_template_complains_of_is_said(make: Any) -> None:
    with pytest.raises(InputError, match="the chat template refuses the messages: no dogs"):
        Template(make("{{ raise_exception('no dogs') }}")).render(TURNS)


# --- one clock ---------------------------------------------------------------------------------------------------------


def test_all_renderings_with_a_tokenizer_see_the_clock_that_was_set(make: Any) -> None:
    first, second = (make("{{ strftime_now('%d %b %Y %H:%M') }}") for _ in range(2))
    set_clock(first, datetime(1999, 12, 31, 23, 59))
    set_clock(second, datetime(2031, 1, 2, 3, 4))
    assert Template(first).render(TURNS) == "31 Dec 1999 23:59"
    assert Template(second).render(TURNS) == "02 Jan 2031 03:04"
    assert Template(copy.deepcopy(first)).render(TURNS, True) == "31 Dec 1999 23:59"
    assert str(datetime.now().year) in first.apply_chat_template(TURNS, tokenize=False)  # others see the true one


def test_a_clock_that_nobody_sets_stands_at_the_first_rendering(make: Any) -> None:
    tokenizer = make("{{ strftime_now('%f') }}")
    text = Template(tokenizer).render(TURNS)
    assert all(Template(tokenizer).render(TURNS) == text for _ in range(50))
    assert clock_of(tokenizer).strftime("%f") == text


# --- without an end ----------------------------------------------------------------------------------------------------

ENDLESS = {
    "a silent loop": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "a condition": "{% for a in range(99) %}{% for b in range(9999) if b < 0 %}{% endfor %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "a recursive loop": "{% for a in [[0]] recursive %}{% if loop.depth < 40 %}{{ loop([a, a]) }}{% endif %}{% endfor %}",
    "a block": "{% set n = namespace(at=0) %}{% block b %}{% set n.at = n.at + 1 %}{% if n.at < 20 %}{{ self.b() * 2 }}"
    "{{ self.b() }}{% endif %}{% set n.at = n.at - 1 %}{% endblock %}",
    "letters": "{% set s = 'a' * 9999 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_refused_by_name(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_STEPS", 1_000)
    tokenizer = make(ENDLESS[name])
    tokenizer.name_or_path = "some/model"
    assert re.match(
        r"the chat template of some/model does not come to an end: it takes more than 100\d turns of its loops; ",
        refusal(tokenizer),
    )


@pytest.mark.parametrize(
    "grows",
    ["n.x ~ n.x", "n.x + n.x", "[n.x, n.x] | join ~ ''", "n.x * 2", "2 * n.x", "(n.x, 'y')[0] ~ n.x", "[1] * 10 ** 9"],
)
def test_a_text_that_grows_without_an_end_is_refused(make: Any, grows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_CHARACTERS", 2**16)
    start = f"{{% set n = namespace(x='x') %}}{{% for a in range(99) %}}{{% set n.x = {grows} %}}{{% endfor %}}"
    assert f"it makes a text of more than {2**16} characters" in refusal(make(start))


@pytest.mark.parametrize("number", ["9 ** (9 ** 9)", "10 ** 999999999"])
def test_a_number_of_endless_digits_is_refused(make: Any, number: str) -> None:
    assert "it computes a number of more than 16384 bits" in refusal(make(f"{{{{ {number} }}}}"))


def test_few_steps_that_take_long_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_SECONDS", 0.01)
    assert "it takes more than 0.01 seconds" in refusal(
        make("{% for a in range(9999) %}{% set b = range(9999) | sum %}{% endfor %}")
    )


# --- blocks ------------------------------------------------------------------------------------------------------------


def test_a_template_that_takes_blocks_alone_is_given_blocks(make: Any) -> None:
    blocks = "{% for m in messages %}{% for b in m.content if b.type == 'text' %}{{ b.text }};{% endfor %}{% endfor %}"
    assert Template(make(blocks)).render(TURNS) == "a;b;"


def test_blocks_are_not_given_to_a_template_that_would_write_the_list_itself(make: Any) -> None:
    looks = make("{% for m in messages %}{{ m.content[:5] }};{% endfor %}")
    assert Template(looks).render([{"role": "user", "content": "the dog"}]) == "the d;"
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    for template in (looks, make("{% for m in messages %}{{ m.content | tojson }}{% endfor %}")):
        with pytest.raises(
            InputError, match="template writes the list of a content's blocks as it is, and is not for images"
        ):
            Template(template).render(image)


def test_no_row_is_skipped_for_a_template_without_an_end(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_STEPS", 1_000)
    data = DataConfig(path="rows.jsonl", on_bad_row="skip")
    with pytest.raises(
        EndlessTemplateError, match=r"job 'first': line 1: the chat template of .* does not come to an end"
    ):
        encode_rows([Row("line 1", messages=TURNS)] * 3, make(ENDLESS["a silent loop"]), data, 99, "first")
