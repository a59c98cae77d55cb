"""Adapters of a model that has a twin: two classes with other names for the same modules (ops/twin.py).

A file has the names of the class that its base model's folder names as its architecture, as programs that serve build that one.
PEFT loads adapters into either class, but looks for names of that class alone; so the tensors are written under the other names
as well. What a configuration says by names chooses the same modules in both classes.

An adapter is read by either names, or both; and by those that its model had in older versions of transformers
(`language_model.model.layers` of LLaVA), which transformers and PEFT rename as well. Written are the names of this version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from packlora.adapters import spec as one_class
from packlora.adapters.kinds import PARAMETERS, PREFIX, owners
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.adapters.targets import patterns_for
from packlora.errors import InputError
from packlora.lora_config import LoraConfig, is_target
from packlora.ops.twin import Twin, twin_of
from packlora.patterns import is_named

NAMED = (
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "target_parameters",
    "trainable_token_indices", "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Keys of a LoraConfig that choose modules by their names."""

Choice = tuple[PreTrainedModel, frozenset[str]]
"""A model, and paths that are to be chosen in it."""


def resolve(peft: LoraConfig, model: PreTrainedModel, job: str, keys: Collection[str] = ()) -> AdapterSpec:
    """Find the layers of the model that the configuration adapts; see spec.resolve.

    Args:
        keys: of the adapter's file, which tell by which of two classes it names its modules; where there are none, by the
            model's, or by its twin's where it matches nothing in the model.

    Raises:
        InputError: as spec.resolve; or it adapts what only the twin has.
    """
    twin, older = twin_of(model), dict[str, str]()
    if keys:
        from packlora.adapters.older_names import by_new_names, first_names, older_names

        older = older_names(keys, [model] if twin is None else [model, twin.model])
        peft = by_new_names(peft, older, NAMED)
    if twin is None:
        found = one_class.resolve(peft, model, job, of_folder=bool(keys))
        found.older = older
        return found
    keys = [*keys, *(PREFIX + path + "." for path in older.values())]
    of_twin = _is_of_twin(peft, keys, model, twin)
    if of_twin:
        found = one_class.resolve(peft, twin.model, job, _paths(model), bool(keys))
        found.modules = dict(_here(path, own, twin, model, job) for path, own in found.modules.items())
    else:
        found = one_class.resolve(peft, model, job, _paths(twin.model), bool(keys))
    found.modules = {path: _with_both(path, own, twin, model, job) for path, own in found.modules.items()}
    found.peft = _for_both(found, model, twin, of_twin)
    found.older = first_names(older, model, twin) if older else older
    return found


def _is_of_twin(peft: LoraConfig, keys: Collection[str], model: PreTrainedModel, twin: Twin) -> bool:
    """Whether a configuration means modules of the twin. Of a file with both names it means those of the text model, which is
    the smaller one, unless the file has others (of a vision tower)."""
    here, there = _names(model), _names(twin.model)
    if keys:
        named = {next((one for one in owners(key) if one in here or one in there), "") for key in keys}
        in_both = [not twin.is_own and twin.there(path) is not None for path in named & (here - there)]
        return bool(named & (there - here)) and all(in_both)
    if isinstance(peft.target_modules, str) and peft.target_modules.lower() == "all-linear":
        return False
    choose = copy.copy(peft)
    choose.modules_to_save = choose.layers_to_transform = choose.exclude_modules = None

    def any_in(names: Iterable[str]) -> bool:
        return any(is_target(choose, name) for name in names if name)

    return bool(peft.target_modules) and not any_in(here) and any_in(there)


def _names(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_modules(remove_duplicate=False)}


def _paths(model: PreTrainedModel) -> set[str]:
    return _names(model) | {name for name, _ in model.named_parameters()}


def _here(path: str, own: ModuleSpec, twin: Twin, model: PreTrainedModel, job: str) -> tuple[str, ModuleSpec]:
    """The model's name of what the twin has at a path, and what is trained there."""
    if (found := twin.here(path)) is None:
        raise InputError(
            f"job {job!r}: the adapter changes {path} of {type(twin.model).__name__}; {type(model).__name__}, which is trained "
            "and run here, has no such module. Leave it out, or fold the adapter in with packlora merge"
        )
    return found, own if own.stored_at is None else replace(own, stored_at=_stored(own, path, found))


def _stored(own: ModuleSpec, path: str, other: str) -> str:
    """Under which path files have the tensors of what is trained at a path, by its other name."""
    if own.stored_at is None:
        return other
    owner, there = (one.rpartition(".")[0] for one in (path, other))
    return there + own.stored_at.removeprefix(owner)


def _with_both(path: str, own: ModuleSpec, twin: Twin, model: PreTrainedModel, job: str) -> ModuleSpec:
    """Names of what is trained at a path, with the names that its tensors have in files."""
    other = twin.there(path)
    if other is None and twin.is_own:
        raise InputError(
            f"job {job!r}: {path} of {type(model).__name__} has no place in {type(twin.model).__name__}, which other programs "
            "build of the base model; leave it out"
        )
    stored, also = own.stored_at or path, None if other is None else _stored(own, path, other)
    if twin.is_own and also is not None:
        stored, also = also, stored
    return replace(own, stored_at=stored, also_at=None if also == stored else also)


