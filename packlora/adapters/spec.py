"""What an adapter is: which modules of a model it adapts, with which rank and scaling.

Matching of names and patterns is PEFT's own, so that a run file means here what a LoraConfig means there.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import PreTrainedModel

from packlora.config import AdapterConfig
from packlora.errors import InputError


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The adapter of one linear layer. rank 0: only the bias is trained. base_dropped: see ops.lora_linear.layout.Run."""

    rank: int
    scaling: float
    dropout: float
    use_dora: bool
    train_bias: bool
    base_dropped: bool = True


@dataclass(slots=True)
class AdapterSpec:
    """An adapter of a model: its configuration in PEFT's terms and the layers that it adapts."""

    peft: LoraConfig
    """With names of modules as its target_modules, see `resolve`."""
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    """By module path in the model, in model order."""


def peft_config(adapter: AdapterConfig, base_model: str, revision: str | None) -> LoraConfig:
    """The LoraConfig that PEFT users would write for the adapter."""
    alpha = {key: _whole(value) for key, value in adapter.alpha_pattern.items()}
    return LoraConfig(
        r=adapter.r,
        lora_alpha=_whole(adapter.lora_alpha),
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=alpha,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
        revision=revision,
    )


def _whole(number: float) -> Any:
    """PEFT writes whole alphas without a point."""
    return int(number) if float(number).is_integer() else number


def resolve(peft: LoraConfig, model: PreTrainedModel, job: str, base_dropped: bool = True) -> AdapterSpec:
    """Find the layers of the model that the configuration adapts.

    The configuration of the result names them: not every program that loads an adapter knows the shorthand all-linear or
    regular expressions.

    Args:
        base_dropped: DoRA under dropout scales the base product of the dropped inputs, as PEFT does.

    Raises:
        InputError: nothing matches, a named module matches nothing, a match is not a linear layer or is the output or
            embedding layer, a pattern matches no adapted module, or bias: all meets a bias that no linear layer has.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    head = model.get_output_embeddings()
    head_names = {name for name, module in linears.items() if module is head}
    chosen = _targets(peft, model, linears, head_names, job)
    for pattern_key, patterns in (("rank_pattern", peft.rank_pattern), ("alpha_pattern", peft.alpha_pattern)):
        for pattern in patterns:
            if not any(get_pattern_key([pattern], name) == pattern for name in chosen):
                raise InputError(f"job {job!r}: adapter.{pattern_key} has {pattern!r}, which matches no adapted module")
    biased = _biased(peft, model, linears, chosen, job)
    spec = AdapterSpec(_named(peft, model, chosen))
    for name in linears:
        if name in chosen:
            rank = peft.rank_pattern.get(get_pattern_key(peft.rank_pattern.keys(), name), peft.r)
            alpha = peft.alpha_pattern.get(get_pattern_key(peft.alpha_pattern.keys(), name), peft.lora_alpha)
            scaling = alpha / (math.sqrt(rank) if peft.use_rslora else rank)
            spec.modules[name] = ModuleSpec(
                rank, scaling, peft.lora_dropout, peft.use_dora, name in biased, base_dropped
            )
        elif name in biased:
            spec.modules[name] = ModuleSpec(0, 1.0, 0.0, False, True)
    return spec


def _targets(
    peft: LoraConfig, model: PreTrainedModel, linears: Iterable[str], head_names: set[str], job: str
) -> set[str]:
    targets = sorted(peft.target_modules) if isinstance(peft.target_modules, set) else peft.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        chosen = set(linears) - head_names
        if not chosen:
            raise InputError(f"job {job!r}: target_modules all-linear matches nothing: the model has no linear layers")
        return chosen
    names = [name for name, _ in model.named_modules() if name]
    matched = {name for name in names if _matches(peft, name)}
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in set(linears) - head_names}))
    if not matched:
        raise InputError(
            f"job {job!r}: target_modules {targets!r} matches nothing in the model; linear layers are {leaves}"
        )
    for target in [] if isinstance(targets, str) else sorted(targets or ()):
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, leaves.split(", "), 1)
            raise InputError(
                f"job {job!r}: target_modules names {target!r}, which matches nothing in the model; "
                + (f"did you mean {near[0]!r}?" if near else f"linear layers are {leaves}")
            )
    for name in sorted(matched):
        if name in head_names:
            raise InputError(
                f"job {job!r}: target_modules matches the output layer {name}; this version cannot adapt it"
            )
        if name not in set(linears):
            kind = type(model.get_submodule(name)).__name__
            raise InputError(
                f"job {job!r}: target_modules matches {name}, of type {kind}; only linear layers can be adapted"
            )
    return matched


def _named(peft: LoraConfig, model: PreTrainedModel, chosen: set[str]) -> LoraConfig:
    """The configuration with names in the place of a shorthand or an expression: last parts of names where these match the
    chosen modules alone, else whole paths. As it is where neither does: a chosen path is then the end of another module's."""
    if not isinstance(peft.target_modules, str):
        return peft
    named = copy.copy(peft)
    for names in ({path.rpartition(".")[2] for path in chosen}, chosen):
        named.target_modules = set(names)
        if {name for name, _ in model.named_modules() if name and _matches(named, name)} == chosen:
            return named
    return peft


def _matches(peft: LoraConfig, name: str) -> bool:
    match = check_target_module_exists(peft, name)
    return bool(match) and type(match).__name__ != "_ExcludedModule"


def _biased(
    peft: LoraConfig, model: PreTrainedModel, linears: dict[str, torch.nn.Linear], chosen: set[str], job: str
) -> set[str]:
    """Layers whose bias is trained."""
    if peft.bias == "none":
        return set()
    have = {name for name, module in linears.items() if module.bias is not None}
    if peft.bias == "lora_only":
        return have & chosen
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" and owner not in have:
            raise InputError(
                f"job {job!r}: bias: all would train {name}, which is not of a linear layer; use lora_only"
            )
    if not have:
        raise InputError(f"job {job!r}: bias: all, but the model has no biases; use bias: none")
    return have
