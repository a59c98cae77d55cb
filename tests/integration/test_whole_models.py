"""Adapters of multimodal checkpoints that are trained as text models (Qwen3.5): their files fit the class that others build."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from seeds import some
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import packlora
from packlora.answers.talk import load_speakers
from packlora.errors import InputError
from packlora.export.merge import merge_adapter

Rows = Callable[..., str]
IDS = torch.arange(3, 40)[None]
TEXT, WHOLE = AutoModelForCausalLM, AutoModelForImageTextToText
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora patterns": {"use_dora": True, "rank_pattern": {"model.layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"o_proj": 5}},
    "ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "copy": {"target_modules": ["in_proj_qkv"], "modules_to_save": ["embed_tokens", "model.norm", "1.input_layernorm"]},
    "rows": {"target_modules": ["down_proj"], "trainable_token_indices": [3, 7, 11]},
    "some layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "expression": {"target_modules": r"model\.layers\..*(attn|mlp)\..*_proj", "exclude_modules": r"model\.layers\.1\.mlp.*"},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(whole_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a job of each kind."""
    folder = tmp_path_factory.mktemp("trained")
    packlora.train(run_of(whole_base(), rows_into(folder)("rows"), folder / "run", KINDS))
    return folder / "run"


def run_of(base: str, data: str, out: Path, adapters: dict[str, dict[str, Any]], **keys: Any) -> dict[str, Any]:
    train = {"global_batch_size": 4, "max_steps": 2, "learning_rate": 5e-2, "shuffle": False}
    jobs = [
        {"name": name.replace(" ", "-"), "data": {"path": data}, "adapter": adapter, "train": train}
        for name, adapter in adapters.items()
    ]
    return {"base_model": base, "output_dir": str(out), "device": "cpu", "dtype": "float32", "jobs": jobs, **keys}


def rounding_of_peft(base: str, folder: Path, want: torch.Tensor) -> float:
    """Largest difference that merging in float32 makes to these logits where PEFT does it."""
    model = PeftModel.from_pretrained(TEXT.from_pretrained(base, dtype=torch.float32), folder)
    return float((logits(model.merge_and_unload()) - want).abs().max())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.double().eval()(IDS).logits
    return out


def plain(auto: Any, base: str) -> Any:
    return auto.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")


