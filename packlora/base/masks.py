"""Comparison of a model's own attention masks with those of packed attention, at any length.

transformers builds a layer's mask from rules (causal, windows, chunks) that a layer need not tell its attention function of.
Here the model runs once with its own rules, and each layer's is compared, row by row, with causal attention in the window that
the layer passes on. No mask of size T x T is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packlora.errors import Unpackable
from packlora.ops.attention.attention import packed_attention

OWN_MASKS = "packlora-own-masks"
"""Attention under which masks are looked at. In place of a mask, layers are given one number that describes it."""
ROWS = 256
"""Rows of a mask that are compared together."""


@dataclass(slots=True)
class MaskLimits:
    """Results of a run of the model under OWN_MASKS."""

    names: dict[int, str]
    """Names of all modules, by id(module)."""
    limits: dict[str, int] = field(default_factory=dict)
    """Tokens up to which a layer's mask is what packed attention takes it for, by the layer's name, where it is not so for the
    whole sample."""


def describe(**kwargs: Any) -> torch.Tensor:
    """A mask in one number: n > 0 for causal attention in a window of n; else -n, where row n is the first that is not
    causal attention without a window."""
    length, device = int(kwargs["kv_length"]), kwargs["device"]
    if kwargs["q_length"] != length:
        raise Unpackable("the model attends to keys that are not its tokens")
    keys = torch.arange(length, device=device)
    window, other = None, None
    for start in reversed(range(0, length, ROWS)):  # the last row shows the window
        stop = min(start + ROWS, length)
        part = {"q_length": stop - start, "q_offset": start, "allow_is_causal_skip": False}
        part["allow_is_bidirectional_skip"] = False
        mask = sdpa_mask(**{**kwargs, **part})[0]
        queries = torch.arange(start, stop, device=device)[:, None]
        causal = (keys <= queries).expand_as(mask)
        if window is None:
            window = int(mask[0, -1].sum())
        is_causal = torch.equal(mask, causal)
        if not is_causal:
            other = start + int((mask != causal).any(-1).any(0).nonzero()[0])
        if not (is_causal if stop <= window else torch.equal(mask, causal & (keys > queries - window))):
            window = 0
    return torch.tensor(window if window else -(other or 0), device=device).view(1, 1, 1, 1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sample_lengths: Sequence[int] | None = None,
    own_masks: MaskLimits | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    T = query.shape[2]
    if own_masks is None:
        raise Unpackable(f"{type(module).__name__} does not pass on to its attention what the model is given for it")
    if attention_mask is None or attention_mask.numel() != 1:
        raise Unpackable(f"{type(module).__name__} builds a mask of its own")
    own, told = int(attention_mask), min(sliding_window or T, T)
    if own != told:
        own_masks.limits[own_masks.names[id(module)]] = min(abs(own), told)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query[0], key[0], value[0], (T,), scale, sliding_window, softcap, sinks_H=s_aux)[None], None


ALL_ATTENTION_FUNCTIONS.register(OWN_MASKS, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(OWN_MASKS, describe)
