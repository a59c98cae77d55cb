"""The loss of a packed microbatch, with the logits and without: the same, where the output layer comes last; else not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import FAMILIES, TINY, tiny_model
from packed import PackedSample, parts
from peft import LoraConfig

from packlora.adapters.attach import attach
from packlora.adapters.spec import resolve
from packlora.base.model import Base, load_base
from packlora.base.packing import prepare_model
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.engine import heads as loss
from packlora.engine.collate import collate
from packlora.engine.heads import token_losses

CPU = torch.device("cpu")


def samples(lengths: tuple[int, ...], seed: int = 0) -> list[PackedSample]:
    generator = np.random.default_rng(seed)
    out = []
    for number, length in enumerate(lengths):
        is_label = generator.random(length) < 0.7
        is_label[0], is_label[-1] = False, True
        ids = generator.integers(3, TINY["vocab_size"], length).astype(np.int32)
        out.append(PackedSample(0, Sample(ids, is_label), number, 0, None))
    return out


def adapted(family: str, dtype: torch.dtype, targets: Any = "all-linear") -> tuple[Any, Any, list[torch.nn.Parameter]]:
    model = tiny_model(family, dtype)
    prepare_model(model, False)
    spec = resolve(LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"), model, "job")
    attached, (adapter,) = attach(model, {"job": spec}, 0)
    parameters = list(adapter.named_parameters().values())
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 8)
    return model, attached, parameters


def test_an_output_layer_with_an_adapter_or_a_gradient_is_run_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, attached, _ = adapted("llama", torch.float32)
    batch = collate(parts(samples((30, 7))), CPU)
    monkeypatch.setattr(loss, "linear_cross_entropy", None)
    model.lm_head.weight.requires_grad_(True)
    with attached.active(batch.owners):
        token_losses(model, batch, fused=True)
    model.lm_head.weight.requires_grad_(False)
    with attached.active(batch.owners), pytest.raises(TypeError):
        token_losses(model, batch, fused=True)


def load(folder: str, dtype: str) -> Base:
    jobs = [{"name": "x", "data": {"path": "x"}}]
    tree = {"base_model": folder, "output_dir": "x", "device": "cpu", "dtype": dtype, "jobs": jobs}
    return load_base(Run.model_validate(tree), None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_layer_is_known_to_come_last_where_logits_are_its_output(
    family: str, dtype: str, tiny_base: Callable[[str], str]
) -> None:
    """gemma2 caps its logits."""
    model, ids = tiny_model(family, getattr(torch, dtype)), torch.arange(3, 13)[None]
    with torch.no_grad():
        comes_last = torch.equal(model(ids).logits, model.lm_head(model.model(ids).last_hidden_state))
    assert comes_last or family != "llama"
    assert not comes_last or family != "gemma2"
    assert load(tiny_base(family), dtype).fused_loss == comes_last


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("GraniteConfig", {"logits_scaling": 1.001}),
        ("CohereConfig", {"logit_scale": 0.999}),
        ("Gemma2Config", {"head_dim": 16, "final_logit_softcapping": 1000.0}),
    ],
)
def test_a_model_that_changes_its_logits_ever_so_little_keeps_them(
    name: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**TINY, **extra}))
    model.save_pretrained(tmp_path)
    assert not load(str(tmp_path), "float32").fused_loss
