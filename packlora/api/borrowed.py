"""A loaded transformers model that is trained in place: what it must be, and how it becomes again what it was.

Training changes modules, configurations and flags, never weights. All of these are Python attributes, so they are noted before
and put back afterwards, whatever happened in between. Weights are neither copied nor noted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Linear
from transformers import PreTrainedModel

from packlora.adapters.kinds import is_linear
from packlora.base.classes import twin_for, without_weights
from packlora.base.shape import attention_of_text
from packlora.errors import InputError
from packlora.form import is_stored
from packlora.ops.twin import set_twin

if TYPE_CHECKING:
    from packlora.weight_form import WeightForm

DTYPES = ("float32", "bfloat16", "float16", "float64")
OTHERS = {"BaseTunerLayer", "FrozenLinear", "AdaptedLinear", "Routed"}
"""Classes of layers that PEFT's adapters, quantised bases and other trainers of this package put onto a model."""
HELD = (dict, list, set)
"""Types of a module's attributes that training may write into: parameters, modules, hooks."""
REMEDY = "give the name or the folder of the model, or a model that from_pretrained has loaded"


def check_loaded(model: Any) -> None:
    """Raises InputError where an object is no loaded model that can be trained in place."""
    if not isinstance(model, PreTrainedModel):
        inner = " (unwrap it: model.unload())" if hasattr(model, "peft_config") else ""
        raise InputError(f"model is a {type(model).__name__}, which is no transformers model{inner}; {REMEDY}")
    if model.get_output_embeddings() is None:
        raise InputError(
            f"model is a {type(model).__name__}, which has no output layer; load it by AutoModelForCausalLM"
        )
    found = next(
        (name for name, one in model.named_modules() if OTHERS & {kind.__name__ for kind in type(one).mro()}), None
    )
    if found is not None:
        raise InputError(f"model has an adapter or another trainer's layer already ({found}); {REMEDY}")
    stored = is_stored(model.config)
    linear = (
        (name, one) for name, one in model.named_modules() if is_linear(one) or (stored and isinstance(one, Linear))
    )
    watched = next((name for name, one in linear if _is_watched(one, stored)), None)
    if watched is not None:
        raise InputError(
            f"model has a hook or another forward on its linear layer {watched}, which training reads and does not call; "
            "remove it, or put it on the module around the layer"
        )
    if any(one.is_inference() for one in model.parameters()):
        raise InputError(
            "model was loaded under torch.inference_mode, so it cannot be trained; load it outside of that"
        )
    devices = sorted({str(one.device) for one in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise InputError(
            f"model has weights on {', '.join(devices) or 'no device'}; it must be on one device as a whole"
        )
    if (dtype := str(model.dtype).removeprefix("torch.")) not in DTYPES:
        raise InputError(f"model is of dtype {dtype}; it is trained in one of {', '.join(DTYPES)}")


def _is_watched(module: torch.nn.Module, stored: bool) -> bool:
    """Whether a call of a module does more than its class says. Accelerate's hook for devices changes no number, and leaves the
    class's forward as the module's own.

    Args:
        stored: in a model of codes, whose library may put a forward of its own onto a layer.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    is_other = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return any(hooks) or (is_other and not stored)


class Borrowed:
    """A loaded model while a run trains it; what base/ asks of it in the place of a folder."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InputError where it cannot be trained in place."""
        check_loaded(model)
        self.model = model

    @property
    def config_text(self) -> str:
        """The configuration as JSON."""
        return str(self.model.config.to_json_string(use_diff=False))

    def skeleton(self) -> PreTrainedModel:
        """A copy without weights (meta device); of a quantised model with layers of floats. The model is as it was."""
        model = self.model
        if is_stored(model.config):
            return without_weights(type(model), model.config)
        meta: dict[int, Any] = {id(one): one.to("meta") for one in model.buffers()}
        for one in model.parameters():
            meta[id(one)] = torch.nn.Parameter(one.detach().to("meta"), False)
        copied: PreTrainedModel = copy.deepcopy(model, meta)
        set_twin(copied, twin_for(type(model), model.config))
        return copied

    def ready(self, form: WeightForm | None, path: str, notes: list[str]) -> PreTrainedModel:
        """The model with the attention that its own logits are computed with, and this package's layers in the place of a
        library's.

        Args:
            form: of its linear layers; None for floats.
            path: name of the model, for messages.
            notes: gets what is to be known of quantised layers.

        Raises:
            InputError: something of it is in codes that are not read here.
        """
        self.model.set_attn_implementation(attention_of_text(self.model, "eager"))
        return self.model if form is None else form.own_layers(self.model, self.model.dtype, path, notes)


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Note a model's modules, hooks, attributes, configurations and flags, and put them back when the block ends."""
    owners: list[Any] = [*model.modules(), *_configs(model)]
    noted = [(one, type(one), dict(vars(one))) for one in owners]
    contents = [(value, copy.copy(value)) for one in owners for value in vars(one).values() if isinstance(value, HELD)]
    flags = [(one, one.data, one.requires_grad, one.grad) for one in model.parameters()]
    try:
        yield
    finally:
        for owner, kind, attributes in noted:
            if type(owner) is not kind:
                owner.__class__ = kind
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, before in contents:  # the very containers: handles of hooks refer to them
            _fill(container, before)
        for parameter, data, requires_grad, grad in flags:
            if parameter.data_ptr() != data.data_ptr():  # another dtype, of what a quantised model has in floats
                parameter.data = data
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


def _fill(container: Any, before: Any) -> None:
    """Give a container the contents that it had."""
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same weights: what is put onto it, or set on its parameters, does not change the first one."""
    known = dict[int, Any]()
    for one in [*model.parameters(), *model.buffers()]:
        plain = type(one) is torch.nn.Parameter
        known[id(one)] = torch.nn.Parameter(one.detach(), one.requires_grad) if plain else one
    second: PreTrainedModel = copy.deepcopy(model, known)
    return second
