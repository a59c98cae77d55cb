"""Targets on models whose experts and routers are parameters: what would be left out is said, not left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from peft import LoraConfig, get_peft_model

from packlora.adapters.spec import AdapterSpec, resolve
from packlora.errors import InputError

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0]},
    "Phimoe": {"num_local_experts": 4},
}


def model_of(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**TINY | MODELS[name])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def targets(wanted: Any, model: Any) -> AdapterSpec:
    return resolve(LoraConfig(target_modules=wanted, task_type="CAUSAL_LM"), model, "x")


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_on_experts_is_refused_with_what_it_would_leave_out_and_how_to_mean_it(name: str) -> None:
    model = model_of(name)
    with pytest.raises(InputError, match="'x': target_modules all-linear would leave out") as caught:
        targets("all-linear", model)
    message = str(caught.value)
    assert "model.layers.*.mlp.experts.gate_up_proj" in message
    assert "router.weight" in message if name == "Phimoe" else "mlp.gate.weight" in message
    names = message.partition("name them: target_modules: [")[2].rstrip("]").split(", ")
    assert set(names) >= set(ATTENTION)
    meant = targets(names, model).modules
    linears = {key for key, module in model.named_modules() if type(module) is torch.nn.Linear and key != "lm_head"}
    assert set(meant) == {key for key in linears if key.rpartition(".")[2] in names}


@pytest.mark.parametrize(
    "wanted", [["q_proj", "gate_proj", "up_proj"], ["down_proj"], r".*\.(q_proj|gate_proj|up_proj)"]
)
def test_names_that_mean_experts_to_peft_are_refused_where_a_dense_layer_bears_them_too(wanted: Any) -> None:
    """Layer 0 has a gate_proj of its own; PEFT adapts the experts of the others under this name."""
    model = model_of("Qwen3Moe")
    assert "model.layers.0.mlp.gate_proj" in dict(model.named_modules())
    with pytest.raises(InputError, match="means experts or routers of this model to PEFT"):
        targets(wanted, model)


@pytest.mark.parametrize("name", MODELS)
def test_attention_named_on_a_model_with_experts_is_what_peft_adapts(name: str) -> None:
    model = model_of(name)
    mine = set(targets(ATTENTION, model).modules)
    peft = get_peft_model(model, LoraConfig(target_modules=ATTENTION, task_type="CAUSAL_LM"))
    theirs = {key.split(".lora_")[0] for key, _ in peft.base_model.model.named_parameters() if ".lora_" in key}
    assert mine == theirs
    assert len(mine) == 8


def test_all_linear_takes_every_layer_of_a_dense_model() -> None:
    for family in ("llama", "gemma3", "qwen2"):
        assert len(targets("all-linear", tiny_model(family)).modules) == 14
