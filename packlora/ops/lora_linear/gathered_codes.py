"""Quantised linear layers whose codes are sharded by rows: a process has all rows only while the layer runs.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from packlora.ops.lora_linear.quantized import Codes, Quantized, QuantizedLinear


class GatheredCodes(Quantized):
    """The weight of a GatheredCodesLinear. Nobody writes to its codes, so what was made of them stands."""

    def __init__(self, layer: GatheredCodesLinear, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype

    @property
    def codes(self) -> Codes:  # type: ignore[override]
        return self.layer.codes

    @property
    def is_here(self) -> bool:
        """Whether the codes are gathered. adapters.norms asks for it by name: other frozen weights are always here."""
        return not isinstance(self.layer.weight, DTensor)

    @property
    def shape(self) -> tuple[int, int]:
        return self.layer.out_features, self.layer.in_features

    @property
    def device(self) -> torch.device:
        return self.layer.weight.device

    @property
    def key(self) -> Hashable:
        return id(self.layer), self.dtype

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self.layer)


class GatheredCodesLinear(QuantizedLinear):
    """A layer of codes in the place of `whole`, which is on the meta device, as this is until `take` is given its weight.

    weight: the codes as they are stored, to be sharded by rows; a plain tensor while they are here. The scales are whole.

    Args:
        make: codes of a weight [N, K] of floats.
        stored: shape and dtype of the codes.
        dtype: of products.
    """

    def __init__(
        self, whole: torch.nn.Linear, make: Callable[[torch.Tensor], Codes], stored: tuple[tuple[int, int], torch.dtype],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        N, K = whole.weight.shape
        torch.nn.Linear.__init__(self, K, N, whole.bias is not None, "meta", dtype)
        self.weight = torch.nn.Parameter(torch.empty(stored[0], dtype=stored[1], device="meta"), requires_grad=False)
        if whole.bias is not None:
            self.bias.requires_grad_(False)
        self.make, self.frozen = make, GatheredCodes(self, dtype)
        self._scales: Codes | None = None

    @property
    def codes(self) -> Codes:
        assert self._scales is not None, "its weight has not been read"
        return self._scales.with_stored(self.weight)

    def take(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Keep the scales of a weight, of floats on the layer's device, and give its codes."""
        made = self.make(weight_NK)
        assert made.stored.shape == self.weight.shape
        self._scales = made.with_stored(made.stored.new_empty(0))
        return made.stored

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return torch.nn.Linear._apply(self, fn, recurse)
