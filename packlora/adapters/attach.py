"""Put the adapters of several jobs onto one model, at once or one after the other, and take them off again.

Adapted linear layers are replaced in place by AdaptedLinear; everything else of the model is left alone and frozen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.experts import (
    ExpertWeights,
    adapt_experts,
    adapted_experts,
    adapted_router,
    frozen_at,
    router_path,
    shapes_at,
)
from packlora.adapters.flat import FlatLayout
from packlora.adapters.linear import AdaptedCall, AdaptedLinear, Attached, compute
from packlora.adapters.owners import MIN_ROWS
from packlora.adapters.sharded import LINEAR
from packlora.adapters.siblings import SiblingGroup, sibling_groups
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import AdapterWeights, parameter_shapes
from packlora.errors import InputError
from packlora.ops.dropout.keys import layer_salt
from packlora.ops.lora_linear.frozen import Storage
from packlora.ops.lora_linear.quantized import Quantized
from packlora.ops.recompute import add_recompute
from packlora.plans.select import PlanChooser
from packlora.seeding import stable_hash


@dataclass(slots=True)
class Adapter:
    """One job's adapter on the model: its number among the owners of tokens and its weights by module path.

    flat: all its trainable parameters, one tensor of float32 (float64 on a float64 base); those of `weights` are views of it.
    layout: of `flat`, by the names of `named_parameters`; biases lie behind all others.
    trained_on: how the weights of its layers are quantised, as text for its file; None of dense ones.
    elsewhere: shapes of its parameters on layers that are not of this model, but of other stages (parallel/stages.py), by name.
    """

    name: str
    number: int
    spec: AdapterSpec
    weights: dict[str, AdapterWeights | ExpertWeights]
    layout: FlatLayout
    flat: torch.Tensor
    trained_on: dict[str, Any] | None = None
    elsewhere: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """All trainable parameters, as `module path/A` and so on, in model order."""
        return {
            f"{path}/{name}": parameter
            for path, weights in self.weights.items()
            for name, parameter in weights.named_parameters().items()
        }

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all of them by name, also where other processes have them, or slices of them."""
        return dict(self.elsewhere) | {
            f"{path}/{name}": weights.whole_shape(name, parameter.shape)
            for path, weights in self.weights.items()
            for name, parameter in weights.named_parameters().items()
        }

    @property
    def num_parameters(self) -> int:
        """Elements of them all, of all slices."""
        return sum(map(math.prod, self.whole_shapes.values()))


def attach(
    model: PreTrainedModel,
    specs: dict[str, AdapterSpec],
    seed: int | Mapping[str, int],
    chooser: PlanChooser | Mapping[str, PlanChooser] | None = None,
    storage: Storage | None = None,
) -> tuple[Attached, list[Adapter]]:
    """Freeze the model and attach one adapter per job.

    Initial values depend on (seed, module path) alone: a job starts the same whatever it is called and is trained beside.

    Args:
        model: gets its adapted layers replaced, in place.
        specs: by job name, from spec.resolve on this model.
        seed: of every adapter, or by job name.
        chooser: chooses how layers are computed, one for all or by path; by default from what is known of the device. Siblings
            with different ones are computed apart.
        storage: how the weights of the model lie; None: in memory. Where it is not whole, modules that the model lacks are
            elsewhere.
    """
    model.requires_grad_(False)
    if not isinstance(chooser, Mapping):
        adapted = [path for spec in specs.values() for path in spec.modules]
        chooser = dict.fromkeys(adapted, chooser or PlanChooser(model.device))
    attached = Attached([*chooser.values()], storage)
    layers: dict[str, AdaptedLinear] = {}
    attached.groups = shared_inputs(model)
    seeds = dict.fromkeys(specs, seed) if isinstance(seed, int) else seed
    own = {path for path, _ in model.named_modules()}
    for job, spec in specs.items():
        if spec.parameter is not None and not attached.storage.is_whole:
            raise InputError(f"job {job!r} adapts {spec.parameter}, which takes the whole base model on every device")
    here = {job: [p for p in spec.modules if attached.storage.is_whole or p in own] for job, spec in specs.items()}
    adapters = []
    for number, (job, spec) in enumerate(specs.items()):
        _replace(model, _layers_of(spec, here[job]), attached, layers, chooser)
        adapters.append(_adapter(job, number, spec, here[job], layers, seeds[job], model, attached))
    _write_first_values(model, attached, layers, range(len(specs)))
    _join_siblings(model, layers, attached.groups.values())
    attached.storage.adapted(layers)
    if model.device.type == "cuda":  # where activations are what memory goes to
        add_recompute(model, attached.storage.each)
    return attached, adapters


