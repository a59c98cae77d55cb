"""Groups of layers in FP8 and what they must give: the specification of the operator, with base products in float64 of numbers
that are rounded here to e4m3 by its definition. Used on the CPU and on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from group_cases import GroupCase, run_reference

from packlora.fp8.rows import coded
from packlora.fp8.weight import Fp8Weight, TwiceCoded
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.types import Layer


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest numbers of e4m3, of ties the even one: 3 digits after the first, down to 2^-6 and in even steps below."""
    x = x.double()
    exponent = torch.frexp(x).exponent.sub(1).clamp_min(-6).double()
    step = torch.exp2(exponent - 3)
    return torch.round(x / step) * step


def rounded_rows(x_TK: torch.Tensor) -> torch.Tensor:
    """Rows as their codes stand for them, in float64: scales in float32, by which the largest number gets 448."""
    wide = x_TK.float()
    most = wide.abs().amax(1, keepdim=True).clamp_min(1e-30)
    largest = torch.full_like(most, 448.0)
    return e4m3(wide * (largest / most)) * (most / largest).double()


class _Product(torch.autograd.Function):
    """x W' of rounded rows; d times W's scales is rounded before it is multiplied by the codes of W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes_NK: torch.Tensor, scales_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes_NK, scales_N)
        return rounded_rows(x) @ (codes_NK * scales_N[:, None]).T

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes_NK, scales_N = ctx.saved_tensors
        return rounded_rows(d.float() * scales_N.float()) @ codes_NK, None, None


class Spelt(torch.Tensor):
    """A weight [N, K] that reference.py multiplies by: x @ weight.T is _Product."""

    codes_NK: torch.Tensor
    scales_N: torch.Tensor

    @staticmethod
    def of(weight_NK: torch.Tensor) -> Spelt:
        exponents = torch.ceil(torch.log2(weight_NK.double().abs().amax(1) / 448.0))
        scales_N = torch.exp2(exponents)
        codes_NK = e4m3(weight_NK.double() / scales_N[:, None])
        own = (codes_NK * scales_N[:, None]).as_subclass(Spelt)
        own.codes_NK, own.scales_N = codes_NK, scales_N
        return own

    @property
    def T(self) -> Spelt:  # type: ignore[override]
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul):
            return _Product.apply(args[0], args[1].codes_NK, args[1].scales_N)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def in_fp8(case: GroupCase, dtype: torch.dtype) -> GroupCase:
    """The case with weights in codes, for products in a dtype."""
    return replace(case, layers=tuple(_coded(layer, dtype) for layer in case.layers))


def _coded(layer: Layer, dtype: torch.dtype) -> Layer:
    weight = layer.frozen.rows(0, layer.frozen.shape[0])
    return replace(layer, frozen=Fp8Weight(TwiceCoded.of(coded(weight)), dtype))


def specified(case: GroupCase) -> dict[str, torch.Tensor]:
    """What a case of dense weights gives in FP8, in float64."""
    own = tuple(replace(layer, frozen=Dense(Spelt.of(layer.frozen.dense()))) for layer in case.layers)
    return run_reference(replace(case, layers=own), torch.float64)


class SpeltLinear(torch.nn.Linear):
    """A linear layer of float64 whose products are in FP8 as they are specified, for a model of transformers or PEFT. Its
    weight is what the codes stand for."""

    @staticmethod
    def of(layer: torch.nn.Linear) -> SpeltLinear:
        own = SpeltLinear(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)
        own.load_state_dict(layer.state_dict())
        own.spelt = Spelt.of(layer.weight.detach())
        own.weight.data = own.spelt.as_subclass(torch.Tensor)
        return own.requires_grad_(False)

    spelt: Spelt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Product.apply(x.reshape(-1, x.shape[-1]), self.spelt.codes_NK, self.spelt.scales_N)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def spelt_model(model: Any) -> Any:
    """A model with such layers in the place of all linear ones but the output layer."""
    for path, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            model.set_submodule(path, SpeltLinear.of(layer))
    return model
