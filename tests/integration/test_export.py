"""`packlora export`: what other programs read of a folder, by their own rules, has the adapter's numbers.

The readers here are written from what vLLM 0.33, SGLang 0.5.23 and llama.cpp look at when they load an adapter, so what such a
program passes over is passed over here: a folder that they would read with other numbers fails.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_training import PEFT_KINDS, perturbed_peft
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from typer.testing import CliRunner

from packlora.cli import app
from packlora.commands.adapter_folder import named_base
from packlora.errors import InputError, WriteError
from packlora.export.export import export_adapter

Base = Callable[[str], str]
Deltas = dict[str, torch.Tensor]
IDS = torch.arange(3, 40)[None]
PLAIN = ["lora", "rslora", "patterns"]
LEAF = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj"}  # fmt: skip


def factors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Pairs of tensors by module. Programs that serve adapters know no other names."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert found is not None, f"{name} is unsupported LoRA weight"
        out.setdefault(found[1], {})[found[2]] = tensor
    return out


def as_vllm(folder: Path, max_lora_rank: int = 16) -> Deltas:
    config = json.loads((folder / "adapter_config.json").read_text())
    assert not config["use_dora"] and config["bias"] == "none" and not config["modules_to_save"]
    assert config["r"] <= max_lora_rank
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    deltas = {}
    for path, own in factors(folder).items():
        assert own["A"].shape[0] <= max_lora_rank
        deltas[path] = scaling * own["B"].double() @ own["A"].double()
    return deltas


def as_sglang(folder: Path) -> Deltas:
    """use_rslora, rank_pattern, alpha_pattern and bias are not looked at; tensors are cut to r."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert not config["use_dora"]
    assert isinstance(config["target_modules"], list), "Only 'all-linear' can be used as the string for target module"
    leaves = {name.split(".")[-1] for name in config["target_modules"]}
    rank, scaling = config["r"], config["lora_alpha"] / config["r"]
    deltas = {}
    for path, own in factors(folder).items():
        assert path.split(".")[-1] in leaves
        A, B = torch.zeros(rank, own["A"].shape[1]), torch.zeros(own["B"].shape[0], rank)
        A.copy_(own["A"]), B.copy_(own["B"])
        deltas[path] = scaling * B.double() @ A.double()
    return deltas


def as_llama_cpp(file: Path, base: str) -> Deltas:
    """Names and rows of q and k by transformers' own reading of GGUF models."""
    reader, config = gguf.GGUFReader(file), AutoConfig.from_pretrained(base)
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert (said["general.type"], said["adapter.type"]) == ("adapter", "lora")
    arch = {"llama": "llama", "mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    assert said["general.architecture"] == arch
    tensors = {t.name: torch.from_numpy(as_float(t)) for t in reader.tensors}
    processor = LlamaTensorProcessor(config.to_dict())
    deltas = {}
    for name in sorted({name.rpartition(".")[0] for name in tensors}):
        A, B = (tensors[f"{name}.lora_{part}"].double() for part in "ab")
        delta = said["adapter.lora.alpha"] / B.shape[1] * B @ A
        if arch == "llama":
            delta = torch.from_numpy(processor.process(delta.numpy(), name).weights)
        block, kind = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name).groups()  # type: ignore[union-attr]
        deltas[f"model.layers.{block}.{LEAF[kind]}"] = delta
    return deltas


def as_float(tensor: Any) -> Any:
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return tensor.data.copy()


