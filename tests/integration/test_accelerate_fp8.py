"""accelerate(model, compute="fp8"): PEFT over layers whose rounding is spelt out says what is right."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from conftest import tiny_model
from fp8_cases import spelt_model
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

import packlora
from packlora.fp8 import weight as fp8_weight


def adapted(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    own = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).double()
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return own.train()


def results(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every adapter."""
    model.zero_grad()
    logits = model(torch.arange(3, 33).view(2, 15), use_cache=False).logits
    logits.square().sum().backward()
    grads = {name.replace("base_layer.", ""): p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"logits": logits.detach(), **grads}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).norm() <= 1e-8 * want[name].norm(), name


@pytest.mark.parametrize("dora", [False, True])
def test_a_model_of_peft_has_the_specified_numbers_and_keeps_its_weights(dora: bool) -> None:
    ours = adapted(tiny_model("qwen2", torch.float64), use_dora=dora)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with mock.patch.object(fp8_weight, "rows_of", wraps=fp8_weight.rows_of) as made:
        report = packlora.accelerate(ours, compute="fp8")
        assert "base products of 14 of 14 linear layers in FP8" in str(report)
        made.reset_mock()
        got = results(ours)
    assert made.call_count == 2 * (4 + 7) - 3  # siblings share the codes of what they read; nobody wants the first dx
    theirs = adapted(spelt_model(tiny_model("qwen2", torch.float64)), use_dora=dora)
    set_peft_model_state_dict(
        theirs, get_peft_model_state_dict(ours)
    )  # magnitudes begin with the norms of other weights
    same(got, results(theirs))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    packlora.restore(ours)
    same(results(ours), results(adapted(tiny_model("qwen2", torch.float64), use_dora=dora)))


def test_codes_are_made_again_where_weights_are_written_to() -> None:
    ours = adapted(tiny_model("qwen2", torch.float64))
    packlora.accelerate(ours, compute="fp8")
    results(ours)
    other = tiny_model("qwen2", torch.float64, seed=1)
    with torch.no_grad():
        ours.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.copy_(
            other.model.layers[0].mlp.up_proj.weight
        )
    base = tiny_model("qwen2", torch.float64)
    base.model.layers[0].mlp.up_proj.load_state_dict(other.model.layers[0].mlp.up_proj.state_dict())
    same(results(ours), results(adapted(spelt_model(base))))


def test_what_cannot_be_met_is_refused_by_name() -> None:
    model = adapted(tiny_model("qwen2", torch.float64))
    with pytest.raises(ValueError, match="compute is 'fp4'; accepted are 'dtype', 'fp8' and 'dora_fp8'"):
        packlora.accelerate(model, compute="fp4")  # type: ignore[arg-type]
    without = mock.patch("packlora.fp8.peft.why_not_on", return_value="this GPU has none")
    with without, pytest.raises(ValueError, match="compute='fp8' cannot be met: this GPU has none"):
        packlora.accelerate(model, compute="fp8")
    with torch.inference_mode():
        base = tiny_model("qwen2", torch.float64)
    with pytest.raises(ValueError, match="compute='fp8' cannot be met: a base weight was made in inference mode"):
        packlora.accelerate(adapted(base), compute="fp8")
    odd = adapted(tiny_model("qwen2", torch.float64, intermediate_size=40), target_modules=["up_proj", "down_proj"])
    with pytest.raises(ValueError, match="no adapter is on a plain linear layer whose sizes 16 divides"):
        packlora.accelerate(odd, compute="fp8")
