"""Specification of an adapter: which modules of a model it adapts, with which rank and scaling.

Matching of names and patterns is PEFT's own (targets.py), so that a run file means here what a LoraConfig means there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from packlora.adapters.kinds import PARAMETERS, Kind, is_linear, is_routed, kind_of, routed
from packlora.adapters.targets import (
    bare_layers,
    check_narrowed,
    check_patterns,
    excluding_nothing,
    left_out_by_all_linear,
    shown,
    targets_of,
    try_all_patterns,
    with_names,
    without_idle,
)
from packlora.errors import InputError, quoted
from packlora.lora_config import OF_WEIGHTS, LoraConfig, is_doubled, rank_and_alpha, scaling_of

if TYPE_CHECKING:
    from packlora.adapters.expert_targets import ParameterTarget


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """Specification of what a job trains on one module, or on one parameter of experts or of a router. rank 0: no low-rank
    part. base_dropped: see ops.lora_linear.types.Segment.

    kind: see kinds/. start: what A and B begin with, as PEFT's init_lora_weights. tokens: whose rows are trained. stored_at:
    the module path under which PEFT's files have its tensors, where that is not its own path. also_at: a second one, see
    names.py.
    """

    rank: int
    scaling: float
    dropout: float
    use_dora: bool
    train_bias: bool
    base_dropped: bool = True
    kind: Kind = "linear"
    start: bool | str = True
    tokens: tuple[int, ...] = ()
    stored_at: str | None = None
    also_at: str | None = None

    @property
    def trained_rank(self) -> int:
        """Ranks that steps change, the first ones; the others hold what was there at the beginning, see starts.py."""
        return self.rank // 2 if is_doubled(self.start) else self.rank

    @property
    def scales_dropped(self) -> bool:
        """Whether DoRA scales the base product of the dropped inputs, which so has two base products."""
        return self.use_dora and self.dropout > 0 and self.base_dropped


@dataclass(slots=True)
class AdapterSpec:
    """An adapter of a model: its configuration in PEFT's terms and the modules that it trains something on."""

    peft: LoraConfig
    """With names of modules as its target_modules, see `resolve`."""
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    """Modules by path in the model, in model order; then those of experts and routers, by the path of the parameter."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on the targets."""
    older: dict[str, str] = field(default_factory=dict)
    """First paths of modules, by their paths in a file of an older version of transformers, see names.py."""

    def with_base_dropped(self, base_dropped: bool) -> AdapterSpec:
        """Let DoRA under dropout scale the base product of the dropped inputs, as PEFT has it, or not. Returns itself."""
        own = {path: replace(one, base_dropped=base_dropped) for path, one in self.modules.items() if one.rank}
        self.modules |= own
        return self

    @property
    def also(self) -> dict[str, str]:
        """First path of a module in files, by the second one where it has one."""
        return {own.also_at: own.stored_at or path for path, own in self.modules.items() if own.also_at is not None}

    @property
    def read_as(self) -> dict[str, str]:
        """First paths of modules, by other paths that a file may name."""
        return self.also | self.older

    @property
    def of_weights(self) -> list[str]:
        """Modules whose adapter begins with what is in their weights, see starts.py."""
        return [
            path for path, own in self.modules.items() if own.rank and OF_WEIGHTS.fullmatch(str(own.start)) is not None
        ]

    @property
    def parameter(self) -> str | None:
        """The first of its targets that is no module, but weights of experts or of a router."""
        return next((path for path, module in self.modules.items() if module.kind in PARAMETERS), None)


def resolve(
    peft: LoraConfig,
    model: PreTrainedModel,
    job: str,
    twins: Collection[str] = (),
    of_folder: bool = False,
) -> AdapterSpec:
    """Find the layers of the model that the configuration adapts.

    The configuration of the result names them: not every program that loads an adapter knows the shorthand all-linear or
    regular expressions.

    Args:
        twins: paths of modules and parameters in the model's twin (names.py), which the configuration may name as well.
        of_folder: targets may name what the model does not have, as PEFT lets them: the tensors say what is adapted.

    Raises:
        InputError: nothing matches, a named module matches nothing, a match is of no kind that is adapted (kinds/), PEFT
            would also adapt experts or routers, which are no linear layers, a pattern matches no adapted module or takes
            too long to, bias: all meets a bias that is the output layer's or that no linear layer has, or one module is
            to be trained in two ways.
    """
    every = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    try_all_patterns(peft, every, job)
    asked = peft
    if get_checkpoint_conversion_mapping(model.config.model_type) is not None:  # else PEFT changes nothing
        from packlora.adapters.expert_targets import as_peft_takes_it

        peft = as_peft_takes_it(peft, model, job)
    if of_folder:
        peft = without_idle(peft, model, twins)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    head = model.get_output_embeddings()
    head_names = {name for name, module in linears.items() if module is head}
    parameters = _parameters(peft, model, job, twins)
    chosen = {name: name for name in targets_of(peft, model, linears, head_names, job, twins)}
    chosen |= {path.rpartition(".")[0]: path for path, found in parameters.items() if found.kind == "linear"}
    of_parameters = {path: found for path, found in parameters.items() if found.kind != "linear"}
    check_patterns(peft, [*chosen.values(), *of_parameters, *twins], job)
    check_narrowed(peft, of_parameters, job)
    biased = _biased(peft, model, linears, set(chosen), head_names, job, of_folder)
    others = _others(peft, model, job, twins)
    spec = AdapterSpec(with_names(peft, model, set(chosen)))
    for name, module in model.named_modules(remove_duplicate=False):
        if name in others:
            if name in chosen or name in biased:
                from packlora.adapters.other_modules import trained_twice

                raise trained_twice(name, others[name].kind, name in chosen, job)
            spec.modules[name] = others[name]
        elif name in chosen:
            kind = kind_of(module)
            assert kind is not None
            own = replace(_low_rank(peft, chosen[name], kind, job), train_bias=name in biased)
            if is_routed(kind) and (reason := routed(kind).why_not(own, module)):
                raise InputError(f"job {job!r}: target_modules matches {name}, {reason}; leave the module out")
            spec.modules[name] = own
        elif name in biased:
            spec.modules[name] = ModuleSpec(0, 1.0, 0.0, False, True)
    for path, found in of_parameters.items():
        own = _low_rank(peft, path, found.kind, job)
        spec.modules[path] = replace(own, stored_at=found.stored_at)
    spec.notes += left_out_by_all_linear(asked, model, spec.modules, job)
    spec.notes += _unknown_to_peft(peft, parameters, job)
    if idle := excluding_nothing(peft.exclude_modules or set(), [*every, *twins]):
        spec.notes.append(f"job {job!r}: exclude_modules {shown(idle)} matches nothing in the model")
    if bare := bare_layers(peft, every):
        spec.notes.append(
            f"job {job!r}: layers_to_transform has {quoted(bare, 120)}, layers in which target_modules matches nothing"
        )
    if peft.bias == "lora_only" and not biased:
        spec.notes.append(f"job {job!r}: bias: lora_only trains no bias, as no adapted layer has one")
    return spec


