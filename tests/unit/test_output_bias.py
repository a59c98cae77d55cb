"""Biases of an output layer, which sees the rows of the labels alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY
from peft import LoraConfig
from safetensors.torch import save_file

from packlora.adapters.files import WEIGHTS
from packlora.adapters.reading import read_tensors
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


def test_what_peft_writes_of_an_output_layer_with_a_bias_is_not_read_but_where_it_is_trained(tmp_path: Path) -> None:
    names = "base_model.model.lm_head.", "base_model.model.lm_head.base_layer."
    tensors = {
        f"{names[0]}lora_A.weight": torch.ones(2, 5), f"{names[0]}lora_B.weight": torch.ones(7, 2),
        f"{names[1]}weight": torch.ones(7, 5), f"{names[1]}bias": torch.ones(7),
    }  # fmt: skip
    save_file(tensors, tmp_path / WEIGHTS)
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    shapes.pop(f"{names[1]}weight")
    with pytest.warns(UserWarning, match="copy of a base weight"):
        assert read_tensors(tmp_path, shapes, "x").keys() == shapes.keys()
    shapes.pop(f"{names[1]}bias")
    with pytest.warns(UserWarning, match="copy of a base bias"):
        assert read_tensors(tmp_path, shapes, "x").keys() == shapes.keys()
    save_file(tensors | {f"{names[1]}bias": torch.ones(8)}, tmp_path / WEIGHTS)
    with pytest.warns(UserWarning, match="base weight"), pytest.raises(InputError, match="not of this adapter"):
        read_tensors(tmp_path, shapes, "x")


@pytest.mark.parametrize(("target", "notes"), [("o_proj", 1), ("q_proj", 0)])
def test_that_lora_only_finds_no_bias_in_the_adapted_layers_is_told(target: str, notes: int) -> None:
    with torch.device("meta"):  # of Qwen 2, q_proj has a bias and o_proj none
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**TINY))
    found = resolve(LoraConfig(target_modules=[target], bias="lora_only", task_type="CAUSAL_LM"), model, "x").notes
    assert found == ["job 'x': bias: lora_only trains no bias, as no adapted layer has one"] * notes
