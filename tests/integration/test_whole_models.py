"""Adapters of multimodal checkpoints that are trained as text models (Qwen3.5): their files fit the class that others build."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from whole_models import whole_folder

import packlora
from packlora.commands.merge import merge_adapter

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


@pytest.fixture(scope="session")
def whole_base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., str]:
    made: dict[str, str] = {}

    def make(family: str = "qwen3_5", **text: Any) -> str:
        key = f"{family} {text}"
        if key not in made:
            made[key] = whole_folder(family, tokenizer, tmp_path_factory.mktemp("whole"), **text)
        return made[key]

    return make


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_folder_loads_with_all_classes_of_its_base_and_has_its_vision_tower(
    kind: str, whole_base: Callable[..., str], trained: Path, tmp_path: Path
) -> None:
    base, folder = whole_base(), trained / kind.replace(" ", "-")
    merge_adapter(folder, tmp_path / "merged")
    want = loaded(TEXT, base, folder)
    for auto in (WHOLE, TEXT):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=1e-5, atol=1e-5)
    merged, before = (plain(WHOLE, str(one)).state_dict() for one in (tmp_path / "merged", base))
    tower = [name for name in before if ".visual." in name]
    assert tower and all(torch.equal(merged[name], before[name]) for name in tower)
    config, old = (json.loads((Path(one) / "config.json").read_text()) for one in (tmp_path / "merged", base))
    assert config["architectures"] == old["architectures"] and config["vision_config"] == old["vision_config"]
