"""Patterns of an adapter against the names of a model: those that would never end are refused, plain names are explained."""

from __future__ import annotations

import time
from typing import Any

import pytest
from peft import LoraConfig

from packlora.adapters import spec, targets
from packlora.errors import InputError
from tests.conftest import tiny_model

ENDLESS = r"((\w|\.)+)+!"
CATASTROPHES: dict[str, dict[str, Any]] = {
    "target_modules": {"target_modules": ENDLESS}, "rank_pattern": {"target_modules": ["q_proj"], "rank_pattern": {ENDLESS: 4}},
    "alpha_pattern": {"target_modules": ["q_proj"], "alpha_pattern": {ENDLESS: 4}},
    "exclude_modules": {"target_modules": ["q_proj"], "exclude_modules": ENDLESS},
    "layers_pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ENDLESS},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("key", CATASTROPHES)
def test_a_pattern_that_backtracks_without_end_is_refused(
    model: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MATCH_SECONDS", 0.1)
    start = time.process_time()
    with pytest.raises(
        InputError, match=r"job 'first': the regular expressions of its adapter .*more than 0.1 s"
    ) as caught:
        spec.resolve(LoraConfig(**CATASTROPHES[key]), model, "first")
    assert "!" in str(caught.value)
    assert time.process_time() - start < 10  # the time limit is that of another process


def test_usual_patterns_choose_what_they_chose_before(model: Any) -> None:
    peft = LoraConfig(
        target_modules=r".*\.(q|v)_proj", rank_pattern={r"layers\.0\.self_attn\.q_proj": 4}, alpha_pattern={"v_proj": 3}
    )
    modules = spec.resolve(peft, model, "first").modules
    assert len(modules) == 4
    assert {name.rpartition(".")[2] for name in modules} == {"q_proj", "v_proj"}
    assert [own.rank for own in modules.values()] == [4, 8, 8, 8]


def test_plain_names_start_no_process(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_match", lambda *_: pytest.fail("a process was started"))
    peft = LoraConfig(
        target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 4}, alpha_pattern={"layers.0.x-y": 1, "v_proj": 2}
    )
    with pytest.raises(InputError, match="which matches no adapted module"):
        spec.resolve(peft, model, "first")
    assert len(spec.resolve(LoraConfig(target_modules="all-linear"), model, "first").modules) == 14


def test_a_pattern_that_peft_would_break_on_is_refused(model: Any) -> None:
    peft = LoraConfig(target_modules=["q_proj"], rank_pattern={"(?i)Q_PROJ": 4})
    with pytest.raises(
        InputError, match=r"job 'first': a regular expression of its adapter cannot be used: .*global flags"
    ):
        spec.resolve(peft, model, "first")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("q_proj", "[q_proj]"), ("q_proj, v_proj", "[q_proj, v_proj]"), ("q_proj v_proj", "[q_proj, v_proj]"),
     ("(q_proj|v_proj)", "[q_proj, v_proj]")],
)  # fmt: skip
def test_a_name_given_as_a_text_is_refused_with_what_would_be_meant(model: Any, text: str, wanted: str) -> None:
    with pytest.raises(InputError) as caught:
        spec.resolve(LoraConfig(target_modules=text), model, "first")
    message = str(caught.value)
    assert message.startswith(f"job 'first': target_modules {text!r} matches nothing in the model; linear layers are ")
    assert message.endswith(
        f"A text is a regular expression for whole module paths, as in PEFT; for these layers write {wanted}"
    )


def test_a_pattern_of_other_words_is_not_explained(model: Any) -> None:
    with pytest.raises(InputError) as caught:
        spec.resolve(LoraConfig(target_modules="attn.*"), model, "first")
    assert "A text is" not in str(caught.value)