# --- a configuration for both classes ----------------------------------------------------------------------------------


def _for_both(found: AdapterSpec, model: PreTrainedModel, twin: Twin, of_twin: bool) -> LoraConfig:
    """The configuration of an adapter so that PEFT finds the same modules in both classes."""
    peft = copy.copy(found.peft)
    low_rank = [path for path, own in found.modules.items() if own.rank and own.kind not in PARAMETERS]
    parameters = [path for path, own in found.modules.items() if own.kind in PARAMETERS]
    copies = [path for path, own in found.modules.items() if own.kind == "copy"]
    if peft.modules_to_save:
        peft.modules_to_save = _chosen(peft.modules_to_save, copies, model, twin, str.endswith)
    if peft.target_parameters:
        peft.target_parameters = _chosen(peft.target_parameters, parameters, model, twin, is_named)
    if isinstance(peft.trainable_token_indices, dict):
        rows = [path for path, own in found.modules.items() if own.kind in ("tokens", "tied")]
        peft.trainable_token_indices = {
            name: tokens
            for asked, tokens in peft.trainable_token_indices.items()
            for name in _chosen(
                [asked], [path for path in rows if path.endswith(asked)] or rows, model, twin, str.endswith
            )
        }
    if low_rank and peft.target_modules:
        _choose_targets(peft, low_rank, model, twin)
    for key, otherwise in (("rank_pattern", peft.r), ("alpha_pattern", peft.lora_alpha)):
        pairs = [(path, twin.there(path) or path) for path in (*low_rank, *parameters)]
        pairs = [(there, here) for here, there in pairs] if of_twin else pairs
        setattr(peft, key, patterns_for(getattr(peft, key), pairs, otherwise))
    return peft


def _both(paths: Sequence[str], model: PreTrainedModel, twin: Twin) -> list[Choice]:
    there = [other for path in paths if (other := twin.there(path)) is not None]
    return [(model, frozenset(paths)), (twin.model, frozenset(there))]


def _candidates(paths: Sequence[str], twin: Twin) -> list[list[str]]:
    """Names for modules, the shorter ones first: what paths of both classes end in, and the paths themselves."""
    pairs = [(path, twin.there(path) or path) for path in paths]
    tails = sorted({_tail(*pair) for pair in pairs})
    return [tails, sorted(paths), sorted({name for pair in pairs for name in pair})]


def _tail(path: str, other: str) -> str:
    same = 0
    parts, others = path.split("."), other.split(".")
    while same < min(len(parts), len(others)) and parts[-1 - same] == others[-1 - same]:
        same += 1
    return ".".join(parts[len(parts) - same :])


def _chosen(
    asked: Collection[str], paths: Sequence[str], model: PreTrainedModel, twin: Twin, fits: Callable[[str, str], bool]
) -> Any:
    """Names that choose these modules or parameters in both classes; as they are where they do. fits: PEFT's comparison of a
    path with a name: of target_parameters is_named, of modules_to_save and trainable_token_indices str.endswith."""
    every = [(_paths(one), wanted) for one, wanted in _both(paths, model, twin)]
    for names in [asked, *_candidates(paths, twin)]:
        if all(
            {path for path in known if any(fits(path, name) for name in names)} == wanted for known, wanted in every
        ):
            return _like(asked, names)
    return _like(asked, _candidates(paths, twin)[-1])


def _like(asked: Collection[str], names: Iterable[str]) -> Collection[str]:
    return set(names) if isinstance(asked, set) else list(names)


def _choose_targets(peft: LoraConfig, paths: Sequence[str], model: PreTrainedModel, twin: Twin) -> None:
    """Let target_modules be names that choose these modules in both classes, without other keys where these are in the way.
    What they choose besides (the q_proj of a vision tower) is excluded."""
    choices = _both(paths, model, twin)

    def chosen(one: PreTrainedModel) -> set[str]:
        return {name for name in _names(one) if name and is_target(peft, name)}

    leaves = sorted({path.rpartition(".")[2] for path in paths})
    own = [] if isinstance(peft.target_modules, str) else [sorted(peft.target_modules or ())]
    names = [*own, leaves, *_candidates(paths, twin)]
    for narrowing in (True, False):
        if not narrowing:
            peft.exclude_modules = peft.layers_to_transform = peft.layers_pattern = None
        for targets in names:
            peft.target_modules = set(targets)
            if all(chosen(one) == wanted for one, wanted in choices):
                return
    for targets in names:
        peft.target_modules, peft.exclude_modules = set(targets), None
        peft.exclude_modules = {name for one, wanted in choices for name in chosen(one) - wanted}
        if all(chosen(one) == wanted for one, wanted in choices):
            return
