"""Names that modules had in older versions of transformers, in the files of adapters (`language_model.model.layers` of LLaVA).

transformers renames the keys of weight files by mappings of each class; here keys of adapters go by the same.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel

from packlora.adapters.kinds import LOW_RANK, PREFIX, every_kind, suffixes
from packlora.adapters.targets import patterns_for
from packlora.lora_config import LoraConfig, is_target
from packlora.ops.twin import Twin
from packlora.patterns import pattern_key
from packlora.renaming import renamed

LEAVES = ("weight", "bias", "gate_up_proj", "down_proj")
"""Parameters by which a module's older name is known."""
_END = re.compile(
    r"(\.base_layer)*\.("
    + "|".join(re.escape(end) for own in (LOW_RANK, *map(suffixes, every_kind())) for end in own.values())
    + r")(\.weight)?$"
)


def module_of(key: str) -> str:
    """The path of the module whose tensor a key in the files of PEFT names."""
    return _END.sub("", key.removeprefix(PREFIX))


def older_names(keys: Iterable[str], models: Sequence[PreTrainedModel]) -> dict[str, str]:
    """Paths of modules in the keys of a file that no model has, with those that transformers makes of them for one."""
    there = {name for model in models for name, _ in model.named_modules(remove_duplicate=False)}
    found: dict[str, str] = {}
    for model in models:
        old = {module_of(key) for key in keys} - there - found.keys()
        names, _, _ = renamed(model, model.state_dict(), [f"{path}.{leaf}" for path in sorted(old) for leaf in LEAVES])
        found |= {key.rpartition(".")[0]: name.rpartition(".")[0] for name, key in names.items()}
    return found


def by_new_names(peft: LoraConfig, older: Mapping[str, str], keys: Iterable[str]) -> LoraConfig:
    """A configuration that may name modules by older paths, by those of this version. keys: that choose modules by names."""
    if not older:
        return peft
    new = copy.copy(peft)
    if isinstance(peft.target_modules, str):
        only_old = not any(is_target(peft, path) for path in older.values())
        new.target_modules = (
            {older[path] for path in older if is_target(peft, path)} if only_old else peft.target_modules
        )
    for key in keys:
        value = getattr(peft, key)
        if isinstance(value, list | set):
            setattr(new, key, type(value)(older.get(one, one) for one in value))
        elif isinstance(value, dict):
            setattr(new, key, {older.get(one, one): said for one, said in value.items()})
    for key, otherwise in (("rank_pattern", peft.r), ("alpha_pattern", peft.lora_alpha)):
        every = patterns_for(getattr(peft, key), older.items(), otherwise)
        used = {one for one in every if any(pattern_key([one], path) == one for path in older.values())}
        setattr(new, key, {one: said for one, said in every.items() if one in used})
    return new


def first_names(older: Mapping[str, str], model: PreTrainedModel, twin: Twin) -> dict[str, str]:
    """Map each older path to the first of its module's two paths in files, where this version's path is either one."""
    here = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def first(path: str) -> str:
        if twin.is_own:
            return twin.there(path) or path
        return path if path in here else twin.here(path) or path

    return {old: first(path) for old, path in older.items()}
