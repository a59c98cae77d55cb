"""PEFT's LoRA layers over quantised ones: what of them the operator reads.

The operator multiplies with what the codes stand for, as the libraries' own training does, in the layer's compute dtype
(`CastProduct` where x is wider). bitsandbytes' 8 bits: base products of the forward stay the library's (`LibraryProduct`),
which on a GPU quantises the inputs as well; those of the backward are with what the codes stand for, there and here.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from peft.import_utils import is_bnb_available
from torch import nn
from torch.distributed.tensor import DTensor

from packlora.codes.library import EightBit, FourBit, library_codes, state_of
from packlora.codes.weight import Codes, Quantized
from packlora.live.adapter import observed
from packlora.live.wrapped import UNITS, NotWhole, weight_of, why_called, why_no_weight
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.stamp import plain_reads


@lru_cache
def quantised_kinds() -> dict[type, type | None]:
    """PEFT's LoRA layers over quantised ones that the operator computes, with the layers that each must be over; None: those of
    which library_codes reads the weight."""
    from peft.tuners.lora.awq import AwqLoraLinear
    from peft.tuners.lora.gptq import GPTQLoraLinear
    from peft.tuners.lora.torchao import TorchaoLoraLinear

    found: dict[type, type | None] = {TorchaoLoraLinear: None, GPTQLoraLinear: None, AwqLoraLinear: None}
    if not is_bnb_available():
        return found
    from peft.tuners.lora import bnb  # imports bitsandbytes

    for name in ("Linear4bit", "Linear8bitLt"):
        if hasattr(bnb, name):
            found[getattr(bnb, name)] = getattr(bnb.bnb.nn, name)
    return found


def stored_weight(kind: type | None, base: Any, known: StoredWeight | None) -> StoredWeight | str:
    """The weight of a quantised base layer, or why it cannot be read.

    Args:
        kind: of quantised_kinds.
        known: what was read the last time.
    """
    name = f"{type(base).__module__}.{type(base).__qualname__}"
    if isinstance(base, UNITS):
        return why_no_weight("base layer", base)
    if kind is not None and type(base) is not kind:
        return f"its base layer is a {name}, not {kind.__name__}"
    if observed(base):
        return why_called("base layer", base)
    if kind is not None:
        with plain_reads():
            reason = _why_no_codes(base)
        if reason:
            return reason
    if known is not None and known.is_of(base):
        return known
    codes = library_codes(base)
    if codes is None:
        return f"its base layer is a {name}, whose codes are not read here"
    if codes.quantises_inputs:
        return f"its base layer is a {name}, which quantises its inputs too"
    return StoredWeight(base, codes)


def _why_no_codes(base: Any) -> str | None:
    """Why the operator cannot read the weight of a bitsandbytes layer."""
    weight = weight_of(base)
    if isinstance(weight, DTensor):
        return why_no_weight("base layer", base)
    if hasattr(base, "state"):
        if not hasattr(weight, "SCB"):
            return f"the weight of its base layer is a {type(weight).__name__} without bitsandbytes' scales"
        if base.state.has_fp16_weights or weight.dtype != torch.int8:
            return "its base layer is not quantised (has_fp16_weights)"
        return "the scales of its base layer are gone" if base.state.SCB is None and weight.SCB is None else None
    state = state_of(base)
    if state is None:
        return "its base layer is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has packed its base layer for inference on a CPU, which cannot be trained"
    if weight.dtype != (made := getattr(weight, "quant_storage", weight.dtype)):
        now, before = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, made))
        return f"the codes of its base layer were cast from {before} to {now} and are lost; load the model again"
    shape = base.out_features, base.in_features
    if tuple(state.shape) != shape or weight.numel() * weight.itemsize != (shape[0] * shape[1] + 1) // 2:
        return NotWhole("the weight of its base layer is not whole here")
    return None


class StoredWeight:
    """A quantised base layer as the operator takes it: the same object for a dtype while it has the same codes. See
    live/foreign.py, StoredWeight."""

    def __init__(self, base: Any, codes: Codes) -> None:
        self.base, self.codes = base, codes
        self._parts = _parts(base)
        self._weights: dict[tuple[torch.dtype, torch.dtype], FrozenWeight] = {}

    def is_of(self, base: Any) -> bool:
        now = _parts(base)
        return base is self.base and len(now) == len(self._parts) and all(map(operator.is_, now, self._parts))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def together(self, like: torch.Tensor) -> Hashable:
        return type(self.codes), self.products(like, like.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The tensor of integers that stands for it."""
        found: torch.Tensor = weight_of(self.base)
        return found if isinstance(self.codes, FourBit | EightBit) else self.codes.stored

    @property
    def bias(self) -> torch.Tensor | None:
        own: torch.Tensor | None = self.base._parameters.get("bias")
        return self.base._buffers.get("bias") if own is None else own

    def products(self, x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the library would multiply x. dtype: that in which torch would."""
        if isinstance(self.codes, FourBit):
            own: torch.dtype | None = self.base.compute_dtype
            return x.dtype if own is None else own
        if self.codes.settings["method"] == "awq":
            return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
        return dtype

    def frozen(self, dtype: torch.dtype, products: torch.dtype) -> FrozenWeight:
        found = self._weights.get((dtype, products))
        if found is None:
            if isinstance(self.codes, EightBit):
                found = LibraryProduct(self.base, self.codes, dtype)
            else:
                found = Quantized(self.codes, dtype) if dtype == products else CastProduct(self.codes, dtype, products)
            self._weights[dtype, products] = found
        return found


def _parts(base: Any) -> list[object]:
    """Parts of a layer's codes: all of its tensors, and what bitsandbytes keeps beside them."""
    parts: list[object] = [*base._parameters.values(), *base._buffers.values()]
    weight, state = weight_of(base), getattr(base, "state", None)
    if state is not None:
        parts += state.CB, state.SCB, weight.SCB
    elif hasattr(base, "quant_state"):
        parts += weight, state_of(base)
    return parts


class CastProduct(Quantized):
    """A weight whose products are of another dtype than x and what else is computed of it."""

    has_tensor = False

    def __init__(self, codes: Codes, dtype: torch.dtype, products: torch.dtype) -> None:
        super().__init__(codes, dtype)
        self.products: FrozenWeight = Quantized(codes, products)

    def matmul(
        self,
        x_TK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return _onto(self.products.matmul(x_TK.to(self.products.dtype)), x_TK, bias_N, accumulate, scale)

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        return _onto(self.products.matmul_t(d_TN.to(self.products.dtype)), d_TN, None, accumulate, scale)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.products.rows(start, stop)

    def tensor(self) -> None:
        return None


class LibraryProduct(Quantized):
    """The weight of a Linear8bitLt whose products with x are bitsandbytes' own."""

    has_tensor = False

    def __init__(self, base: Any, codes: EightBit, dtype: torch.dtype) -> None:
        import bitsandbytes

        super().__init__(codes, dtype)
        self.base, self.state = base, bitsandbytes.MatmulLtState()
        self.state.CB, self.state.SCB = codes.stored, codes.largest_N
        self.state.has_fp16_weights, self.state.threshold = False, base.state.threshold
        self.state.use_pool = base.state.use_pool

    def matmul(
        self,
        x_TK: torch.Tensor,
        bias_N: torch.Tensor | None = None,
        accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        import bitsandbytes

        self.state.is_training = self.base.training
        with torch.no_grad():
            y_TN: torch.Tensor = bitsandbytes.matmul(x_TK, self.codes.stored, state=self.state)
        return _onto(y_TN, x_TK, bias_N, accumulate, scale)

    def tensor(self) -> None:
        return None


def _onto(
    product: torch.Tensor, x: torch.Tensor, bias_N: torch.Tensor | None, accumulate: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """accumulate + scale product + bias in x's dtype, as FrozenWeight.matmul says."""
    if accumulate is not None:
        y = accumulate.add_(product, alpha=scale)
    else:
        y = product.to(x.dtype) if scale == 1.0 else product.to(x.dtype) * scale
    if bias_N is not None:
        y = y + bias_N
    return y.to(x.dtype)


@contextmanager
def left_as_they_are(model: nn.Module) -> Iterator[None]:
    """During a run of the model in evaluation: bitsandbytes' layers keep their layout, which they would change for good on some
    CPUs, and the dtype that they compute in, which the first input decides; GPTQModel's keep their scales, which AWQ's layers
    would round to the input's dtype."""
    names = ("support_avx512bf16_for_cpu", "compute_dtype", "compute_type_is_set")
    layers = [module for module in model.modules() if hasattr(module, "compute_type_is_set")]
    before = [{name: getattr(layer, name) for name in names if hasattr(layer, name)} for layer in layers]
    buffers = [
        (module, dict(module._buffers))
        for module in model.modules()
        if type(module).__module__.startswith("gptqmodel.")
    ]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            layer.__dict__.update(kept)
        for module, own in buffers:
            module._buffers.update(own)
