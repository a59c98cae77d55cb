"""PEFT's LoRA layers whose base products accelerate() computes in FP8: codes of the base weight beside it, which stays as it
is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch

from packlora.fp8.change import CodedBeside, why_not_beside_on
from packlora.fp8.rows import coded
from packlora.fp8.weight import Fp8Weight, TwiceCoded, takes, why_not_on
from packlora.live.adapter import plain_weight, why_not_read
from packlora.live.layers import LayerForward
from packlora.ops.lora_linear.frozen import FrozenWeight

UNCOUNTED = "a base weight was made in inference mode, so that writes to it are not counted"
"""Why no codes are kept beside a weight."""


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
            self._weights[dtype] = self._made(dtype)
        return self._weights[dtype]

    @staticmethod
    def why_not_on(device: torch.device) -> str | None:
        return why_not_on(device)

    def _made(self, dtype: torch.dtype) -> FrozenWeight:
        return Fp8Weight(self._codes, dtype)


class WeightBeside(CodedWeight):
    """The same, whose products are of the weight itself, with codes for what dropout changes of DoRA (change.py)."""

    @staticmethod
    def why_not_on(device: torch.device) -> str | None:
        return why_not_beside_on(device)

    def _made(self, dtype: torch.dtype) -> FrozenWeight:
        return CodedBeside(self.weight.detach().to(dtype), self._codes)


def _stamp(base: Any) -> tuple[int, int, int, int]:
    weight = base.weight
    return id(weight), weight.data_ptr(), weight._version, id(base.bias)


def coded_weight(base: Any, known: CodedWeight | None, kind: type[CodedWeight] = CodedWeight) -> CodedWeight | str:
    """The weight of a base layer with codes, or why it cannot be read. known: what was read the last time."""
    if plain_weight(base) is None:
        return why_not_read([("base layer", base)]) or "its base layer is no plain layer of floats any more"
    if base.weight.is_inference():
        return UNCOUNTED
    if known is not None and known.is_of(base):
        return known
    if (reason := kind.why_not_on(base.weight.device)) is not None:
        return f"compute is in FP8, and {reason}"
    return kind(base)


def compute_in_fp8(forwards: Mapping[str, LayerForward], compute: str) -> list[str]:
    """Let layers compute their base products in FP8, or what dropout changes of those of DoRA; notes for the report.

    Args:
        forwards: of linear layers, by path.
        compute: fp8, or dora_fp8.

    Raises:
        ValueError: none can.
    """
    beside = compute == "dora_fp8"
    kind = WeightBeside if beside else CodedWeight
    taken, reason = 0, f"no adapter is on a plain linear layer whose sizes 16 divides{', with DoRA' if beside else ''}"
    for forward in forwards.values():
        base = forward.layer.get_base_layer()
        if forward.read is not None or plain_weight(base) is None or not takes(base):
            continue
        if beside and not getattr(forward.layer, "lora_magnitude_vector", None):
            continue
        found = UNCOUNTED if base.weight.is_inference() else kind.why_not_on(base.weight.device)
        if found is not None:
            reason = found
            continue
        forward.read, taken = partial(coded_weight, kind=kind), taken + 1
    if not taken:
        raise ValueError(f"compute={compute!r} cannot be met: {reason}")
    what = "what dropout changes of DoRA's base products" if beside else "base products"
    return [f"{what} of {taken} of {len(forwards)} linear layers in FP8, of codes beside the weights"]
