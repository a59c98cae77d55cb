"""A loaded transformers model that is trained in place: what it must be, and how it becomes again what it was.

Training changes modules, configurations and flags, never weights. All of these are Python attributes, so they are noted before
and put back afterwards, whatever happened in between. Weights are neither copied nor noted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from packlora.errors import InputError
from packlora.form import is_stored
from packlora.ops.lora_linear.frozen import FrozenLinear

DTYPES = ("float32", "bfloat16", "float16", "float64")
REMEDY = "give the name or the folder of the model, or a model that from_pretrained has loaded"


def check_loaded(model: Any) -> None:
    """Raises InputError where an object is no loaded model that can be trained in place."""
    if not isinstance(model, PreTrainedModel):
        inner = " (unwrap it: model.unload())" if hasattr(model, "peft_config") else ""
        raise InputError(f"model is a {type(model).__name__}, which is no transformers model{inner}; {REMEDY}")
    found = next((name for name, one in model.named_modules() if isinstance(one, BaseTunerLayer | FrozenLinear)), None)
    if found is not None:
        raise InputError(f"model has an adapter or another trainer's layer already ({found}); {REMEDY}")
    if is_stored(model.config) or getattr(model, "quantization_method", None) is not None:
        raise InputError(
            "model is quantised, and a loaded model is trained in its floats in this version; give the model's name, and "
            "quantization='nf4' (or as its folder is saved)"
        )
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise InputError(
            f"model has weights on {', '.join(devices) or 'no device'}; it must be on one device as a whole"
        )
    if (dtype := str(model.dtype).removeprefix("torch.")) not in DTYPES:
        raise InputError(f"model is of dtype {dtype}; it is trained in one of {', '.join(DTYPES)}")


@contextmanager
def borrowed(model: PreTrainedModel | None) -> Iterator[None]:
    """Note a model's modules, hooks, attributes, configurations and flags, and put them back when the block ends."""
    if model is None:
        yield
        return
    owners: list[Any] = [*model.modules(), *_configs(model)]
    noted = [(one, type(one), {key: _shallow(value) for key, value in vars(one).items()}) for one in owners]
    flags = [(one, one.requires_grad, one.grad) for one in model.parameters()]
    try:
        yield
    finally:
        for owner, kind, attributes in noted:
            if type(owner) is not kind:
                owner.__class__ = kind
            vars(owner).clear()
            vars(owner).update(attributes)
        for parameter, requires_grad, grad in flags:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configurations that modules hold, and those in them, each once."""
    found = dict[int, Any]()
    pending = [held for one in model.modules() if (held := vars(one).get("config")) is not None]
    while pending:
        config = pending.pop()
        if id(config) not in found and hasattr(config, "to_dict"):
            found[id(config)] = config
            pending += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return [*found.values()]


def _shallow(value: Any) -> Any:
    """A container that stays as it is while the noted one is changed; another value itself."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same weights: what is put onto it, or set on its parameters, does not change the first one."""
    known = dict[int, Any]()
    for one in [*model.parameters(), *model.buffers()]:
        plain = type(one) is torch.nn.Parameter
        known[id(one)] = torch.nn.Parameter(one.detach(), one.requires_grad) if plain else one
    second: PreTrainedModel = copy.deepcopy(model, known)
    return second