def logits_of(base: str, deltas: Deltas) -> torch.Tensor:
    """Of the base model in float64 with the differences added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        for path, delta in deltas.items():
            model.get_submodule(path).weight += delta
        return model(IDS).logits


def in_double(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.double().eval()(IDS).logits


@pytest.mark.parametrize("kind", PLAIN)
def test_what_vllm_sglang_and_peft_read_of_a_folder_is_the_adapter(kind: str, tiny_base: Base, tmp_path: Path) -> None:
    base = tiny_base("qwen2")
    want = in_double(perturbed_peft(base, kind, tmp_path / "job"))
    for target, read in (("vllm", as_vllm), ("sglang", as_sglang)):
        out = tmp_path / target
        assert export_adapter(tmp_path / "job", out, target, base) == []
        torch.testing.assert_close(logits_of(base, read(out)), want, rtol=2e-6, atol=2e-6)
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["rank_pattern"] == config["alpha_pattern"] == {} and config["use_rslora"] is False
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        torch.testing.assert_close(in_double(PeftModel.from_pretrained(plain, out)), want, rtol=2e-6, atol=2e-6)
    if kind != "lora":  # these readers see what a folder that is not exported would lose
        names = list(factors(tmp_path / "job"))
        try:
            lost = logits_of(base, as_sglang(tmp_path / "job"))
        except RuntimeError:
            lost = torch.zeros_like(want)
        assert names and not torch.allclose(lost, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_exported_for_peft_every_kind_has_its_numbers_and_names_its_modules(
    kind: str, tiny_base: Base, tmp_path: Path
) -> None:
    base = tiny_base("qwen2")
    want = in_double(perturbed_peft(base, kind, tmp_path / "job"))
    export_adapter(tmp_path / "job", tmp_path / "out", "peft", base)
    assert isinstance(json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"], list)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    torch.testing.assert_close(
        in_double(PeftModel.from_pretrained(plain, tmp_path / "out")), want, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "lora"), ("mistral", "patterns"), ("qwen2", "rslora"), ("qwen3", "lora"), ("gemma3", "patterns")],
)
def test_a_gguf_file_read_back_and_added_to_the_base_is_the_adapter(
    family: str, kind: str, tiny_base: Base, tmp_path: Path
) -> None:
    base = tiny_base(family)
    want = in_double(perturbed_peft(base, kind, tmp_path / "job"))
    out = tmp_path / "new" / "job.gguf"
    export_adapter(tmp_path / "job", out, "gguf", base)
    deltas = as_llama_cpp(out, base)
    assert len(deltas) == len(factors(tmp_path / "job"))
    torch.testing.assert_close(logits_of(base, deltas), want, rtol=2e-6, atol=2e-6)


def test_programs_are_told_the_base_and_the_adapter(tiny_base: Base, tmp_path: Path) -> None:
    base = tiny_base("llama")
    perturbed_peft(base, "lora", tmp_path / "job")
    told = {}
    for target in ("gguf", "ollama", "vllm", "sglang"):
        words = ["export", str(tmp_path / "job"), str(tmp_path / target), "--for", target, "--check", "never"]
        out = CliRunner().invoke(app, [*words, "--base-model", base])
        assert out.exit_code == 0, out.output
        told[target] = out.stdout
    commands = (tmp_path / "ollama" / "Modelfile").read_text().splitlines()
    assert [line for line in commands if line[0] != "#"] == [f"FROM {base}", "ADAPTER ./adapter.gguf"]
    assert (tmp_path / "ollama" / "adapter.gguf").read_bytes() == (tmp_path / "gguf").read_bytes()
    assert f"--enable-lora --max-lora-rank 8 --lora-modules vllm={tmp_path / 'vllm'}" in told["vllm"]
    assert f"--model-path {base} --lora-paths sglang={tmp_path / 'sglang'}" in told["sglang"]


def test_an_exported_adapter_names_the_base_that_was_given(tiny_base: Base, tmp_path: Path) -> None:
    """As where its folder has moved since the adapter was trained."""
    perturbed_peft(tiny_base("llama"), "lora", tmp_path / "job")
    shutil.copytree(tiny_base("llama"), tmp_path / "moved")
    for target in ("peft", "vllm", "sglang"):
        words = ["export", str(tmp_path / "job"), str(tmp_path / target), "--for", target, "--check", "never"]
        out = CliRunner().invoke(app, [*words, "--base-model", str(tmp_path / "moved")], env={"COLUMNS": "999"})
        assert out.exit_code == 0, out.output
        named = json.loads((tmp_path / target / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(tmp_path / "moved"), target
        assert target == "peft" or f" {tmp_path / 'moved'} " in out.stdout


def test_a_chat_template_of_the_adapter_goes_where_the_adapter_goes(tiny_base: Base, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    perturbed_peft(tiny_base("llama"), "lora", folder)
    for own in (None, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        if own is not None:
            (folder / "chat_template.jinja").write_text(own)
        for target in ("vllm", "sglang", "peft", "ollama", "gguf"):
            out = tmp_path / f"{target}-{own is None}"
            told = CliRunner().invoke(app, ["export", str(folder), str(out), "--for", target], env={"COLUMNS": "999"})
            assert told.exit_code == 0, told.output
            there = out / "chat_template.jinja"
            if target in ("ollama", "gguf"):
                assert (f"it was trained with the chat template {folder}" in told.output) == (own is not None)
                continue
            assert (there.read_text() if there.exists() else None) == own
            if target != "peft":
                assert (f" --chat-template {there}" in told.output) == (own is not None)


def test_a_tokenizer_beside_the_adapter_is_told_where_it_is_not_the_base_models(
    tiny_base: Base, tmp_path: Path
) -> None:
    base, folder = tiny_base("llama"), tmp_path / "job"
    perturbed_peft(base, "lora", folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for template, told in ((tokenizer.chat_template, []), ("{{ messages[0].content }}", ["another chat template"])):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        notes = export_adapter(folder, tmp_path / f"out-{len(told)}", "vllm", check="never")
        own = [note for note in notes if "tokenizer of its own" in note]
        assert [f"{folder} has a tokenizer of its own, with {what} than" in own[0] for what in told] == [True] * len(
            own
        )
        assert len(own) == len(told)


def test_a_base_in_a_relative_folder_is_found_above_the_adapter_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file of a run that was started in tmp_path says it."""
    job, base, elsewhere = tmp_path / "runs" / "a", tmp_path / "models" / "m", tmp_path / "elsewhere"
    for folder in (job, base, elsewhere):
        folder.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    assert named_base(Path("../runs/a"), "models/m") == str(base)
    assert named_base(job, "models/other") == "models/other"
    assert named_base(job, str(base)) == str(base)


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_tensors_are_rounded_once_to_the_dtype_asked_for(
    dtype: str, stored: torch.dtype, tiny_base: Base, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    perturbed_peft(base, "patterns", tmp_path / "job")
    for name, chosen in (("wide", "float32"), ("narrow", dtype)):
        export_adapter(tmp_path / "job", tmp_path / name, "sglang", base, chosen)
        export_adapter(tmp_path / "job", tmp_path / f"{name}.gguf", "gguf", base, chosen)
    wide, narrow = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("wide", "narrow"))
    assert all(torch.equal(narrow[key], wide[key].to(stored)) for key in wide)
    whole, half = (as_llama_cpp(tmp_path / f"{name}.gguf", base) for name in ("wide", "narrow"))
    for path, delta in whole.items():
        assert 0 < (half[path] - delta).abs().max() < 0.02 * delta.abs().max()


