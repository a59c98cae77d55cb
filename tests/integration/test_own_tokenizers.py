"""What other trainers save beside an adapter: tokenizers that may write other prompts than the base model's, more adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import packlora
from packlora.answers.talk import load_speakers
from packlora.errors import InputError
from packlora.export.merge import merge_adapter

Base = Callable[..., str]
OTHER = CHAT.replace("<|im_start|>", "[").replace("<|im_end|>", "]")


def by_peft(folder: Path, tokenizer: Any = None, template: str = CHAT, tokens: int = 0) -> Path:
    """An adapter of the tiny base as TRL saves one, with a tokenizer."""
    own = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(tiny_model("llama"), own).save_pretrained(folder)
    if tokenizer is not None:
        saved = copy.deepcopy(tokenizer)
        saved.chat_template = template
        saved.add_tokens([f"<new{number}>" for number in range(tokens)])
        saved.save_pretrained(folder)
    return folder


def run_from(folder: Path, base: str, data: str, out: Path) -> dict[str, Any]:
    """A run of a step that goes on from an adapter's folder."""
    train = {"global_batch_size": 2, "max_steps": 1}
    job = {"name": "job", "data": {"path": data}, "adapter": {"init_from": str(folder)}, "train": train}
    return {"base_model": base, "output_dir": str(out), "device": "cpu", "jobs": [job]}


def test_a_merged_model_has_the_tokenizer_that_its_adapter_was_trained_with(
    tiny_base: Base, tokenizer: Any, tmp_path: Path
) -> None:
    base = tiny_base()
    said = merge_adapter(by_peft(tmp_path / "own", tokenizer, OTHER), tmp_path / "merged", base)
    assert said is not None and "own, which has another chat template than the base's" in said
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == OTHER
    said = merge_adapter(by_peft(tmp_path / "grown", tokenizer, OTHER, tokens=3), tmp_path / "grown-merged", base)
    assert said is not None and "grown, which has another chat template and other tokens than the base's" in said
    assert "<new2>" in AutoTokenizer.from_pretrained(tmp_path / "grown-merged").get_vocab()


def test_a_tokenizer_with_tokens_that_the_model_does_not_have_is_left_out_and_named(
    tiny_base: Base, tokenizer: Any, tmp_path: Path
) -> None:
    said = merge_adapter(by_peft(tmp_path / "own", tokenizer, tokens=99), tmp_path / "merged", tiny_base())
    assert said is not None and "has tokens beyond the 320 embeddings of the base" in said
    assert "<new0>" not in AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab()


@pytest.mark.parametrize("kind", ["none", "a copy", "broken"])
def test_a_tokenizer_that_is_the_base_s_or_none_is_not_spoken_of(
    kind: str, tiny_base: Base, tokenizer: Any, tmp_path: Path
) -> None:
    folder = by_peft(tmp_path / "own", None if kind == "none" else tokenizer)
    if kind == "broken":
        (folder / "tokenizer.json").write_text("{")
    assert merge_adapter(folder, tmp_path / "merged", tiny_base()) is None
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == CHAT


def test_answers_and_runs_that_go_on_say_that_texts_are_made_by_the_base_s(
    tiny_base: Base, tokenizer: Any, write_rows: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, said = (
        by_peft(tmp_path / "own", tokenizer, OTHER),
        "own has a tokenizer of its own, with another chat template",
    )
    load_speakers([folder], tiny_base(), "float32", "cpu")
    assert said in capsys.readouterr().err
    run = run_from(folder, tiny_base(), write_rows("rows"), tmp_path / "run")
    packlora.train(run)
    written = capsys.readouterr()
    assert (written.out + written.err).count(said) == 1


def test_a_folder_of_adapters_by_their_names_is_refused_with_them(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    own = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(tiny_model("llama"), own, adapter_name="mine").save_pretrained(tmp_path / "peft")
    said = r"peft is not a PEFT adapter folder: it holds no adapter_config\.json, but adapters by their names: \S+peft/mine;"
    with pytest.raises(InputError, match=said):
        merge_adapter(tmp_path / "peft", tmp_path / "out", tiny_base())
    run = run_from(tmp_path / "peft", tiny_base(), write_rows("rows"), tmp_path / "run")
    with pytest.raises(InputError, match=said):
        packlora.train(run)