def loaded(auto: Any, base: str, folder: Path) -> torch.Tensor:
    """Logits of PEFT's model of a folder; a tensor that it misses is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return logits(PeftModel.from_pretrained(plain(auto, base), folder))


def as_served(base: str, folder: Path) -> torch.Tensor:
    """Logits with what a program adds that builds the class which the folder of the base names and passes over all else."""
    model = plain(WHOLE, base)
    modules, config = dict(model.named_modules()), json.loads((folder / "adapter_config.json").read_text())
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        path, _, part = key.removeprefix("base_model.model.").rpartition(".lora_")
        if path in modules:
            factors.setdefault(path, {})[part[0]] = tensor.double()
    with torch.no_grad():
        for path, own in factors.items():
            modules[path].weight += config["lora_alpha"] / config["r"] * own["B"] @ own["A"]
    return logits(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_folder_loads_into_both_classes_with_the_same_numbers(
    kind: str, whole_base: Callable[..., str], trained: Path
) -> None:
    base, folder = whole_base(), trained / kind.replace(" ", "-")
    got = loaded(WHOLE, base, folder)
    torch.testing.assert_close(got, loaded(TEXT, base, folder), rtol=1e-9, atol=1e-9)
    assert (got - logits(plain(WHOLE, base))).abs().max() > 1e-2
    if kind in ("lora", "expression", "some layers"):
        torch.testing.assert_close(as_served(base, folder), got, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_folder_loads_with_all_classes_of_its_base_and_has_its_vision_tower(
    kind: str, whole_base: Callable[..., str], trained: Path, tmp_path: Path
) -> None:
    base, folder = whole_base(), trained / kind.replace(" ", "-")
    merge_adapter(folder, tmp_path / "merged")
    want = loaded(TEXT, base, folder)
    bound = max(1e-5, 2 * rounding_of_peft(base, folder, want))
    for auto in (WHOLE, TEXT):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=0, atol=bound)
    merged, before = (plain(WHOLE, str(one)).state_dict() for one in (tmp_path / "merged", base))
    tower = [name for name in before if ".visual." in name]
    assert tower and all(torch.equal(merged[name], before[name]) for name in tower)
    config, old = (json.loads((Path(one) / "config.json").read_text()) for one in (tmp_path / "merged", base))
    assert config["architectures"] == old["architectures"] and config["vision_config"] == old["vision_config"]


def without(names: str, folder: Path, out: Path) -> Path:
    """A copy of a folder whose file names modules by one class alone, as older versions and PEFT write it."""
    shutil.copytree(folder, out)
    weights = load_file(folder / "adapter_model.safetensors")
    left = {key: value for key, value in weights.items() if ("language_model" in key) != (names == "whole")}
    save_file(left, out / "adapter_model.safetensors")
    assert 0 < len(left) < len(weights)
    return out


def by_peft(base: str, folder: Path, **settings: Any) -> Any:
    """PEFT's own adapter of the whole class, far from its first values."""
    torch.manual_seed(3)
    model = get_peft_model(plain(WHOLE, base).float(), LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


CONTINUED = ["lora", "dora patterns", "copy", "expression"]
FORMS = ["both", "text", "whole"]


@pytest.fixture(scope="module")
def continued(whole_base: Callable[..., str], trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters named in each form, and a run that goes on from them."""
    folder, starts = tmp_path_factory.mktemp("continued"), {}
    for kind in CONTINUED:
        both = trained / kind.replace(" ", "-")
        for form in FORMS:
            start = folder / f"{kind}-{form}".replace(" ", "-")
            starts[start.name] = {
                "init_from": str(shutil.copytree(both, start) if form == "both" else without(form, both, start))
            }
    packlora.train(run_of(whole_base(), rows_into(folder)("rows"), folder / "run", starts))
    return folder


@pytest.mark.parametrize("kind", CONTINUED)
def test_either_names_or_both_are_continued_and_merged_alike(kind: str, continued: Path, tmp_path: Path) -> None:
    names = [f"{kind}-{form}".replace(" ", "-") for form in FORMS]
    first, *others = [(continued / "run" / name / "adapter_model.safetensors").read_bytes() for name in names]
    assert others == [first, first]
    for name in names:
        merge_adapter(continued / name, tmp_path / name, check="never")
    first, *others = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert others == [first, first]


def test_two_tensors_of_one_name_are_refused(whole_base: Callable[..., str], trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained / "lora", tmp_path / "changed"))
    weights = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in weights if "language_model" not in key)
    save_file(weights | {key: weights[key] + 1}, folder / "adapter_model.safetensors")
    with pytest.raises(
        InputError, match="are names of one tensor in two classes of the base model, and hold other numbers"
    ):
        merge_adapter(folder, tmp_path / "out")


WHOLE_TARGETS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "down_proj"]},
    "an expression": {"target_modules": r"model\.language_model\.layers\.\d+\.mlp\..*_proj"},
    "patterns": {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {r"model\.language_model\.layers\.1\..*q_proj": 2}},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": {"language_model.embed_tokens": [3, 5]}},
    "copy": {"target_modules": ["in_proj_z"], "modules_to_save": ["language_model.norm", "lm_head"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def of_peft(
    whole_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with adapters of the whole class and a run that hardly changes them; the logits of each."""
    base, folder = whole_base(), tmp_path_factory.mktemp("peft")
    want = {kind: logits(by_peft(base, folder / kind.replace(" ", "-"), **own)) for kind, own in WHOLE_TARGETS.items()}
    starts = {kind: {"init_from": str(folder / kind.replace(" ", "-"))} for kind in want}
    run = run_of(base, rows_into(folder)("rows"), folder / "run", starts)
    for job in run["jobs"]:
        job["train"]["learning_rate"] = 1e-12
    packlora.train(run)
    return folder, want


@pytest.mark.parametrize("kind", some(list(WHOLE_TARGETS), one_in=2))
def test_an_adapter_of_the_whole_class_by_peft_is_read_and_goes_on(
    kind: str, whole_base: Callable[..., str], of_peft: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    base, (folder, all_wanted), name = whole_base(), of_peft, kind.replace(" ", "-")
    want = all_wanted[kind]
    merge_adapter(folder / name, tmp_path / "merged", base, check="never")
    torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / "merged"))), want, rtol=1e-5, atol=1e-5)
    for auto in (WHOLE, TEXT):
        torch.testing.assert_close(loaded(auto, base, folder / "run" / name), want, rtol=1e-5, atol=1e-5)
    speakers = load_speakers([folder / name], base, "float64", "cpu")
    with torch.no_grad(), speakers.attached.only(speakers.adapters[name].number):
        torch.testing.assert_close(speakers.model(IDS).logits, want, rtol=1e-6, atol=1e-6)


def test_what_an_adapter_changes_in_the_vision_tower_is_merged_and_refused_elsewhere(
    whole_base: Callable[..., str], write_rows: Rows, tmp_path: Path
) -> None:
    base = whole_base()
    model = by_peft(base, tmp_path / "peft", target_modules=["q_proj", "qkv", "linear_fc1"])
    merge_adapter(tmp_path / "peft", tmp_path / "merged", base)
    want, got = model.merge_and_unload().state_dict(), plain(WHOLE, str(tmp_path / "merged")).state_dict()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name].float(), tensor, rtol=1e-6, atol=1e-6)
    said = r"changes model\.visual\.\S+ of Qwen3_5ForConditionalGeneration; Qwen3_5ForCausalLM, which is trained and run here"
    with pytest.raises(InputError, match=said):
        packlora.train(
            run_of(base, write_rows("rows"), tmp_path / "run", {"job": {"init_from": str(tmp_path / "peft")}})
        )
    with pytest.raises(InputError, match=said):
        load_speakers([tmp_path / "peft"], base, "float32", "cpu")
