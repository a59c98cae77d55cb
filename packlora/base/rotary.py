"""Rotary embeddings whose frequencies depend on how long a sample is (longrope, dynamic NTK), for packed samples.

transformers chooses such frequencies once for the whole row that it is given, by the largest position in it; one long sample
would change all its neighbours. Here each sample has those that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch

BY_LENGTH = ("dynamic", "longrope")
"""Parts of the names of rope types that look at the largest position; the others do not."""


def rotate_by_sample(model: torch.nn.Module) -> None:
    """Make every rotary embedding that depends on the largest position compute it sample by sample."""
    for module in _by_length_of(model):
        module.forward = MethodType(_by_sample(type(module).forward, _limit(module)), module)


def depends_on_length(model: torch.nn.Module) -> bool:
    """Whether the model has a rotary embedding whose frequencies depend on how long a sample is."""
    return any(True for _ in _by_length_of(model))


def _by_length_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if any(isinstance(name, str) and part in name for name in names for part in BY_LENGTH):
            yield module


def _limit(module: torch.nn.Module) -> int:
    """Samples of at most so many tokens have the same frequencies; 0 where that is not known."""
    kept = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    dicts = [kept, *(value for value in kept.values() if isinstance(value, Mapping))]
    found = [value.get("original_max_position_embeddings") for value in dicts] + [
        getattr(module, "original_max_seq_len", 0)
    ]
    return min((number for number in found if isinstance(number, int)), default=0)


def _by_sample(own: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """forward of a rotary embedding, called once for all samples that have the same frequencies."""

    @wraps(own)
    def forward(self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.ndim > 1 and position_ids.shape[-2] != 1:  # generation: a batch, not a packed row
            return own(self, x, position_ids, *args, **kwargs)
        parts = _by_length(position_ids.reshape(-1, position_ids.shape[-1])[0].tolist(), limit)
        first = torch.zeros_like(position_ids[..., :1])
        own(self, x, first, *args, **kwargs)  # dynamic: forgets the longest sample so far
        if len(parts) == 1:
            return own(self, x, position_ids, *args, **kwargs)
        rows = [torch.tensor(parts[key], device=position_ids.device) for key in sorted(parts)]
        back = torch.cat(rows).argsort()
        made = [own(self, x, position_ids[..., own_rows], *args, **kwargs) for own_rows in rows]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made, -2).index_select(-2, back)
        return tuple(torch.cat(each, -2).index_select(-2, back) for each in zip(*made, strict=True))

    return forward


def _by_length(positions: list[int], limit: int) -> dict[int, list[int]]:
    """Rows of a packed row by the largest position of their sample, all samples within the limit together."""
    parts: dict[int, list[int]] = {}
    start = 0
    for stop in range(1, len(positions) + 1):
        if stop == len(positions) or positions[stop] != positions[stop - 1] + 1:
            parts.setdefault(max(positions[stop - 1] + 1, limit), []).extend(range(start, stop))
            start = stop
    return parts
