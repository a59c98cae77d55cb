"""What an adapter is: which modules of a model it adapts, with which rank and scaling.

Matching of names and patterns is PEFT's own, so that a run file means here what a LoraConfig means there.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from packlora.adapters import convolution
from packlora.adapters.expert_targets import (
    all_linear_leaves_out,
    as_peft_takes_it,
    is_all_linear,
    parameter_targets,
)
from packlora.adapters.kinds import PARAMETERS, Kind, copied, is_linear, kind_of, why_no_rows
from packlora.config import AdapterConfig
from packlora.config.adapter import DOUBLED
from packlora.errors import InputError, quoted
from packlora.ops.modules import beside_decoder

OF_WEIGHTS = re.compile("pissa.*|olora|loftq")
"""Values of init_lora_weights for which starts.py has the first values."""
MATCH_SECONDS = 10.0
"""For all patterns of an adapter against all names of a model; usual ones take milliseconds."""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """What a job trains on one module, or on one parameter of experts or of a router. rank 0: no low-rank part. base_dropped:
    see ops.lora_linear.types.Segment.

    kind: see kinds.py. start: what A and B begin with, as PEFT's init_lora_weights. tokens: whose rows are trained. stored_at:
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


@dataclass(slots=True)
class AdapterSpec:
    """An adapter of a model: its configuration in PEFT's terms and the modules that it trains something on."""

    peft: LoraConfig
    """With names of modules as its target_modules, see `resolve`."""
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    """By module path in the model, in model order; then those of experts and routers, by the path of the parameter."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of the targets."""

    @property
    def also(self) -> dict[str, str]:
        """By second path of a module in files, where it has one, the first."""
        return {own.also_at: own.stored_at or path for path, own in self.modules.items() if own.also_at is not None}

    @property
    def parameter(self) -> str | None:
        """The first of its targets that is no module, but weights of experts or of a router."""
        return next((path for path, module in self.modules.items() if module.kind in PARAMETERS), None)


def peft_config(adapter: AdapterConfig, base_model: str, revision: str | None) -> LoraConfig:
    """The LoraConfig that PEFT users would write for the adapter; of twice the rank and the same scaling where starts.py needs
    it."""
    ranks, alphas = _factors(adapter.is_doubled, adapter.use_rslora)
    alpha = {key: whole_number(value * alphas) for key, value in adapter.alpha_pattern.items()}
    config = LoraConfig(
        r=adapter.r * ranks,
        lora_alpha=whole_number(adapter.lora_alpha * alphas),
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        target_parameters=adapter.target_parameters,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
        rank_pattern={key: rank * ranks for key, rank in adapter.rank_pattern.items()},
        alpha_pattern=alpha,
        exclude_modules=adapter.exclude_modules,
        layers_to_transform=adapter.layers_to_transform,
        layers_pattern=adapter.layers_pattern,
        modules_to_save=adapter.modules_to_save,
        trainable_token_indices=adapter.trainable_token_indices,
        task_type="CAUSAL_LM",
        base_model_name_or_path=from_everywhere(base_model),
        revision=revision,
    )
    config.init_lora_weights = adapter.init_lora_weights  # of loftq PEFT wants settings
    return config


def from_everywhere(base_model: str) -> str:
    """The name of a base model as any program finds it, whatever folder it is started in: of a folder that is here its absolute
    path."""
    return os.path.abspath(base_model) if os.path.isdir(base_model) else base_model


def as_asked(config: LoraConfig, key: str) -> Any:
    """What a run file says under a key of an adapter of twice the rank."""
    value, (ranks, alphas) = getattr(config, key), _factors(True, config.use_rslora)
    factor = {"r": ranks, "rank_pattern": ranks, "lora_alpha": alphas, "alpha_pattern": alphas}.get(key)
    if factor is None:
        return value
    halves = {
        name: whole_number(one / factor) for name, one in (value if isinstance(value, dict) else {key: value}).items()
    }
    return halves if isinstance(value, dict) else halves[key]


def _factors(doubled: bool, use_rslora: bool) -> tuple[int, float]:
    """Of the ranks and of the alphas, by which an adapter of twice the rank has the same scaling."""
    return (2, math.sqrt(2) if use_rslora else 2) if doubled else (1, 1)


