"""LoRA+ steps are those of PEFT's create_loraplus_optimizer, to the bit, and go on from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from packlora.adapters.attach import attach
from packlora.adapters.files import keyed
from packlora.adapters.spec import resolve
from packlora.config import TrainConfig
from packlora.engine.optimizer import FlatAdamW


def keys(name: str) -> str:
    """PEFT's name of a parameter as its files have it."""
    return name.replace(".default", "").removesuffix(".weight") if "magnitude" in name else name.replace(".default", "")


@pytest.mark.parametrize("ratio", [None, 1.0, 16.0, 0.5])
def test_steps_are_those_of_peft_s_loraplus_optimizer_to_the_bit(ratio: float | None) -> None:
    """A, B, magnitudes and biases, decayed and not, one parameter without a gradient now and then."""
    lora = LoraConfig(
        r=3, lora_alpha=5, use_dora=True, bias="lora_only", target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    peft = get_peft_model(tiny_model("qwen2"), lora)
    theirs = {keys(name): p for name, p in peft.named_parameters() if p.requires_grad}
    optimizer = create_loraplus_optimizer(
        peft, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=ratio or 1.0, loraplus_weight_decay=0.1, foreach=False
    )
    model = tiny_model("qwen2")
    _, (adapter,) = attach(model, {"job": resolve(lora, model, "job")}, 0)
    ours = keyed(adapter, adapter.named_parameters())
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for key, parameter in ours.items():
            parameter.copy_(theirs[key])
    gradient = torch.zeros_like(adapter.flat)
    views = keyed(adapter, adapter.layout.views(gradient))
    names = keyed(adapter, {name: name for name in adapter.named_parameters()})
    config = TrainConfig(weight_decay=0.1, loraplus_lr_ratio=ratio)
    flat = FlatAdamW(adapter.flat, adapter.layout, config)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        left_out = sorted(ours)[step] if step else None
        for key, parameter in theirs.items():
            value = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if key == left_out else value
            views[key].copy_(value)
        optimizer.step()
        flat.ready(gradient, {names[left_out]} if left_out else set(), 0.01)()
        if step == 1:  # an interruption
            state = flat.state()
            flat = FlatAdamW(adapter.flat, adapter.layout, config)
            flat.load(state)
        for key, parameter in ours.items():
            assert torch.equal(parameter, theirs[key]), (step, key)
