"""View of a tensor by the host without waiting for a device, and whether it sees the same again."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.stamp import version

_expired = torch.UntypedStorage._expired


class Sight:
    """Record of what the host saw of a tensor: where its data lay, in which storage and how, and its version, None where that
    is not counted (of tensors made in inference mode). The storage is not kept alive, but no other can be taken for it."""

    __slots__ = ("at", "dtype", "shape", "storage", "stride", "type", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.type, self.at, self.storage = type(tensor), tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())
        self.shape, self.stride, self.dtype, self.version = tensor.shape, tensor.stride(), tensor.dtype, version(tensor)

    def lies(self, tensor: torch.Tensor) -> bool:
        """Whether it lies where it lay. A live storage at one address is one storage."""
        return (
            type(tensor) is self.type and tensor.data_ptr() == self.at and not _expired(self.storage.cdata)
            and tensor.shape == self.shape and tensor.stride() == self.stride and tensor.dtype == self.dtype
        )  # fmt: skip

    def stands(self, tensor: Any) -> bool:
        """Whether nobody wrote into it either."""
        try:
            written = tensor._version != self.version
        except RuntimeError:  # made in inference mode
            written = self.version is not None
        return not written and self.lies(tensor)


class Key:
    """The same of a weight that is no tensor, or that lies elsewhere every time."""

    __slots__ = ("key",)

    def __init__(self, weight: FrozenWeight) -> None:
        self.key = weight.key

    def stands(self, weight: Any) -> bool:
        return self.key is not None and weight.key == self.key


def sight_of(weight: torch.Tensor | FrozenWeight) -> Sight | Key:
    """Sight of a tensor, or key of a frozen weight, as it is now."""
    return Sight(weight) if isinstance(weight, torch.Tensor) else Key(weight)