def is_doubled(start: bool | str) -> bool:
    """Whether an adapter that begins so has twice the rank, of which the first half is trained, see starts.py."""
    return re.fullmatch(DOUBLED, str(start)) is not None


def whole_number(number: float) -> Any:
    """PEFT writes whole alphas without a point."""
    return int(number) if float(number).is_integer() else number


def resolve(
    peft: LoraConfig,
    model: PreTrainedModel,
    job: str,
    base_dropped: bool = True,
    twins: Collection[str] = (),
    of_folder: bool = False,
) -> AdapterSpec:
    """Find the layers of the model that the configuration adapts.

    The configuration of the result names them: not every program that loads an adapter knows the shorthand all-linear or
    regular expressions.

    Args:
        base_dropped: DoRA under dropout scales the base product of the dropped inputs, as PEFT does.
        twins: paths of modules and parameters in the model's twin (names.py), which the configuration may name as well.
        of_folder: target_modules may name what the model does not have, as PEFT lets it: the tensors say what is adapted.

    Raises:
        InputError: nothing matches, a named module matches nothing, a match is of no kind that is adapted (kinds.py), PEFT
            would also adapt experts or routers, which are no linear layers, a pattern matches no adapted module or takes
            too long to, bias: all meets a bias that is the output layer's or that no linear layer has, or one module is
            to be trained in two ways.
    """
    every = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    _try_patterns(peft, every, job)
    asked, peft = peft, as_peft_takes_it(peft, model, job)
    if of_folder:
        peft = _without_idle(peft, [*every, *twins])
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    head = model.get_output_embeddings()
    head_names = {name for name, module in linears.items() if module is head}
    parameters = parameter_targets(peft, model, job, twins)
    chosen = {name: name for name in _targets(peft, model, linears, head_names, job, twins)}
    chosen |= {path.rpartition(".")[0]: path for path, found in parameters.items() if found.kind == "linear"}
    of_parameters = {path: found for path, found in parameters.items() if found.kind != "linear"}
    _check_patterns(peft, [*chosen.values(), *of_parameters, *twins], job)
    _check_narrowed(peft, of_parameters, job)
    biased = _biased(peft, model, linears, set(chosen), head_names, job)
    others = other_modules(peft, model, job, twins)
    spec = AdapterSpec(_named(peft, model, set(chosen)))
    for name, module in model.named_modules(remove_duplicate=False):
        if name in others:
            if name in chosen or name in biased:
                raise InputError(
                    f"job {job!r}: {name} is to be trained in two ways: by target_modules or bias, and {others[name].kind}"
                )
            spec.modules[name] = others[name]
        elif name in chosen:
            kind = kind_of(module)
            assert kind is not None
            own = _low_rank(peft, chosen[name], kind, base_dropped, job)
            if kind == "convolution" and (reason := convolution.why_unfit(module, own.rank)):
                raise InputError(
                    f"job {job!r}: target_modules matches {name}, a convolution which {reason}; leave it out"
                )
            spec.modules[name] = replace(own, train_bias=name in biased)
        elif name in biased:
            spec.modules[name] = ModuleSpec(0, 1.0, 0.0, False, True)
    for path, found in of_parameters.items():
        own = _low_rank(peft, path, found.kind, base_dropped, job)
        spec.modules[path] = replace(own, stored_at=found.stored_at)
    spec.notes += _left_out(asked, model, spec, job)
    if idle := _excluding_nothing(peft.exclude_modules or set(), [*every, *twins]):
        spec.notes.append(f"job {job!r}: exclude_modules {_told(idle)} matches nothing in the model")
    if bare := _bare_layers(peft, every):
        spec.notes.append(
            f"job {job!r}: layers_to_transform has {quoted(bare, 120)}, layers in which target_modules matches nothing"
        )
    if peft.bias == "lora_only" and not biased:
        spec.notes.append(f"job {job!r}: bias: lora_only trains no bias, as no adapted layer has one")
    return spec


