"""PEFT's ParamWrapper over a router at run time: LoRA on the weight that a router multiplies what it is given with.

PEFT makes W + s B A in W's dtype, where in 16 bits most of what an adapter learns at first is lost. Here the product of the
router with its weight is the operator's, as of a linear layer; what the router makes of it stays its own.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from packlora.adapters.expert_targets import RouterProduct, router_product
from packlora.adapters.norms import RowNorms
from packlora.live.adapter import DTYPES, LayerCall, is_replaced, parameter_adapter
from packlora.live.experts import NO_REGISTRY
from packlora.live.forward import OwnForward
from packlora.live.layers import LayerForward, compute
from packlora.live.wrapped import why_called, why_not_whole

COMPILED = "routers are not computed here in compiled graphs"


class RouterForward(LayerForward):
    """Forward of a ParamWrapper over the weight of a router."""

    has_siblings = False

    def why_peft(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return COMPILED if torch.compiler.is_compiling() else super().why_peft(x, args, kwargs)

    def compute(self, x: torch.Tensor, call: LayerCall) -> Any:
        router = self.layer.get_base_layer()

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return compute(x, (LayerCall(self, weight, call.A, call.B, call.scaling, 0.0, call.name),))[0]

        with RouterProduct(call.weight, product):
            return router(x)

    def ready(self) -> LayerCall | str:
        router = self.layer.get_base_layer()
        replaced = is_replaced(router)  # hooks are called, with what the operator computes
        adapter = parameter_adapter(self.layer, why_called("router", router) if replaced else None)
        if isinstance(adapter, str):
            return adapter
        A, B = adapter.A, adapter.B
        weight = router._parameters.get(self.layer.parameter_name)
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.shape != (B.shape[0], A.shape[1]):
            return why_not_whole("router", weight)
        if weight.dtype not in DTYPES:
            return f"the weight of its router is {weight.dtype}"
        if weight.requires_grad:
            return "the weight of its router is trained too"
        return LayerCall(self, weight, A, B, adapter.scaling, 0.0, adapter.name)


def router_forward(layer: ParamWrapper, path: str, norms: RowNorms) -> OwnForward | str:
    """Forward of a ParamWrapper over a parameter that is neither of experts nor of a linear layer, or why it stays PEFT's."""
    router, name = layer.get_base_layer(), layer.parameter_name
    weight = layer.get_param()
    if isinstance(router, nn.Embedding):
        return f"{name} is that of an embedding, whose whole W + s B A PEFT makes; target_modules adapts it without"
    if weight.ndim != 2:
        return NO_REGISTRY
    try:
        router_product(router, weight)
    except ValueError as error:
        return f"{name} is not a weight that a router multiplies with: {error}"
    return RouterForward(layer, path, norms)
