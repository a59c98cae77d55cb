"""The architecture of a base model: its sizes, its output layer, and where its attention depends on the place in a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.errors import InputError

MOST = {"layers": 10_000, "experts": 100_000}
"""Upper bounds of a base model's sizes; many more would exhaust the memory while the model is laid out. Doge has 16384
experts."""


def check_sizes(config: Any, path: str) -> None:
    """Raises InputError for a number of layers or experts that no model has."""
    pending = [config.to_dict()]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int) and (found := re.search(r"layers|n_layer\b|experts", str(key))):
                most = MOST["experts" if found.group() == "experts" else "layers"]
                if value > most:
                    raise InputError(
                        f"base_model {path!r}: its configuration has {key} {value}, more than {most}; this is no model"
                    )


def context_of(config: Any) -> int:
    """Most tokens that a sample may have: max_position_embeddings, times the factor of a dynamic rotary embedding, which
    stretches longer samples as far as that; 2^31 where a configuration names none."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    ropes = getattr(text, "rope_parameters", None) or {}
    factors = [
        rope.get("factor", 1.0)
        for rope in (ropes, *ropes.values()) if isinstance(rope, dict) and "dynamic" in str(rope.get("rope_type"))
    ]  # fmt: skip
    return int(known * max([1.0, *factors])) if known else 2**31


def check_row(model: PreTrainedModel, budget: int | str, path: str) -> None:
    """Refuse microbatches longer than a causal mask [1, 1, N, N] that an attention layer keeps for itself (GPT-Neo), and
    attention to compressed tokens (DeepSeek-V4), which are made of so many of a row, whichever samples it has."""
    for name, module in model.named_modules():
        if isinstance(rate := getattr(module, "compress_rate", None), int):
            raise InputError(
                f"base_model {path!r}: packlora cannot train a {model.config.model_type} model: {name} makes one of every "
                f"{rate} tokens of a row, in which samples that are packed together see each other"
            )
    for name, buffer in model.named_buffers():
        N = buffer.shape[-1] if buffer.ndim else 0
        if buffer.shape == (1, 1, N, N) and N > 1 and (isinstance(budget, str) or budget > N):
            raise InputError(
                f"base_model {path!r}: a {model.config.model_type} model keeps masks for {N} tokens ({name}), and so takes no "
                f"more in one microbatch; max_tokens_per_microbatch is {budget}, set it to {N} or less"
            )


def scaled_by_place(model: PreTrainedModel) -> dict[str, Any]:
    """Attention layers that scale a query by its place in the row, from the floor_scale-th on (Llama 4 without positions)."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "attn_temperature_tuning", False)
        and not getattr(module, "use_rope", False)
        and isinstance(getattr(module, "floor_scale", None), int | float)
    }


def decoder_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The layers of the decoder by path: the entries of the list of modules with the most parameters."""
    lists = [
        (path, found) for path, found in model.named_modules() if isinstance(found, torch.nn.ModuleList) and len(found)
    ]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return {f"{path}.{number}": layer for number, layer in enumerate(largest)}


def plain_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The output layer, if it is a frozen linear layer that carries no adapter."""
    head = model.get_output_embeddings()
    frozen = type(head) is torch.nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())
    return head if frozen else None


def vocabulary(model: PreTrainedModel) -> int:
    """Size of the vocabulary that the model has embeddings for, wherever their weights are."""
    embedding: Any = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", 0) or embedding.weight.shape[0])


def attention_of_text(model: PreTrainedModel, name: str) -> str | Mapping[str, str]:
    """Attention implementation of a model's language model, for set_attn_implementation: a vision tower keeps its own."""
    config = model.config
    if getattr(config, "vision_config", None) is None:
        return name
    own = [key for key in config.sub_configs if getattr(config, key, None) is config.get_text_config()]
    return {"": name, **dict.fromkeys(own, name)}


def fast_towers(model: PreTrainedModel) -> None:
    """Switch a vision tower to torch's fused attention, where its class supports it: scores of all pairs of thousands of
    patches would not fit into memory."""
    config = getattr(model.config, "vision_config", None)
    towers = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]
    if config is not None and towers and all(getattr(tower, "_supports_sdpa", False) for tower in towers):
        model.set_attn_implementation({"vision_config": "sdpa"})
