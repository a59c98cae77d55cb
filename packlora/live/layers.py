"""PEFT's LoRA layers at run time: what one of them computes now, and how this package computes it in its place.

`look` reads a layer of PEFT and says what it would compute, or why that is left to PEFT. It is called at every forward, so
adapters may be switched, merged, disabled, loaded or deleted at any time. `LayerForward` is what packlora.accelerate puts in
the place of a layer's forward. Nothing of the layer itself is changed: same parameters, same keys, same files.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from torch.autograd import forward_ad

from packlora.adapters.norms import RowNorms, row_norm_op
from packlora.adapters.outputs import KeptOutputs
from packlora.adapters.siblings import SiblingGroup
from packlora.ops.gpu import HAS_TRITON, capability
from packlora.ops.lora_linear import registered as compiled
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.recipe import recipe_of
from packlora.ops.stamp import stamps
from packlora.plans.case import Case
from packlora.plans.select import Planner

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPILED_TOKENS = 4096
AUTOCAST = ("cpu", "cuda")
"""Devices whose autocast is known here; asking torch which ones have it breaks a compiled graph."""


# --- which plan --------------------------------------------------------------------------------------------------------


@lru_cache
def without_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels are not used on a device, or None where they are."""
    if device.type != "cuda":
        return f"{device.type} has no Triton kernels"
    if torch.version.hip is not None:
        return "the kernels have not been tried on AMD GPUs"
    if (found := capability(device)) < (8, 0):
        return f"the kernels need compute capability 8.0 or newer, this GPU has {found[0]}.{found[1]}"
    return None if HAS_TRITON else "the triton package is not installed"


@lru_cache(maxsize=4096)
def choose_plan(
    device: torch.device, dtype: torch.dtype, num_tokens: int, K: int, sizes: tuple[int, ...], ranks: tuple[int, ...],
    dropout: float, dora: bool,
) -> Plan:  # fmt: skip
    """The plan of a group of layers.

    Args:
        device, dtype: of x as it is multiplied.
        num_tokens, K: T and K.
        sizes, ranks: N and r of every layer of the group.
        dropout: rate; 0 in evaluation.
        dora: one of the adapters has a magnitude.
    """
    if device.type == "cuda" and without_kernels(device):
        return CHAIN
    drops, biases = dropout > 0, (False,) * len(sizes)
    case = Case.of(
        device, dtype, num_tokens, K, sizes, (ranks,), (drops,), biases, composed=dora, base_dropped=dora and drops
    )
    return _planner(device).plan_for(case)