def _parameters(
    peft: LoraConfig, model: PreTrainedModel, job: str, twins: Collection[str]
) -> dict[str, ParameterTarget]:
    """Parameters by path that target_parameters means, see expert_targets.py."""
    if not peft.target_parameters:
        return {}
    from packlora.adapters.expert_targets import parameter_targets

    return parameter_targets(peft, model, job, twins)


def _unknown_to_peft(peft: LoraConfig, parameters: Collection[str], job: str) -> list[str]:
    """Note on an adapter whose folder PEFT does not load. parameters: paths of those that have adapters."""
    if not (peft.use_dora and parameters):
        return []
    return [
        f"job {job!r}: use_dora: true, and {next(iter(parameters))} has an adapter; PEFT has no DoRA of experts and routers, "
        "and does not load such a folder; `packlora merge` makes a model of it; target_modules can name other layers alone"
    ]


def _others(peft: LoraConfig, model: PreTrainedModel, job: str, twins: Collection[str]) -> dict[str, ModuleSpec]:
    """Modules that are trained beside low-rank adapters, by path, see other_modules.py."""
    if not (peft.modules_to_save or peft.trainable_token_indices):
        return {}
    from packlora.adapters.other_modules import other_modules

    found = other_modules(peft, model, job, twins)
    return {path: ModuleSpec(0, 1.0, 0.0, False, False, kind=kind, tokens=own) for path, (kind, own) in found.items()}


def _low_rank(peft: LoraConfig, name: str, kind: Kind, job: str) -> ModuleSpec:
    """name: that patterns of ranks and alphas are held against."""
    rank, alpha = rank_and_alpha(peft, name)
    dropout = 0.0 if kind == "embedding" else peft.lora_dropout
    start = _start(peft, rank, name, kind, job)
    return ModuleSpec(rank, scaling_of(peft, rank, alpha), dropout, peft.use_dora, False, kind=kind, start=start)


def _start(peft: LoraConfig, rank: int, name: str, kind: Kind, job: str) -> bool | str:
    """Start of A and B of a module. PEFT takes null for False."""
    start: Any = peft.init_lora_weights or False
    if is_doubled(start) and rank % 2:
        raise InputError(
            f"job {job!r}: of an adapter that began with {start} half of the ranks are trained, and {name} has {rank}; "
            "init_lora_weights: true trains all of them"
        )
    if start == "orthogonal" and rank % 2:
        raise InputError(f"job {job!r}: init_lora_weights: orthogonal takes even ranks, and {name} has {rank}")
    if start == "orthogonal" and kind == "experts":
        raise InputError(
            f"job {job!r}: init_lora_weights: orthogonal is not for experts, as {name}; leave one of them out"
        )
    return start  # type: ignore[no-any-return]


def _biased(
    peft: LoraConfig, model: PreTrainedModel, linears: dict[str, torch.nn.Linear], chosen: set[str], heads: set[str], job: str,
    of_folder: bool,
) -> set[str]:  # fmt: skip
    """Layers whose bias is trained. heads: output layers, which see other rows than the tokens. of_folder: see resolve."""
    if peft.bias == "none":
        return set()
    have = {name for name, module in linears.items() if module.bias is not None}
    if peft.bias == "lora_only":
        return {name for name in chosen if getattr(model.get_submodule(name), "bias", None) is not None}
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" and (owner not in have or owner in heads):
            why = (
                "of the output layer, which sees other rows than the tokens"
                if owner in heads
                else "not of a linear layer"
            )
            raise InputError(
                f"job {job!r}: the adapter was trained with bias: all, so it has {name}, which is {why}; biases of other "
                "linear layers are read. PEFT's merge_and_unload() folds it into its base"
                if of_folder
                else f"job {job!r}: bias: all would train {name}, which is {why}; use lora_only"
            )
    if not have and not of_folder:  # of a folder the tensors say whether there were some
        raise InputError(f"job {job!r}: bias: all, but the model has no biases; use bias: none")
    return have
