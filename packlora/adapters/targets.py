"""Modules that the configuration of an adapter means, by PEFT's rules of names and patterns; refusals of what it cannot
mean.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from packlora.adapters.kinds import is_of_images, kind_of, why_no_rows
from packlora.errors import InputError, quoted
from packlora.lora_config import LoraConfig, is_all_linear, is_excluded, is_target
from packlora.ops.modules import beside_decoder
from packlora.patterns import is_named, pattern_key

MATCH_SECONDS = 10.0
"""For all patterns of an adapter against all names of a model; usual ones take milliseconds."""


def targets_of(
    peft: LoraConfig,
    model: PreTrainedModel,
    linears: Iterable[str],
    head_names: set[str],
    job: str,
    twins: Collection[str],
) -> set[str]:
    targets = peft.target_modules
    if is_all_linear(targets):
        every = copy.copy(peft)
        every.target_modules = set(linears) - head_names
        chosen = {name for name in every.target_modules if is_target(every, name)}
        if not chosen:
            raise InputError(
                f"job {job!r}: target_modules all-linear matches nothing: the model has no linear layers"
                + (" but those that exclude_modules or modules_to_save name" if every.target_modules else "")
            )
        return chosen
    if not targets and peft.target_parameters:
        return set()
    names = [name for name, _ in model.named_modules() if name]
    check_layer_numbers(peft, names, f"job {job!r}")
    matched = {name for name in names if is_target(peft, name)}
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in set(linears) - head_names}))
    if not matched and (narrowing := _narrowed_away(peft, names)):
        raise InputError(f"job {job!r}: {narrowing} leaves nothing of what target_modules {shown(targets)} matches")
    if not matched:
        raise InputError(
            f"job {job!r}: target_modules {shown(targets)} matches nothing in the model; linear layers are {leaves}, and "
            "all-linear, not in a list, takes them all" + _meant(targets, leaves)
        )
    for target in [] if isinstance(targets, str) else sorted(targets or ()):
        if not any(is_named(name, target) for name in (*names, *twins)):
            near = difflib.get_close_matches(target, leaves.split(", "), 1)
            raise InputError(
                f"job {job!r}: target_modules names {quoted(target, 300)}, which matches nothing in the model; "
                + (f"did you mean {near[0]!r}?" if near else f"linear layers are {leaves}")
            )
    beside = beside_decoder(model)
    for name in sorted(matched):
        module = model.get_submodule(name)
        kind = kind_of(module)
        found = None if kind is not None else f"of type {type(module).__name__}"
        if isinstance(module, torch.nn.Embedding):
            found = why_no_rows(module)
        if kind not in (None, "linear") and is_of_images(kind) and name not in beside:
            found = (
                f"a {type(module).__name__} over tokens, in which packed samples would see each other (PEFT and "
                "packlora.accelerate train it)"
            )
        if found:
            raise InputError(
                f"job {job!r}: target_modules matches {name}, {found}; linear layers, embeddings and convolutions of a "
                "vision tower can be adapted"
            )
    return matched


def _meant(targets: Any, leaves: str) -> str:
    """Hint for a text that holds names of layers: as a pattern it must match a whole path."""
    words = re.split(r"[\s,|()]+", targets.strip("()")) if isinstance(targets, str) else [""]
    if not set(words) <= set(leaves.split(", ")):
        return ""
    return f". A text is a regular expression for whole module paths, as in PEFT; for these layers write [{', '.join(words)}]"


def without_idle(peft: LoraConfig, model: PreTrainedModel, twins: Collection[str]) -> LoraConfig:
    """The configuration without names of target_modules and target_parameters that match nothing, where others do."""
    out = copy.copy(peft)
    for key, own in (("target_modules", model.named_modules()), ("target_parameters", model.named_parameters())):
        asked, paths = getattr(peft, key), [*(path for path, _ in own), *twins]
        if asked and not isinstance(asked, str):
            setattr(out, key, {name for name in asked if any(is_named(path, name) for path in paths)})
    out.target_parameters = out.target_parameters or peft.target_parameters
    return out if out.target_modules or out.target_parameters else peft


def excluding_nothing(excluded: str | set[str], every: Iterable[str]) -> str | set[str]:
    """Parts of exclude_modules: an expression, or those names, that match no path."""
    if isinstance(excluded, str):
        return "" if any(re.fullmatch(excluded, path) for path in every) else excluded
    return {name for name in excluded if not any(is_named(path, name) for path in every)}


def left_out_by_all_linear(asked: LoraConfig, model: PreTrainedModel, adapted: Iterable[str], job: str) -> list[str]:
    """Note on matrices that all-linear may be thought to take. asked: before parameters were looked for."""
    if not is_all_linear(asked.target_modules):
        return []
    excluded = [name for name, _ in model.named_modules() if name and is_excluded(asked, name)]
    left_out = all_linear_leaves_out(model, [*adapted, *excluded])
    say = f"job {job!r}: target_modules all-linear leaves out"
    notes = [f"{say} {path}{reason}" for path, reason in left_out.items() if reason is not None]
    if others := [path for path, reason in left_out.items() if reason is None]:
        names = ", ".join(others)
        notes.append(f"{say} {names}, which PEFT does not take; target_parameters takes them by name")
    return notes


def all_linear_leaves_out(model: PreTrainedModel, adapted: Iterable[str]) -> dict[str, str | None]:
    """Matrices of the model that `all-linear` does not take, although one may think so, a * in place of each number: linear
    layers under the names of experts, experts and routers that PEFT has no names for, or that cannot be adapted, and then why.
    adapted: paths of what is taken."""
    taken, head, left = set(adapted), model.get_output_embeddings(), dict[str, str]()
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        apart = module is head or isinstance(module, torch.nn.Embedding | torch.nn.modules.conv._ConvNd)
        matrix = parameter.ndim == 3 or (parameter.ndim == 2 and leaf == "weight")
        shown = re.sub(r"\.\d+(?=\.)", ".*", name)
        if matrix and not apart and name not in taken and owner not in taken:
            left.setdefault(shown, name)
    if not left:
        return {}
    from packlora.adapters.expert_targets import why_unfit

    return {shown: why_unfit(model, name) for shown, name in left.items()}


def check_narrowed(peft: LoraConfig, parameters: Iterable[str], job: str) -> None:
    """Raises InputError where keys that narrow target_modules are given for experts or routers: PEFT ignores them."""
    for path in parameters:
        owner = path.rpartition(".")[0]
        if peft.exclude_modules and (is_excluded(peft, owner) or is_excluded(peft, path)):
            raise InputError(
                f"job {job!r}: exclude_modules matches {owner}, but PEFT excludes no experts and no routers; name other layers "
                "alone in target_modules, and parameters in target_parameters"
            )
        if peft.layers_to_transform is not None:
            raise InputError(
                f"job {job!r}: layers_to_transform does not go with {path}, experts or a router, which PEFT adapts in all "
                "layers; name parameters by their paths in target_parameters"
            )


def check_patterns(peft: LoraConfig, adapted: Iterable[str], job: str) -> None:
    names = list(adapted)
    for kind, patterns in (("rank_pattern", peft.rank_pattern), ("alpha_pattern", peft.alpha_pattern)):
        for pattern in patterns:
            if not any(pattern_key([pattern], name) == pattern for name in names):
                raise InputError(
                    f"job {job!r}: adapter.{kind} has {quoted(pattern, 300)}, which matches no adapted module"
                )


def patterns_for(asked: dict[str, Any], pairs: Iterable[tuple[str, str]], otherwise: Any) -> dict[str, Any]:
    """A rank_pattern or alpha_pattern that says of the second names what it says of the first ones."""

    def said(name: str) -> Any:
        return asked.get(pattern_key(list(asked), name), otherwise)

    return {re.escape(other): said(name) for name, other in pairs if said(other) != said(name)} | asked


def check_layer_numbers(peft: LoraConfig, names: Collection[str], where: str) -> None:
    """Raises InputError where layers_to_transform has the number of no layer: PEFT passes over it.

    Args:
        names: of all modules of the model.
        where: whose configuration it is, for messages.
    """
    every = copy.copy(peft)
    every.target_modules = {name.rpartition(".")[2] for name in names}  # the last part of every name matches
    if missing := bare_layers(every, [name for name in names if name not in every.target_modules]):
        of = f" in lists named {shown(peft.layers_pattern)} (layers_pattern)" if peft.layers_pattern else ""
        raise InputError(
            f"{where}: layers_to_transform has {missing[0]}, and the model has no layer of that number{of}; layers count from 0"
        )


def bare_layers(peft: LoraConfig, names: Collection[str]) -> list[int]:
    """Numbers of layers_to_transform in whose layers target_modules matches nothing."""
    asked = peft.layers_to_transform
    out = []
    for number in [asked] if isinstance(asked, int) else asked or ():
        own = copy.copy(peft)
        own.layers_to_transform, own.exclude_modules, own.modules_to_save = [number], None, None
        out += [] if any(is_target(own, name) for name in names) else [number]
    return out


def _narrowed_away(peft: LoraConfig, names: Iterable[str]) -> str | None:
    """Keys that leave nothing of what target_modules matches by itself."""
    both = ("layers_to_transform", "exclude_modules", "modules_to_save")

    def matches_without(*keys: str) -> bool:
        without = copy.copy(peft)
        for key in keys:
            setattr(without, key, None)
        return any(is_target(without, name) for name in names)

    alone = [key for key in both if matches_without(key)]
    if not alone and not matches_without(*both):
        return None
    told = alone or [key for key in both if getattr(peft, key)]
    return " with ".join(f"{key} {shown(getattr(peft, key))}" for key in told)


def shown(names: Any) -> str:
    return quoted(sorted(names) if isinstance(names, set) else names, 300)


def with_names(peft: LoraConfig, model: PreTrainedModel, chosen: set[str]) -> LoraConfig:
    """The configuration with names in the place of a shorthand or an expression: last parts of names where these match the
    chosen modules alone, else whole paths. As it is where neither does: a chosen path is then the end of another module's."""
    transposed = any(type(model.get_submodule(name)) is Conv1D for name in chosen)
    if not isinstance(peft.target_modules, str) and peft.fan_in_fan_out == transposed:
        return peft
    named = copy.copy(peft)
    named.fan_in_fan_out = transposed
    if not isinstance(peft.target_modules, str):
        return named
    for names in ({path.rpartition(".")[2] for path in chosen}, chosen):
        named.target_modules = set(names)
        if {name for name, _ in model.named_modules() if name and is_target(named, name)} == chosen:
            return named
    named.target_modules = peft.target_modules
    return named


# The patterns as PEFT uses them. A process of its own, as nothing ends a match that backtracks for hours in this one.
_MATCH = """
import json, re, sys
uses, names = json.load(sys.stdin)
for whole, pattern in uses:
    match = (re.fullmatch if whole else re.match)
    for name in names:
        match(pattern, name)
"""


def try_all_patterns(peft: LoraConfig, names: list[str], job: str) -> None:
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
