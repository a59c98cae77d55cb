"""Adapter folders as hostile input, and as output that other programs read.

A downloaded adapter_config.json may hold anything, its tensors too: bad ones are refused before a model is loaded, with the
file, the key, what was found and what is accepted. What is written names modules, so that every reader means the same ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TINY, tiny_model
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from typer.testing import CliRunner

import packlora
from packlora.adapters.attach import attach
from packlora.adapters.files import save_adapter
from packlora.adapters.reading import base_note, read_tensors
from packlora.adapters.spec import resolve
from packlora.cli import app
from packlora.config import Run
from packlora.config.adapter_file import read_config
from packlora.errors import InputError
from packlora.export.export import export_adapter
from packlora.export.merge import merge_adapter
from packlora.runtime.prepare import prepare

Base = Callable[..., str]
KEY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Those of rank 4 on the q_proj of the tiny model."""
    shapes = {"A": (4, 64), "B": (64, 4)}
    return {KEY.format(layer, part): torch.ones(shapes[part]).to(dtype) for layer in range(2) for part in "AB"}


def write_adapter(folder: Path, base: str, change: dict[str, Any] | None = None, **replaced: torch.Tensor) -> Path:
    """An adapter as PEFT writes it, with keys of its configuration changed."""
    folder.mkdir()
    made = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", base_model_name_or_path=base)
    made.save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (change or {})))
    save_file(tensors() | replaced, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def train_from(tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """(adapter folder, keys of the job's adapter) -> what `packlora train` gives that continues it beside a good job."""

    def train_from(folder: Path, **adapter: Any) -> Any:
        first = {"name": "first", "data": {"path": write_rows("rows", 4)}, "train": {"max_steps": 1}}
        good = first | {"name": "good", "adapter": {"r": 2}}
        tree = {
            "base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"),
            "jobs": [good, first | {"adapter": {"init_from": str(folder), **adapter}}],
        }  # fmt: skip
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(tree))
        return CliRunner().invoke(app, ["train", str(file)])

    return train_from


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights of a base model may be read."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a base model was loaded")

    monkeypatch.setattr("packlora.runtime.placement.load_base", load)
    monkeypatch.setattr("packlora.export.merge.WeightFiles", load)


