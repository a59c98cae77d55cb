"""What a piece of work sends to the other processes: how many collectives, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from packlora.parallel.collectives import GATHER, SCATTER


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


SENT: dict[str, Callable[[int, tuple[Any, ...]], float]] = {
    "all_reduce": lambda size, args: 2 * (size - 1) / size * _bytes(args[0]),
    "all_gather": lambda size, args: (size - 1) * _bytes(args[1]),
    GATHER: lambda size, args: (size - 1) * _bytes(args[1]),
    SCATTER: lambda size, args: (size - 1) * _bytes(args[0]),
    "reduce_scatter": lambda size, args: (size - 1) * _bytes(args[0]),
    "all_to_all": lambda size, args: (size - 1) / size * sum(map(_bytes, args[1])),
    "all_to_all_single": lambda size, args: (size - 1) / size * _bytes(args[1]),
    "broadcast": lambda size, args: _bytes(args[0]),
    "reduce": lambda size, args: _bytes(args[0]),
    "send": lambda size, args: _bytes(args[0]),
}
"""By function of torch.distributed, the bytes that a process sends where messages go round in a ring."""


@dataclass(slots=True)
class Messages:
    """names: of the collectives that were called. sent: bytes that this process sent."""

    names: list[str] = field(default_factory=list)
    sent: float = 0.0


@contextmanager
def counted() -> Iterator[Messages]:
    """Count what this process calls of SENT, on the default group or one of the same size."""
    found, own, size = Messages(), {name: getattr(dist, name) for name in SENT}, dist.get_world_size()

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.names.append(name)
            found.sent += SENT[name](size, args)
            return own[name](*args, **kwargs)

        return call

    for name in own:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in own.items():
            setattr(dist, name, function)
