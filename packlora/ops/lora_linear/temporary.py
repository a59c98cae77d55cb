"""Tensors that are made where they are read: of frozen weights, such as quantised ones (codes/weight.py), and of what layers
read, such as the codes of tokens (fp8/weight.py).

A weight's tensor stays until the layer's part of the call ends, so that all its products share it, however many jobs own its
tokens; or until others need the room: all of them together take at most what the largest two would. What is made of the call's
input stays until the call ends, so that siblings share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch


class _Made(threading.local):
    """Temporary tensors of the call that runs in this thread, by key; the one made last comes last."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, torch.Tensor] = {}
        self.input: tuple[torch.Tensor, Any] | None = None
        """An input of layers, and what was made of it."""


_MADE = _Made()


def temporary(key: Hashable, size: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the tensor of `size` elements that `make` gives, or the one made under the same key earlier in this call. A tensor
    under the key None is never reused."""
    made = _MADE.tensors
    found = None if key is None else made.get(key)
    if found is not None:
        return found
    sizes = {known: tensor.numel() for known, tensor in made.items()}
    while sizes and sum(sizes.values()) + size > 2 * max(size, *sizes.values()):
        oldest = next(iter(sizes))
        del made[oldest], sizes[oldest]
    tensor = made[key] = make()
    return tensor


def made_of(x: torch.Tensor, make: Callable[[], Any]) -> Any:
    """Return what `make` makes of an input of layers, or what it made of the same tensor earlier in this call."""
    known = _MADE.input
    if known is None or known[0] is not x:
        known = _MADE.input = x, make()
    return known[1]


class _Call:
    """Context manager around a call. It is a class because it is entered for every layer, and a generator takes the host three
    times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        forget()


_CALL = _Call()


def forget(layer: bool = False) -> None:
    """The end of a call, or of one layer's part of it: temporary tensors that were made in it are gone."""
    _MADE.tensors.clear()
    _MADE.input = _MADE.input if layer else None


def no_longer_than_this() -> AbstractContextManager[None]:
    """A call: temporary tensors that are made in it are gone afterwards."""
    return _CALL