def _without_idle(peft: LoraConfig, every: Collection[str]) -> LoraConfig:
    """The configuration without names of target_modules that match none of these paths, where others do."""
    if isinstance(peft.target_modules, str):
        return peft
    named = {name for name in peft.target_modules or () if any(_is_named(path, name) for path in every)}
    out = copy.copy(peft)
    out.target_modules = named or peft.target_modules
    return out


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _excluding_nothing(excluded: str | set[str], every: Iterable[str]) -> str | set[str]:
    """Of exclude_modules: an expression, or those names, that match no path."""
    if isinstance(excluded, str):
        return "" if any(re.fullmatch(excluded, path) for path in every) else excluded
    return {name for name in excluded if not any(_is_named(path, name) for path in every)}


def _low_rank(peft: LoraConfig, name: str, kind: Kind, base_dropped: bool, job: str) -> ModuleSpec:
    """name: that patterns of ranks and alphas are held against."""
    rank = peft.rank_pattern.get(get_pattern_key(peft.rank_pattern.keys(), name), peft.r)
    alpha = peft.alpha_pattern.get(get_pattern_key(peft.alpha_pattern.keys(), name), peft.lora_alpha)
    scaling = alpha / (math.sqrt(rank) if peft.use_rslora else rank)
    dropout = 0.0 if kind == "embedding" else peft.lora_dropout
    start = _start(peft, rank, name, kind, job)
    return ModuleSpec(rank, scaling, dropout, peft.use_dora, False, base_dropped, kind, start)


def _left_out(asked: LoraConfig, model: PreTrainedModel, spec: AdapterSpec, job: str) -> list[str]:
    """What to say of matrices that all-linear may be thought to take. asked: before parameters were looked for."""
    if not is_all_linear(asked.target_modules):
        return []
    excluded = [name for name, _ in model.named_modules() if name and _is_excluded(asked, name)]
    left_out = all_linear_leaves_out(model, [*spec.modules, *excluded])
    say = f"job {job!r}: target_modules all-linear leaves out"
    notes = [f"{say} {path}{reason}" for path, reason in left_out.items() if reason is not None]
    if others := [path for path, reason in left_out.items() if reason is None]:
        names = ", ".join(others)
        notes.append(f"{say} {names}, which PEFT does not take; target_parameters takes them by name")
    return notes


def _check_narrowed(peft: LoraConfig, parameters: Iterable[str], job: str) -> None:
    """Raises InputError where keys that narrow target_modules are given for experts or routers: PEFT ignores them."""
    for path in parameters:
        owner = path.rpartition(".")[0]
        if peft.exclude_modules and (_is_excluded(peft, owner) or _is_excluded(peft, path)):
            raise InputError(
                f"job {job!r}: exclude_modules matches {owner}, but PEFT excludes no experts and no routers; name other layers "
                "alone in target_modules, and parameters in target_parameters"
            )
        if peft.layers_to_transform is not None:
            raise InputError(
                f"job {job!r}: layers_to_transform does not go with {path}, experts or a router, which PEFT adapts in all "
                "layers; name parameters by their paths in target_parameters"
            )


def _check_patterns(peft: LoraConfig, adapted: Iterable[str], job: str) -> None:
    names = list(adapted)
    for pattern_key, patterns in (("rank_pattern", peft.rank_pattern), ("alpha_pattern", peft.alpha_pattern)):
        for pattern in patterns:
            if not any(get_pattern_key([pattern], name) == pattern for name in names):
                raise InputError(
                    f"job {job!r}: adapter.{pattern_key} has {quoted(pattern, 300)}, which matches no adapted module"
                )


