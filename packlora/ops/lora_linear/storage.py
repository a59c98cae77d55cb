"""Interface of the storage of a model's frozen weights to adapted layers. It is imported for its type alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from packlora.ops.lora_linear.frozen import FrozenWeight


class Storage(Protocol):
    """Storage of the frozen weights of a model."""

    @property
    def is_whole(self) -> bool:
        """Whether all weights are here all the time. If not, a forward of the model takes all processes that have some."""

    @property
    def can_record(self) -> bool:
        """Whether a forward may be recorded as CUDA graphs: all that it reads and sends stays at one place."""

    def each(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths of modules, each while the weights that lie in its module, or above it in its layer, are here."""

    def frozen(self, weight: torch.Tensor) -> FrozenWeight:
        """A weight as the operator takes it."""

    def adapted(self, paths: Iterable[str]) -> None:
        """Adapters have been put onto the layers at these paths."""

    def holds(self, path: str) -> bool:
        """Whether adapters on the module at this path of the model are trained on this process, if the module is here."""

    def idle(self, context: Any, backward: bool) -> None:
        """Take part in a forward of the other processes, and in its backward, where they need this one for weights or tokens.

        Args:
            context: what the adapted layers share.
        """
