"""Adapters on experts and routers of models whose linear layers are in codes; experts stay floats there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import tiny_experts
from quantised import dequantise, load_quantised
from test_training import adapter, config, distance, train
from transformers import AutoModelForCausalLM

from packlora.export.merge import merge_adapter

DOUBLE = {"method": "nf4", "double_quant": True}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def jobs_on(router: str) -> list[dict[str, Any]]:
    """On experts, routers and linear layers; and on experts alone."""
    settings = {"max_steps": 2, "global_batch_size": 3, "learning_rate": 1e-2}
    mixed = {"r": 3, "lora_dropout": 0.2, "target_modules": ["o_proj"], "target_parameters": [*BOTH, router]}
    alone = {"r": 2, "lora_dropout": 0.1, "use_dora": True, "target_modules": [], "target_parameters": BOTH}
    return [
        {"name": name, "train": settings, "adapter": own | {"init_lora_weights": False}}
        for name, own in (("mixed", mixed), ("alone", alone))
    ]


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.soak), "llama4"])
def test_experts_beside_codes_learn_what_they_learn_beside_dense_weights_which_say_the_same(
    family: str, tokenizer: Any, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    """Also once merged, onto a base in codes too; transformers does not read a Llama 4 that it saved in codes."""
    tiny_experts(family, torch.float32).save_pretrained(tmp_path / "base")
    quantised = load_quantised(str(tmp_path / "base"), "nf4 double")
    quantised.save_pretrained(tmp_path / "saved")
    plain = dequantise(quantised, torch.float32)
    del plain.config.quantization_config
    plain.save_pretrained(tmp_path / "plain")
    for name in ("base", "plain", "saved"):
        tokenizer.save_pretrained(tmp_path / name)
    jobs = jobs_on("router.weight" if family == "llama4" else "gate.weight")
    dense = config(str(tmp_path / "plain"), tmp_path / "dense", write_rows, jobs, dtype="float64")
    codes = {
        **dense,
        "base_model": str(tmp_path / "base"),
        "output_dir": str(tmp_path / "codes"),
        "quantization": DOUBLE,
    }
    train(dense)
    train(codes)
    for name in ("mixed", "alone"):
        assert distance(adapter(tmp_path / "codes", name), adapter(tmp_path / "dense", name)) < 1e-10
        merged, of_codes = [], "saved" if name == "mixed" and family != "llama4" else "base"
        for out, base in (("dense", "plain"), ("codes", of_codes)):
            note = merge_adapter(tmp_path / out / name, tmp_path / f"{name} {base}", str(tmp_path / base))
            assert (note is None) == (out == "dense")
            model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} {base}", dtype=torch.float32)
            merged.append(model.state_dict())
        assert max(float((merged[1][key] - own).abs().max()) for key, own in merged[0].items()) < 1e-5
