"""Models that are moved after packlora.accelerate: other dtypes, other Parameters, assigned and emptied weights. Models whose
layers lie on several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from conftest import tiny_model
from expert_models import tiny_experts
from peft import LoraConfig, get_peft_model
from wrapped import Case, adapted, data, difference

import packlora


def life(dora: bool, accelerated: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Outputs and gradients of a step after each move, and the report."""
    model = adapted(Case("none", dora=dora, layers=1))
    report = packlora.accelerate(model) if accelerated else None
    found: dict[str, torch.Tensor] = {}

    def step(name: str) -> None:
        out = model(input_ids=data(0, 0), labels=data(0, 0))
        out.loss.backward()
        found[f"{name} logits"] = out.logits.detach()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"{name} {path}"] = parameter.grad.clone()
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    step("first")
    model.to("cpu")
    step("where it was")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float32).to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    step("other Parameters")
    weights = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    step("assigned")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(weights)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    step("emptied")
    return found, report


@pytest.mark.parametrize("dora", [False, True])
def test_a_model_that_is_moved_after_it_was_accelerated_has_the_numbers_of_peft(dora: bool) -> None:
    want, _ = life(dora, False)
    got, report = life(dora, True)
    worst, where = difference(got, want)
    assert worst < 1e-10, where
    assert [(one.served, one.left) for one in report.served().values()] == [(5, {})] * 7


def step_of(spread: bool, family: str, settings: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """An adapted model, with Accelerate's hooks of a `device_map` over several devices or without, and a step's numbers."""
    model = tiny_experts(family) if family == "mixtral" else tiny_model(family, torch.float64)
    if spread:
        blocks = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
        devices = dict.fromkeys(["", *blocks], torch.device("cpu"))
        attach_align_device_hook_on_blocks(model, devices, offload=dict.fromkeys(devices, False))
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, **settings)).double().train()
    return model, numbers_of(model)


def numbers_of(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(input_ids=data(0, 0), labels=data(0, 0))
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "use_dora": True}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]}),
    ],
    ids=["LoRA", "DoRA", "experts"],
)
def test_layers_that_device_map_spreads_over_devices_are_computed_here(family: str, settings: dict[str, Any]) -> None:
    """All on one device here, with the hooks that bring inputs to a layer's device. Another forward under one is PEFT's."""
    _, plain = step_of(False, family, settings)
    model, hooked = step_of(True, family, settings)
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(path)
    assert "forward" in vars(layer.base_layer)
    report = packlora.accelerate(model)
    for found in (hooked, numbers_of(model)):
        worst, where = difference(found, plain)
        assert worst < 1e-10, where
    assert report.accelerated == len(report.modules)
    assert {(one.served, *one.left) for one in report.served().values()} == {(1,)}
    layer.base_layer._old_forward = lambda x: torch.nn.functional.linear(x, 2 * layer.base_layer.weight)
    doubled = numbers_of(model)
    assert list(report.served()[path].left) == ["its base layer has hooks or a replaced forward"]
    packlora.restore(model)
    assert difference(doubled, numbers_of(model))[0] < 1e-10 < difference(doubled, plain)[0]