def _targets(
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
        chosen = {name for name in every.target_modules if matches(every, name)}
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
    matched = {name for name in names if matches(peft, name)}
    leaves = ", ".join(sorted({name.rpartition(".")[2] for name in set(linears) - head_names}))
    if not matched and (narrowing := _narrowed_away(peft, names)):
        raise InputError(f"job {job!r}: {narrowing} leaves nothing of what target_modules {_told(targets)} matches")
    if not matched:
        raise InputError(
            f"job {job!r}: target_modules {_told(targets)} matches nothing in the model; linear layers are {leaves}"
            + _meant(targets, leaves)
        )
    for target in [] if isinstance(targets, str) else sorted(targets or ()):
        if not any(_is_named(name, target) for name in (*names, *twins)):
            near = difflib.get_close_matches(target, leaves.split(", "), 1)
            raise InputError(
                f"job {job!r}: target_modules names {quoted(target, 300)}, which matches nothing in the model; "
                + (f"did you mean {near[0]!r}?" if near else f"linear layers are {leaves}")
            )
    of_images = beside_decoder(model)
    for name in sorted(matched):
        module = model.get_submodule(name)
        kind = kind_of(module)
        found = None if kind is not None else f"of type {type(module).__name__}"
        if isinstance(module, torch.nn.Embedding):
            found = why_no_rows(module)
        if kind == "convolution" and name not in of_images:
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


def check_layer_numbers(peft: LoraConfig, names: Collection[str], where: str) -> None:
    """Raises InputError where layers_to_transform has the number of no layer: PEFT passes over it.

    Args:
        names: of all modules of the model.
        where: whose configuration it is, for messages.
    """
    every = copy.copy(peft)
    every.target_modules = {name.rpartition(".")[2] for name in names}  # the last part of every name matches
    if missing := _bare_layers(every, [name for name in names if name not in every.target_modules]):
        of = f" in lists named {_told(peft.layers_pattern)} (layers_pattern)" if peft.layers_pattern else ""
        raise InputError(
            f"{where}: layers_to_transform has {missing[0]}, and the model has no layer of that number{of}; layers count from 0"
        )


def _bare_layers(peft: LoraConfig, names: Collection[str]) -> list[int]:
    """Numbers of layers_to_transform in whose layers target_modules matches nothing."""
    asked = peft.layers_to_transform
    out = []
    for number in [asked] if isinstance(asked, int) else asked or ():
        own = copy.copy(peft)
        own.layers_to_transform, own.exclude_modules, own.modules_to_save = [number], None, None
        out += [] if any(matches(own, name) for name in names) else [number]
    return out


def _narrowed_away(peft: LoraConfig, names: Iterable[str]) -> str | None:
    """Which key, or which two, leave nothing of what target_modules matches by itself."""
    both = ("layers_to_transform", "exclude_modules")

    def matches_without(*keys: str) -> bool:
        without = copy.copy(peft)
        for key in keys:
            setattr(without, key, None)
        return any(matches(without, name) for name in names)

    alone = [key for key in both if matches_without(key)]
    if not alone and not matches_without(*both):
        return None
    return " with ".join(f"{key} {_told(getattr(peft, key))}" for key in alone or both)


def _told(names: Any) -> str:
    return quoted(sorted(names) if isinstance(names, set) else names, 300)


def _start(peft: LoraConfig, rank: int, name: str, kind: Kind, job: str) -> bool | str:
    """What A and B of a module begin with. PEFT takes null for False."""
    start: Any = peft.init_lora_weights or False
    if is_doubled(start) and rank % 2:
        raise InputError(
            f"job {job!r}: of an adapter that began with {start} half of the ranks are trained, and {name} has {rank}; "
            "init_lora_weights: true trains all of them"
        )
    if start == "orthogonal" and rank % 2:
        raise InputError(f"job {job!r}: init_lora_weights: orthogonal takes even ranks, and {name} has {rank}")
    if start == "orthogonal" and kind in ("experts", "convolution"):
        what = "experts" if kind == "experts" else "convolutions"
        raise InputError(
            f"job {job!r}: init_lora_weights: orthogonal is not for {what}, as {name}; leave one of them out"
        )
    return start  # type: ignore[no-any-return]


def other_modules(
    peft: LoraConfig, model: PreTrainedModel, job: str, twins: Collection[str] = ()
) -> dict[str, ModuleSpec]:
    """What is trained beside low-rank adapters, by path: modules_to_save and trainable_token_indices, which PEFT compares with
    the ends of paths."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, ModuleSpec] = {}
    for name in peft.modules_to_save or ():
        paths = [path for path in modules if path.endswith(name)]
        if not paths and not any(path.endswith(name) for path in twins):
            raise InputError(
                f"job {job!r}: modules_to_save names {quoted(name, 300)}, which matches nothing in the model"
            )
        for path in paths:
            try:
                copied(modules[path])
            except ValueError as error:
                raise InputError(
                    f"job {job!r}: modules_to_save matches {path}, {error}; taken are linear layers, embeddings and norms"
                ) from None
            found[path] = ModuleSpec(0, 1.0, 0.0, False, False, kind="copy")
    if not peft.trainable_token_indices:
        return found
    for path, tokens in _token_rows(peft, model, modules, job).items():
        if path in found:
            raise InputError(
                f"job {job!r}: {path} is in modules_to_save and has trainable_token_indices; give one of them"
            )
        found[path] = ModuleSpec(0, 1.0, 0.0, False, False, kind="tokens" if tokens else "tied", tokens=tokens)
    return found


def _token_rows(
    peft: LoraConfig, model: PreTrainedModel, modules: dict[str, torch.nn.Module], job: str
) -> dict[str, tuple[int, ...]]:
    """By path the tokens whose rows are trained; none for an output layer that has those of the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs = next(path for path, module in modules.items() if module is embedding)
    outputs = next((path for path, module in modules.items() if module is head), None)
    asked: Any = peft.trainable_token_indices
    asked = asked if isinstance(asked, dict) else {inputs.rpartition(".")[2]: asked}
    rows: dict[str, tuple[int, ...]] = {}
    for name, tokens in asked.items():
        paths = [path for path in modules if path.endswith(name)]
        if not paths:
            raise InputError(
                f"job {job!r}: trainable_token_indices names {quoted(name, 300)}, which matches nothing in the model"
            )
        for path in paths:
            module: Any = modules[path]
            plain = type(module) is torch.nn.Linear and module.bias is None
            if not plain and (not isinstance(module, torch.nn.Embedding) or why_no_rows(module)):
                raise InputError(
                    f"job {job!r}: trainable_token_indices matches {path}, of type {type(module).__name__}; taken are "
                    "embeddings and output layers without a bias"
                )
            most = module.weight.shape[0]
            if wrong := [token for token in tokens if not 0 <= token < most]:
                raise InputError(
                    f"job {job!r}: trainable_token_indices has {wrong[0]}, and {path} has rows for tokens 0 to {most - 1}"
                )
            rows[path] = tuple(tokens)
    tied = getattr(model.config, "tie_word_embeddings", False) and outputs is not None and inputs in rows
    if tied and rows.get(outputs or "", rows[inputs]) == rows[inputs]:
        assert outputs is not None
        if getattr(head, "bias", None) is not None:
            raise InputError(
                f"job {job!r}: trainable_token_indices: {outputs}, tied to {inputs}, has a bias; that is not taken"
            )
        rows[outputs] = ()
    return rows


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
    transposed = any(type(model.get_submodule(name)) is Conv1D for name in chosen)
    if not isinstance(peft.target_modules, str) and peft.fan_in_fan_out == transposed:
        return peft
    named = copy.copy(peft)
    named.fan_in_fan_out = transposed
    if not isinstance(peft.target_modules, str):
        return named
    for names in ({path.rpartition(".")[2] for path in chosen}, chosen):
        named.target_modules = set(names)
        if {name for name, _ in model.named_modules() if name and matches(named, name)} == chosen:
            return named
    named.target_modules = peft.target_modules
    return named


def matches(peft: LoraConfig, name: str) -> bool:
    """Whether a configuration adapts the module of a name, by PEFT's own rule."""
    return bool(check_target_module_exists(peft, name)) and not _is_excluded(peft, name)


def _is_excluded(peft: LoraConfig, name: str) -> bool:
    return type(check_target_module_exists(peft, name)).__name__ == "_ExcludedModule"


def _biased(
    peft: LoraConfig, model: PreTrainedModel, linears: dict[str, torch.nn.Linear], chosen: set[str], heads: set[str], job: str
) -> set[str]:  # fmt: skip
    """Layers whose bias is trained. heads: output layers, which see other rows than the tokens."""
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
            raise InputError(f"job {job!r}: bias: all would train {name}, which is {why}; use lora_only")
    if not have:
        raise InputError(f"job {job!r}: bias: all, but the model has no biases; use bias: none")
    return have
