"""Decode passes of one attention layer, by torch and by the kernel."""

from __future__ import annotations

from typing import Any

import torch
from seeds import SEED

from packlora.base.kv_cache import Decode, KeyValueCache
from packlora.ops.attention.cached import Visible

PLACES, ROWS = [0, 63, 64, 7, 129, 0], [2, 4, 1, 3, 0, 2]
"""Of each slot; the last one is idle, and names the row of the first."""
SLOTS = [4, 2, 0, 3, 1, 1, 0]
"""Of each row; the last ones are padding."""
REAL = 5
"""Rows before the padding."""
LENGTH = 130
LAYER = torch.nn.Identity()


def drawn(H: int, h: int, D: int, seed: int) -> list[torch.Tensor]:
    """q, k, v [heads, R, D] as views of [R, heads, D], and keys and values [S, h, L, D], in float64."""
    generator = torch.Generator().manual_seed(SEED + seed)
    new = [torch.randn(len(SLOTS), n, D, generator=generator, dtype=torch.float64).transpose(0, 1) for n in (H, h, h)]
    kept = [torch.randn(len(PLACES), h, LENGTH, D, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [*new, *kept]


def attended(operands: list[torch.Tensor], *how: Any) -> dict[str, torch.Tensor]:
    """What a pass gives, and the cache after it at the places of slots with a sequence."""
    q, k, v, *kept = (tensor.clone() for tensor in operands)
    cache = KeyValueCache()
    cache.slots, cache.length, cache.layers[LAYER] = len(PLACES), LENGTH, (kept[0], kept[1])
    rows, slots, places = (torch.tensor(own, device=q.device) for own in (ROWS, SLOTS, PLACES))
    one = Decode(cache, rows, slots, Visible(places, LENGTH))
    y = one.attend(LAYER, q, k, v, *how)
    return {"y": y, "k": kept[0][:-1], "v": kept[1][:-1]}
