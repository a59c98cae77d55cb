"""Quantised linear layers whose codes are sharded by rows: a process has all rows only while the layer runs.

Each process makes the codes of a whole layer out of the floats in the files, one layer at a time, as a process does that has
all of it, and keeps its own rows. FSDP2 gathers codes as it gathers floats. Scales take some hundredths of what codes take, and
are whole everywhere: their blocks go over the borders of rows.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packlora.codes.load import codes_made_of, quantised_paths
from packlora.codes.weight import Codes, Quantized, QuantizedLinear
from packlora.config import QuantizationConfig


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


def share_codes(model: PreTrainedModel, quantization: QuantizationConfig, dtype: torch.dtype) -> None:
    """Put layers of codes in the place of those that are quantised, in a model on the meta device.

    Args:
        quantization: by bitsandbytes, of floats.
        dtype: of the run.
    """
    make = partial(codes_made_of, quantization=quantization, dtype=dtype)
    for path in quantised_paths(model):
        whole: Any = model.get_submodule(path)
        N, K = whole.weight.shape
        stored = ((N, K), torch.int8) if quantization.method == "int8" else (((N * K + 1) // 2, 1), torch.uint8)
        model.set_submodule(path, GatheredCodesLinear(whole, make, stored, dtype))
