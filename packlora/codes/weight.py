"""Frozen weights that are codes, and the layer that has one. How libraries store codes, and what these stand for: library.py.

A product takes W as a tensor of the compute dtype, which is made of the codes where it is read and is gone when the call of the
operator ends (temporary.py); then it is a product like any other, and any plan computes it. What is made is what the library
makes of the same codes, bit for bit.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from packlora.ops.first_order import first_order
from packlora.ops.lora_linear.frozen import FrozenLinear, Products
from packlora.ops.lora_linear.temporary import no_longer_than_this, temporary
from packlora.ops.stamp import plain_reads, stamps


class Codes(Protocol):
    """The numbers of a quantised weight [N, K].

    stored: the tensor that most of its memory is; where another module owns it, it may be bytes that are called floats.
    settings: how they were made, as a run file says it. quantises_inputs: the library's own product rounds its inputs as well.
    """

    stored: torch.Tensor
    settings: dict[str, Any]
    quantises_inputs: bool

    @property
    def shape(self) -> tuple[int, int]: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the weight by names for files; empty for `stored`."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K], newly made."""

    def with_stored(self, stored: torch.Tensor) -> Codes:
        """Copy with `stored` on a device, to which the other tensors are moved."""


class Quantized(Products):
    """A weight [N, K] of codes as the operator takes it (frozen.FrozenWeight). dtype: of its products."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self.codes, self.dtype = codes, dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.stored.device

    @property
    def key(self) -> Hashable:
        with plain_reads():
            found = stamps([self.codes.stored])
        return None if found is None else (id(self.codes.stored), self.dtype, *found[0])

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Quantized) and type(other) is type(self) and other.dtype == self.dtype
        return self is other or (same and other.codes.stored is self.codes.stored)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return id(self.codes.stored)

    def dense(self) -> None:
        return None

    def _made(self) -> torch.Tensor:
        return temporary(self.key, self.shape[0] * self.shape[1], self._values)

    def _values(self) -> torch.Tensor:
        with torch.no_grad():
            return self.codes.values(self.dtype)


class QuantizedLinear(FrozenLinear):
    """A frozen linear layer with a quantised weight, of the compute dtype.

    weight: the codes as they are stored, of integers: floats would be cast with the model (bnb_4bit_quant_storage has bytes in
    tensors of floats). frozen: the weight as the operator takes it, always the same object on a device, made by `frozen_of`.
    """

    frozen_of: Callable[[Any, torch.dtype], Quantized] = Quantized

    def __init__(self, codes: Codes, bias_N: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(codes.shape[1], codes.shape[0], bias_N is not None, "meta")
        stored = codes.stored.detach().as_subclass(torch.Tensor)
        stored = stored.view(torch.uint8) if stored.is_floating_point() else stored
        self.weight = torch.nn.Parameter(stored, requires_grad=False)
        if bias_N is not None:
            self.bias = torch.nn.Parameter(bias_N.detach().to(dtype), requires_grad=False)
        self.frozen: Quantized = type(self).frozen_of(codes.with_stored(self.weight), dtype)

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.frozen.codes.settings, "dtype": str(self.frozen.dtype).removeprefix("torch.")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_TN: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.bias, self.frozen)
        # the view is made out here, for what a Function gives may not be one, to be added to
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)
        if self.weight is not self.frozen.codes.stored or self.weight.device != self.frozen.device:
            self.frozen = type(self).frozen_of(self.frozen.codes.with_stored(self.weight), self.frozen.dtype)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.frozen.codes.tensors().items():
            if name:
                destination[f"{prefix}weight.{name}"] = tensor

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self.frozen.codes.settings['method']}"
        )


class _Product(torch.autograd.Function):
    """x W' + bias for x [T, K]; W is made again of the codes in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias_N: torch.Tensor | None, frozen: Quantized) -> torch.Tensor:
        ctx.frozen = frozen
        with no_longer_than_this():
            return frozen.matmul(x, bias_N)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with no_longer_than_this():
            return ctx.frozen.matmul_t(d), None, None
