"""Models that are moved after packlora.accelerate: other dtypes, other Parameters, assigned and emptied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
