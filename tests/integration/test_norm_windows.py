"""packlora.accelerate looks at the data behind DoRA's norms once per forward of the model, and no forward sees an old norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_accelerate import IDS, SEED, assert_same, lora, outcome
from torch import nn

import packlora
from packlora.adapters.norms import RowNorms


def norms_of(model: Any) -> RowNorms:
    (norms,) = {part._packlora.norms for part in model.modules() if "_packlora" in part.__dict__}
    return norms  # type: ignore[no-any-return]


def adapters(model: Any) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_A" in name or "lora_B" in name]


# --- every way of changing A, B or W, between two forwards ----------------------------------------------------------------


def fused_step(model: Any) -> None:
    """An optimizer that moves no version counter."""
    optimizer = torch.optim.AdamW(adapters(model), lr=0.05, fused=True)
    for p in adapters(model):
        p.grad = torch.randn_like(p)
    optimizer.step()


def foreign_step(model: Any) -> None:
    """An optimizer that is not torch's and writes through .data."""
    for p in adapters(model):
        p.data.add_(torch.randn_like(p), alpha=0.05)


def numpy_write(model: Any) -> None:
    for p in adapters(model):
        with torch.autograd._unsafe_preserve_version_counter(p):
            p.detach().numpy()[0] += 0.3


def loaded(assign: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        state = {name: tensor * 1.1 if "lora_" in name else tensor for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


def weights(model: Any) -> None:
    for name, p in model.named_parameters():
        if "base_layer.weight" in name:
            p.data.mul_(1.2)


def reshard(model: Any) -> None:
    """As sharding does between two forwards: storages freed and filled anew, version counters put back."""
    for p in adapters(model):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
            new, storage = torch.randn_like(p) * 0.2, p.untyped_storage()
            size = storage.size()
            storage.resize_(0)
            storage.resize_(size)
            p.copy_(new)


CHANGES = {
    "fused optimizer": fused_step, "foreign optimizer": foreign_step, "numpy": numpy_write, "load": loaded(False),
    "load assign": loaded(True), "weights through .data": weights, "resharded": reshard,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_no_forward_sees_the_norm_of_older_values(change: str) -> None:
    torch.manual_seed(SEED)
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=False)
    for _ in range(2):
        before = outcome(model)["logits"]
        CHANGES[change](model)
        got = outcome(model)
        packlora.restore(model)
        assert_same(got, outcome(model))
        assert float((got["logits"] - before).abs().max()) > 1e-3, "the change matters"
        packlora.accelerate(model, keep_outputs=False)
        outcome(model)


@pytest.mark.parametrize("first", [True, False])
def test_what_a_hook_of_the_model_writes_before_its_forward_is_seen(first: bool) -> None:
    model = lora(use_dora=True)

    def write(*_: Any) -> None:
        for p in adapters(model):
            p.data.mul_(1.05)

    if first:
        model.register_forward_pre_hook(write)
    packlora.accelerate(model, keep_outputs=False)
    if not first:
        model.register_forward_pre_hook(write)
    outcome(model)
    values = [p.detach().clone() for p in adapters(model)]
    got = outcome(model)
    packlora.restore(model)
    for p, value in zip(adapters(model), values, strict=True):
        p.data.copy_(value)
    assert_same(got, outcome(model))


def test_a_layer_called_by_itself_checks_by_itself() -> None:
    model = lora(use_dora=True)
    packlora.accelerate(model, keep_outputs=False)
    outcome(model)
    layer, x = model.base_model.model.model.layers[0].mlp.up_proj, torch.randn(3, 64, dtype=torch.float64)
    for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
        p.data.mul_(1.5)
    got = layer(x)
    packlora.restore(model)
    assert torch.allclose(got, layer(x), rtol=1e-12, atol=1e-12)


# --- once per forward --------------------------------------------------------------------------------------------------------


def test_all_layers_are_checked_by_one_call_per_forward_of_the_model(looks: list[int]) -> None:
    model = lora(dtype=torch.bfloat16, use_dora=True, target_modules=["q_proj", "o_proj"])
    packlora.accelerate(model, keep_outputs=False)
    model(input_ids=IDS)
    assert sum(looks) == 4
    for change in (None, foreign_step, fused_step, None):
        looks.clear()
        if change is not None:
            change(model)
        model(input_ids=IDS)
        assert looks == [4]
    assert not norms_of(model)._open


def test_models_without_dora_have_no_hooks_of_it() -> None:
    model = lora(target_modules=["q_proj"])
    packlora.accelerate(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