def refused(result: Any, *said: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1, result.stderr
    for text in said:
        assert text in result.stderr


CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rank 0": ({"r": 0}, ("r: input should be greater than or equal to 1; found 0",)),
    "rank -1": ({"r": -1}, ("r: ", "found -1")),
    "rank as text": ({"r": "4"}, ("r: input should be a valid integer; found '4'",)),
    "rank yes": ({"r": True}, ("r: ", "found True")),
    "rank null": ({"r": None}, ("r: ", "found None")),
    "rank that no layer has": ({"r": 10**9}, ("r: ", "found 1000000000")),
    "rank of many digits": ({"r": 10**400}, ("r: ",)),
    "another rank": ({"r": 8}, ("is (4, 64)", "(8, 64)")),
    "alpha NaN": ({"lora_alpha": float("nan")}, ("lora_alpha: ", "found nan")),
    "alpha infinite": ({"lora_alpha": float("inf")}, ("lora_alpha: ", "found inf")),
    "alpha 0": ({"lora_alpha": 0}, ("lora_alpha: ", "found 0")),
    "alpha of many digits": ({"lora_alpha": 10**400}, ("lora_alpha: ",)),
    "alpha as a list": ({"lora_alpha": [8]}, ("lora_alpha: ", "found a list")),
    "dropout 1": ({"lora_dropout": 1.0}, ("lora_dropout: ", "less than 1; found 1.0")),
    "dropout -0.1": ({"lora_dropout": -0.1}, ("lora_dropout: ", "found -0.1")),
    "dropout NaN": ({"lora_dropout": float("nan")}, ("lora_dropout: ", "found nan")),
    "rslora yes": ({"use_rslora": "yes"}, ("use_rslora: input should be true or false; found 'yes'",)),
    "dora 1": ({"use_dora": 1}, ("use_dora: ", "found 1")),
    "bias": ({"bias": "some"}, ("bias: ", "'none', 'all' or 'lora_only'; found 'some'")),
    "no targets": ({"target_modules": None}, ("target_modules: ", "found None")),
    "empty targets": ({"target_modules": []}, ("target_modules: ", "is empty")),
    "targets of numbers": ({"target_modules": [1]}, ("target_modules[0]: ", "found 1")),
    "a bad regex": ({"target_modules": "(("}, ("target_modules: ", "not a valid regular expression")),
    "a bad pattern": ({"rank_pattern": {"((": 2}}, ("rank_pattern.((: ", "not a valid regular expression")),
    "rank pattern 0": ({"rank_pattern": {"q_proj": 0}}, ("rank_pattern.q_proj: ", "found 0")),
    "rank pattern as text": ({"rank_pattern": {"q_proj": "4"}}, ("rank_pattern.q_proj: ", "found '4'")),
    "rank pattern 1e9": ({"rank_pattern": {"q_proj": 10**9}}, ("rank_pattern.q_proj: ", "found 1000000000")),
    "rank pattern as a list": ({"rank_pattern": [4]}, ("rank_pattern: ", "found a list")),
    "alpha pattern NaN": ({"alpha_pattern": {"q_proj": float("nan")}}, ("alpha_pattern.q_proj: ", "found nan")),
    "layers as text": ({"layers_to_transform": "all"}, ("layers_to_transform: ", "found 'all'")),
    "a bad layers pattern": (
        {"layers_to_transform": [0], "layers_pattern": "(("},
        ("layers_pattern: ", "not a valid regular expression"),
    ),
    "a layers pattern alone": ({"layers_pattern": "h"}, ("layers_pattern goes with layers_to_transform",)),
    "a bad exclusion": ({"exclude_modules": "(("}, ("exclude_modules: ", "not a valid regular expression")),
    "an unknown task": ({"task_type": "MAGIC"}, ("task_type: ", "'CAUSAL_LM'", "MAGIC")),
    "a base that is a list": ({"base_model_name_or_path": ["x"]}, ("base_model_name_or_path: ", "found a list")),
    "a long value": ({"r": "x" * 10**6}, ("r: ", "found 'xxx")),
    "an escape sequence": ({"r": "\x1b[2J"}, (r"found '\x1b[2J'",)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_with_a_wrong_value_is_refused_before_a_model_is_loaded(
    case: str, train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    change, said = CONFIGS[case]
    folder = write_adapter(tmp_path / "start", tiny_base("llama"), change)
    result = train_from(folder)
    refused(result, "job 'first': ", str(folder), *said)
    assert len(result.stderr) < 1000
    assert not (tmp_path / "out").exists()
    refused(CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / "merged")]), "'start'", *said)
    assert not (tmp_path / "merged").exists()


