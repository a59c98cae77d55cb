"""Put the adapters of several jobs onto one model, at once or one after the other, and take them off again.

Adapted linear layers are replaced in place by AdaptedLinear, other modules on which a job trains something by Routed, which may
stand around an AdaptedLinear; everything else of the model is left alone and frozen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.embeddings import hook_embeddings
from packlora.adapters.expert_layout import adapted_experts, router_path
from packlora.adapters.flat import UNDECAYED, FlatLayout
from packlora.adapters.kinds import PARAMETERS, as_linear, is_known_linear, routed
from packlora.adapters.linear import AdaptedCall, AdaptedLinear, AdaptedModule, Attached, adapted_linear, compute
from packlora.adapters.owners import MIN_ROWS
from packlora.adapters.siblings import SiblingGroup, join, sibling_groups
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.adapters.weights import AdapterWeights, TrainedWeights, parameter_shapes, shapes_at
from packlora.ops.dropout.keys import layer_salt
from packlora.ops.lora_linear.frozen import FrozenLinear
from packlora.ops.modules import beside_decoder
from packlora.plans.select import PlanChooser
from packlora.seeding import stable_hash

if TYPE_CHECKING:
    from packlora.ops.lora_linear.storage import Storage


@dataclass(slots=True)
class Adapter:
    """One job's adapter on the model: its number among the owners of tokens and its weights by module path.

    flat: all its trainable parameters, one tensor of float32 (float64 on a float64 base); those of `weights` are views of it.
    layout: of `flat`, by the names of `named_parameters`; what is not decayed lies behind all others.
    trained_on: how the weights of its layers are quantised, as text for its file; None of dense ones.
    elsewhere: shapes of its parameters on layers that are not of this model, but of other stages (packlora/pipeline/), by name.
    """

    name: str
    number: int
    spec: AdapterSpec
    weights: dict[str, TrainedWeights]
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
    def trained_parts(self) -> dict[str, tuple[slice, ...]]:
        """The parts of parameters that steps change, by name, of those that steps do not change whole."""
        parts: dict[str, tuple[slice, ...]] = {}
        for path in self.weights:
            module = self.spec.modules[path]
            if (r := module.trained_rank) < module.rank:
                parts |= {f"{path}/A": (slice(r),), f"{path}/B": (slice(None), slice(r))}
        return parts

    @property
    def copied_embeddings(self) -> set[str]:
        """Names of the parameters that are whole embeddings of the job's own."""
        return {f"{path}/weight" for path, own in self.weights.items() if own.copies_embedding}

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all whole parameters by name, also where other processes have them, or slices of them."""
        return dict(self.elsewhere) | {
            f"{path}/{name}": weights.whole_shape(name, parameter.shape)
            for path, weights in self.weights.items()
            for name, parameter in weights.named_parameters().items()
        }

    @property
    def num_parameters(self) -> int:
        """Elements of them all, of all slices."""
        return sum(map(math.prod, self.whole_shapes.values()))

    def own_of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This process's parts of whole tensors, by the names of `named_parameters`."""
        own = {}
        for name, tensor in whole.items():
            path, _, attribute = name.rpartition("/")
            if path in self.weights:
                own[name] = self.weights[path].own(attribute, tensor)
        return own

    @property
    def on_experts(self) -> int:
        """Elements of all parameters that are on experts, of all slices."""
        experts = {path for path, module in self.spec.modules.items() if module.kind == "experts"}
        shapes = self.whole_shapes.items()
        return sum(math.prod(shape) for name, shape in shapes if name.rpartition("/")[0] in experts)


def attach(
    model: PreTrainedModel,
    specs: dict[str, AdapterSpec],
    seed: int | Mapping[str, int],
    chooser: PlanChooser | Mapping[str, PlanChooser] | None = None,
    storage: Storage | None = None,
    example: Mapping[str, Any] | None = None,
    recompute: bool = True,
) -> tuple[Attached, list[Adapter]]:
    """Freeze the model and attach one adapter per job.

    Initial values depend on (seed, module path) alone: a job starts the same whatever it is called and is trained beside.

    Args:
        model: gets its adapted layers replaced, in place.
        specs: by job name, from spec.resolve on this model.
        seed: of every adapter, or by job name.
        chooser: chooses how layers are computed, one for all or by path; by default from what is known of the device. Siblings
            with different ones are computed apart.
        storage: how the weights of the model lie; None: in memory. Modules that the model lacks are elsewhere.
        example: keyword arguments of a packed call with extras; None where no sample has any.
        recompute: compute outputs of norms and gated products again in the backward, on a GPU.
    """
    model.requires_grad_(False)
    if not isinstance(chooser, Mapping):
        adapted = [path for spec in specs.values() for path in spec.modules]
        chooser = dict.fromkeys(adapted, chooser or PlanChooser(model.device))
    attached = Attached([*chooser.values()], storage)
    layers: Layers = {}
    with given_half(model) as attached.of_rows:
        attached.groups = shared_inputs(model, example)
    seeds = dict.fromkeys(specs, seed) if isinstance(seed, int) else seed
    here = {job: _here(model, spec, attached) for job, spec in specs.items()}
    adapters = []
    for number, (job, spec) in enumerate(specs.items()):
        _replace(model, spec, here[job], attached, layers, chooser)
        adapters.append(_adapter(job, number, spec, here[job], layers, seeds[job], model, attached))
    write_first_values(model, attached, layers, range(len(specs)))
    _join_siblings(model, layers, attached.groups.values())
    attached.storage.adapted([path for own in here.values() for path in own])
    if recompute and model.device.type == "cuda":
        from packlora.ops.recompute_hooks import add_recompute

        add_recompute(model, attached.storage.each)
    return attached, adapters


