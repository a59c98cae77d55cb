"""PEFT layers that accelerate() serves: what stands in the place of each one's forward, by the kind of its base layer
(adapters/kinds/)."""

from __future__ import annotations

from collections.abc import Mapping

from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from packlora.adapters.kinds import Kind, kind_of_parameter
from packlora.adapters.norms import RowNorms
from packlora.live.foreign import weight_reader
from packlora.live.forward import OwnForward
from packlora.live.layers import LayerForward
from packlora.live.wrapped import kind_of
from packlora.plans.ask import Ask

KINDS: dict[type, Kind] = {
    PeftLinear: "linear", Embedding: "embedding", Conv1d: "convolution", Conv2d: "convolution", Conv3d: "convolution",
    TrainableTokensLayer: "tokens",
}  # fmt: skip
"""Kinds by PEFT's layer; that of quantised layers and of parameters is looked up."""
NOT_LORA = "neither LoRA on a kind of layer that is known here nor rows of tokens"


def served_kind(layer: BaseTunerLayer) -> Kind | None:
    """The kind of base layer that a PEFT layer is over, where its method is known here."""
    kind = kind_of(layer)
    if kind is ParamWrapper:
        return kind_of_parameter(layer.get_base_layer(), layer.parameter_name)
    return KINDS.get(kind) or (None if weight_reader(kind) is None else "linear")


def forward_for(
    layer: BaseTunerLayer, path: str, norms: RowNorms, asks: Mapping[str, Ask], others: Mapping[str, OwnForward]
) -> OwnForward | str:
    """Replacement of a layer's forward, or why it stays.

    Args:
        asks: how linear layers are to be computed, by path.
        others: what goes in the place of the layers before it.
    """
    if "forward" in layer.__dict__:
        return "its forward was replaced by other code"
    match served_kind(layer):
        case "linear":
            return LayerForward(layer, path, norms, asks[path])
        case "embedding":
            from packlora.live.dora import EmbeddingForward

            return EmbeddingForward(layer, path, norms)
        case "convolution":
            from packlora.live.dora import ConvolutionForward

            return ConvolutionForward(layer, path, norms)
        case "experts":
            from packlora.live.experts import ExpertsForward

            around, _, leaf = path.rpartition(".")
            outer = others.get(around) if leaf == "base_layer" else None
            return ExpertsForward(layer, path, norms, outer if isinstance(outer, ExpertsForward) else None)
        case "tokens":
            from packlora.live.tokens import TokensForward

            return TokensForward(layer, path, norms)
        case "router":
            from packlora.live.routers import router_forward

            return router_forward(layer, path, norms)
        case _:
            return NOT_LORA
