"""What an adapter is: which modules of a model it adapts, with which rank and scaling.

Matching of names and patterns is PEFT's own, so that a run file means here what a LoraConfig means there.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import PreTrainedModel

from packlora.adapters.expert_targets import (
    Kind,
    ParameterTarget,
    all_linear_leaves_out,
    as_peft_takes_it,
    parameter_targets,
)
from packlora.adapters.sharded import LINEAR
from packlora.config import AdapterConfig
from packlora.errors import InputError, quoted

MATCH_SECONDS = 10.0
"""For all patterns of an adapter against all names of a model; usual ones take milliseconds."""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The adapter of one linear layer, of a router, or of one parameter of all experts of a layer.

    rank 0: only the bias is trained. base_dropped: see ops.lora_linear.layout.Run. stored_at: the module path under which
    PEFT's files have its tensors, where that is not its own path.
    """

    rank: int
    scaling: float
    dropout: float
    use_dora: bool
    train_bias: bool
    base_dropped: bool = True
    kind: Kind = "linear"
    stored_at: str | None = None


@dataclass(slots=True)
class AdapterSpec:
    """An adapter of a model: its configuration in PEFT's terms and the layers that it adapts."""

    peft: LoraConfig
    """With names of modules as its target_modules, see `resolve`."""
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    """By module path in the model, in model order; then those of experts and routers, by the path of the parameter."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of the targets."""

    @property
    def parameter(self) -> str | None:
        """The first of its targets that is no linear layer, but weights of experts or of a router."""
        return next((path for path, module in self.modules.items() if module.kind != "linear"), None)


def peft_config(adapter: AdapterConfig, base_model: str, revision: str | None) -> LoraConfig:
    """The LoraConfig that PEFT users would write for the adapter."""
    alpha = {key: whole_number(value) for key, value in adapter.alpha_pattern.items()}
    return LoraConfig(
        r=adapter.r,
        lora_alpha=whole_number(adapter.lora_alpha),
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        target_parameters=adapter.target_parameters,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=alpha,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
        revision=revision,
    )


def whole_number(number: float) -> Any:
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
            embedding layer, PEFT would also adapt experts or routers, which are no linear layers, a pattern matches no adapted
            module or takes too long to, or bias: all meets a bias that is the output layer's or that no linear layer has.
    """
    every = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    _try_patterns(peft, every, job)
    asked, peft = peft, as_peft_takes_it(peft, model, job)
    linears = {name: module for name, module in model.named_modules() if type(module) in LINEAR}
    head = model.get_output_embeddings()
    head_names = {name for name, module in linears.items() if module is head}
    parameters = parameter_targets(peft, model, job)
    chosen = {name: name for name in _targets(peft, model, linears, head_names, job)}
    chosen |= {path.rpartition(".")[0]: path for path, found in parameters.items() if found.kind == "linear"}
    others = {path: found for path, found in parameters.items() if found.kind != "linear"}
    _check_patterns(peft, [*chosen.values(), *others], job)
    biased = _biased(peft, model, linears, set(chosen), head_names, job)
    spec = AdapterSpec(_named(peft, model, set(chosen)))
    for name in linears:
        if name in chosen:
            spec.modules[name] = _module_spec(peft, chosen[name], None, name in biased, base_dropped)
        elif name in biased:
            spec.modules[name] = ModuleSpec(0, 1.0, 0.0, False, True)
    for path, found in others.items():
        spec.modules[path] = _module_spec(peft, path, found, False, base_dropped)
    all_linear = isinstance(asked.target_modules, str) and asked.target_modules.lower() == "all-linear"
    if all_linear and (left_out := all_linear_leaves_out(model, spec.modules)):
        spec.notes.append(
            f"job {job!r}: target_modules all-linear leaves out {', '.join(left_out)}, which PEFT does not take or "
            "cannot run; target_parameters takes experts and routers by name"
        )
    return spec


def _module_spec(
    peft: LoraConfig, name: str, parameter: ParameterTarget | None, train_bias: bool, base_dropped: bool
) -> ModuleSpec:
    """name: that patterns of ranks and alphas are held against."""
    rank = peft.rank_pattern.get(get_pattern_key(peft.rank_pattern.keys(), name), peft.r)
    alpha = peft.alpha_pattern.get(get_pattern_key(peft.alpha_pattern.keys(), name), peft.lora_alpha)
    scaling = alpha / (math.sqrt(rank) if peft.use_rslora else rank)
    own = ModuleSpec(rank, scaling, peft.lora_dropout, peft.use_dora, train_bias, base_dropped)
    return own if parameter is None else replace(own, kind=parameter.kind, stored_at=parameter.stored_at)


def _check_patterns(peft: LoraConfig, adapted: Iterable[str], job: str) -> None:
    names = list(adapted)
    for pattern_key, patterns in (("rank_pattern", peft.rank_pattern), ("alpha_pattern", peft.alpha_pattern)):
        for pattern in patterns:
            if not any(get_pattern_key([pattern], name) == pattern for name in names):
                raise InputError(
                    f"job {job!r}: adapter.{pattern_key} has {quoted(pattern, 300)}, which matches no adapted module"
                )


def _targets(
    peft: LoraConfig, model: PreTrainedModel, linears: Iterable[str], head_names: set[str], job: str
) -> set[str]:
    targets = sorted(peft.target_modules) if isinstance(peft.target_modules, set) else peft.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        chosen = set(linears) - head_names
        if not chosen:
            raise InputError(
                f"job {job!r}: target_modules all-linear matches nothing: the model has no layers of type torch.nn.Linear"
            )
        return chosen
    if not targets and peft.target_parameters:
        return set()
    names = [name for name, _ in model.named_modules() if name]
    matched = {name for name in names if _matches(peft, name)}
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in set(linears) - head_names}))
    if not matched:
        raise InputError(
            f"job {job!r}: target_modules {quoted(targets, 300)} matches nothing in the model; linear layers are {leaves}"
            + _meant(targets, leaves)
        )
    for target in [] if isinstance(targets, str) else sorted(targets or ()):
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, leaves.split(", "), 1)
            raise InputError(
                f"job {job!r}: target_modules names {quoted(target, 300)}, which matches nothing in the model; "
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


def _meant(targets: Any, leaves: str) -> str:
    """What to say of a text that holds names of layers: as a pattern it must match a whole path."""
    words = re.split(r"[\s,|()]+", targets.strip("()")) if isinstance(targets, str) else [""]
    if not set(words) <= set(leaves.split(", ")):
        return ""
    return f". A text is a regular expression for whole module paths, as in PEFT; for these layers write [{', '.join(words)}]"


# The patterns as PEFT uses them. A process of its own, as nothing ends a match that backtracks for hours in this one.
_MATCH = """
import json, re, sys
uses, names = json.load(sys.stdin)
for whole, pattern in uses:
    match = (re.fullmatch if whole else re.match)
    for name in names:
        match(pattern, name)
