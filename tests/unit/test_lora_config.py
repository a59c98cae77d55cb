"""The configuration of an adapter against PEFT's own: keys of the file, rules of names and patterns."""

from __future__ import annotations

import itertools
import json
from typing import get_args

import pytest
from peft import LoraConfig as OfPeft
from peft import TaskType
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from packlora.adapters.files import config_dict
from packlora.lora_config import LoraConfig, Task, is_excluded, is_target
from packlora.patterns import pattern_key

PATHS = [
    "q_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.q_proj", "model.h.11.self_attn.xq_proj",
    "visual.blocks.1.q_proj", "model.layers.10.mlp", "lm_head", "score.q_proj", "layers.1.q_proj",
]  # fmt: skip
KEYS = {
    "target_modules": [
        ["q_proj"],
        ["self_attn.q_proj", "lm_head"],
        r".*\.(q_proj|mlp)",
        "q_proj",
        ["model.layers.10.mlp"],
    ],
    "exclude_modules": [None, ["self_attn.q_proj"], r"model\..*"],
    "modules_to_save": [None, ["lm_head", "score"]],
    "layers_to_transform": [None, 1, [0, 11], []],
    "layers_pattern": [None, "h", ["layers", "h"]],
}
ASKED = [
    {"r": 4, "target_modules": ["a", "b"], "lora_alpha": 16, "lora_dropout": 0.1},
    {"target_modules": "all-linear", "use_dora": True, "use_rslora": True, "bias": "lora_only"},
    {
        "target_modules": ["a"], "rank_pattern": {"a": 2}, "alpha_pattern": {"a": 3}, "exclude_modules": ["c"],
        "modules_to_save": ["lm_head"], "layers_to_transform": [1], "layers_pattern": "h", "init_lora_weights": "gaussian",
    },
    {"target_modules": [], "target_parameters": ["experts.down_proj"], "trainable_token_indices": [1, 2]},
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_an_adapter_config_is_the_text_that_peft_writes(asked: dict[str, object]) -> None:
    own = LoraConfig(**asked, task_type="CAUSAL_LM", base_model_name_or_path="b", revision="main")  # type: ignore[arg-type]
    theirs = OfPeft(**asked, task_type="CAUSAL_LM", base_model_name_or_path="b", revision="main")
    assert json.dumps(config_dict(own)) == json.dumps(config_dict(theirs))  # type: ignore[arg-type]


def test_defaults_and_their_order_are_those_of_peft() -> None:
    theirs = OfPeft().to_dict()
    assert list(LoraConfig().to_dict().items()) == list(theirs.items())


def test_tasks_are_those_of_peft() -> None:
    assert set(get_args(Task)) == {task.value for task in TaskType}


def test_modules_are_meant_and_excluded_as_peft_means_them() -> None:
    seen = set()
    for values in itertools.product(*KEYS.values()):
        own = LoraConfig(**dict(zip(KEYS, values, strict=True)))  # type: ignore[arg-type]
        for path in PATHS:
            found = check_target_module_exists(own, path)
            excluded = type(found).__name__ == "_ExcludedModule"
            assert is_excluded(own, path) == excluded, (values, path)
            assert is_target(own, path) == (bool(found) and not excluded), (values, path)
            seen.add((excluded, bool(found)))
    assert len(seen) == 3


@pytest.mark.parametrize("patterns", [["q_proj", "self_attn.q_proj"], [r"layers\.1\..*", "mlp"], ["a|lm_head"], []])
def test_patterns_mean_what_they_mean_to_peft(patterns: list[str]) -> None:
    assert [pattern_key(patterns, path) for path in PATHS] == [get_pattern_key(patterns, path) for path in PATHS]