def attach_one(
    model: PreTrainedModel, attached: Attached, name: str, number: int, spec: AdapterSpec, seed: int,
    chooser: Mapping[str, PlanChooser],
) -> Adapter:  # fmt: skip
    """Attach one more adapter to a model that has some, between two microbatches. It starts as it would have at first.

    Args:
        model: whole on its device.
        number: larger than those of all that were attached.
        chooser: by path.
    """
    layers = adapted_layers(model)
    before = set(layers)
    _replace(model, _layers_of(spec, spec.modules), attached, layers, chooser)
    adapter = _adapter(name, number, spec, list(spec.modules), layers, seed, model, attached)
    _write_first_values(model, attached, layers, [number])
    changed = [attached.groups[path] for path in layers.keys() - before if path in attached.groups]
    parents = {_parent(paths[0]) for paths in changed}
    for path in parents:
        SiblingGroup.detach(model.get_submodule(path))
    _join_siblings(model, layers, [paths for paths in attached.groups.values() if _parent(paths[0]) in parents])
    for path in _layers_of(spec, spec.modules):
        layers[path].adapters_changed()
    return adapter


def detach_one(model: PreTrainedModel, adapter: Adapter) -> None:
    """Take an adapter off again, between two microbatches. Layers that have none any more stay, and do as the model does."""
    layers = adapted_layers(model)
    for path in _layers_of(adapter.spec, adapter.spec.modules):
        del layers[path].adapters[adapter.number]
        layers[path].adapters_changed()
    for _, state in adapted_experts(model):
        for own in state.adapters.values():
            own.pop(adapter.number, None)