"""


def _try_patterns(peft: LoraConfig, names: list[str], job: str) -> None:
    """Raises InputError where the patterns of a configuration take too long to be compared with the names, or are none."""

    def regular(*texts: Any) -> list[str]:
        return [text for text in texts if isinstance(text, str) and not re.fullmatch(r"[\w.-]+", text)]

    layers = [peft.layers_pattern] if isinstance(peft.layers_pattern, str) else peft.layers_pattern or []
    uses = [(True, text) for text in regular(peft.target_modules, peft.exclude_modules)]
    uses += [(False, rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\.") for text in regular(*layers)]
    uses += [(False, rf"(.*\.)?({text})$") for text in regular(*peft.rank_pattern, *peft.alpha_pattern)]
    _try(uses, names, f"job {job!r}", "its adapter")


def try_patterns(patterns: Iterable[str], names: list[str], where: str, owner: str) -> None:
    """The same for patterns that are used as those of rank_pattern. where, owner: of the patterns, for messages."""
    _try([(False, rf"(.*\.)?({text})$") for text in patterns], names, where, owner)


def _try(uses: list[tuple[bool, str]], names: list[str], where: str, owner: str) -> None:
    """uses: each with whether it must match the whole name."""
    if not uses:
        return
    try:
        _match(json.dumps([uses, names]), MATCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{where}: the regular expressions of {owner} ({', '.join(quoted(text, 60) for _, text in uses[:3])}) "
            f"take more than {MATCH_SECONDS:g} s to be compared with {len(names)} module names; write them without repeated "
            "repetitions, such as (a+)+, or name the modules"
        ) from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        raise InputError(f"{where}: a regular expression of {owner} cannot be used: {last}") from None


@functools.cache
def _match(task: str, seconds: float) -> None:
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _MATCH]
    subprocess.run(command, input=task, capture_output=True, text=True, timeout=seconds, check=True)


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
    peft: LoraConfig, model: PreTrainedModel, linears: dict[str, torch.nn.Linear], chosen: set[str], heads: set[str], job: str
) -> set[str]:  # fmt: skip
    """Layers whose bias is trained. heads: output layers, which see other rows than the tokens."""
    if peft.bias == "none":
        return set()
    have = {name for name, module in linears.items() if module.bias is not None}
    if peft.bias == "lora_only":
        return have & chosen
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf == "bias" and (owner not in have or owner in heads):
            why = "of the output layer, which this version cannot adapt" if owner in heads else "not of a linear layer"
            raise InputError(f"job {job!r}: bias: all would train {name}, which is {why}; use lora_only")
    if not have:
        raise InputError(f"job {job!r}: bias: all, but the model has no biases; use bias: none")
    return have
