"""A tiny model with four different adapters for sampling, and PEFT models of each as oracles."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import TINY, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import Attached
from packlora.adapters.reading import load_adapter
from packlora.base.packing import prepare_model
from packlora.engine.sampling import SampledToken
from packlora.runtime.continued import resolve_folder

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 8, "use_dora": True, "target_modules": "all-linear"},
    "some": {"r": 5, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "head": {"r": 3, "target_modules": ["v_proj", "lm_head"]},
}


@dataclass
class Case:
    """model: packed, with all adapters. peft: by name, and the plain model under ""."""

    model: Any
    attached: Attached
    adapters: list[Adapter]
    peft: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, int]:
        """Adapters' numbers by name, and of the base model."""
        return {"": -1} | {adapter.name: adapter.number for adapter in self.adapters}


def case_of(
    folder: Path, names: Sequence[str] = tuple(ADAPTERS), dtype: torch.dtype = torch.float64, family: str = "llama",
    **changes: Any,
) -> Case:  # fmt: skip
    model = tiny_model(family, dtype, **changes)
    model.set_attn_implementation("sdpa")  # transformers' eager softmax is in float32
    peft: dict[str, Any] = {"": copy.deepcopy(model)}
    for seed, name in enumerate(names):
        made = get_peft_model(copy.deepcopy(model), LoraConfig(**{"task_type": "CAUSAL_LM"} | ADAPTERS[name]))
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in (one for one in made.parameters() if one.requires_grad):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
        made.save_pretrained(folder / name)
        peft[name] = PeftModel.from_pretrained(copy.deepcopy(model), folder / name).eval()
    prepare_model(model, False)
    attached, adapters = attach(model, {name: resolve_folder(folder / name, model, name) for name in names}, 0)
    for adapter in adapters:
        load_adapter(folder / adapter.name, adapter)
    return Case(model, attached, adapters, peft)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(6, TINY["vocab_size"], length).tolist())


def full_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of a whole forward by transformers, without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def ids_of(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.id for token in tokens]
