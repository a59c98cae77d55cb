"""The adapter of a run file in PEFT's terms, and back."""

from __future__ import annotations

import math
from typing import Any

from packlora.config.adapter import AdapterConfig
from packlora.files import from_everywhere
from packlora.given import MEMORY
from packlora.lora_config import LoraConfig


def peft_config(adapter: AdapterConfig, base_model: str, revision: str | None) -> LoraConfig:
    """The LoraConfig that PEFT users would write for the adapter; of twice the rank and the same scaling where
    adapters/starts.py needs it."""
    ranks, alphas = _factors(adapter.is_doubled, adapter.use_rslora)
    alpha = {key: whole_number(value * alphas) for key, value in adapter.alpha_pattern.items()}
    config = LoraConfig(
        r=adapter.r * ranks,
        lora_alpha=whole_number(adapter.lora_alpha * alphas),
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        target_parameters=adapter.target_parameters,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
        rank_pattern={key: rank * ranks for key, rank in adapter.rank_pattern.items()},
        alpha_pattern=alpha,
        exclude_modules=adapter.exclude_modules,
        layers_to_transform=adapter.layers_to_transform,
        layers_pattern=adapter.layers_pattern,
        modules_to_save=adapter.modules_to_save,
        trainable_token_indices=adapter.trainable_token_indices,
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base_model.startswith(MEMORY) else from_everywhere(base_model),
        revision=revision,
    )
    config.init_lora_weights = adapter.init_lora_weights  # of loftq PEFT wants settings
    return config


def as_asked(config: LoraConfig, key: str) -> Any:
    """Value in a run file under a key of an adapter of twice the rank."""
    value, (ranks, alphas) = getattr(config, key), _factors(True, config.use_rslora)
    factor = {"r": ranks, "rank_pattern": ranks, "lora_alpha": alphas, "alpha_pattern": alphas}.get(key)
    if factor is None:
        return value
    halves = {
        name: whole_number(one / factor) for name, one in (value if isinstance(value, dict) else {key: value}).items()
    }
    return halves if isinstance(value, dict) else halves[key]


def _factors(doubled: bool, use_rslora: bool) -> tuple[int, float]:
    """Factors of the ranks and of the alphas, by which an adapter of twice the rank has the same scaling."""
    return (2, math.sqrt(2) if use_rslora else 2) if doubled else (1, 1)


def whole_number(number: float) -> Any:
    """PEFT writes whole alphas without a point."""
    return int(number) if float(number).is_integer() else number