def test_a_pattern_that_matches_nothing_is_refused(
    train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"), {"rank_pattern": {"x_proj": 4}})
    refused(train_from(folder), "job 'first': ", "rank_pattern has 'x_proj', which matches no adapted module")


@pytest.mark.parametrize(
    "start", [True, False, None, "gaussian", "orthogonal", "eva", "pissa", "olora", "loftq", "corda"]
)
def test_a_folder_is_read_by_whether_its_start_changed_the_base_weights(
    start: bool | str | None, tmp_path: Path
) -> None:
    """Every start that a job may ask for is read where it left the base alone."""
    told = {"peft_type": "LORA", "target_modules": ["q_proj"], "init_lora_weights": start}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    if start in ("pissa", "olora", "loftq", "corda"):
        with pytest.raises(InputError, match=f"init_lora_weights '{start}', which goes with other base weights"):
            read_config(str(tmp_path), "job")
    else:
        assert read_config(str(tmp_path), "job").r == 8


def test_a_configuration_nested_thousands_deep_is_refused(
    train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"))
    for text in ("[" * 100_000, '{"r":' * 100_000, '{"r": ' + "9" * 10_000 + "}"):
        (folder / "adapter_config.json").write_text(text)
        refused(train_from(folder), "job 'first': ", f"{folder} is not a PEFT adapter folder: ")


def test_a_pipe_in_place_of_a_file_does_not_hang(
    train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = write_adapter(tmp_path / f"start-{name}", tiny_base("llama"))
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(train_from(folder), "job 'first': ", str(folder), "not a file")


INTEGERS = tensors(torch.int32)[KEY.format(1, "A")]
NOT_FINITE = torch.ones(64, 4).index_put((torch.tensor(7), torch.tensor(2)), torch.tensor(float("nan")))
BAD_TENSORS: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {
    "integers": (INTEGERS, (f"'{KEY.format(1, 'A')}' holds int32, not floating-point numbers",)),
    "bools": (INTEGERS.bool(), ("holds bool, not floating-point numbers",)),
    "complex": (torch.ones(4, 64, dtype=torch.complex64), ("holds complex64, not floating-point numbers",)),
    "infinite": (torch.full((4, 64), float("inf")), (f"'{KEY.format(1, 'A')}' holds numbers that are not finite",)),
    "too large": (torch.full((4, 64), 1e300, dtype=torch.float64), ("holds numbers that are not finite in float32",)),
    "rank 0": (torch.ones(0, 64), ("is (0, 64), the model needs (4, 64)",)),
    "one dimension": (torch.ones(256), ("is (256,), the model needs (4, 64)",)),
    "a number": (torch.tensor(1.0), ("is (), the model needs (4, 64)",)),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_are_no_adapter_are_refused_before_a_model_is_loaded(
    case: str, train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    tensor, said = BAD_TENSORS[case]
    folder = write_adapter(tmp_path / "start", tiny_base("llama"), **{KEY.format(1, "A"): tensor})
    refused(train_from(folder), "job 'first': ", "adapter_model.safetensors", *said)
    assert not (tmp_path / "out").exists()
    refused(CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / "merged")]), "'start'", *said)
    assert not (tmp_path / "merged").exists()


def test_nan_in_one_number_is_refused_with_its_tensor(
    train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"), **{KEY.format(0, "B"): NOT_FINITE})
    refused(train_from(folder), f"'{KEY.format(0, 'B')}' holds numbers that are not finite")
    refused(CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / "merged")]), "numbers that are not finite")