@pytest.mark.parametrize("target", ["vllm", "sglang", "gguf"])
@pytest.mark.parametrize("kind", ["dora", "bias lora_only"])
def test_what_a_program_cannot_hold_is_refused_with_the_remedy(
    kind: str, target: str, tiny_base: Base, tmp_path: Path
) -> None:
    perturbed_peft(tiny_base("qwen2"), kind, tmp_path / "job")
    out = CliRunner().invoke(app, ["export", str(tmp_path / "job"), str(tmp_path / "out"), "--for", target])
    assert out.exit_code == 2 and not (tmp_path / "out").exists()
    what = "DoRA adapter" if kind == "dora" else "trained biases, the first of model.layers.0"
    program = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}[target]
    assert what in out.output and program in out.output and f"`packlora merge {tmp_path / 'job'} OUT`" in out.output


def test_slips_are_refused_and_a_large_rank_is_told(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, job, full = tiny_base("gemma2"), tmp_path / "job", tmp_path / "full"
    perturbed_peft(base, "lora", job)
    full.mkdir()
    (full / "file").touch()
    for arguments, said in (
        ((full, "vllm"), "is not empty"), ((full / "file", "gguf"), "exists"), ((tmp_path / "o", "tgi"), "'tgi' is not one of"),
        ((tmp_path / "o", "vllm", base, "int8"), "dtype 'int8' is not one of"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            export_adapter(job, *arguments)
    from packlora.export import gguf_file

    known = {name: arch for name, arch in gguf_file.ARCHITECTURES.items() if name != "gemma2"}
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "ARCHITECTURES", known)
        with pytest.raises(InputError, match=r"of type gemma2, .* convert_lora_to_gguf"):
            export_adapter(job, tmp_path / "o", "gguf", base)
    large = load_file(job / "adapter_model.safetensors")
    key = next(iter(large))
    save_file({**large, key: large[key] * 1e6}, job / "adapter_model.safetensors")
    with pytest.raises(InputError, match="is not finite in float16"):
        export_adapter(job, tmp_path / "o", "vllm", base, "float16")
    assert not (tmp_path / "o").exists()
    monkeypatch.setattr("packlora.export.export.VLLM_RANK", 3)
    assert export_adapter(job, tmp_path / "o", "vllm", base) == ["rank 4: start vLLM with --max-lora-rank 8"]


def test_a_full_disk_leaves_nothing_behind(tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    perturbed_peft(tiny_base("llama"), "lora", tmp_path / "job")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("packlora.export.export.write_json", full)
    with pytest.raises(WriteError, match="No space left"):
        export_adapter(tmp_path / "job", tmp_path / "out", "vllm")
    assert [path.name for path in tmp_path.iterdir() if path.name != "job"] == []
