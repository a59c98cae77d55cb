"""The loss of a packed microbatch, with the logits and without: the same, where the output layer comes last; else not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
from packlora.engine.collate import IGNORE, collate
from packlora.engine.heads import token_losses
from packlora.ops.cross_entropy import linear_cross_entropy

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


def losses_and_gradients(
    model: Any, attached: Any, parameters: list[torch.nn.Parameter], packed: list[PackedSample], fused: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = collate(parts(packed), CPU)
    weights = torch.linspace(0.5, 2, len(batch.labels_L), dtype=torch.float64)
    with attached.active(batch.owners):
        losses, total, _ = token_losses(model, batch, weights, fused)
        return losses, list(torch.autograd.grad(total, parameters))


@pytest.mark.parametrize("lengths", [(30, 7, 41), (3,)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma3"])
def test_losses_and_adapter_gradients_are_the_same_with_and_without_logits_in_float64(
    family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 1)  # several chunks
    case = adapted(family, torch.float64)
    packed = samples(lengths)
    want, want_gradients = losses_and_gradients(*case, packed, False)
    monkeypatch.setattr(loss, "packed_logits", None)  # must not be needed
    got, gradients = losses_and_gradients(*case, packed, True)
    assert not got.requires_grad
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (got[collate(parts(packed), CPU).labels_L == IGNORE] == 0).all()


def test_losses_are_torchs_cross_entropy_of_each_sample_alone() -> None:
    model, attached, _ = adapted("llama", torch.float64)
    packed = samples((30, 7, 41))
    batch = collate(parts(packed), CPU)
    with attached.active(batch.owners), torch.no_grad():
        got, total, _ = token_losses(model, batch, fused=True)
    want = []
    for item in packed:
        model.set_attn_implementation("eager")
        ids = torch.from_numpy(item.sample.ids).long()[None]
        with attached.only(0), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        at = torch.from_numpy(np.flatnonzero(item.sample.is_label))
        want.append(F.cross_entropy(logits[at - 1], ids[0, at], reduction="none"))
    # the models compute norms and softmax in float32
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, got.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_has_the_bits_that_it_has_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where chunks of rows cut through it elsewhere."""
    model, attached, _ = adapted("llama", dtype)
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 1)
    packed = samples((40, 55, 33, 90))
    batch = collate(parts(packed), CPU)
    with attached.active(batch.owners), torch.no_grad():
        together, *_ = token_losses(model, batch, fused=True)
    start = 0
    for item in packed:
        alone = collate(parts([item]), CPU)
        with attached.active(alone.owners), torch.no_grad():
            got, *_ = token_losses(model, alone, fused=True)
        assert torch.equal(got, together[start : start + item.sample.num_labels])
        start += item.sample.num_labels


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
