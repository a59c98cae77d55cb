"""FP8 products of what dropout changes of DoRA's base product, beside products in the weight's own dtype.

    v = c drop(x) - x     in codes by token; with W's codes by output it is y += (g - 1) v W' and z += v W'
    u = (g - 1) d W       (g - 1) d times W's scales in codes by token, and W's codes again; dx += c drop(u) - u

See ops/lora_linear/changes.py. Products of codes are some 4e-2 off, and v is sqrt(p / (1 - p)) the size of x, so y and dx are
|g - 1| sqrt(p / (1 - p)) times 4e-2 off beside what bfloat16 rounds, and the gradient of the magnitude, which takes z,
sqrt(p / (1 - p)) times 4e-2. Where u would be less than LEFT_OUT of d W it is left out, token by token.

W's codes lie in memory twice, beside W: see weight.py. Shapes: t tokens of a segment, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from packlora.fp8.change_rows import changed_rows_of, factors_of, scaled_rows_of
from packlora.fp8.rows import CODE, Rows, coded
from packlora.fp8.weight import MULTIPLE, TwiceCoded, why_not_on
from packlora.ops.gpu import capability, has_copy_engine, why_no_kernels
from packlora.ops.lora_linear.changes import ChangeProduct, Mask
from packlora.ops.lora_linear.frozen import Dense, FrozenLinear


def why_not_beside_on(device: torch.device) -> str | None:
    """Reason why what dropout changes is not multiplied in FP8 on a device; None where it is."""
    if (reason := why_not_on(device)) is not None or device.type != "cuda":
        return reason
    if not has_copy_engine(device):
        own = ".".join(map(str, capability(device)))
        return f"DoRA's products beside others in FP8 need a GPU of compute capability 9.0 or 10.0, this one has {own}"
    return why_no_kernels(device)


class CodedBeside(Dense):
    """A weight [N, K] of floats, with codes beside it for the products of what dropout changes. codes: made when first used."""

    __slots__ = ("_codes",)

    def __init__(self, weight_NK: torch.Tensor, codes: TwiceCoded | None = None) -> None:
        super().__init__(weight_NK)
        self._codes = codes

    def make(self) -> TwiceCoded:
        """The codes, made where there are none on the weight's device. Raises ValueError where a number is not finite."""
        if self._codes is None or self._codes.stored.device != self.device:
            with torch.inference_mode(False), torch.no_grad():
                self._codes = TwiceCoded.of(coded(self.weight.detach()))
        return self._codes

    @property
    def change(self) -> ChangeProduct | None:
        N, K = self.weight.shape
        takes = N % MULTIPLE == 0 and K % MULTIPLE == 0 and (self.weight.itemsize == 2 or not self.weight.is_cuda)
        return self if takes and why_not_beside_on(self.device) is None else None

    def of_input(self, x_tK: torch.Tensor, mask: Mask) -> Rows:
        return changed_rows_of(x_tK, mask)

    def add(self, change: Rows, g_N: torch.Tensor, y_tN: torch.Tensor, z_tN: torch.Tensor | None) -> None:
        codes = self.make()
        if y_tN.is_cuda:
            from packlora.fp8.change_launches import add_change

            add_change(change, codes.stored.view(CODE), codes.scales_N, g_N, y_tN, z_tN)
            return
        u_tN = _product(change, codes.stored, codes.scales_N, y_tN.dtype)
        y_tN.copy_(y_tN + (g_N - 1) * u_tN)
        if z_tN is not None:
            z_tN.copy_(z_tN + u_tN)

    def add_t(self, d_tN: torch.Tensor, g_N: torch.Tensor, mask: Mask, dx_tK: torch.Tensor) -> None:
        codes = self.make()
        rows = scaled_rows_of(d_tN, g_N, codes.scales_N, mask)
        if dx_tK.is_cuda:
            from packlora.fp8.change_launches import add_change_t

            add_change_t(rows, codes.turned.view(CODE), mask, dx_tK)
            return
        u_tK = _product(rows, codes.turned, codes.ones_K, dx_tK.dtype)
        dx_tK.copy_(dx_tK + factors_of(mask, u_tK.shape[1]) * u_tK)


def _product(rows: Rows, stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of what the codes stand for, in float32 (float64 of float64); 0 in rows that are left out."""
    wide = torch.promote_types(dtype, torch.float32)
    y_TQ = rows.codes.to(wide) @ stored.view(CODE).to(wide).t()
    y_TQ = y_TQ.mul_(rows.scales.to(wide)[:, None]).mul_(scales.to(wide))
    return torch.where(rows.scales[:, None] > 0, y_TQ, 0)


class CodedBesideLinear(FrozenLinear):
    """A frozen linear layer of floats, whose weight the operator takes as CodedBeside."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, "meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._frozen = CodedBeside(self.weight)

    @property
    def frozen(self) -> CodedBeside:  # type: ignore[override]
        if self._frozen.weight is not self.weight:
            self._frozen = CodedBeside(self.weight)
        return self._frozen

    @property
    def settings(self) -> dict[str, Any] | None:  # type: ignore[override]
        """None: how a run computes says nothing of the base that its adapters are for."""
        return None
