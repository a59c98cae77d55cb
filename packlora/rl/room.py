"""Room of the sampler on a GPU: how many completions are drawn at once, and how many tokens its cache holds."""

from __future__ import annotations

from typing import Any

import torch

from packlora.engine.memory import memory_room
from packlora.runtime.prepared_job import number_of

MOST_ROWS = 256
"""Completions that are drawn at once. A decode pass reads all weights, whatever the number of its rows."""
SHARE = 0.3
"""Share of the free memory that the cache may take; it is copied when it grows."""
FEWEST_TOKENS, MOST_TOKENS = 1 << 14, 1 << 19


def sampler_room(model: Any) -> dict[str, Any]:
    """Arguments of a Sampler: rows, and tokens of the cache, a power of two. None on a CPU, where the sampler's own stand."""
    if model.device.type != "cuda":
        return {}
    free = memory_room(model.device) - torch.cuda.memory_allocated(model.device)
    tokens = int(SHARE * free / max(1, bytes_per_token(model)))
    tokens = 1 << max(1, tokens).bit_length() - 1
    return {"rows": MOST_ROWS, "cache_tokens": min(max(tokens, FEWEST_TOKENS), MOST_TOKENS)}


def bytes_per_token(model: Any) -> int:
    """Bytes of the keys and values of a token in all layers."""
    config = model.config.get_text_config()
    heads = number_of(config, "num_attention_heads", 1)
    width = number_of(config, "head_dim", number_of(config, "hidden_size", 1) // heads)
    kept = number_of(config, "num_key_value_heads", heads) * width
    layers: int = number_of(config, "num_hidden_layers", 1)
    return 2 * layers * kept * int(model.dtype.itemsize)
