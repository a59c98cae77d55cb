"""Number of a model's first layers that together show everything that its layers do with positions of tokens.

Layers that are built alike and that the model treats alike attend alike. So what is proved of long samples on one layer of each
kind holds for the model, at a fraction of the time. What tells layers apart is read from the model and from its configuration.
Only families of transformers' own are looked at so: their layers use their number for caches, for what was read from the
configuration when they were built, and for scales by depth. Code that came with a model may do anything with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.base.fingerprint import word_sums
from packlora.base.shape import decoder_layers

OWN_NUMBER = ("layer_idx", "layer_id")
"""Attributes that hold a layer's number, which do not depend on its kind."""
OF_TORCH = frozenset(vars(torch.nn.Module()))


def layers_of_each_kind(model: PreTrainedModel) -> int | None:
    """The fewest first layers among which there is one of each kind; None where that cannot be told."""
    layers = list(decoder_layers(model).values())
    if not type(model).__module__.startswith("transformers.models.") or len(layers) < 2:
        return None
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [vars(module) for module in model.modules() if id(module) not in inside]
    held = [*outside, *_configurations(model)]
    kinds = [(_built(layer), _treated(held, number, len(layers))) for number, layer in enumerate(layers)]
    return 1 + max(kinds.index(kind) for kind in kinds)


@contextlib.contextmanager
def first_layers(model: PreTrainedModel, count: int | None) -> Iterator[None]:
    """Run the model with only its first `count` layers; None: with all of them."""
    layers = decoder_layers(model)
    if count is None or count >= len(layers):
        yield
        return
    parent_path, _, name = next(iter(layers)).rpartition(".")[0].rpartition(".")
    parent = model.get_submodule(parent_path)
    every = parent.get_submodule(name)
    setattr(parent, name, torch.nn.ModuleList([*layers.values()][:count]))
    try:
        yield
    finally:
        setattr(parent, name, every)


def _built(layer: torch.nn.Module) -> list[Any]:
    """Description of a layer's modules, without the values of their parameters."""
    out: list[Any] = []
    for path, module in layer.named_modules():
        own = {
            key: _plain(value) for key, value in vars(module).items() if key not in OF_TORCH and key not in OWN_NUMBER
        }
        parameters = {key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)}
        buffers = dict(module.named_buffers(recurse=False))
        shapes = [tuple(value.shape) for value in buffers.values()]
        out.append((path, type(module), own, parameters, [*buffers], shapes, word_sums([*buffers.values()])))
    return out


def _treated(held: list[Mapping[str, Any]], number: int, layers: int) -> list[Any]:
    """Settings of a layer that are stored outside of it: entries of lists by layer, whether its number is in a list of layers,
    and whether it comes before or after a layer that is named by its number."""
    out: list[Any] = []
    for own in held:
        for key, value in own.items():
            if isinstance(value, list | tuple) and len(value) == layers:
                out.append(_plain(value[number]))
            elif isinstance(value, list | tuple | set | frozenset) and all(type(item) is int for item in value):
                out.append(number in value)
            if type(value) is int and "layer" in key:
                out.append((number > value) - (number < value))
    return out


def _configurations(model: PreTrainedModel) -> list[Mapping[str, Any]]:
    """The model's, and those that are within it."""
    out, pending = [], [model.config.to_dict()]
    while pending:
        out.append(pending.pop())
        pending += [value for value in out[-1].values() if isinstance(value, dict)]
    return out


def _plain(value: Any) -> Any:
    """A value that is equal for equal ones; of an object that is not known to be so, itself alone."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items()]
    if isinstance(value, partial):
        return _plain([value.func, value.args, value.keywords])
    known = value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | type | FunctionType
    )
    return value if known else id(value)