def adapted_layers(model: PreTrainedModel) -> dict[str, AdaptedLinear]:
    """Layers that have adapters, or had some, by path."""
    return {router_path(path): module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def _layers_of(spec: AdapterSpec, paths: Iterable[str]) -> list[str]:
    """Those that are adapted as linear layers: all but experts."""
    return [path for path in paths if spec.modules[path].kind != "experts"]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _write_first_values(
    model: PreTrainedModel, attached: Attached, layers: Mapping[str, AdaptedLinear], numbers: Collection[int]
) -> None:
    """Those that are made of the frozen layers, of adapters with these numbers."""
    made = [
        first
        for path in attached.storage.each(layers)
        for number, weights in layers[path].adapters.items()
        if number in numbers
        for first in weights.first_values(layers[path].frozen, layers[path].bias, attached.norms)
    ]
    made += [
        first
        for _, state in adapted_experts(model)
        for own in state.adapters.values()
        for number, weights in own.items()
        if number in numbers
        for first in weights.first_values()
    ]
    with torch.no_grad():
        for parameter, value in made:
            parameter.copy_(value)


def _join_siblings(
    model: PreTrainedModel, layers: Mapping[str, AdaptedLinear], groups: Iterable[tuple[str, ...]]
) -> None:
    """Let siblings of one chooser be computed together."""
    for paths in set(groups):
        siblings = [layers[path] for path in paths if path in layers]
        for one in dict.fromkeys(member.chooser for member in siblings):
            members = [member for member in siblings if member.chooser is one]
            if len(members) > 1:
                group = SiblingGroup(members, compute, AdaptedCall)
                group.attach(model.get_submodule(_parent(paths[0])))
                for index, member in enumerate(members):
                    member.siblings, member.index = group, index


def _adapter(
    name: str, number: int, spec: AdapterSpec, here: Sequence[str], layers: Mapping[str, AdaptedLinear], seed: int,
    model: PreTrainedModel, attached: Attached,
) -> Adapter:  # fmt: skip
    """Make an adapter and put it onto those of its layers that are here."""
    linear = _layers_of(spec, here)
    shapes = {path: _shapes(model, layers, path, spec) for path in here}
    named = {f"{path}/{attribute}": shape for path, own in shapes.items() for attribute, shape in own.items()}
    layout = FlatLayout(dict(sorted(named.items(), key=lambda item: item[0].endswith("/bias"))))
    frozen = [layers[path].frozen() for path in linear]
    dtypes = [weight.dtype for weight in frozen] or [model.dtype]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    flat = torch.zeros(layout.size, dtype=wide, device=model.device)
    views, weights = layout.views(flat), dict[str, AdapterWeights | ExpertWeights]()
    for path in here:
        room = {attribute: views[f"{path}/{attribute}"] for attribute in shapes[path]}
        start = stable_hash("start", seed, path)
        if path in layers:
            own = weights[path] = AdapterWeights(spec.modules[path], layers[path].base, start, room)
            layers[path].adapters[number] = own
        else:
            owner, _, leaf = path.rpartition(".")
            experts = ExpertWeights(spec.modules[path], frozen_at(model.get_submodule(owner), leaf), start, room)
            weights[path] = experts
            adapt_experts(model, path, attached, number, experts)
    codes = next((one.codes for one in frozen if isinstance(one, Quantized)), None)
    trained_on: dict[str, Any] | None = None
    if codes is not None:
        dtype = str(frozen[0].dtype).removeprefix("torch.")
        trained_on = {"method": codes.method, "double_quant": codes.double_quant, "dtype": dtype}
    return Adapter(name, number, spec, weights, layout, flat, trained_on)


def _shapes(
    model: PreTrainedModel, layers: Mapping[str, AdaptedLinear], path: str, spec: AdapterSpec
) -> dict[str, tuple[int, ...]]:
    return (
        parameter_shapes(spec.modules[path], layers[path].base)
        if path in layers
        else shapes_at(model, path, spec.modules[path])
    )


def shared_inputs(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """For every linear layer that has siblings, the paths of its group in the order of their calls.

    All linear layers of the base model are looked at, adapted or not: the group, whose first path names its dropout mask,
    does not depend on which jobs there are.
    """
    paths = [path for path, module in model.named_modules() if type(module) in LINEAR]
    ids = torch.arange(MIN_ROWS, device=model.device)[None]
    example = {"input_ids": ids, "position_ids": ids, "use_cache": False, "sample_lengths": (MIN_ROWS,)}
    return {path: group for group in sibling_groups(model, paths, example) for path in group}


def _replace(
    model: PreTrainedModel, paths: Sequence[str], attached: Attached, layers: dict[str, AdaptedLinear],
    chooser: Mapping[str, PlanChooser],
) -> None:  # fmt: skip
    """Make adapted layers of those at these paths that are none yet, and put them into `layers`."""
    for path in paths:
        if path in layers:
            continue
        parent_path, _, leaf = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        base = getattr(parent, leaf)
        if isinstance(base, torch.nn.Parameter):
            layers[path] = adapted_router(model, path, attached, chooser[path])
            continue
        assert type(base) in LINEAR
        salt = layer_salt(attached.groups.get(path, (path,))[0])
        layers[path] = AdaptedLinear(base, salt, attached, chooser[path])
        setattr(parent, leaf, layers[path])
