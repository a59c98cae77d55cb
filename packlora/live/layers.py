"""One lora.Linear of PEFT at run time: how this package computes it in its place.

`LayerForward` is what packlora.accelerate puts in the place of a layer's forward: it reads what the layer computes now
(adapter.py), and hands the call to `compute`, by itself or through the group of its siblings; and `compute` calls the operator.
Nothing of the layer itself is changed: same parameters, same keys, same files.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from packlora.adapters.cache import GroupCache
from packlora.adapters.kept_outputs import is_on_liger, reader_of, why_product
from packlora.adapters.kinds import lies_transposed
from packlora.adapters.norms import NormHandle, RowNorms
from packlora.adapters.siblings import SiblingGroup
from packlora.live.adapter import (
    COMPILED,
    LayerCall,
    active_adapter,
    is_plain_dropout,
    plain_weight,
    to_dtype,
    why_adapter_not_read,
    why_no_adapter,
)
from packlora.live.foreign import StoredWeight, weight_reader
from packlora.live.forward import OwnForward
from packlora.live.wrapped import is_frozen, kind_of, weight_of
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.traced import TracedLayer, traced_group
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.recompute import recompute_of
from packlora.ops.row_norm.row_norm import traced_row_norm
from packlora.plans.ask import MEASURED, Ask
from packlora.plans.case import Case
from packlora.plans.select import PlanChooser

REPORTED_TOKENS = 4096
"""For which the report names the plan."""


# --- which plan --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def choose_plan(
    device: torch.device, dtype: torch.dtype, num_tokens: int, K: int, sizes: tuple[int, ...], ranks: tuple[int, ...],
    dropout: float, dora: bool, ask: Ask = MEASURED, changed: bool = False,
) -> tuple[Plan, Case]:  # fmt: skip
    """The plan of a group of layers, and the case that it is chosen for.

    Args:
        device, dtype: of x as it is multiplied.
        num_tokens, K: T and K.
        sizes, ranks: N and r of every layer of the group.
        dropout: rate; 0 in evaluation.
        dora: one of the adapters has a magnitude. changed: weights multiply what dropout changes (ops.lora_linear.changes).
        ask: what the user wants.
    """
    case = Case.of(
        device, dtype, num_tokens, K, sizes, [ranks], [dropout > 0], [False] * len(sizes), composed=dora,
        base_dropped=dora and dropout > 0 and not changed,
    )  # fmt: skip
    return _chooser(device, ask).plan_for(case), case


@lru_cache
def _chooser(device: torch.device, ask: Ask) -> PlanChooser:
    return PlanChooser(device, ask=ask)


# --- computing it ------------------------------------------------------------------------------------------------------


Products = tuple[torch.dtype, torch.dtype, torch.device]
"""Dtype in which x is multiplied, dtype of the base product, and the device."""


class KeptLayer(NamedTuple):
    """A layer as the operator takes it, the call that it was made of, and for what products.

    lasts: it has no copy of an operand that was cast for the one call, whose values may be others by the next.
    """

    call: LayerCall
    of: Products
    layer: Layer
    lasts: bool

    def serves(self, x: torch.Tensor, call: LayerCall, of: Products) -> bool:
        """Whether it is also that of another call of the owner, which takes x (`_check`)."""
        return (
            self.of == of and call.has_operands_of(self.call) and _fits(x, call, of[0])
            and (call.magnitude is None or call.owner.has_norm(call, self.layer))
        )  # fmt: skip


def compute(x: torch.Tensor, calls: Sequence[LayerCall]) -> list[torch.Tensor]:
    """Outputs of layers that all read x, by one call of the operator.

    Under dropout the layers share one mask. In compiled graphs dropout is torch's own. Elsewhere its keys come from torch's
    generator of x's device: seeds, random states kept by checkpointing and CUDA graphs work as for torch's dropout.

    Args:
        x: [..., K], of a dtype that the base layers would take.
        calls: of layers that agree in `together`.

    Returns:
        y [..., N] of every call, in the dtype that torch.nn.functional.linear would return; in x's over quantised layers.

    Raises:
        ValueError: x does not fit a layer; the message names the layer and what it takes.
    """
    dtype, products, autocast = calls[0].dtypes(x)
    operator: Callable[..., Sequence[torch.Tensor]]
    arguments: tuple[Any, ...]
    if torch.compiler.is_compiling():
        operator, arguments = _by_tracing, (x, calls, dtype, autocast)
    else:
        operator, arguments = lora_group, _arguments(x, calls, (dtype, products, x.device), autocast)
    if autocast:
        with torch.autocast(x.device.type, enabled=False):
            outputs = list(operator(*arguments))
    else:
        outputs = list(operator(*arguments))
    for index, call in enumerate(calls):
        if call.outer_bias is not None:
            outputs[index] = outputs[index] + call.outer_bias.to(dtype)
    return outputs if calls[0].stored is None else [to_dtype(y, x.dtype) for y in outputs]


def _arguments(x: torch.Tensor, calls: Sequence[LayerCall], of: Products, autocast: bool) -> tuple[Any, ...]:
    """The arguments of lora_group. autocast: whether it was on."""
    first, dtype = calls[0], of[0]
    layers, cache = [], first.owner.groups
    for call in calls:
        kept = call.owner.kept
        if kept is None or not kept.serves(x, call, of):
            kept = _kept(x, call, of, autocast)
            cache = cache if kept.lasts else GroupCache()
        layers.append(kept.layer)
    recompute = recompute_of(x) if x.dtype == dtype else None
    x = to_dtype(x, dtype)
    x, T = x if x.is_contiguous() else x.contiguous(), x.numel() // x.shape[-1]
    keys_T2 = _dropout_keys(T, x.device) if first.p else None
    group = cache.of(tuple(layers))
    if group.tokens != (T, first.p):
        plan, _ = _chosen(calls, x.device, dtype, T)
        group = cache.put(group, (T, first.p), (Segment(0, 0, T, first.p),), plan)
    return x, group.layers, group.segments, keys_T2, 0, group.plan, group.state, recompute


def _kept(x: torch.Tensor, call: LayerCall, of: Products, autocast: bool) -> KeptLayer:
    """The layer of a call as the operator takes it; its owner keeps it where it lasts."""
    owner, (dtype, products, _) = call.owner, of
    _check(x, call, dtype, autocast)
    weight, norm, keep = call.frozen(dtype, products), None, False
    if call.magnitude is not None:
        norm, keep = owner.norm(call, call.weight if call.stored is None else weight), owner.keeps_output()
    bias = None if call.bias is None else to_dtype(call.bias, weight.dtype)
    layer = Layer(weight, bias, {0: LowRank(call.A, call.B, call.scaling, call.magnitude, norm)}, keep)
    lasts = (call.stored is not None or call.weight.dtype == dtype) and bias is call.bias
    made = KeptLayer(call, of, layer, lasts)
    if lasts:
        owner.kept = made
    return made


def _by_tracing(x: torch.Tensor, calls: Sequence[LayerCall], dtype: torch.dtype, autocast: bool) -> list[torch.Tensor]:
    """The outputs in plain operations, for torch.compile."""
    layers = []
    for call in calls:
        _check(x, call, dtype, autocast)
        norm_N = None
        if call.magnitude is not None:
            norm_N = traced_row_norm(call.weight, call.A, call.B, call.scaling)
        bias = None if call.bias is None else to_dtype(call.bias, dtype)
        operands = (to_dtype(call.weight, dtype), bias, call.A, call.B, call.scaling, call.magnitude, norm_N)
        layers.append(TracedLayer(*operands))
    return traced_group(to_dtype(x, dtype), layers, calls[0].p)


def _chosen(calls: Sequence[LayerCall], device: torch.device, dtype: torch.dtype, T: int) -> tuple[Plan, Case]:
    sizes = tuple(call.shape[0] for call in calls)
    ranks = tuple(call.A.shape[0] for call in calls)
    dora = any(call.magnitude is not None for call in calls)
    changed = all(call.stored is not None and call.frozen(dtype, dtype).change is not None for call in calls)
    return choose_plan(device, dtype, T, calls[0].shape[1], sizes, ranks, calls[0].p, dora, calls[0].owner.ask, changed)


def _dropout_keys(T: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32, device=device)


def _fits(x: torch.Tensor, call: LayerCall, dtype: torch.dtype) -> bool:
    """Whether a layer takes x: its width, the dtype in which it is multiplied, and the one device of all operands."""
    device = x.device
    return bool(
        x.ndim and x.shape[-1] == call.shape[1]
        and (call.weight.dtype == dtype if call.stored is None else x.is_floating_point())
        and call.weight.device == device and call.A.device == device and call.B.device == device
        and (call.bias is None or call.bias.device == device)
    )  # fmt: skip


def _check(x: torch.Tensor, call: LayerCall, dtype: torch.dtype, autocast: bool) -> None:
    """Raise ValueError, naming the operand and what is accepted, before anything runs on the device."""
    if _fits(x, call, dtype):
        return
    weight, K, device = call.weight, call.shape[1], x.device
    if not x.ndim or x.shape[-1] != K:
        raise ValueError(f"{call.owner.path}: x must be [..., {K}], got {list(x.shape)}")
    if call.stored is not None:
        if not x.is_floating_point():
            raise ValueError(f"{call.owner.path}: x is {x.dtype}; accepted is a floating-point tensor")
    elif (weight.dtype == torch.float64) != (dtype == torch.float64) if autocast else weight.dtype != dtype:
        under = f" under autocast to {torch.get_autocast_dtype(x.device.type)}" if autocast else ""
        accepted = "any but torch.float64" if autocast and weight.dtype != torch.float64 else str(weight.dtype)
        raise ValueError(
            f"{call.owner.path}: x is {x.dtype}{under}; accepted with a base weight of {weight.dtype}: {accepted}"
        )
    for name, operand in (("base weight", weight), ("lora_A", call.A), ("lora_B", call.B), ("base bias", call.bias)):
        if operand is not None and operand.device != device:
            raise ValueError(
                f"{call.owner.path}: x is on {device}, {name} on {operand.device}; all must be on one device"
            )


# --- in the place of a layer's forward ---------------------------------------------------------------------------------


class LayerForward(OwnForward):
    """Forward of a lora.Linear, also over a quantised layer: the operator where it can, else PEFT's own forward.

    ask: how the user wants it to be computed.
    """

    has_siblings = True
    """It may be computed together with others."""

    def __init__(self, layer: Any, path: str, norms: RowNorms, ask: Ask = MEASURED) -> None:
        super().__init__(layer, path, norms)
        self.ask, kind = ask, kind_of(layer)
        self.read = weight_reader(kind)
        """Reads the weight of a base layer that is none of torch's."""
        self.group: SiblingGroup | None = None
        self.index = 0
        self.groups = GroupCache()
        self.kept: KeptLayer | None = None
        self.keep_output = False
        """See adapters/kept_outputs.py."""
        self._reader: nn.Module | None = None
        """Module that might be given liger's kernels later."""
        self._norms: dict[str, tuple[NormHandle, Callable[[], torch.Tensor]]] = {}
        """Norms by adapter."""
        self._stored: StoredWeight | None = None
        self._turned: tuple[object, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "groups": GroupCache(), "kept": None, "_norms": {}, "_stored": None, "_turned": None}

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take fewer calls to a kernel than other layers do."""
        if not self.on or torch.compiler.is_compiling():
            return OwnForward.__call__(self, x, *args, **kwargs)
        call: Any = self.why_peft(x, args, kwargs) or self.ready()
        if isinstance(call, str):
            self.calls.leave(call)
            return self.peft(x, *args, **kwargs)
        self.calls.served += 1
        return self.compute(x, call) if self.group is None else self.group.serve(self.index, x, call)

    def compute(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        group = self.group
        if group is None:
            return compute(x, (call,))[0]
        return group.serve_traced(self.index, x, call)  # siblings that are not compiled are served by __call__

    def stored(self, base: nn.Module) -> StoredWeight | str | None:
        """The weight of a quantised base layer, or why it cannot be read; None of another layer."""
        if self.read is None:
            return None
        found = self.read(base, self._stored)
        self._stored = None if isinstance(found, str) else found
        return found

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def is_plain(self, name: str) -> bool:
        """Whether this adapter can be read, by the kinds of its modules, over a layer that is not quantised. While a graph is
        traced it is asked of the layer as it is then, and nothing of it is guarded."""
        layer = self.layer
        parts = (layer._modules[part]._modules[name] for part in ("lora_A", "lora_B", "lora_dropout"))
        return self.read is None and not (
            why_no_adapter(layer, name, DoraLinearVariant)
            or why_adapter_not_read(layer, (layer._modules["base_layer"], *parts), None)
        )

    def from_outputs(self, base: nn.Module) -> torch.Tensor:
        """The weight [N, K] of a layer that has it transposed: the same view of it while it is the same tensor."""
        own: torch.Tensor = weight_of(base)
        assert own is not None
        if torch.compiler.is_compiling():
            return own.detach().T
        key = (id(own), own.data_ptr(), own.dtype, own.shape)
        turned = self._turned
        if turned is None or turned[0] != key:
            turned = self._turned = key, own.detach().T
        return turned[1]

    def ready(self) -> LayerCall | str:
        """Call that the layer computes for an x without further arguments, or the reason why PEFT must compute it.

        A compiler guards all that is read here, and checks it at every call of the graph: in a graph, what hangs on the kinds
        of modules alone is not read again, for their types are guarded.
        """
        layer = self.layer
        modules: dict[str, Any] = layer._modules
        own_A = modules["lora_A"]._modules
        name, reason = active_adapter(layer, own_A)
        if reason:
            return reason
        base, A, B = modules["base_layer"], own_A[name], modules["lora_B"]._modules[name]
        drop = modules["lora_dropout"]._modules[name]
        dora = name in layer.lora_variant
        stored: StoredWeight | None = None
        weight: Any
        of_A: Any
        of_B: Any
        known = torch.compiler.is_compiling() and self.is_plain(name) and B._parameters["bias"] is None
        if dora and known:
            known = type(layer.lora_variant[name]) is DoraLinearVariant
        if known and not ("forward" in base.__dict__ or "forward" in A.__dict__ or "forward" in B.__dict__):
            weight, of_A, of_B = weight_of(base), weight_of(A), weight_of(B)
        else:
            if unfit := why_no_adapter(layer, name, DoraLinearVariant):
                return unfit
            weight, of_A, of_B = plain_weight(base), plain_weight(A), plain_weight(B)
            if (
                weight is None or of_A is None or of_B is None or self.read is not None or not is_plain_dropout(drop)
                or getattr(layer, "fan_in_fan_out", False)
            ):  # fmt: skip
                found = self.stored(base)
                if isinstance(found, str):
                    return found
                stored = found
                if stored is not None and torch.compiler.is_compiling():
                    return COMPILED
                if unread := why_adapter_not_read(layer, (base, A, B, drop), stored):
                    return unread
                weight, of_A, of_B = weight_of(base) if stored is None else stored.weight, weight_of(A), weight_of(B)
        bias = base._parameters.get("bias", base.__dict__.get("bias")) if stored is None else stored.bias
        if weight.requires_grad and not is_frozen(weight):
            return "its base weight is trained too"
        if type(base) is not nn.Linear and lies_transposed(base):
            weight = self.from_outputs(base)
        p = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
        if dora and not layer.training:
            p = 0.0
        if p >= 1.0 or (p and drop.inplace):
            return f"its lora_dropout drops everything or works in place (p = {p})"
        magnitude = weight_of(modules["lora_magnitude_vector"]._modules[name]) if dora else None
        trained = bias is not None and bias.requires_grad
        return LayerCall(
            self, weight, of_A, of_B, float(layer.scaling[name]), p, name, None if trained else bias, bias if trained else None,
            magnitude, stored,
        )  # fmt: skip

    def siblings(self) -> tuple[str, ...]:
        return () if self.group is None else tuple(member.path for member in self._members())

    def _members(self) -> tuple[LayerForward, ...]:
        return (self,) if self.group is None else self.group.siblings  # type: ignore[return-value]

    def planned(self, found: Mapping[str, object]) -> tuple[str, str]:
        calls = [call for member in self._members() if isinstance(call := found[member.path], LayerCall)]
        device = calls[0].weight.device
        dtype = calls[0].weight.dtype
        if (stored := calls[0].stored) is not None:
            dtype = stored.products(calls[0].A, calls[0].A.dtype)
        plan, case = _chosen(calls, device, dtype, REPORTED_TOKENS)
        return plan.name, f"{_chooser(device, self.ask).choice(case).described(case)}, at {REPORTED_TOKENS} tokens"

    # --- DoRA ----------------------------------------------------------------------------------------------------------

    def norm(self, call: LayerCall, weight: torch.Tensor | FrozenWeight) -> Callable[[], torch.Tensor]:
        """Gives the row norms [N] of a DoRA adapter for the present values; the same object as long as the adapter is there."""
        kept = self._norms.get(call.name)
        if kept is None:
            there = self.layer.lora_magnitude_vector.keys()
            handle = NormHandle(self.norms, weight, call.A, call.B, call.scaling)
            kept = handle, handle.get
            self._norms = {name: own for name, own in self._norms.items() if name in there} | {call.name: kept}
        kept[0].point(weight, call.A, call.B, call.scaling)
        return kept[1]

    def has_norm(self, call: LayerCall, layer: Layer) -> bool:
        """Whether a layer has the norm of a call's operands, and keeps its output or not as one that is made now would."""
        known, weight = self._norms.get(call.name), call.weight if call.stored is None else layer.frozen
        return (
            known is not None and layer.adapters[0].norm is known[1]
            and known[0].is_of(weight, call.A, call.B, call.scaling)
            and layer.keep_output == self.keeps_output()
        )  # fmt: skip

    def use_output(self, model: nn.Module, overwritten: bool) -> str | None:
        """Let the backward read this layer's output in the place of the product where that is right, else say why not.

        overwritten: see adapters/kept_outputs.py. What liger is put on later is seen at every call.
        """
        call = self.ready()
        assert not isinstance(call, str) and call.magnitude is not None
        drop: Any = self.layer.lora_dropout[call.name]
        drops = isinstance(drop, nn.Dropout) and drop.p > 0
        reason = why_product(call.bias is not None, drops, [call.magnitude], overwritten)
        self.keep_output, self._reader = reason is None, reader_of(model, self.path)
        return reason

    def keeps_output(self) -> bool:
        """Whether the backward of a call that begins now may read the output."""
        return self.keep_output and (self._reader is None or not is_on_liger(self._reader))
