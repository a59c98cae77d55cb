"""GPT-OSS as it is published, its experts in codes of 4 bits: what floats that the codes stand for train and merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import tiny_experts
from safetensors.torch import load_file, save_file
from stored_codes import save_stored, write_config

import packlora
from packlora.base.model import load_base
from packlora.base.weight_files import WeightFiles
from packlora.config import Run
from packlora.errors import InputError
from packlora.export.merge import merge_adapter

SIGNED = [sign * one for sign in (1, -1) for one in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
TOLD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
JOBS = [{"name": "x", "data": {"path": "rows"}}]


def made(folder: Path, tokenizer: Any) -> None:
    """The same tiny model in codes and in floats."""
    tiny_experts("gpt_oss", torch.float32).save_pretrained(folder / "floats")
    tokenizer.save_pretrained(folder / "floats")
    shutil.copytree(folder / "floats", folder / "codes")
    tensors, generator = load_file(folder / "floats" / "model.safetensors"), torch.Generator().manual_seed(0)
    codes = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = codes.pop(name).shape
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (E, N, K // 32), generator=generator, dtype=torch.uint8)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        out = torch.empty(E, N, K)
        for at in range(K):  # one input after the other
            byte = blocks[..., at // 32, at % 32 // 2]
            number = byte % 16 if at % 2 == 0 else byte // 16
            out[..., at] = torch.tensor(SIGNED)[number.long()] * 2.0 ** (scales[..., at // 32].float() - 127)
        tensors[name] = out.transpose(1, 2).contiguous()
    for kind, own in (("floats", tensors), ("codes", codes)):
        save_file(own, folder / kind / "model.safetensors", metadata={"format": "pt"})
    write_config(folder / "codes", TOLD)


def test_experts_in_codes_train_and_merge_as_what_they_stand_for(
    tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    made(tmp_path, tokenizer)
    adapter = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    train = {"max_steps": 1, "learning_rate": 1e-2}
    merged = {}
    for kind in ("floats", "codes"):
        tree = {
            "base_model": str(tmp_path / kind), "output_dir": str(tmp_path / f"out-{kind}"), "device": "cpu",
            "jobs": [{"name": "x", "data": {"path": write_rows("rows")}, "train": train, "adapter": adapter}],
        }  # fmt: skip
        assert packlora.train(tree).status == "done"
        merge_adapter(tmp_path / f"out-{kind}" / "x", tmp_path / f"merged-{kind}")
        merged[kind] = load_file(tmp_path / f"merged-{kind}" / "model.safetensors")
        assert "quantization_config" not in (tmp_path / f"merged-{kind}" / "config.json").read_text()
        told = json.loads((tmp_path / f"out-{kind}" / "run.json").read_text())["warnings"]
        assert any("saved in mxfp4, are read as floats of float32" in one for one in told) is (kind == "codes")
    adapters = [load_file(tmp_path / f"out-{kind}" / "x" / "adapter_model.safetensors") for kind in merged]
    for one, other in (adapters, merged.values()):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    files = WeightFiles(str(tmp_path / "codes"), None)
    name = "model.layers.1.mlp.experts.down_proj"
    dense = load_file(tmp_path / "floats" / "model.safetensors")[name]
    assert torch.equal(files.read(name, slice(1, 3), slice(5, 40)).float(), dense[1:3, 5:40])
    asked = {"base_model": str(tmp_path / "codes"), "output_dir": "x", "device": "cpu", "jobs": JOBS}
    with pytest.raises(InputError, match=r"quantization is nf4, but base_model .* is saved as mxfp4, of which floats"):
        load_base(Run.model_validate(asked | {"quantization": "nf4"}), None)


def test_experts_in_fp8_are_refused_by_name(tmp_path: Path) -> None:
    tiny_experts("qwen3_moe", torch.float32).save_pretrained(tmp_path / "base", save_original_format=True)
    save_stored("fp8", tmp_path / "base", tmp_path / "codes")
    asked = {"base_model": str(tmp_path / "codes"), "output_dir": "x", "device": "cpu", "jobs": JOBS}
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts is FP8Experts, experts in codes, .* in bfloat16"):
        load_base(Run.model_validate(asked), None)