@lru_cache
def _planner(device: torch.device) -> Planner:
    return Planner(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_plan(
    asked: str | None,
    device: torch.device,
    dtype: torch.dtype,
    K: int,
    size: int,
    rank: int,
    dropout: float,
    dora: bool,
) -> str:
    """The plan in a compiled graph, as JSON; by default that of COMPILED_TOKENS, for the graph may serve any T."""
    if asked is None:
        plan = choose_plan(device, dtype, COMPILED_TOKENS, K, (size,), (rank,), dropout, dora)
    else:
        plan = compiled.plan_of(asked)
    return json.dumps((plan if compiled.compilable(plan) else CHAIN).to_dict())


# --- what a layer computes ---------------------------------------------------------------------------------------------


class LayerCall:
    """One active LoRA or DoRA on one layer. bias [N] goes into the operator; outer_bias is one that is trained, added by
    torch."""

    __slots__ = ("A", "B", "bias", "magnitude", "name", "outer_bias", "owner", "p", "scaling", "weight")

    def __init__(
        self, owner: LayerForward, weight: torch.Tensor, bias: torch.Tensor | None, A: torch.Tensor, B: torch.Tensor,
        scaling: float, p: float, name: str, magnitude: torch.Tensor | None,
    ) -> None:  # fmt: skip
        trained = bias is not None and bias.requires_grad
        self.owner, self.weight, self.A, self.B, self.scaling, self.p = owner, weight, A, B, scaling, p
        self.name, self.magnitude = name, magnitude
        self.bias = None if trained else bias
        self.outer_bias = bias if trained else None

    @property
    def together(self) -> Hashable:
        return (self.weight.shape[1], self.weight.dtype, self.weight.device, self.p, self.owner.plan)

    def stamp(self) -> Hashable:
        operands = (self.weight, self.bias, self.outer_bias, self.A, self.B, self.magnitude)
        there = [t for t in operands if t is not None]
        return (tuple((id(t), t.requires_grad) for t in there), tuple(stamps(there) or ()), self.scaling, self.p)


def look(owner: LayerForward) -> LayerCall | str:
    """What the owner's layer computes for an x without further arguments, or the reason why PEFT must compute it."""
    layer = owner.layer
    if layer._disable_adapters:
        return DISABLED
    if layer.merged_adapters:
        return MERGED
    modules: dict[str, Any] = layer._modules
    own_A = modules["lora_A"]._modules
    active = layer._active_adapter
    names = [name for name in ([active] if isinstance(active, str) else active) if name in own_A]
    if len(names) != 1:
        return f"several adapters are active: {', '.join(names)}" if names else NOT_ACTIVE
    (name,) = names
    magnitude: Any = None
    if name in layer.lora_variant:
        variant = type(layer.lora_variant[name])
        if variant is not DoraLinearVariant:
            return f"its adapter is a variant of LoRA: {variant.__name__.removesuffix('LinearVariant')}"
        holder = modules["lora_magnitude_vector"]._modules[name]
        magnitude = holder._parameters.get("weight")
        if observed(holder) or type(magnitude) not in (nn.Parameter, torch.Tensor):
            return "its lora_magnitude_vector has hooks, a replaced forward, or a weight that is no Parameter"
    if layer.lora_bias.get(name):
        return "lora_bias is set"
    if layer.fan_in_fan_out:
        return "fan_in_fan_out is set"
    scaling = layer.scaling[name]
    if not isinstance(scaling, float | int):
        return f"its scaling is a {type(scaling).__name__}, not a number"

    base, A, B = modules["base_layer"], own_A[name], modules["lora_B"]._modules[name]
    drop = modules["lora_dropout"]._modules[name]
    for role, module in (("base layer", base), ("lora_A", A), ("lora_B", B)):
        if type(module) is not nn.Linear:
            return f"its {role} is a {type(module).__module__}.{type(module).__qualname__}, not torch.nn.Linear"
        if observed(module):
            return f"its {role} has hooks or a replaced forward"
        weight: Any = module._parameters.get("weight")
        if type(weight) not in (nn.Parameter, torch.Tensor):
            return f"the weight of its {role} is a {type(weight).__name__}, not a Parameter"
        if weight.shape != (module.out_features, module.in_features):
            return f"the weight of its {role} is not whole here: {tuple(weight.shape)}"
        if weight.dtype not in DTYPES:
            return f"the weight of its {role} is {weight.dtype}"
    if base._parameters["weight"].requires_grad:
        return "its base weight is trained too"
    if type(drop) not in (nn.Identity, nn.Dropout) or observed(drop):
        return f"its lora_dropout is a {type(drop).__name__} of its own or has hooks; known are Dropout and Identity"
    p = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
    if magnitude is not None and not layer.training:
        p = 0.0
    if p >= 1.0 or (p and drop.inplace):
        return f"its lora_dropout drops everything or works in place (p = {p})"
    return LayerCall(
        owner, base._parameters["weight"], base._parameters.get("bias"), A._parameters["weight"], B._parameters["weight"],
        float(scaling), p, name, magnitude,
    )  # fmt: skip


def observed(module: nn.Module) -> bool:
    """Somebody looks at, or changes, what goes through this module: then it must be called, not only read."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or ("forward" in module.__dict__)


# --- computing it ------------------------------------------------------------------------------------------------------


def compute(x: torch.Tensor, calls: Sequence[LayerCall]) -> list[torch.Tensor]:
    """y [..., N] of layers that all read x [..., K], in the dtype that torch.nn.functional.linear would return.

    Under dropout the layers share one mask. Its keys come from torch's generator of x's device: seeds, random states kept by
    checkpointing and CUDA graphs work as for torch's own dropout.

    Raises:
        ValueError: x does not fit a layer; the message names the layer and what it takes.
    """
    dtype, autocast = _product_dtype(x)
    for call in calls:
        _check(x, call, dtype, autocast)
    if autocast:
        with torch.autocast(x.device.type, enabled=False):
            return _compute(x, calls, dtype)
    return _compute(x, calls, dtype)


def _compute(x: torch.Tensor, calls: Sequence[LayerCall], dtype: torch.dtype) -> list[torch.Tensor]:
    first = calls[0]
    K, p = x.shape[-1], first.p
    recipe = recipe_of(x) if x.dtype == dtype else None
    x = _to(x, dtype)
    x, T = x if x.is_contiguous() else x.contiguous(), x.numel() // K
    keys_T2 = None
    if p:
        keys_T2 = torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32, device=x.device)
    weights = [_to(call.weight, dtype) for call in calls]
    biases = [None if call.bias is None else _to(call.bias, dtype) for call in calls]
    plan = first.owner.plan
    if torch.compiler.is_compiling():
        (call,) = calls
        dora = call.magnitude is not None
        plan = _constant_plan(plan, x.device, dtype, K, call.weight.shape[0], call.A.shape[0], p, dora)
        norm_N = None
        if call.magnitude is not None:
            operands = (call.weight.detach(), call.A.detach(), call.B.detach())
            norm_N = row_norm_op(*operands, call.scaling, -1)
        outputs: Sequence[torch.Tensor] = compiled.lora_linear(
            x.reshape(-1, K),
            weights[0],
            biases[0],
            call.A,
            call.B,
            call.magnitude,
            norm_N,
            call.scaling,
            p,
            keys_T2,
            0,
            plan,
        )[:1]
        outputs = [y_TN.view(*x.shape[:-1], y_TN.shape[1]) for y_TN in outputs]
    else:
        if plan is None:
            sizes = tuple(weight.shape[0] for weight in weights)
            ranks = tuple(call.A.shape[0] for call in calls)
            chosen = choose_plan(
                x.device, dtype, T, K, sizes, ranks, p, any(call.magnitude is not None for call in calls)
            )
        else:
            chosen = compiled.plan_of(plan)
        # a state would keep a copy of a weight that was cast just now
        state = None if weights[0] is not first.weight else first.owner.states.setdefault(len(calls), GroupState())
        last = () if state is None else state.layers
        layers = tuple(
            _layer(call, weight, bias, last[index] if index < len(last) else None)
            for index, (call, weight, bias) in enumerate(zip(calls, weights, biases, strict=True))
        )
        outputs = lora_group(x, layers, _whole(T, p), keys_T2, 0, chosen, state, recipe)
    return [
        y if call.outer_bias is None else y + call.outer_bias.to(dtype) for call, y in zip(calls, outputs, strict=True)
    ]


@lru_cache(maxsize=1024)
def _whole(T: int, p: float) -> tuple[Segment, ...]:
    """One adapter that has all tokens; the same object for the same tokens."""
    return (Segment(0, 0, T, p),)


def _product_dtype(x: torch.Tensor) -> tuple[torch.dtype, bool]:
    """What torch.nn.functional.linear would multiply in, and whether autocast is on."""
    kind = x.device.type
    autocast = kind in AUTOCAST and torch.is_autocast_enabled(kind)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind), True
    return x.dtype, autocast


def _layer(call: LayerCall, weight: torch.Tensor, bias: torch.Tensor | None, last: Layer | None) -> Layer:
    """As the operator takes it; `last`, the very object, where that still says the same."""
    norm = call.owner.norm(call)
    keep = call.magnitude is not None and call.owner.keeps_output(weight.device, weight.dtype)
    if last is not None and last.frozen.dense() is weight and last.bias is bias and last.keep_output == keep:
        low = last.adapters[0]
        if (
            low.A is call.A and low.B is call.B and low.scaling == call.scaling and low.magnitude is call.magnitude
            and low.norm is norm
        ):  # fmt: skip
            return last
    return Layer(Dense(weight), bias, {0: LowRank(call.A, call.B, call.scaling, call.magnitude, norm)}, keep)


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """tensor.to(dtype), without the call where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _check(x: torch.Tensor, call: LayerCall, dtype: torch.dtype, autocast: bool) -> None:
    """Raise ValueError, naming the operand and what is accepted, before anything runs on the device."""
    weight = call.weight
    K = weight.shape[1]
    if not x.ndim or x.shape[-1] != K:
        raise ValueError(f"{call.owner.path}: x must be [..., {K}], got {list(x.shape)}")
    if (weight.dtype == torch.float64) != (dtype == torch.float64) if autocast else weight.dtype != dtype:
        under = f" under autocast to {torch.get_autocast_dtype(x.device.type)}" if autocast else ""
        accepted = "any but torch.float64" if autocast and weight.dtype != torch.float64 else str(weight.dtype)
        raise ValueError(
            f"{call.owner.path}: x is {x.dtype}{under}; accepted with a base weight of {weight.dtype}: {accepted}"
        )
    for name, operand in (("base weight", weight), ("lora_A", call.A), ("lora_B", call.B), ("base bias", call.bias)):
        if operand is not None and operand.device != x.device:
            raise ValueError(
                f"{call.owner.path}: x is on {x.device}, {name} on {operand.device}; all must be on one device"
            )


# --- in the place of a layer's forward ---------------------------------------------------------------------------------

DISABLED, MERGED = "its adapters are disabled", "its adapters are merged into the base weights"
NOT_ACTIVE, EMPTY = "no active adapter targets it", "x is empty"
ASKED_FOR = (DISABLED, MERGED, NOT_ACTIVE, EMPTY)
"""Reasons for PEFT's own forward that are no loss: there is no adapter to compute."""
REPLICA = "a replica of nn.DataParallel computes with tensors of its own"


@dataclass(slots=True)
class Warned:
    """Whether the one warning of a model was given."""

    yet: bool = False


@dataclass(slots=True)
class Calls:
    """Of one layer: how often it was computed here, and how often by PEFT, by reason. Compiled graphs count nothing."""

    path: str
    promised: bool = False
    """The report calls the layer accelerated, so a call that PEFT computes is worth a warning."""
    warned: Warned = field(default_factory=Warned)
    served: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, reason: str) -> None:
        """Count a call that PEFT computes."""
        if torch.compiler.is_compiling():
            return
        self.left[reason] = self.left.get(reason, 0) + 1
        if self.promised and not self.warned.yet and reason not in ASKED_FOR:
            self.warned.yet = True
            warnings.warn(
                f"packlora: {self.path} runs PEFT's own forward now, though the report of accelerate() calls it accelerated: "
                f"{reason}. This is said once for a model; report.served() counts the calls of every layer",
                stacklevel=2,
            )


