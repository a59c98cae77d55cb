"""What a job trains is what PEFT's get_peft_model trains: the same tensors by name and shape, on many families of models."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from conftest import FAMILIES as CONFIGS
from conftest import TINY
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from packlora.adapters.reading import tensor_shapes
from packlora.adapters.spec import resolve
from packlora.errors import InputError

PLAIN = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64}
WIDE = PLAIN | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": TINY, "Mistral": TINY, "Qwen2": TINY, "Qwen3": TINY | {"head_dim": 16}, "Gemma2": TINY | {"head_dim": 16},
    "Gemma3Text": TINY | {"head_dim": 16}, "Phi3": TINY, "Starcoder2": TINY, "GPT2": PLAIN | GPT2,
    "GPTNeoX": WIDE | {"intermediate_size": 96}, "OPT": WIDE | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Falcon": WIDE | {"new_decoder_architecture": False}, "Bloom": PLAIN | {"n_layer": 2, "hidden_size": 64, "n_head": 4},
}  # fmt: skip
INNER = {
    "GPT2": ["c_attn", "c_proj"], "GPTNeoX": ["query_key_value", "dense"], "OPT": ["q_proj", "fc1"],
    "Falcon": ["query_key_value", "dense_h_to_4h"], "Bloom": ["query_key_value", "dense"], "Phi3": ["qkv_proj", "down_proj"],
    "Starcoder2": ["q_proj", "c_fc"],
}  # fmt: skip


def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def cases(model: Any, family: str) -> dict[str, dict[str, Any]]:
    """Settings of a LoraConfig that mean something on the model."""
    names = INNER.get(family, ["q_proj", "down_proj"])
    paths = {id(module): path for path, module in model.named_modules()}
    embedding = paths[id(model.get_input_embeddings())].rpartition(".")[2]
    head = paths[id(model.get_output_embeddings())].rpartition(".")[2]
    norms = [path for path, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    layers = next(path for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    last = norms[-1].rpartition(".")[2]
    return {
        "all-linear": {"target_modules": "all-linear", "use_dora": True},
        "list": {"target_modules": names, "rank_pattern": {names[0]: 3}},
        "expression": {"target_modules": rf".*\.1\..*({'|'.join(names)})"},
        "all but some": {"target_modules": "all-linear", "exclude_modules": [names[0]]},
        "excluded by expression": {"target_modules": names, "exclude_modules": r".*\.0\..*"},
        "layers": {"target_modules": names, "layers_to_transform": [1]},
        "a layer of a list": {
            "target_modules": names, "layers_to_transform": 0,
            "layers_pattern": layers.rpartition(".")[2],
        },
        "embedding": {"target_modules": [*names, embedding], "use_dora": True},
        "output layer": {"target_modules": [*names, head]},
        "saved": {"target_modules": names, "modules_to_save": [last, head]},
        "saved embedding": {"target_modules": "all-linear", "modules_to_save": [embedding]},
        "tokens": {"target_modules": names, "trainable_token_indices": [5, 300, 17]},
        "tokens by module": {"target_modules": names, "trainable_token_indices": {embedding: [4, 9]}},
    }  # fmt: skip


LIKE_OTHERS = ("Mistral", "Qwen2", "Gemma2", "Starcoder2")
"""Whose modules are, by kind and name, those of other families here."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.soak) if name in LIKE_OTHERS else name for name in FAMILIES]
)
def test_tensors_of_an_adapter_are_those_that_peft_makes(family: str) -> None:
    model = model_of(family)
    for name, settings in cases(model, family).items():
        config = LoraConfig(**({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | settings))
        ours = tensor_shapes(resolve(copy.deepcopy(config), model, "x"), model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(copy.deepcopy(model), config, low_cpu_mem_usage=True)
            theirs = get_peft_model_state_dict(peft, save_embedding_layers=False)
        assert {key: tuple(shape) for key, shape in ours.items()} == {
            key: tuple(value.shape) for key, value in theirs.items()
        }, name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"target_modules": ["q_proj", "embed_tokens"], "trainable_token_indices": [7]},
            "model.embed_tokens is to be trained in two ways, by target_modules and by trainable_token_indices; leave one",
        ),
        (
            {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [7]},
            "lm_head is to be trained in two ways, by target_modules and by trainable_token_indices, since it is tied to the "
            "embedding; leave one",
        ),
        (
            {"target_modules": ["v_proj"], "bias": "all", "modules_to_save": ["q_proj"]},
            "model.layers.0.self_attn.q_proj is to be trained in two ways, by bias: all and by modules_to_save; leave one",
        ),
    ],
    ids=["target and rows", "target and rows of the tied embedding", "bias and copy"],
)  # fmt: skip
def test_a_module_that_is_trained_in_two_ways_is_refused_with_both_keys(settings: dict[str, Any], said: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**TINY | {"tie_word_embeddings": True, "attention_bias": True})
        )
    with pytest.raises(InputError, match=f"^job 'x': {re.escape(said)}"):
        resolve(LoraConfig(**settings), model, "x")


def test_an_exclusion_that_matches_nothing_is_told() -> None:
    model = model_of("Llama")
    told = [
        resolve(
            LoraConfig(target_modules="all-linear", exclude_modules=own, modules_to_save=["norm"]), model, "x"
        ).notes
        for own in (["zz", "down_proj", "down_prj"], ["down_proj"], r".*\.0\.mlp", ".*mlp.down")
    ]
    words = "job 'x': exclude_modules {} matches nothing in the model"
    assert told == [[words.format("['down_prj', 'zz']")], [], [], [words.format("'.*mlp.down'")]]


def test_a_layer_without_the_named_modules_is_told() -> None:
    """Of every four layers of Qwen 3.5 one has attention with q_proj."""
    _, extra = CONFIGS["qwen3_5"]
    config = transformers.Qwen3_5TextConfig(**TINY | extra | {"num_hidden_layers": 4, "full_attention_interval": 4})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    told = [
        resolve(LoraConfig(target_modules=["q_proj"], layers_to_transform=layers), model, "x").notes
        for layers in ([3], [1, 3])
    ]
    words = "job 'x': layers_to_transform has [1], layers in which target_modules matches nothing"
    assert told == [[], [words]]
