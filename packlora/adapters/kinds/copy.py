"""Copies of modules: y = the module with the job's own parameters. Copies of matrices are cast to the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.func import functional_call

from packlora.adapters.linear import Attached
from packlora.adapters.other_modules import copied
from packlora.adapters.routed import First, Own, RoutedWeights
from packlora.adapters.spec import ModuleSpec


class Weights(RoutedWeights):
    """All parameters of the module, which begin with its values."""

    suffixes = MappingProxyType({"weight": "weight", "norm": "weight", "bias": "bias"})
    keeps_base = False
    unread = "holds parameters of {path} itself"

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.copies_embedding = isinstance(base, torch.nn.Embedding)

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        """See RoutedWeights."""
        return {name: tuple(getattr(base, own).shape) for name, own in copied(base).items()}

    @classmethod
    def replaced(cls, W: torch.Tensor, leaf: str, spec: ModuleSpec, own: Own) -> torch.Tensor | None:
        """See RoutedWeights."""
        return own(next(name for name, end in cls.suffixes.items() if end == leaf))

    def first_values(self, base: Any, attached: Attached) -> First:
        return [(self.parameters[name], getattr(base, own).detach()) for name, own in copied(base).items()]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        names = copied(base)
        if "norm" in names or "weight" not in names:  # a product in 16 bits would lose what is small beside 1
            wide: dict[str, torch.Tensor] = {own: self.parameters[name] for name, own in names.items()}
            dtype = next(iter(wide.values())).dtype
            return functional_call(base, wide, (x.to(dtype),)).to(x.dtype)  # type: ignore[no-any-return]
        cast = {own: self.parameters[name].to(base.weight.dtype) for name, own in names.items()}
        return functional_call(base, cast, (x,))  # type: ignore[no-any-return]
