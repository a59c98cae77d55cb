"""Reading of what a PEFT layer computes now: which one adapter is active, and whether a module may be read in the place of
calling it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from packlora.adapters.kinds import is_linear, lies_transposed, sizes
from packlora.live.wrapped import UNITS, weight_of, why_called, why_no_weight, why_not_whole

DTYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
DISABLED, MERGED = "its adapters are disabled", "its adapters are merged into the base weights"
NOT_ACTIVE = "no active adapter targets it"


def active_adapter(layer: Any, own: Container[str]) -> tuple[str, str]:
    """The name of the one active adapter, or "" and the reason why PEFT must compute the layer.

    own: adapters that the layer has.
    """
    if layer._disable_adapters:
        return "", DISABLED
    if layer.merged_adapters:
        return "", MERGED
    active = layer._active_adapter
    if not isinstance(active, str) and len(active) == 1:
        active = active[0]
    if isinstance(active, str):
        return (active, "") if active in own else ("", NOT_ACTIVE)
    names = [name for name in active if name in own]
    if len(names) == 1:
        return names[0], ""
    return "", f"several adapters are active: {', '.join(names)}" if names else NOT_ACTIVE


def why_no_adapter(layer: Any, name: str, variant: type) -> str | None:
    """Why the adapter is another function than LoRA or DoRA, or has a magnitude that is not read. variant: PEFT's of DoRA on
    such a layer."""
    if name in layer.lora_variant:
        kind = type(layer.lora_variant[name])
        if kind is not variant:
            return f"its adapter is a variant of LoRA: {kind.__name__.removesuffix('LinearVariant')}"
        holder = layer._modules["lora_magnitude_vector"]._modules[name]
        if observed(holder):
            return why_called("lora_magnitude_vector", holder)
        if type(weight_of(holder)) not in (nn.Parameter, torch.Tensor):
            return why_no_weight("lora_magnitude_vector", holder)
    return "lora_bias is set" if layer.lora_bias.get(name) else why_no_scaling(layer.scaling[name])


def why_no_scaling(scaling: object) -> str | None:
    """Why the scaling of an adapter is not read."""
    return None if isinstance(scaling, float | int) else f"its scaling is a {type(scaling).__name__}, not a number"


def is_plain_dropout(drop: Any) -> bool:
    """Whether a module drops as torch does, and nobody looks at it."""
    return type(drop) in (nn.Identity, nn.Dropout) and not observed(drop)


def why_not_dropped(drop: Any) -> str:
    """Why a lora_dropout that is none of these must be called."""
    return f"its lora_dropout is a {type(drop).__name__} of its own or has hooks; known are Dropout and Identity"


class ParameterAdapter(NamedTuple):
    """The one active adapter of a ParamWrapper."""

    name: str
    A: torch.Tensor
    B: torch.Tensor
    scaling: float


def parameter_adapter(layer: Any, unfit: str | None) -> ParameterAdapter | str:
    """Adapter of a ParamWrapper, or the reason why PEFT must compute it. unfit: why the module that has the parameter cannot be
    read."""
    modules: dict[str, Any] = layer._modules
    own_A = modules["lora_A"]._modules
    name, reason = active_adapter(layer, own_A)
    if reason := reason or unfit or "":
        return reason
    A, B = own_A[name], modules["lora_B"]._modules[name]
    if unread := why_not_read([("lora_A", A), ("lora_B", B)]):
        return unread
    scaling = layer.scaling[name]
    return why_no_scaling(scaling) or ParameterAdapter(name, weight_of(A), weight_of(B), float(scaling))


def observed(module: nn.Module) -> bool:
    """Somebody looks at, or changes, what goes through this module: then it must be called, not only read. Hooks are read as
    attributes: then a compiler does not guard those of modules that have none, as it does not for PEFT."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in module.__dict__
    )  # fmt: skip


def plain_weight(module: Any) -> nn.Parameter | None:
    """The weight of a torch.nn.Linear with whole parameters that nobody looks at, against which `why_not_read` has nothing to
    say; None of other modules."""
    if (
        type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        or module._backward_pre_hooks or "forward" in module.__dict__
    ):  # fmt: skip
        return None
    weight = module._parameters.get("weight")
    if (
        type(weight) is nn.Parameter and weight.shape == (module.out_features, module.in_features)
        and weight.dtype in DTYPES
    ):  # fmt: skip
        return weight
    return None


def why_not_read(modules: Sequence[tuple[str, Any]]) -> str | None:
    """Why the weight of one of these linear layers, by its role, cannot be read in the place of calling it."""
    for role, module in modules:
        if plain_weight(module) is not None:
            continue
        if isinstance(module, UNITS):
            return why_no_weight(role, module)
        if not is_linear(module):
            return f"its {role} is a {type(module).__module__}.{type(module).__qualname__}, not torch.nn.Linear"
        if observed(module):
            return why_called(role, module)
        weight = weight_of(module)
        if type(weight) not in (nn.Parameter, torch.Tensor):
            return why_no_weight(role, module)
        if weight.shape != (sizes(module)[::-1] if lies_transposed(module) else sizes(module)):
            return why_not_whole(role, weight)
        if weight.dtype not in DTYPES:
            return f"the weight of its {role} is {weight.dtype}"
    return None