def attach_one(
    model: PreTrainedModel, attached: Attached, name: str, number: int, spec: AdapterSpec, seed: int,
    chooser: Mapping[str, PlanChooser],
) -> Adapter:  # fmt: skip
    """Attach one more adapter to a model that has some, between two microbatches. It starts as it would have at first.

    Args:
        model: on its device; modules that it lacks are elsewhere.
        number: larger than those of all that were attached.
        chooser: by path.
    """
    layers = adapted_layers(model)
    before, here = set(layers), _here(model, spec, attached)
    _replace(model, spec, here, attached, layers, chooser)
    hook_embeddings(model, attached)
    adapter = _adapter(name, number, spec, here, layers, seed, model, attached)
    write_first_values(model, attached, layers, [number])
    new = [path for path, linear in layers.keys() - before if linear]
    changed = [attached.groups[path] for path in new if path in attached.groups]
    parents = {_parent(paths[0]) for paths in changed}
    for path in parents:
        SiblingGroup.detach(model.get_submodule(path))
    _join_siblings(model, layers, [paths for paths in attached.groups.values() if _parent(paths[0]) in parents])
    for path in _layers_of(spec, here):
        layers[path, is_linear(spec.modules[path])].adapters_changed()
    return adapter


def detach_one(model: PreTrainedModel, number: int) -> None:
    """Take the adapter of this number off again, between two microbatches, also one that was attached in part. Layers that have
    none any more stay, and do as the model does."""
    for layer in adapted_layers(model).values():
        if layer.adapters.pop(number, None) is not None:
            layer.adapters_changed()
    for _, state in adapted_experts(model):
        for own in state.adapters.values():
            own.pop(number, None)


Layers = dict[tuple[str, bool], AdaptedModule]
"""Layers by path and by whether they are for low-rank adapters of a linear layer or a router: one path may have both, of
different jobs. Experts are none of them."""


def _here(model: PreTrainedModel, spec: AdapterSpec, attached: Attached) -> list[str]:
    """Paths of what a job adapts, without those of modules that the model lacks or that are trained elsewhere."""
    own = {path for path, _ in model.named_modules() if attached.storage.holds(path)}
    return [
        path for path, module in spec.modules.items() if (_parent(path) if module.kind in PARAMETERS else path) in own
    ]


def is_linear(spec: ModuleSpec) -> bool:
    return spec.kind in ("linear", "router")


def _layers_of(spec: AdapterSpec, paths: Iterable[str]) -> list[str]:
    """Modules that get layers of their own: all but experts."""
    return [path for path in paths if spec.modules[path].kind != "experts"]


def adapted_layers(model: PreTrainedModel) -> Layers:
    """Modules that have adapters, or had some."""
    found: Layers = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            inside = isinstance(model.get_submodule(_parent(path)), AdaptedModule)
            found[_parent(path) if inside else router_path(path), True] = module
        elif isinstance(module, AdaptedModule):
            found[path, False] = module
    return found


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def write_first_values(model: PreTrainedModel, attached: Attached, layers: Layers, numbers: Collection[int]) -> None:
    """Write the first values that are made of the frozen layers, of adapters with these numbers."""
    kinds = {path: [linear for at, linear in layers if at == path] for path, _ in layers}
    made = [
        first
        for path in attached.storage.each(kinds)
        for linear in kinds[path]
        for number in layers[path, linear].adapters
        if number in numbers
        for first in layers[path, linear].first_values(number)
    ]
    experts = {state.path: state.adapters for _, state in adapted_experts(model)}
    made += [
        first
        for path in attached.storage.each(experts)
        for own in experts[path].values()
        for number, weights in own.items()
        if number in numbers
        for first in weights.first_values()
    ]
    with torch.no_grad():
        for parameter, value in made:
            parameter.copy_(value)


def _join_siblings(model: PreTrainedModel, layers: Layers, groups: Iterable[tuple[str, ...]]) -> None:
    """Let siblings of one chooser be computed together."""
    members = {path: layer for (path, _), layer in layers.items() if isinstance(layer, AdaptedLinear)}
    join(model, set(groups), members, lambda member: member.chooser, compute, AdaptedCall)


