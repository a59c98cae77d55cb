"""Biases of an output layer, which sees the rows of the labels alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import TINY
from peft import LoraConfig

from packlora.adapters.spec import resolve
from packlora.errors import InputError


def model_with_a_biased_head() -> Any:
    config = transformers.Ernie4_5_MoeConfig(
        **TINY, moe_num_experts=4, moe_intermediate_size=32, moe_k=2, use_bias=True, tie_word_embeddings=False
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_training_the_bias_of_the_output_layer_is_refused_before_training() -> None:
    model = model_with_a_biased_head()
    assert model.lm_head.bias is not None
    peft = LoraConfig(target_modules=["q_proj", "v_proj"], bias="all", task_type="CAUSAL_LM")
    with pytest.raises(InputError, match=r"'x': bias: all would train lm_head\.bias, which is of the output layer"):
        resolve(peft, model, "x")
    peft.bias = "lora_only"
    found = resolve(peft, model, "x").modules
    assert sorted({name.rpartition(".")[2] for name in found}) == ["q_proj", "v_proj"]
    assert all(module.train_bias for module in found.values())