class OwnForward:
    """In the place of `forward` of one PEFT layer."""

    def __init__(self, layer: Any, path: str, norms: RowNorms) -> None:
        self.layer, self.path, self.norms = layer, path, norms
        self.on = True
        self.calls = Calls(path)

    def install(self) -> None:
        self.layer.forward = self
        self.layer._packlora = self
        self.layer._replicate_for_data_parallel = self.replica

    @staticmethod
    def remove(module: nn.Module) -> None:
        """From a module that has one. Where other code has wrapped the forward since, the wrapper keeps it: it is only off."""
        own = module.__dict__.pop("_packlora", None)
        if own is not None:
            own.on = False
            module.__dict__.pop("_replicate_for_data_parallel", None)
            if module.__dict__.get("forward") is own:
                del module.__dict__["forward"]

    def replica(self) -> nn.Module:
        """What nn.DataParallel asks for: a copy of the layer that will have tensors of its own, and so PEFT's own forward."""
        copy: nn.Module = type(self.layer)._replicate_for_data_parallel(self.layer)
        for name in ("forward", "_packlora", "_replicate_for_data_parallel"):
            copy.__dict__.pop(name, None)
        self.calls.leave(REPLICA)
        return copy

    def why_peft(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call is PEFT's, whatever the layer computes now."""
        if args or kwargs:
            return f"it is called with more than x ({', '.join(kwargs) or len(args)})"
        if type(x) not in (torch.Tensor, nn.Parameter):
            return f"x is a {type(x).__name__}, not a Tensor"
        if not x.numel():
            return EMPTY
        if torch.compiler.is_compiling():
            return None
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return "a transform of torch.func or forward differentiation is at work"
        return None


class LayerForward(OwnForward):
    """Of a lora.Linear: the operator where it can, else PEFT's own forward."""

    def __init__(self, layer: PeftLinear, path: str, plan: str | None, norms: RowNorms) -> None:
        super().__init__(layer, path, norms)
        self.plan = plan
        self.group: SiblingGroup | None = None
        self.index = 0
        self.states: dict[int, GroupState] = {}
        """Of the operator, by the number of layers that are computed together with this one first."""
        self.outputs: KeptOutputs | None = None
        """Of the model, where it was watched."""

        self._norms: dict[str, tuple[Hashable, Callable[[], torch.Tensor]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "states": {}, "_norms": {}}

    def norm(self, call: LayerCall) -> Callable[[], torch.Tensor] | None:
        """Gives the row norms of a DoRA adapter for the present values; the same object while the tensors are the same."""
        if call.magnitude is None:
            return None
        own = (call.weight, call.A, call.B)
        key = (call.scaling, *((id(t), t.data_ptr(), t.dtype, t.device) for t in own))
        kept = self._norms.get(call.name)
        if kept is None or kept[0] != key:
            gone = self._norms.keys() - self.layer.lora_magnitude_vector.keys()
            self._norms = {name: value for name, value in self._norms.items() if name not in gone}
            kept = self._norms[call.name] = (key, self.norms.add(*own, call.scaling).get)
        return kept[1]

    def keeps_output(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether nobody writes into its output, so that the backward may read it there."""
        return self.outputs is not None and self.outputs.keeps(self.path, device, dtype)

    def could_keep_output(self) -> bool | None:
        """Whether its backward, in training, could do with its output where it keeps a product now; None where it keeps
        nothing as large."""
        call = self.ready()
        if isinstance(call, str) or call.magnitude is None or not call.magnitude.requires_grad:
            return None
        drop: Any = self.layer.lora_dropout[call.name]
        if call.bias is not None or (isinstance(drop, nn.Dropout) and drop.p):
            return False
        return bool(call.magnitude.detach().all())  # where g is 0, y tells nothing of z

    def ready(self) -> LayerCall | str:
        return look(self)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.on:
            return self._peft(x, *args, **kwargs)
        call: LayerCall | str = self.why_peft(x, args, kwargs) or look(self)
        if isinstance(call, str):
            self.calls.leave(call)
            return self._peft(x, *args, **kwargs)
        if torch.compiler.is_compiling():
            return compute(x, (call,))[0]
        self.calls.served += 1
        return compute(x, (call,))[0] if self.group is None else self.group.serve(self.index, x, call)

    def _peft(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = PeftLinear.forward(self.layer, x, *args, **kwargs)
        return y