def _adapter(
    name: str, number: int, spec: AdapterSpec, here: Sequence[str], layers: Layers, seed: int, model: PreTrainedModel,
    attached: Attached,
) -> Adapter:  # fmt: skip
    """Make an adapter and put it onto those of its modules that are here."""
    own = {path: layers[path, is_linear(spec.modules[path])] for path in _layers_of(spec, here)}
    shapes = {
        path: parameter_shapes(spec.modules[path], own[path].base)
        if path in own
        else shapes_at(model, path, spec.modules[path])
        for path in here
    }
    named = {f"{path}/{attribute}": shape for path, of_path in shapes.items() for attribute, shape in of_path.items()}
    layout = FlatLayout(dict(sorted(named.items(), key=lambda item: item[0].endswith(UNDECAYED))))
    frozen = [layer.frozen() for layer in own.values() if isinstance(layer, AdaptedLinear)]
    dtypes = [weight.dtype for weight in frozen] or [model.dtype]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    flat = torch.zeros(layout.size, dtype=wide, device=model.device)
    views = layout.views(flat)
    weights: dict[str, TrainedWeights] = {}
    embedded: TrainedWeights | None = None
    for path in here:
        module, layer, at = spec.modules[path], own.get(path), stable_hash("start", seed, path)
        room = {attribute: views[f"{path}/{attribute}"] for attribute in shapes[path]}
        if layer is None:
            from packlora.adapters.experts import adapt_experts

            weights[path] = adapt_experts(model, path, attached, number, module, at, room)
            continue
        if isinstance(layer, AdaptedLinear):
            weights[path] = layer.adapters[number] = AdapterWeights(module, layer.base, at, room)
            continue
        weights[path] = layer.adapters[number] = own_there = routed(module.kind)(module, layer.base, at, room)
        if module.kind == "tokens" and isinstance(layer.base, torch.nn.Embedding):
            embedded = own_there
        if module.kind == "tied":  # the embedding comes first
            own_there.tied_to = embedded
    trained_on = next((module.settings for module in model.modules() if isinstance(module, FrozenLinear)), None)
    return Adapter(name, number, spec, weights, layout, flat, trained_on)


def shared_inputs(model: PreTrainedModel, example: Mapping[str, Any] | None = None) -> dict[str, tuple[str, ...]]:
    """For every linear layer that has siblings, the paths of its group in the order of their calls.

    All linear layers of the base model are looked at, adapted or not: the group, whose first path names its dropout mask,
    does not depend on which jobs there are. Half of the tokens are kept for the output layer, as rows of labels are.
    example: see attach.
    """
    paths = [path for path, module in model.named_modules() if is_known_linear(module)]
    ids = torch.arange(MIN_ROWS, device=model.device)[None]
    plain = {"input_ids": ids, "position_ids": ids, "use_cache": False, "sample_lengths": (MIN_ROWS,)}
    told = dict(example or plain)
    told["logits_to_keep"] = torch.arange(told["input_ids"].shape[1] // 2, device=model.device)
    return {path: group for group in sibling_groups(model, paths, told) for path in group}


@contextmanager
def given_half(model: PreTrainedModel) -> Iterator[set[str]]:
    """Paths of the modules that are given half as many tokens as the model's embedding inside, which stand behind the decoder:
    the output layer and, in some models, what treats the hidden states before it. What is in a list of modules, as layers and
    experts are, is none of it."""
    found, tokens = set[str](), [0]

    def note(path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, torch.Tensor) and x.ndim > 2 and 2 * x.shape[-2] == tokens[0]:
            found.add(path)

    def begin(module: torch.nn.Module, args: Any, y: torch.Tensor) -> None:
        tokens[0] = y.shape[-2]

    beside = beside_decoder(model)
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path and path not in beside and not any(part.isdecimal() for part in path.split(".")):
                hooks.enter_context(module.register_forward_pre_hook(partial(note, path), with_kwargs=True))
        hooks.enter_context(model.get_input_embeddings().register_forward_hook(begin))
        yield found


def _replace(
    model: PreTrainedModel, spec: AdapterSpec, paths: Sequence[str], attached: Attached, layers: Layers,
    chooser: Mapping[str, PlanChooser],
) -> None:  # fmt: skip
    """Put what serves a job's adapter at these paths, where there is none yet, and into `layers`."""
    beside = beside_decoder(model)
    for path in _layers_of(spec, paths):
        linear = is_linear(spec.modules[path])
        if (path, linear) in layers:
            continue
        parent_path, _, leaf = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        there = getattr(parent, leaf)
        if isinstance(there, torch.nn.Parameter):
            from packlora.adapters.experts import adapted_router

            layers[path, True] = adapted_router(model, path, attached, chooser[path])
            continue
        of_rows = path in attached.of_rows or there is model.get_output_embeddings()
        if not linear:
            layers[path, False] = routed(spec.modules[path].kind).layer(there, attached, of_rows, path)
            setattr(parent, leaf, layers[path, False])
            continue
        salt = layer_salt(attached.groups.get(path, (path,))[0])
        around = there if isinstance(there, AdaptedModule) else None
        base = as_linear(there if around is None else around.inner)
        layers[path, True] = adapted = adapted_linear(
            base, salt, attached, chooser[path], of_rows, path in beside
        )  # fmt: skip
        if around is None:
            setattr(parent, leaf, adapted)
        else:
            around.inner = adapted
