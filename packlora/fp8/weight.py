"""Frozen weights whose products are in FP8, and the layer that has one.

    y = x W'      x in codes by token, W in codes by output
    dx = d W      d times W's scales in codes by token, and W's codes again: dx is of the very W that y was computed with

Both products sum over the last dimension of both operands, as the hardware wants it, so W's codes lie in memory twice, [N, K]
and [K, N]: two bytes a number, as W of 16 bits. Products are summed in float32 and scaled once. On a device without FP8 the
codes' values are multiplied in float32.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from packlora.codes.weight import Quantized, QuantizedLinear
from packlora.fp8.rows import CODE, Rows, rows_of
from packlora.ops.gpu import capability
from packlora.ops.lora_linear.frozen import EXACT, Factors
from packlora.ops.lora_linear.temporary import made_of

OLDEST = (8, 9)
"""Compute capability from which on GPUs multiply FP8: Ada, Hopper, Blackwell."""
MULTIPLE = 16
"""Number that the inputs and outputs of a layer must be a multiple of; other layers stay as they are."""


def why_not_on(device: torch.device) -> str | None:
    """Reason why products cannot be in FP8 on a device; None where they can. A CPU computes what they would give."""
    if device.type not in ("cpu", "cuda"):
        return f"products in FP8 are computed on CUDA and the CPU, not on {device.type}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "products in FP8 are not computed on GPUs of AMD in this version"
    if device.type == "cuda" and (own := capability(device)) < OLDEST:
        return f"products in FP8 need a GPU of compute capability 8.9 or newer, this one has {own[0]}.{own[1]}"
    return None


def takes(layer: torch.nn.Linear) -> bool:
    """Whether a linear layer's sizes are those of products in FP8."""
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


class TwiceCoded:
    """Codes of a weight W [N, K] (codes/weight.py, Codes). stored: of bytes [N, K]; turned: the same bytes, [K, N]; scales:
    float32 [N], one an output. settings: how the base model was saved, where it was saved in codes."""

    quantises_inputs = True

    def __init__(
        self, stored: torch.Tensor, turned: torch.Tensor, scales_N: torch.Tensor, settings: dict[str, Any]
    ) -> None:
        self.stored, self.turned, self.scales_N, self.settings = stored, turned, scales_N, settings
        self.ones_K = torch.ones(stored.shape[1], device=stored.device)

    @staticmethod
    def of(rows: Rows, settings: dict[str, Any] | None = None) -> TwiceCoded:
        stored = rows.codes.view(torch.uint8)
        return TwiceCoded(stored, stored.t().contiguous(), rows.scales, settings or {})

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape  # type: ignore[return-value]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"": self.stored, "scales": self.scales_N}

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return Rows(self.stored.detach().view(CODE), self.scales_N).values(dtype)

    def with_stored(self, stored: torch.Tensor) -> TwiceCoded:
        device = stored.device
        return TwiceCoded(stored, self.turned.to(device), self.scales_N.to(device), self.settings)


class Fp8Weight(Quantized):
    """A weight [N, K] in codes as the operator takes it (ops/lora_linear/frozen.py, FrozenWeight)."""

    codes: TwiceCoded

    def matmul(
        self, x_TK: torch.Tensor, bias_N: torch.Tensor | None = None, accumulate: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:  # fmt: skip
        if EXACT:
            return super().matmul(x_TK, bias_N, accumulate, scale)
        return _product(self.factors(x_TK), x_TK.dtype, bias_N, accumulate, scale)

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        if EXACT:
            return super().matmul_t(d_TN, accumulate, scale)
        return _product(self.factors_t(d_TN), d_TN.dtype, None, accumulate, scale)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        codes = self.codes
        return Rows(codes.stored[start:stop].view(CODE), codes.scales_N[start:stop]).values(self.dtype)

    def factors(self, x: torch.Tensor) -> Factors:
        rows: Rows = made_of(x, lambda: rows_of(x.reshape(-1, x.shape[-1])))
        return Factors(rows.codes, self.codes.stored.view(CODE), rows.scales, self.codes.scales_N)

    def factors_t(self, d: torch.Tensor) -> Factors:
        rows = rows_of(d.reshape(-1, d.shape[-1]), self.codes.scales_N)
        return Factors(rows.codes, self.codes.turned.view(CODE), rows.scales, self.codes.ones_K)


def _product(
    of: Factors, dtype: torch.dtype, bias_N: torch.Tensor | None, accumulate: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """accumulate + scale x V' + bias [T, Q] in a dtype, for x [T, P] and V [Q, P]; rounded once but where the device's own
    product has rounded it before."""
    y_TQ = (_scaled_mm if of.x.is_cuda else _emulated)(of, dtype, scale)
    if accumulate is not None:
        y_TQ = accumulate.add_(y_TQ) if accumulate.dtype == y_TQ.dtype else y_TQ + accumulate
    if bias_N is not None:
        y_TQ = y_TQ.add_(bias_N) if y_TQ.dtype == bias_N.dtype else y_TQ + bias_N
    return y_TQ if y_TQ.dtype == dtype else y_TQ.to(dtype)


def _emulated(of: Factors, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The product of what the codes stand for, in float32 (float64 of float64)."""
    wide = torch.promote_types(dtype, torch.float32)
    assert of.x_scales is not None and of.weight_scales is not None
    y_TQ = of.x.to(wide) @ of.weight.to(wide).t()
    return y_TQ.mul_((of.x_scales.to(wide) * scale)[:, None]).mul_(of.weight_scales.to(wide))


def _scaled_mm(of: Factors, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The product of the hardware, in bfloat16."""
    assert of.x_scales is not None and of.weight_scales is not None
    x_scales = of.x_scales if scale == 1.0 else of.x_scales * scale
    return torch._scaled_mm(
        of.x, of.weight.t(), scale_a=x_scales[:, None], scale_b=of.weight_scales[None], out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


class Fp8Linear(QuantizedLinear):
    """A frozen linear layer whose products are in FP8, of the compute dtype."""

    frozen_of: Callable[[Any, torch.dtype], Quantized] = Fp8Weight

    @property
    def settings(self) -> dict[str, Any] | None:  # type: ignore[override]
        """None where the base was saved as floats: how a run computes says nothing of the base that its adapters are for."""
        return super().settings if self.frozen.codes.settings else None
