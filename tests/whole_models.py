"""Tiny random multimodal models of which transformers makes a text model as well, in folders with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0,
        "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Config", {}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", EXPERTS),
}


def whole_config(family: str, **text: Any) -> Any:
    """The configuration of a whole model. text: of its part for texts."""
    name, own = FAMILIES[family]
    said = TEXT | QWEN | own | text
    tied = {"tie_word_embeddings": said.get("tie_word_embeddings", False)}
    return getattr(transformers, name)(text_config=said, vision_config=VISION, **tied)


def whole_folder(family: str, tokenizer: Any, folder: Path, **text: Any) -> str:
    """Save a tiny model, in which every weight matters, as its publishers do, with a tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(whole_config(family, **text))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 0.1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
