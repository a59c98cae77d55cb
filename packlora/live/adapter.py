"""Reading of what a PEFT layer computes now: which one adapter is active, and whether a module may be read in the place of
calling it.

A layer is read at every forward, so adapters may be switched, merged, disabled, loaded or deleted at any time.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

from packlora.adapters.kinds import is_linear, lies_transposed, sizes
from packlora.live.wrapped import UNITS, weight_of, why_called, why_no_weight, why_not_whole
from packlora.ops.lora_linear.frozen import Dense, FrozenWeight
from packlora.ops.stamp import plain_reads

if TYPE_CHECKING:
    from packlora.live.foreign import StoredWeight

DTYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
DISABLED, MERGED = "its adapters are disabled", "its adapters are merged into the base weights"
NOT_ACTIVE = "no active adapter targets it"
COMPILED = "quantised layers are not computed here in compiled graphs"


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
        or is_replaced(module)
    )  # fmt: skip


def is_replaced(module: nn.Module) -> bool:
    """Whether its forward is none of its class. Accelerate's hook of `device_map`, which takes x to the device where the weight
    lies, leaves the class's."""
    if "forward" not in module.__dict__:
        return False
    hook, own = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
    is_kept = isinstance(hook, AlignDevicesHook) and not hook.offload and not hook.io_same_device
    return not is_kept or getattr(own, "__func__", None) is not type(module).forward


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


# --- the call of a linear layer ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class LayerCall:
    """One active LoRA or DoRA on one layer.

    owner: the LayerForward of the layer (layers.py). bias: [N], goes into the operator. outer_bias: one that is trained, added
    by torch. stored: the weight where it is quantised; `weight` is then its codes.
    """

    owner: Any
    weight: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    p: float
    name: str
    bias: torch.Tensor | None = None
    outer_bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    stored: StoredWeight | None = None

    @property
    def together(self) -> Hashable:
        weight, stored = self.weight, self.stored
        ask = None if torch.compiler.is_compiling() else self.owner.ask  # it chooses no plan of a graph
        if stored is None:
            return (weight.shape[1], weight.dtype, None, weight.device, self.p, ask)
        with plain_reads():
            return (self.shape[1], weight.dtype, stored.together(self.A), weight.device, self.p, ask)

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.weight.shape if self.stored is None else self.stored.shape  # type: ignore[return-value]

    def dtypes(self, x: torch.Tensor) -> tuple[torch.dtype, torch.dtype, bool]:
        """Dtype in which x is multiplied, dtype of the base product, and whether autocast is on."""
        dtype, autocast = product_dtype(x)
        products = dtype if self.stored is None else self.stored.products(x, dtype)
        return (products if products.itemsize > dtype.itemsize else dtype), products, autocast

    def frozen(self, dtype: torch.dtype, products: torch.dtype) -> FrozenWeight:
        return Dense(to_dtype(self.weight, dtype)) if self.stored is None else self.stored.frozen(dtype, products)

    def operands(self) -> list[torch.Tensor]:
        operands = (self.weight, self.A, self.B, self.bias, self.outer_bias, self.magnitude)
        return [t for t in operands if t is not None]

    def is_same(self, other: LayerCall) -> bool:
        """Whether it is of the very same operands, at the same rates."""
        return self.has_operands_of(other) and self.p == other.p

    def has_operands_of(self, other: LayerCall) -> bool:
        """Whether it is of the very same operands, scaled alike."""
        return (
            self.weight is other.weight and self.A is other.A and self.B is other.B and self.bias is other.bias
            and self.outer_bias is other.outer_bias and self.magnitude is other.magnitude
            and self.stored is other.stored and self.scaling == other.scaling
        )  # fmt: skip

    def outlined(self) -> LayerCall:
        """Description of the call after its operands are gone: the weight and A are shapes without data."""
        weight, A = (t.new_empty(()).expand(t.shape) for t in (self.weight, self.A))
        return replace(self, weight=weight, A=A)

    def stamp(self) -> object:
        found: list[object] = [self.scaling, self.p]
        with plain_reads():
            for t in (self.weight, self.A, self.B, self.bias, self.outer_bias, self.magnitude):
                if t is not None:
                    found += (id(t), t.requires_grad, t.data_ptr(), None if t.is_inference() else t._version)
        return found


def why_adapter_not_read(layer: Any, modules: tuple[Any, ...], stored: StoredWeight | None) -> str | None:
    """Why the modules of an adapter, base, A, B and dropout, cannot be read in the place of calling them."""
    base, A, B, drop = modules
    adapter = [("lora_A", A), ("lora_B", B)]
    if unread := why_not_read(adapter if stored is not None else [("base layer", base), *adapter]):
        return unread
    if lies_transposed(base) != bool(getattr(layer, "fan_in_fan_out", False)):
        return "fan_in_fan_out does not say how its base weight lies"
    return None if is_plain_dropout(drop) else why_not_dropped(drop)


def product_dtype(x: torch.Tensor) -> tuple[torch.dtype, bool]:
    """Dtype in which torch.nn.functional.linear would multiply, and whether autocast is on."""
    kind = x.device.type  # asking torch which devices have autocast breaks a compiled graph
    autocast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind), True
    return x.dtype, autocast


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor.to(dtype), without the call where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