def test_a_key_of_this_program_alone_is_no_disagreement_with_the_file(
    train_from: Any, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"))
    result = train_from(folder, dora_dropout="low_rank")
    assert result.exit_code == 0, (result.output, result.exception)


def test_an_adapter_of_another_base_model_is_continued_with_a_note(
    train_from: Any, tiny_base: Base, tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "other", tiny_base("mistral"))
    result = train_from(other)
    assert result.exit_code == 0, (result.output, result.exception)
    warnings = json.loads((tmp_path / "out" / "run.json").read_text())["warnings"]
    (note,) = [text for text in warnings if "global_batch_size" not in text]
    for text in ("job 'first'", str(other), tiny_base("mistral"), "(mistral)", tiny_base("llama"), "(llama)"):
        assert text in note
    assert note in result.stdout
    link = tmp_path / "link"
    link.symlink_to(tiny_base("llama"))
    for name, same in (("same", tiny_base("llama")), ("linked", str(link))):
        assert base_note(str(write_adapter(tmp_path / name, same)), tiny_base("llama")) is None


def test_a_plain_adapter_that_peft_made_for_a_moe_model_is_read(tmp_path: Path) -> None:
    config = MixtralConfig(**TINY, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    wrapped.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"] == []
    spec = resolve(read_config(str(tmp_path), "job"), AutoModelForCausalLM.from_config(config), "job")
    assert len(spec.modules) == 4


def test_an_adapter_of_expert_parameters_is_refused_on_a_model_without_experts(
    train_from: Any, no_model: None, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"), {"target_parameters": ["experts.gate_up_proj"]})
    refused(train_from(folder), "names 'experts.gate_up_proj', which matches nothing in the model; it has no experts")


# --- what is written ---------------------------------------------------------------------------------------------------

LEAVES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
FIRST_LAYERS = r"model\.layers\.[0-2]\..*_proj"
WRITTEN: dict[str, tuple[Any, dict[str, Any], list[str] | None]] = {
    "a shorthand": ("all-linear", {}, LEAVES),
    "a regex of whole kinds": (r".*\.(q|v)_proj", {"rank_pattern": {"v_proj": 2}}, ["q_proj", "v_proj"]),
    "a regex of one layer": (
        r".*layers\.1\.self_attn\.(q|v)_proj",
        {"alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 3}},
        ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"],
    ),
    "a regex of many modules": (FIRST_LAYERS, {"rank_pattern": {r"layers\.2\..*": 2}}, None),
    "a list": (["q_proj", "layers.0.mlp.up_proj"], {}, ["layers.0.mlp.up_proj", "q_proj"]),
    "a regex with an exclusion": (r".*_proj", {"exclude_modules": ["mlp.up_proj"]}, [n for n in LEAVES if n != "up_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_module_names_are_written_and_peft_adapts_exactly_the_same_modules(case: str, tmp_path: Path) -> None:
    targets, more, written = WRITTEN[case]
    model = tiny_model("llama", num_hidden_layers=4)
    config, theirs = (LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more) for _ in range(2))
    want = set(get_peft_model(tiny_model("llama", num_hidden_layers=4), theirs).targeted_module_names)
    _, (adapter,) = attach(model, {"job": resolve(config, model, "job")}, 0)
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    save_adapter(tmp_path, adapter)
    found = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert found == (sorted(want) if written is None else written)
    loaded = PeftModel.from_pretrained(tiny_model("llama", num_hidden_layers=4), tmp_path)
    assert set(loaded.targeted_module_names) == want == set(adapter.weights)
    for path, weights in adapter.weights.items():
        layer: Any = loaded.get_submodule(f"base_model.model.{path}")
        assert torch.equal(layer.lora_A["default"].weight, weights.A)
        assert torch.equal(layer.lora_B["default"].weight, weights.B)
        assert layer.scaling["default"] == weights.spec.scaling
    written_alpha = json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"]
    assert repr(written_alpha) == repr(read_config(str(tmp_path), "job").lora_alpha) == "8"  # whole, as PEFT has it
    assert config.target_modules == (set(targets) if isinstance(targets, list) else targets)  # the caller's is its own


KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "regex": {"target_modules": r".*layers\.1.*_proj"},
    "patterns": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 32}}, "bias": {"bias": "lora_only"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_transformers_load_what_is_written_and_give_the_same_logits(
    kind: str, tiny_base: Base, tmp_path: Path
) -> None:
    ids, base = torch.arange(3, 40)[None], tiny_base("qwen2")
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **KINDS[kind]})

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    model = fresh()
    attached, (adapter,) = attach(model, {"job": resolve(config, model, "job")}, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(tmp_path, adapter)
    with attached.only(0), torch.no_grad():
        want = model(ids).logits
    theirs = fresh()
    theirs.load_adapter(str(tmp_path))
    for loaded in (PeftModel.from_pretrained(fresh(), tmp_path), theirs):
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, want, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        assert (want - fresh()(ids).logits).abs().max() > 1e-2


def test_an_adapter_is_continued_by_the_regex_that_made_it_and_not_by_another(
    train_from: Any, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"))
    result = train_from(folder, target_modules=r".*\.q_proj")
    assert result.exit_code == 0, (result.output, result.exception)
    shutil.rmtree(tmp_path / "out")
    for other in (r".*\.(q|v)_proj", r".*layers\.1.*q_proj", "all-linear"):
        refused(
            train_from(folder, target_modules=other), f"adapter.target_modules is {other!r}, but", "leave the key out"
        )


# --- merge -------------------------------------------------------------------------------------------------------------


def merge(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def test_merge_refuses_a_base_of_another_architecture_and_notes_another_base(tiny_base: Base, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_base("llama"))
    result = merge(folder, tmp_path / "out", "--base-model", tiny_base("mistral"))
    refused(result, "made for", tiny_base("llama"), "(llama)", tiny_base("mistral"), "(mistral)")
    assert not (tmp_path / "out").exists()
    shutil.copytree(tiny_base("llama"), tmp_path / "copy")
    result = merge(folder, tmp_path / "out", "--base-model", tmp_path / "copy")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"packlora: note: {folder} was made for")
    result = merge(folder, tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""


def test_merge_refuses_a_base_without_all_its_weights(tiny_base: Base, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("llama"), base)
    weights = load_file(base / "model.safetensors")
    save_file({key: weights[key] for key in weights if "layers.1.mlp" not in key}, base / "model.safetensors")
    folder = write_adapter(tmp_path / "adapter", str(base))
    refused(merge(folder, tmp_path / "out"), str(base), "model.layers.1.mlp.", "lack", "--base-model")


def test_merge_refuses_weights_that_would_not_be_finite(tiny_base: Base, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_base("llama"))
    weights = {key: value * 1e30 for key, value in tensors().items()}
    save_file(weights, folder / "adapter_model.safetensors")
    refused(merge(folder, tmp_path / "out"), "model.layers.0.self_attn.q_proj", "not finite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["\x00", "x" * 5000, "https://evil.example/model", "../..", "\x1b[2J", "no/such-model"]
)
def test_a_base_name_that_leads_nowhere_is_refused_without_a_traceback(
    name: str, tiny_base: Base, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", name)
    refused(merge(folder, tmp_path / "out"), "cannot load", "--base-model")
    assert not (tmp_path / "out").exists()
    result = merge(folder, tmp_path / "out", "--base-model", tiny_base("llama"))
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stderr and len(result.stderr) < 1000
    assert "was made for the base model" in result.stderr


def test_merge_without_a_named_base_asks_for_one(tiny_base: Base, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny_base("llama"), {"base_model_name_or_path": None})
    refused(merge(folder, tmp_path / "out"), "names no base model", "--base-model")
    assert merge(folder, tmp_path / "out", "--base-model", tiny_base("llama")).exit_code == 0


# --- nobody's code is run ----------------------------------------------------------------------------------------------


def hostile_base(folder: Path, tiny: str, where: str, mark: Path) -> str:
    """A base whose configuration, tokenizer or generation asks for code beside it, which would write a mark."""
    shutil.copytree(tiny, folder)
    code = f"open({str(mark)!r}, 'w').close()\n"
    (folder / "evil.py").write_text(code + "class Config: pass\nclass Model: pass\nclass Tokens: pass\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code + "def generate(model, **kwargs): pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokens", None]}
    name = {"config": "config.json", "tokenizer": "tokenizer_config.json"}[where]
    tree = json.loads((folder / name).read_text())
    if where == "config":
        tree |= {"model_type": "evil", "architectures": ["Model"]}
    else:
        tree |= {"tokenizer_class": "Tokens"}
    (folder / name).write_text(json.dumps(tree | {"auto_map": auto}))
    return str(folder)


@pytest.mark.parametrize("where", ["config", "tokenizer"])
def test_no_command_runs_the_code_of_a_base_model_or_asks_whether_to(
    where: str, tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    mark = tmp_path / "ran"
    base = hostile_base(tmp_path / "base", tiny_base("llama"), where, mark)
    folder = write_adapter(tmp_path / "adapter", base)
    run_file = tmp_path / "run.yaml"
    jobs = [{"name": "first", "data": {"path": write_rows("rows", 4)}, "train": {"max_steps": 1}}]
    run_file.write_text(yaml.safe_dump({"base_model": base, "output_dir": str(tmp_path / "out"), "jobs": jobs}))
    for command in (
        ["merge", str(folder), str(tmp_path / "merged")],
        ["train", str(run_file)],
        ["plan", str(run_file)],
    ):
        result = CliRunner().invoke(app, command, input="y\n" * 20)  # somebody says yes to everything
        assert "[y/N]" not in result.output
        assert not mark.exists()
        refused(result, base, "custom code")
    assert not (tmp_path / "merged").exists()
    assert not (tmp_path / "out").exists()


def test_attention_that_a_base_model_names_on_the_hub_is_not_fetched(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("llama"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attn_implementation": "kernels-community/evil"}))
    folder = write_adapter(tmp_path / "adapter", str(base))
    run_file = tmp_path / "run.yaml"
    jobs = [{"name": "first", "data": {"path": write_rows("rows", 4)}, "train": {"max_steps": 1}}]
    run_file.write_text(yaml.safe_dump({"base_model": str(base), "output_dir": str(tmp_path / "out"), "jobs": jobs}))
    for command in (["merge", str(folder), str(tmp_path / "merged")], ["train", str(run_file)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (result.output, result.exception)


def test_every_call_that_loads_from_a_folder_or_a_hub_says_whether_code_is_trusted() -> None:
    """transformers asks on the terminal where it is not told."""
    folder = Path(packlora.__file__).parent
    calls = []
    for file in folder.rglob("*.py"):
        text = file.read_text()
        for match in re.finditer(r"(Auto\w+|\bcls|auto_class\(config\))\.from_(pretrained|config)\(", text):
            depth, stop = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[stop], 0)
                stop += 1
            calls.append((file.name, text[match.start() : stop]))
    assert len(calls) >= 6
    for name, call in calls:
        assert "trust_remote_code=" in call, (name, call)


def test_an_adapter_of_a_grown_vocabulary_is_called_so(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    """PEFT saves the embeddings whole beside it."""
    base = tiny_base()
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(333)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
            tmp_path / "grown", save_embedding_layers=True
        )
    job = {"name": "a", "data": {"path": write_rows("rows")}, "adapter": {"init_from": str(tmp_path / "grown")}}
    said = (
        r"lm_head\.weight \[333, 64\].*vocabulary was grown.*resize_token_embeddings\(333\); "
        r".*save_pretrained\(A, save_embedding_layers=False\) .*unload\(\)\.save_pretrained\(B\)"
    )
    with pytest.raises(InputError, match=said):
        prepare(Run.model_validate({"base_model": base, "output_dir": str(tmp_path / "out"), "jobs": [job]}))
    with pytest.raises(InputError, match=said):
        merge_adapter(tmp_path / "grown", tmp_path / "merged", base)


def test_a_number_in_the_place_of_a_whole_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    key, A = "base_model.model.lm_head.weight", torch.zeros(2, 4)
    save_file({"A": A, key: torch.tensor(1.0)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=f"has '{re.escape(key)}' .*not of this adapter"):
        read_tensors(tmp_path, {"A": A.shape}, "a")


@pytest.mark.parametrize(
    "kind",
    [{}, {"trainable_token_indices": [331, 332]}, {"modules_to_save": ["embed_tokens", "lm_head"]}],
    ids=["plain", "rows", "copies"],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_a_grown_vocabulary_is_merged_as_the_message_says(
    kind: dict[str, Any], tied: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """Copies hold all of the new rows themselves; else these are in PEFT's file alone."""
    base, grown, folder = tmp_path / "base", tmp_path / "grown", tmp_path / "adapter"
    tiny_model("llama", tie_word_embeddings=tied).save_pretrained(base)
    tokenizer.save_pretrained(grown)

    def grow() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(333)
        return model

    peft = get_peft_model(grow(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **kind))
    with torch.no_grad():
        for parameter in peft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.requires_grad)
    peft.save_pretrained(folder)
    if "modules_to_save" in kind:
        grow().save_pretrained(grown)
    else:
        grow().save_pretrained(grown)
        with pytest.raises(InputError, match=r"save_pretrained\(A, save_embedding_layers=False\)"):
            merge_adapter(folder, tmp_path / "merged", str(grown))
        loaded = PeftModel.from_pretrained(grow(), folder)
        folder = tmp_path / "alone"
        loaded.save_pretrained(folder, save_embedding_layers=False)
        loaded.unload().save_pretrained(grown)
    merge_adapter(folder, tmp_path / "merged", str(grown))
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.tensor([[7, 331, 40, 332, 9]])
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, peft.eval()(ids).logits, rtol=0, atol=1e-4)


def test_an_adapter_that_peft_made_under_bias_all_is_read_on_a_model_without_biases(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    base = tiny_base()
    config = LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM")
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.nn.init.normal_(peft.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    peft.save_pretrained(tmp_path / "all")
    job = {"name": "a", "data": {"path": write_rows("rows")}, "adapter": {"init_from": str(tmp_path / "all")}}
    tree = {"base_model": base, "output_dir": str(tmp_path / "out"), "jobs": [job | {"train": {"max_steps": 1}}]}
    assert packlora.train(tree).status == "done"
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "a")
    merge_adapter(tmp_path / "all", tmp_path / "merged", base)
    ids = torch.tensor([[7, 9, 40]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(ids).logits, peft.eval()(ids).logits, rtol=0, atol=1e-4)
    weights = tmp_path / "all" / "adapter_model.safetensors"
    bias = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": torch.ones(64)}
    save_file(load_file(weights) | bias, weights)
    file = tmp_path / "all" / "adapter_config.json"
    for kind in ("all", "lora_only"):  # a bias that was trained is not left out
        file.write_text(json.dumps(json.loads(file.read_text()) | {"bias": kind}))
        with pytest.raises(InputError, match=r"q_proj\.base_layer\.bias' .*which is not of this adapter"):
            merge_adapter(tmp_path / "all", tmp_path / "other", base)


def test_a_pickled_adapter_is_refused_by_its_file_with_the_remedy(tiny_base: Base, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "start", tiny_base("llama"))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match=r"adapter_model\.bin is a pickle, which is not opened: load it in PEFT"):
        merge_adapter(folder, tmp_path / "merged")


def test_an_adapter_names_a_folder_as_any_program_finds_it_wherever_it_was_started(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a base that the run file names relatively: its checkpoints, what goes on from them, and what is exported."""
    (tmp_path / "here").mkdir()
    shutil.copytree(tiny_base(), tmp_path / "here" / "base")
    monkeypatch.chdir(tmp_path / "here")
    job = {"name": "a", "data": {"path": write_rows("rows")}, "adapter": {"r": 2}, "train": {"max_steps": 2}}
    tree = {"base_model": "base", "output_dir": "out", "save_every": 1, "device": "cpu", "jobs": [job]}
    packlora.train(tree)
    packlora.train(tree | {"output_dir": "on", "jobs": [job | {"adapter": {"init_from": "out/a"}}]})
    export_adapter(Path("out/a"), Path("exported"), "vllm")
    old = json.loads(Path("out/a/adapter_config.json").read_text()) | {"base_model_name_or_path": "base"}
    shutil.copytree("out/a", "old")
    Path("old/adapter_config.json").write_text(json.dumps(old))
    export_adapter(Path("old"), Path("exported-old"), "peft")
    monkeypatch.chdir("/")
    here = tmp_path / "here"
    folders = [here / "out" / "a", here / "on" / "a", here / "exported", here / "exported-old"]
    checkpoints = list((here / "out" / "a").glob("checkpoint-*"))
    assert checkpoints
    for folder in folders + checkpoints:
        named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(here / "base"), folder
    assert AutoPeftModelForCausalLM.from_pretrained(str(here / "out" / "a")) is not None


def test_a_run_record_and_its_page_have_the_settings_of_the_folder_that_a_job_continues(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    """Not the defaults of keys that the run file leaves to it."""
    adapter = {"r": 3, "lora_alpha": 8, "use_dora": True, "target_modules": ["v_proj"]}
    job = {"name": "a", "data": {"path": write_rows("rows")}, "adapter": adapter, "train": {"max_steps": 1}}
    tree = {"base_model": tiny_base(), "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": [job]}
    packlora.train(tree)
    on = job | {"name": "on", "adapter": {"init_from": str(tmp_path / "out" / "a")}}
    packlora.train(tree | {"output_dir": str(tmp_path / "on"), "jobs": [on]})
    said = json.loads((tmp_path / "on" / "run.json").read_text())["jobs"]["on"]["adapter"]
    assert {key: said[key] for key in adapter} == adapter
    assert "adapter" not in json.loads((tmp_path / "out" / "run.json").read_text())["jobs"]["a"]
    rows = [re.sub("<[^>]+>", " ", (tmp_path / run / "report.html").read_text()).split() for run in ("out", "on")]
    ours, theirs = (row[row.index("DoRA") - 1 : row.index("DoRA") + 3] for row in rows)
    assert ours == theirs == ["v_proj", "DoRA", "3", "8"]
