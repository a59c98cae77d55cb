"""DoRA on PEFT's other layers at run time: embeddings and convolutions, without PEFT's dense product.

PEFT makes W + s B A, of the size of the weight (an embedding's is vocabulary x width), and its norm in every forward. Here the
norm comes from adapters/norms.py, which keeps it until W, A or B change, and the forward is a few plain torch operations
(adapters/dora.py), with PEFT's semantics of dropout and PEFT's own mask. DoRA on linear layers is layers.py's; plain LoRA on
the layers here stays PEFT's own, which makes nothing of the weight's size for it.

Shapes: N outputs (channels, or the width of an embedding), K inputs (the vocabulary of an embedding; channels times kernel
of a convolution), r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d
from peft.tuners.lora.variants import (
    DoraConv1dVariant,
    DoraConv2dVariant,
    DoraConv3dVariant,
    DoraEmbeddingVariant,
)
from torch import nn

from packlora.adapters import convolution
from packlora.adapters.dora import compose, factor
from packlora.adapters.norms import NormHandle, RowNorms
from packlora.live.adapter import DTYPES, active_adapter, is_plain_dropout, observed, why_no_adapter, why_not_dropped
from packlora.live.forward import OwnForward
from packlora.live.wrapped import NotWhole, kind_of, weight_of, why_called, why_not_whole
from packlora.ops.row_norm.row_norm import traced_row_norm

PLAN = "kept-norm"
"""How the report names what this file does."""
CONVOLUTIONS: dict[type, tuple[type, type]] = {
    Conv1d: (nn.Conv1d, DoraConv1dVariant), Conv2d: (nn.Conv2d, DoraConv2dVariant), Conv3d: (nn.Conv3d, DoraConv3dVariant),
}  # fmt: skip
"""Base layer and PEFT's variant, by PEFT's layer."""


@dataclass(frozen=True, slots=True)
class DoraCall:
    """The one active DoRA adapter of a layer. A and B as the layer multiplies them, base the module that they are for."""

    name: str
    base: Any
    A: torch.Tensor
    B: torch.Tensor
    magnitude: torch.Tensor
    scaling: float
    drop: nn.Module | None
    """The dropout module, where it is at work now."""


class DoraForward(OwnForward):
    """Stand-in for `forward` of one PEFT layer: computed here where its one active adapter is DoRA, else by PEFT."""

    variant: type
    prefix = "lora_"

    def __init__(self, layer: Any, path: str, norms: RowNorms) -> None:
        super().__init__(layer, path, norms)
        self._kept: dict[str, tuple[object, list[NormHandle]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    # --- what the layer computes now -----------------------------------------------------------------------------------

    def ready(self) -> DoraCall | str:
        """Call that the layer computes for an x without further arguments, or the reason why PEFT must compute it."""
        layer = self.layer
        own_A = layer._modules[self.prefix + "A"]
        name, reason = active_adapter(layer, own_A)
        if reason:
            return reason
        if name not in layer.lora_variant:
            return self.plain
        if reason := why_no_adapter(layer, name, self.variant) or "":
            return reason
        A, B = own_A[name], layer._modules[self.prefix + "B"][name]
        holder = layer._modules["lora_magnitude_vector"][name]
        base = layer._modules["base_layer"]
        if (unfit := self.unfit(base, A, B)) is not None:
            return unfit
        drop: Any = layer._modules["lora_dropout"][name]
        if not is_plain_dropout(drop):
            return why_not_dropped(drop)
        dropping = self.drops and isinstance(drop, nn.Dropout) and layer.training and drop.training and drop.p > 0
        call = DoraCall(
            name, base, _factor(A), _factor(B), weight_of(holder), float(layer.scaling[name]),
            drop if dropping else None,
        )  # fmt: skip
        for role, tensor in (("base layer", base.weight), ("A", call.A), ("B", call.B), ("magnitude", call.magnitude)):
            if type(tensor) not in (nn.Parameter, torch.Tensor):
                return NotWhole(f"the weight of its {role} is a {type(tensor).__name__}, not a Parameter")
            if not tensor.numel():
                return why_not_whole(role, tensor)
            if tensor.dtype not in DTYPES:
                return f"the weight of its {role} is {tensor.dtype}"
            if tensor.device != base.weight.device:
                return f"the weight of its {role} is on {tensor.device}, its base weight on {base.weight.device}"
        return call

    def planned(self, found: Mapping[str, object]) -> tuple[str, str]:
        return PLAN, ""

    drops = True
    """Whether lora_dropout has a meaning for the layer."""

    plain: str
    """Why a LoRA without DoRA stays PEFT's."""

    def unfit(self, base: nn.Module, A: Any, B: Any) -> str | None:
        """Why these operands cannot be computed here."""
        raise NotImplementedError

    # --- computing it --------------------------------------------------------------------------------------------------

    def base_product(self, x: torch.Tensor, call: DoraCall, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def low_rank(self, x: torch.Tensor, call: DoraCall, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def problems(self, call: DoraCall) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """W [N, K], A [r, K] and B [N, r] whose rows' norms are wanted, as views; of each group, where there are groups."""
        raise NotImplementedError

    def column(self, vector_N: torch.Tensor) -> torch.Tensor:
        """[N] in the shape that multiplies an output."""
        return vector_N

    def compute(self, x: torch.Tensor, call: DoraCall) -> torch.Tensor:
        bias = self.bias(call)
        if call.drop is None:
            base = share = self.base_product(x, call, None)
            xd, offset = x, None if bias is None else self.column(bias)
        else:
            base = offset = self.base_product(x, call, bias)
            xd = call.drop(x)
            share = self.base_product(xd, call, None)
        g = self.column(factor(call.magnitude, self.norm(call)))
        low = self.low_rank(xd, call, base.dtype)
        return compose(share, low, offset, g, call.scaling, call.drop is not None)

    def bias(self, call: DoraCall) -> torch.Tensor | None:
        bias: torch.Tensor | None = call.base._parameters.get("bias")
        return bias

    def norm(self, call: DoraCall) -> torch.Tensor:
        """Row norms [N] of W + s B A, for their present values."""
        operands = (call.base.weight, call.A, call.B)
        # what is kept in Python would be frozen into a CUDA graph; other memory formats are flattened by a copy, which shows no
        # handle what is written to them
        if torch.compiler.is_compiling() or not all(t.is_contiguous() for t in operands):
            return convolution.whole([traced_row_norm(*problem, call.scaling) for problem in self.problems(call)])
        key = (call.scaling, *((t.data_ptr(), t.dtype, t.device, t.shape) for t in operands))
        kept = self._kept.get(call.name)
        if kept is None or kept[0] != key:  # new tensors, not new values in them: those are seen by the handles
            there = self.layer.lora_magnitude_vector.keys()
            kept = key, [NormHandle(self.norms, *problem, call.scaling) for problem in self.problems(call)]
            self._kept = {name: own for name, own in self._kept.items() if name in there} | {call.name: kept}
        return convolution.whole([handle.get() for handle in kept[1]])


def _factor(operand: Any) -> Any:
    """The weight of a module that holds one, or the parameter itself, as in embeddings."""
    return weight_of(operand) if isinstance(operand, nn.Module) else operand


class EmbeddingForward(DoraForward):
    """lora.Embedding: the norm is that of the weight's columns, and nothing is dropped, as in PEFT."""

    variant = DoraEmbeddingVariant
    plain = "of a LoRA on an embedding PEFT looks up the rows of the tokens alone"
    prefix = "lora_embedding_"
    drops = False

    def unfit(self, base: nn.Module, A: Any, B: Any) -> str | None:
        if not isinstance(base, nn.Embedding):
            return f"its base layer is a {type(base).__module__}.{type(base).__qualname__}, not torch.nn.Embedding"
        if base.max_norm is not None:
            return "max_norm is set on its base layer"
        if self.layer.tp_layer is not None:
            return "its base layer is tensor parallel"
        return None if "weight" in base._parameters else "the weight of its base layer is computed"

    def bias(self, call: DoraCall) -> None:
        return None

    def base_product(self, x: torch.Tensor, call: DoraCall, bias: torch.Tensor | None) -> torch.Tensor:
        rows: torch.Tensor = call.base(x)  # called, not read: some embeddings scale what they look up
        return rows

    def low_rank(self, x: torch.Tensor, call: DoraCall, dtype: torch.dtype) -> torch.Tensor:
        low: torch.Tensor = self.layer._embed(x, call.A.T) @ call.B.T
        scale = self.layer._get_embed_scale()
        return low if scale is None else low * scale.to(low.dtype)

    def problems(self, call: DoraCall) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [(call.base.weight.detach().T, call.A.detach(), call.B.detach())]


class ConvolutionForward(DoraForward):
    """lora.Conv1d, 2d and 3d; adapters/convolution.py says what they compute."""

    plain = "of a LoRA on a convolution PEFT makes nothing of the weight's size"

    def __init__(self, layer: Any, path: str, norms: RowNorms) -> None:
        super().__init__(layer, path, norms)
        self.kind, self.variant = CONVOLUTIONS[kind_of(layer)]

    def unfit(self, base: Any, A: Any, B: Any) -> str | None:
        reason = _plain_modules(("base layer", base, self.kind), ("lora_A", A, self.kind), ("lora_B", B, self.kind))
        if reason is None and base.padding_mode != "zeros":
            return f"its base layer pads with {base.padding_mode}, its lora_A with zeros"
        if reason is None and base.dilation != A.dilation:
            return f"its base layer has dilation {base.dilation}, its lora_A {A.dilation}"
        return reason

    def base_product(self, x: torch.Tensor, call: DoraCall, bias: torch.Tensor | None) -> torch.Tensor:
        return convolution.convolve(x, call.base, call.base.weight, bias)

    def low_rank(self, x: torch.Tensor, call: DoraCall, dtype: torch.dtype) -> torch.Tensor:
        A, B = self.layer.lora_A[call.name], self.layer.lora_B[call.name]
        z = convolution.convolve(x.to(dtype), A, call.A.to(dtype))
        return convolution.convolve(z, B, call.B.to(dtype))

    def column(self, vector_N: torch.Tensor) -> torch.Tensor:
        return convolution.column(vector_N, self.layer.get_base_layer())

    def problems(self, call: DoraCall) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return convolution.problems(call.base, call.A, call.B)


def _plain_modules(*wanted: tuple[str, Any, type]) -> str | None:
    """Why a module that is to be read instead of called cannot be."""
    for role, module, kind in wanted:
        found = type(module)
        if found is not kind:
            return f"its {role} is a {found.__module__}.{found.__qualname__}, not {kind.__name__}"
        if observed(module):
            return why_called(role, module)
        if "weight" not in module._parameters:
            return f"the weight of its {role} is computed"
    return None
