"""Models with layers between the decoder and the output layer: these see the rows of labels alone, as the output layer does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY
from safetensors.torch import load_file
from test_training import JOBS, adapter, config, distance, like_peft, perturbed_peft, steps, train, train_by_peft
from transformers import AutoModelForCausalLM

from packlora.config import Run
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "bert": ("BertConfig", {"is_decoder": True, **NO_DROPOUT}, "cls.predictions.transform", ".dense", ".LayerNorm"),
    "electra": (
        "ElectraConfig", {"is_decoder": True, "embedding_size": 48, **NO_DROPOUT},
        "generator_predictions", ".dense", ".LayerNorm",
    ),
    "modernbert decoder": (
        "ModernBertDecoderConfig",
        {"layer_types": ["sliding_attention", "full_attention"], "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
        "lm_head", ".dense", ".norm",
    ),
}  # fmt: skip


@pytest.fixture(
    params=[name if name == "modernbert decoder" else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def base(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Any) -> tuple[str, str, str]:
    """Folder of a model, and the paths of the layer and of the norm before its output layer."""
    name, changes, place, layer, norm = FAMILIES[request.param]
    torch.manual_seed(0)
    settings = getattr(transformers, name)(**{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base"), place + layer, place + norm


def test_they_are_trained_as_peft_trains_them(base: tuple[str, str, str], write_rows: Rows, tmp_path: Path) -> None:
    """all-linear and held-out samples, beside another job with dropout that trains a copy of the norm; that is what it is
    alone."""
    folder, layer, norm = base
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = perturbed_peft(folder, "lora", tmp_path / "start", start).eval()
    job = like_peft(write_rows("rows"), tmp_path / "start")
    job["data"]["eval_path"] = write_rows("held", 4, seed=5)
    own = {"r": 3, "lora_dropout": 0.2, "use_dora": True, "modules_to_save": [norm]}
    other = {**JOBS[1], "adapter": own, "train": {**JOBS[1]["train"], "max_steps": 2}}
    tree = config(folder, tmp_path / "out", write_rows, [job, other], save_every=50)
    losses = train_by_peft(model, prepare(Run.model_validate(tree)).jobs[0].data)
    train(tree)
    for ours, theirs in zip([line for line in steps(tmp_path / "out") if line["job"] == "job"], losses, strict=True):
        assert abs(ours["loss"] - theirs) < 1e-4
    found = adapter(tmp_path / "out", "job")
    assert f"base_model.model.{layer}.lora_A.weight" in found
    model.save_pretrained(tmp_path / "peft")
    assert distance(found, load_file(tmp_path / "peft" / "adapter_model.safetensors")) < 1e-4
    evals = [json.loads(line)["eval_loss"] for line in (tmp_path / "out" / "evals.jsonl").open()]
    assert all(0 < loss < 50 for loss in evals)
    train({**tree, "jobs": tree["jobs"][1:], "output_dir": str(tmp_path / "alone"), "max_tokens_per_microbatch": 64})
    together, alone = (adapter(tmp_path / out, other["name"]) for out in ("out", "alone"))
    assert distance(together, alone) < 1e-5 and any(key.endswith(f"{norm}.weight") for key in alone)
