"""A lack of memory at one place of a program: where one of the tensors is made that it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Short(TorchDispatchMode):
    """Memory that runs out where the `at`-th tensor is made, counted from 1; for good, or once. 0: nowhere."""

    def __init__(self, at: int, lasts: bool = False) -> None:
        super().__init__()
        self.at, self.lasts, self.made = at, lasts, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if returns and all(own.alias_info is None and "Tensor" in str(own.type) for own in returns):
            self.made += 1
            if self.at and (self.made == self.at or (self.lasts and self.made > self.at)):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return func(*args, **(kwargs or {}))
