"""The check of `merge` and `export`: what is written is loaded as programs that serve do, and held against the adapter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from seeds import some
from test_training import perturbed_peft
from test_whole_models import TEXT, WHOLE, by_peft, loaded, logits, plain, run_of, without
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner
from vision_models import SHOWN, vision_folder

import packlora
from packlora.cli import app
from packlora.errors import InputError
from packlora.export import as_served, export
from packlora.export import merge as merging
from packlora.export.export import export_adapter
from packlora.export.merge import merge_adapter
from packlora.export.merged import Merged

Base = Callable[..., str]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.fixture(scope="module")
def whole_adapter(whole_base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "peft"
    by_peft(whole_base(), folder, target_modules=["q_proj", "down_proj"])
    return folder


def test_a_merged_model_that_is_not_the_adapter_is_not_written(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folded = tiny_base("qwen2"), Merged._folded
    perturbed_peft(base, "lora", tmp_path / "job")

    def forgetful(self: Merged, stored: torch.Tensor, path: str, *rest: Any) -> torch.Tensor:
        return stored.float() if path.endswith("down_proj") else folded(self, stored, path, *rest)

    monkeypatch.setattr(Merged, "_folded", forgetful)
    with pytest.raises(
        InputError, match=r"the merged model, loaded as Qwen2ForCausalLM, does not give the adapter's logits"
    ):
        merge_adapter(tmp_path / "job", tmp_path / "out", base)
    assert not (tmp_path / "out").exists()
    merge_adapter(tmp_path / "job", tmp_path / "out", base, check="never")


def test_a_merged_folder_that_the_base_s_class_refuses_is_not_written(
    whole_base: Base,
    whole_adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_text_alone(folder: Path, config: Any, *rest: Any) -> None:
        text = config.get_text_config()
        text.architectures = ["Qwen3_5ForConditionalGeneration"]
        vision = config.vision_config.to_dict()
        vision["depth"] += 1  # the tower of the class itself is large
        written = config.__class__(text_config=text, vision_config=vision, architectures=text.architectures)
        written.save_pretrained(folder)

    monkeypatch.setattr(merging, "_write_config", of_text_alone)
    with pytest.raises(InputError, match=r"the merged model cannot be served: .*weight"):
        merge_adapter(whole_adapter, tmp_path / "out", whole_base())
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_whose_names_or_numbers_are_others_is_not_written(
    whole_base: Base,
    whole_adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = export.write_tensors

    def renamed(path: Path, tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        written(path, {key.replace("language_model.", ""): tensor for key, tensor in tensors.items()}, *rest)

    def scaled(path: Path, tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        written(path, {key: tensor * (1.1 if "lora_B" in key else 1) for key, tensor in tensors.items()}, *rest)

    for write, said in (
        (renamed, "is of no module of Qwen3_5ForConditionalGeneration"),
        (scaled, "does not give the adapter"),
    ):
        monkeypatch.setattr(export, "write_tensors", write)
        with pytest.raises(InputError, match=said):
            export_adapter(whole_adapter, tmp_path / "out", "vllm", whole_base())
    assert not (tmp_path / "out").exists()


def test_a_large_model_is_not_compared_and_that_is_said(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    perturbed_peft(base, "lora", tmp_path / "job")
    assert merge_adapter(tmp_path / "job", tmp_path / "compared", base, "float32") is None
    monkeypatch.setattr(as_served, "PARAMETERS", 1000)
    said = "were not compared with the adapter's: the model has 0.0 billion parameters; --check always compares them"
    for command in (["merge"], ["export", "--for", "vllm"]):
        where = [str(tmp_path / "job"), str(tmp_path / command[0]), "--base-model", base]
        out = CliRunner().invoke(app, [*command, *where])
        assert out.exit_code == 0 and said in " ".join(out.output.split())
        always = CliRunner().invoke(app, [*command, where[0], where[1] + "-always", *where[2:], "--check", "always"])
        assert always.exit_code == 0 and said not in " ".join(always.output.split())
    wrong = CliRunner().invoke(app, ["merge", *where[:2], "--check", "maybe"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize("form", ["text", "whole"])
def test_exported_for_vllm_a_folder_of_either_form_has_the_names_of_the_base_s_class_alone(
    form: str,
    whole_base: Base,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    base = whole_base()
    packlora.train(run_of(base, write_rows("rows"), tmp_path / "run", {"job": {"use_rslora": True}}))
    folder = without(form, tmp_path / "run" / "job", tmp_path / form)
    assert export_adapter(folder, tmp_path / "out", "vllm") == []
    keys = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    assert keys and all(".language_model." in key for key in keys)
    torch.testing.assert_close(
        loaded(WHOLE, base, tmp_path / "out"), loaded(WHOLE, base, tmp_path / "run" / "job"), rtol=1e-5, atol=1e-5
    )


def test_experts_and_routers_beside_a_vision_tower(
    whole_base: Base,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    base = whole_base("qwen3_5_moe")
    packlora.train(run_of(base, write_rows("rows"), tmp_path / "run", {"job": EXPERTS}))
    job = tmp_path / "run" / "job"
    want = loaded(WHOLE, base, job)
    torch.testing.assert_close(loaded(TEXT, base, job), want, rtol=1e-9, atol=1e-9)
    merge_adapter(job, tmp_path / "merged", base)
    for auto in (WHOLE, TEXT):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=1e-5, atol=1e-5)
    assert export_adapter(job, tmp_path / "out", "vllm") == []
    torch.testing.assert_close(loaded(WHOLE, base, tmp_path / "out"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
    ids=["embedding", "head", "copy", "rows"],
)  # fmt: skip
def test_ends_that_are_tied_in_both_classes(own: dict[str, Any], whole_base: Base, tmp_path: Path) -> None:
    base = whole_base(tie_word_embeddings=True)
    want = logits(by_peft(base, tmp_path / "peft", **own))
    merge_adapter(tmp_path / "peft", tmp_path / "merged", base)
    for auto in (WHOLE, TEXT):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=1e-4, atol=1e-4)


def test_an_adapter_trained_on_codes_leaves_the_vision_tower_as_it_is(
    whole_base: Base,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    pytest.importorskip("bitsandbytes")
    base, run = whole_base(), run_of(whole_base(), write_rows("rows"), tmp_path / "run", {"job": {}})
    packlora.train(run | {"quantization": {"method": "nf4"}})
    note = merge_adapter(tmp_path / "run" / "job", tmp_path / "merged")
    assert note is not None and "nf4 codes of the base stand for" in note and "not compared" not in note
    before, after = (plain(WHOLE, str(one)).state_dict() for one in (base, tmp_path / "merged"))
    for name in before:
        assert ".visual." not in name or torch.equal(before[name], after[name])
    merge_adapter(tmp_path / "run" / "job", tmp_path / "codes", requantize="nf4")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "codes")
    for name, tensor in whole.state_dict().items():
        assert ".visual." not in name or torch.equal(before[name].float(), tensor.float())
    again, stored = AutoModelForCausalLM.from_pretrained(tmp_path / "codes"), whole.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(stored[name.replace("model.", "model.language_model.", 1)], tensor), name
    merge_adapter(tmp_path / "run" / "job", tmp_path / "dense", str(tmp_path / "codes"), check="never")
    after = plain(WHOLE, str(tmp_path / "dense")).state_dict()
    assert after.keys() == before.keys() and all(
        torch.equal(before[name], after[name]) for name in after if ".visual." in name
    )


def test_a_run_goes_on_from_a_checkpoint_with_the_names_of_the_text_model(
    whole_base: Base,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    base, data = whole_base(), write_rows("rows")
    for name in ("whole", "stopped"):
        run = run_of(base, data, tmp_path / name, {"job": {"use_dora": True}}, save_every=1)
        packlora.train(run, max_steps=1 if name == "stopped" else None)
    (checkpoint,) = (tmp_path / "stopped" / "job").glob("checkpoint-1")
    weights = load_file(checkpoint / "adapter_model.safetensors")
    assert any("language_model" in key for key in weights)
    packlora.train(run, resume=True)
    first, second = (
        (tmp_path / name / "job" / "adapter_model.safetensors").read_bytes() for name in ("whole", "stopped")
    )
    assert first == second


def test_an_adapter_of_the_text_model_alone_goes_onto_the_whole_one(whole_base: Base, tmp_path: Path) -> None:
    """The text model was saved by itself, as its own base."""
    base, text = whole_base(), tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(text)
    AutoTokenizer.from_pretrained(base).save_pretrained(text)
    want = logits(perturbed_peft(str(text), "lora", tmp_path / "job"))
    for kind, of in (("vllm", WHOLE), ("peft", TEXT)):
        (note,) = export_adapter(tmp_path / "job", tmp_path / kind, kind, base)
        assert "(qwen3_5_text), not for" in note and "(qwen3_5)" in note
        torch.testing.assert_close(loaded(of, base, tmp_path / kind), want, rtol=1e-5, atol=1e-5)
    merge_adapter(tmp_path / "job", tmp_path / "merged", base)
    torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / "merged"))), want, rtol=1e-4, atol=1e-4)


def test_an_architecture_that_transformers_does_not_have_is_told(tiny_base: Base, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_base("llama"), tmp_path / "base"))
    said = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(said | {"architectures": ["LlavaLlamaForCausalLM"]}))
    perturbed_peft(str(base), "lora", tmp_path / "job")
    (note,) = export_adapter(tmp_path / "job", tmp_path / "out", "vllm", str(base))
    assert "names 'LlavaLlamaForCausalLM' as its architecture" in note and "named as in LlamaForCausalLM" in note


@pytest.mark.parametrize("family", some(list(SHOWN), 2))
def test_vision_language_models_are_merged_and_exported_as_others_build_them(
    family: str, tokenizer: Any, tmp_path: Path
) -> None:
    """Files of some name the parts of the model otherwise than its class does."""
    base = vision_folder(family, tokenizer, tmp_path / "base")
    model = get_peft_model(
        plain(WHOLE, base).float(), LoraConfig(r=4, target_modules=r".*(language_model.*_proj|visual.*attn\.proj)")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "job")
    want = logits(model)
    note = merge_adapter(tmp_path / "job", tmp_path / "merged", base, check="always")
    assert note is None or "not compared" not in note
    torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / "merged"))), want, rtol=1e-4, atol=1e-4)
    notes = export_adapter(tmp_path / "job", tmp_path / "out", "vllm", base)
    assert not [one for one in notes if "compared" in one]
    assert any("--enable-tower-connector-lora" in one for one in notes) == ("qwen" in family)
    names = {name for name, _ in plain(WHOLE, base).named_modules()}
    for key in load_file(tmp_path / "out" / "adapter_model.safetensors"):
        assert re.sub(r"\.lora_[AB]\.weight$", "", key.removeprefix("base_model.model.")) in names
