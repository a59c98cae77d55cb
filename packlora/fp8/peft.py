"""PEFT's LoRA layers whose base products accelerate() computes in FP8: codes of the base weight beside it, which stays as it
is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from packlora.fp8.rows import coded
from packlora.fp8.weight import Fp8Weight, TwiceCoded, takes, why_not_on
from packlora.live.adapter import plain_weight, why_not_read
from packlora.live.layers import LayerForward
from packlora.ops.lora_linear.frozen import FrozenWeight


class CodedWeight:
    """A plain base layer as the operator takes it, the same object while its weight is not written to. See live/foreign.py,
    StoredWeight."""

    def __init__(self, base: Any) -> None:
        self.weight: torch.Tensor = base.weight
        self.bias: torch.Tensor | None = base.bias
        self._stamp = _stamp(base)
        self._codes = TwiceCoded.of(coded(self.weight.detach()))
        self._weights: dict[torch.dtype, FrozenWeight] = {}

    def is_of(self, base: Any) -> bool:
        return _stamp(base) == self._stamp

    @property
    def shape(self) -> tuple[int, int]:
        return self._codes.shape

    def together(self, like: torch.Tensor) -> Hashable:
        return type(self).__name__

    def products(self, x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def frozen(self, dtype: torch.dtype, products: torch.dtype) -> FrozenWeight:
        if dtype not in self._weights:
            self._weights[dtype] = Fp8Weight(self._codes, dtype)
        return self._weights[dtype]


def _stamp(base: Any) -> tuple[int, int, int, int]:
    weight = base.weight
    return id(weight), weight.data_ptr(), weight._version, id(base.bias)


def coded_weight(base: Any, known: CodedWeight | None) -> CodedWeight | str:
    """The weight of a base layer in codes, or why it cannot be read. known: what was read the last time."""
    if plain_weight(base) is None:
        return why_not_read([("base layer", base)]) or "its base layer is no plain layer of floats any more"
    if known is not None and known.is_of(base):
        return known
    if (reason := why_not_on(base.weight.device)) is not None:
        return f"compute is fp8, and {reason}"
    return CodedWeight(base)


def compute_in_fp8(forwards: Mapping[str, LayerForward]) -> list[str]:
    """Let layers compute their base products in FP8; notes for the report. forwards: of linear layers, by path.

    Raises:
        ValueError: none can.
    """
    taken, reason = 0, "no adapter is on a plain linear layer whose sizes 16 divides"
    for forward in forwards.values():
        base = forward.layer.get_base_layer()
        if forward.read is not None or plain_weight(base) is None or not takes(base):
            continue
        if (found := why_not_on(base.weight.device)) is not None:
            reason = found
            continue
        forward.read, taken = coded_weight, taken + 1  # type: ignore[assignment]
    if not taken:
        raise ValueError(f"compute='fp8' cannot be met: {reason}")
    return [f"base products of {taken} of {len(forwards)} linear layers in FP8, of codes beside the weights"]
