"""The last values of a pure function: the one bounded cache of the operators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The last `size` values of a pure function, by key."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = make()
            if len(self._values) > self.size:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return value
