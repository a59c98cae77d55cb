"""Models under parallel wrappers: what of them accelerate() runs and reads, and how it leaves them.

DDP holds a whole model. FSDP1 holds a model whose weights are parts of flat tensors, FSDP2 gives modules other classes and
parameters; both put whole weights in place while a layer runs. Under transformers' tensor parallelism a linear layer has a part
of its weight and another forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

UNITS: Any = (FullyShardedDataParallel, FSDPModule)
"""Classes of modules that FSDP gathers as one."""


class NotWhole(str):
    """A reason for PEFT's forward that may be gone while the layer runs: an operand is not whole at this moment."""

    __slots__ = ()


def inner_model(model: nn.Module) -> nn.Module:
    """The model that DDP, nn.DataParallel or DeepSpeed's engine holds: it has the config, and can be run without them."""
    while isinstance(model, DistributedDataParallel | nn.DataParallel) or _is_engine(model):
        model = model.module  # type: ignore[assignment]
    return model


def _is_engine(model: nn.Module) -> bool:
    return type(model).__module__.startswith("deepspeed.") and isinstance(getattr(model, "module", None), nn.Module)


def kind_of(module: nn.Module) -> type:
    """Its class, without the one that FSDP2 has put in front."""
    kind = type(module)
    return kind.__mro__[kind._orig_cls_mro_index] if issubclass(kind, FSDPModule) else kind


# --- FSDP --------------------------------------------------------------------------------------------------------------


def why_not_run(model: nn.Module) -> str | None:
    """Why a forward of this module would not be one of the training: it is inside of what FSDP runs, and each of its units
    would take itself for the root; or its parameters are ZeRO-3's, and the engine that gathers them is not there yet."""
    if not model._forward_pre_hooks and any(_is_partitioned(p) and not p.numel() for p in model.parameters()):
        return (
            "the model's parameters are partitioned by DeepSpeed's ZeRO-3, and its engine does not hold the model yet"
        )
    units = [module for module in model.modules() if isinstance(module, UNITS)]
    if units and not set(map(id, units)) <= set(map(id, units[0].modules())):
        return "parts of the model are FSDP units and no unit has them all; call it on what FSDP returned, or before"
    return None


@contextmanager
def left_sharded(model: nn.Module) -> Iterator[None]:
    """Shard again afterwards what FSDP2 has sharded: a forward without a backward leaves the root's weights whole, and an
    optimizer that is made then would hold tensors that nobody reads."""
    sharded = [
        module for module in model.modules()
        if isinstance(module, FSDPModule) and any(isinstance(p, DTensor) for p in module.parameters())
    ]  # fmt: skip
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def weight_of(module: nn.Module) -> Any:
    """Its weight, a Parameter or what FSDP1 has put in its place, or None."""
    weight = module._parameters.get("weight")
    return module.__dict__.get("weight") if weight is None else weight


def is_frozen(weight: torch.Tensor) -> bool:
    """Whether this weight is not trained. Under FSDP1 with use_orig_params a layer that runs has a view of a flat parameter: it
    wants gradients where any parameter in it does, and FSDP1 throws those of frozen ones away."""
    if not weight.requires_grad:
        return True
    flat = weight._base
    if not isinstance(flat, FlatParameter):
        return False
    views, parameters = getattr(flat, "_tensors", None) or (), getattr(flat, "_params", None) or ()
    return any(view is weight and not own.requires_grad for view, own in zip(views, parameters, strict=False))


# --- why a layer is PEFT's ---------------------------------------------------------------------------------------------


def why_called(role: str, module: nn.Module) -> str:
    """Reason to call a module with hooks or another forward."""
    plan = module.__dict__.get("_hf_tp_plan")
    if plan is not None and "forward" in module.__dict__:
        return f"its {role} is tensor parallel ({plan}, by transformers {transformers.__version__})"
    if any(map(_is_partitioned, module._parameters.values())):
        return _partitioned(role)
    return f"its {role} has hooks or a replaced forward"


def why_no_weight(role: str, module: nn.Module) -> NotWhole:
    """Reason against a module whose weight is no Parameter of its own."""
    if isinstance(module, UNITS):
        return NotWhole(f"its {role} is a unit of FSDP by itself; units of whole layers or blocks are computed here")
    return NotWhole(f"the weight of its {role} is a {type(weight_of(module)).__name__}, not a Parameter")


def why_not_whole(role: str, weight: object) -> NotWhole:
    """Reason against a weight that has another shape than its layer, or nothing in it."""
    return NotWhole(_partitioned(role) if _is_partitioned(weight) else f"the weight of its {role} is not whole here")


def _is_partitioned(weight: object) -> bool:
    """Whether ZeRO-3 has the weight: it is empty where no module that reads it runs."""
    return hasattr(weight, "ds_id")


def _partitioned(role: str) -> str:
    return f"the weight of its {role} is partitioned by DeepSpeed's ZeRO-3; ZeRO-2 and FSDP2 are computed here"


# --- transformers' tensor parallelism ----------------------------------------------------------------------------------


def mend_widths(layers: Iterable[Any]) -> list[str]:
    """Give adapters over tensor-parallel layers the widths of their weights; notes for the report.

    PEFT 0.21 makes the `lora_A` over a row-parallel layer with one shard's in_features, the `lora_B` over a column-parallel one
    with one shard's out_features, and gives them DTensors of the whole width. transformers from 5.21 takes the features for
    the width of the whole, so training fails at rows.
    """
    parallel = mended = 0
    for layer in layers:
        base = layer.get_base_layer()
        if base.__dict__.get("_hf_tp_plan") is None:
            continue
        parallel += 1
        for name in ("lora_A", "lora_B"):
            for module in getattr(layer, name, {}).values():
                weight = module._parameters.get("weight")
                if isinstance(weight, DTensor) and (module.out_features, module.in_features) != tuple(weight.shape):
                    module.out_features, module.in_features = weight.shape
                    mended += 1
    if not parallel:
        return []
    versions = f"PEFT {peft.__version__} on transformers {transformers.__version__}"
    mending = f"; {versions} gave {mended} of their adapters' weights one shard's width: put right" if mended else ""
    return [f"tensor parallel: {parallel} layers are PEFT's, which makes no DoRA for them{mending}"]
