"""Base layers of other libraries than torch, under PEFT's LoRA: what of their weights the operator is given.

Who reads them is a plug-in (packlora/form.py), imported by name for a kind of PEFT's layers that is not over torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from packlora.form import plugin
from packlora.ops.lora_linear.frozen import FrozenWeight

PLAIN = "peft.tuners.lora.layer"
"""PEFT's module of layers over torch's own."""
LIBRARIES = ("bitsandbytes", "gptqmodel")
"""Libraries whose layers change themselves when they run."""


class StoredWeight(Protocol):
    """The weight of a base layer: the same object while it is made of the same tensors."""

    @property
    def weight(self) -> torch.Tensor:
        """The tensor of integers that stands for it."""

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""

    def together(self, like: torch.Tensor) -> Hashable:
        """Key that is the same for weights that are computed together, for an x like a tensor."""

    def products(self, x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the library would multiply x. dtype: that in which torch would."""

    def frozen(self, dtype: torch.dtype, products: torch.dtype) -> FrozenWeight:
        """The weight as the operator takes it: dtype, of x; products, in which it is multiplied."""


WeightReader = Callable[[Any, "StoredWeight | None"], "StoredWeight | str"]
"""Gives the weight of a base layer, or why it cannot be read; it is given what it gave the last time."""


def weight_reader(kind: type) -> WeightReader | None:
    """Reader of the weights under a PEFT layer; None where they are torch's, or of a kind that is not known."""
    if kind.__module__ == PLAIN:
        return None
    found: WeightReader | None = plugin().reader(kind)
    return found


def left_as_they_are(model: torch.nn.Module) -> AbstractContextManager[None]:
    """During a run of the model in evaluation: layers of libraries keep their layout and the dtypes that they compute in."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if not any(kind.__module__.partition(".")[0] in LIBRARIES for kind in kinds):
        return nullcontext()
    found: AbstractContextManager[None] = plugin().left_as_they_are(model)
    return found
