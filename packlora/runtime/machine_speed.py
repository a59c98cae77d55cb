"""How fast a device multiplies and copies, measured in a fraction of a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from packlora.engine.memory import synchronize

SECONDS = 0.1
"""Calls are repeated for as long."""
COPIED_BYTES = 2**28


@lru_cache
def machine_flops(device: torch.device, dtype: str) -> float:
    """FLOP/s that the machine reaches at a large matrix product: the best of some, within a fraction of a second."""
    n = 8192 if device.type == "cuda" else 512
    kind = getattr(torch, dtype)
    noise = torch.Generator(device).manual_seed(0)  # ones take less power than numbers of a model, and less time
    a, b = (torch.randn(n, n, generator=noise, dtype=kind, device=device) for _ in range(2))
    return 2 * n**3 / _fastest(device, lambda: torch.mm(a, b))


@lru_cache
def machine_bandwidth(device: torch.device) -> float:
    """Bytes a second that memory reads and writes in a large copy, on a GPU; on a CPU that is in the share of products."""
    if device.type != "cuda":
        return math.inf
    a = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * COPIED_BYTES / _fastest(device, lambda: b.copy_(a))


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest call, within a fraction of a second."""
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < SECONDS:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
