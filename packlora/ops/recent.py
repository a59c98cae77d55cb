"""The last values of a pure function: the one bounded cache of the operators."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")
_TURN = threading.Lock()
"""Lock shared by all caches: with a lock of its own, an object that holds a cache could not be copied."""


class Recent(Generic[Value]):
    """The last `size` values of a pure function, by key. Threads may share it; two that miss a key at once both make it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        with _TURN:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
                return value
        made = make()  # may take long, and may ask this cache or another
        with _TURN:
            value = self._values.setdefault(key, made)
            if len(self._values) > self.size:
                self._values.popitem(last=False)
            return value
