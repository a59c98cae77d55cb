"""Tensors of frozen weights that are made where they are read, such as those of quantised ones (codes/weight.py).

A tensor that was made stays until the call of the operator ends, so that all products of the call share it, however many jobs
own its tokens; or until others need the room: all of them together take at most what the largest two would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch


class _Made(threading.local):
    """Temporary tensors of the call that runs in this thread, by key; the one made last comes last."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, torch.Tensor] = {}


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


class _Call:
    """Context manager around a call. It is a class because it is entered for every layer, and a generator takes the host three
    times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        forget()


_CALL = _Call()


def forget() -> None:
    """The end of a call: temporary tensors that were made in it are gone."""
    _MADE.tensors.clear()


def no_longer_than_this() -> AbstractContextManager[None]:
    """A call: temporary tensors that are made in it are gone afterwards."""
    return _CALL
