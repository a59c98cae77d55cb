"""Words for what is wrong in a run file.

A message names the job, the key, what was found and what is accepted; it may be the nearest known key, or what stands here for
a key of another tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from packlora.config import AdapterConfig, DataConfig, JobConfig, PlansConfig, Run, TrainConfig
from packlora.config.other_tools import OTHER_TOOLS
from packlora.config.section import Section
from packlora.errors import kind_of, quoted, shown

MOST_PROBLEMS = 20
"""Lines of a refusal."""
OF_FORM = {"string_type", "list_type", "dict_type", "int_type", "bool_type", "model_type", "literal_error"}
"""Errors of a value of another form than one that a key takes."""
OTHER_WORDS = {
    "model_type": "input should be a mapping", "dict_type": "input should be a mapping",
    "bool_type": "input should be true or false",
}  # fmt: skip
"""Words for these errors in the place of pydantic's."""
NEAR = 0.65
"""Least likeness of a key to one that may be meant. At 0.5 two thirds of the other keys of TRL, Axolotl and LLaMA-Factory are
like one that means something else, at 0.65 an eighth."""

Loc = tuple[int | str, ...]


def explained(error: ValidationError, tree: Any) -> list[str]:
    """A line for every problem of a run file that was parsed to `tree`."""
    found = [(_plain(item, tree), item) for item in error.errors()]
    # a value that has another form than one of several that a key takes is judged by its own form
    inner = {loc[:depth] for loc, item in found for depth in range(len(loc) + (item["type"] not in OF_FORM))}
    meant: dict[tuple[Loc, int], list[Any]] = {}  # the forms that a key takes are one problem
    for number, (loc, item) in enumerate(found):
        is_of_form = item["type"] in OF_FORM
        if not (is_of_form and loc in inner):
            meant.setdefault((loc, -1 if is_of_form else number), []).append(item)
    lines = [shown(_explain(loc, items, tree), 1000) for (loc, _), items in [*meant.items()][:MOST_PROBLEMS]]
    return lines + [f"and {len(meant) - MOST_PROBLEMS} more"] * (len(meant) > MOST_PROBLEMS)


def _plain(item: Any, tree: Any) -> Loc:
    """Location of an error in the file, without what pydantic adds: names of a union's branches, and marks of bad keys."""
    out: list[int | str] = []
    node = tree
    for number, part in enumerate(item["loc"], 1):
        is_missing = item["type"] == "missing" and number == len(item["loc"])
        if isinstance(part, int) or (isinstance(node, dict) and (part in node or is_missing)):
            out.append(part)
            node = _inside(node, part)
    return tuple(out)


def _inside(node: Any, part: int | str) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None


def _explain(loc: Loc, errors: Sequence[Any], tree: Any) -> str:
    """Format errors of a place as a sentence: where (job by name), what was found, what is accepted."""
    where, error = _where(loc, tree), errors[0]
    kind, found = error["type"], error["input"]
    if kind == "extra_forbidden":
        more = "; patterns of modules go into plans.plan" * (loc[:-1] == ("plans",))
        return f"{where}: {unknown_key(str(loc[-1]), list(_model_at(loc[:-1]).model_fields), more)}"
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{where}: {message}" if where else message
    said = [OTHER_WORDS.get(one["type"], one["msg"][0].lower() + one["msg"][1:]) for one in errors]
    message = ", or ".join([said[0], *(one.removeprefix("input should be ") for one in said[1:])])
    what = kind_of(found) if isinstance(found, (dict, list)) else quoted(found)
    # transformers 5 takes a share there
    more = "; a share of all steps is warmup_ratio" * (loc[-1:] == ("warmup_steps",) and isinstance(found, float))
    return f"{where}: {message}; found {what}{more}".removeprefix(": ")


def _where(loc: Loc, tree: Any) -> str:
    text, node = "", tree
    for part in loc:
        node = _inside(node, part)
        if isinstance(part, int) and text == "jobs":
            name = node.get("name") if isinstance(node, dict) else None
            text = f"job {quoted(name)}: " if isinstance(name, str) else f"job number {part}: "
        elif isinstance(part, int):
            text += f"[{part}]"
        else:
            text += shown(part) if not text or text.endswith(" ") else f".{shown(part)}"
    return text.removesuffix(": ")


def unknown_key(key: str, known: Sequence[str], more: str = "") -> str:
    """Message for an unknown key: what stands for it here, or the nearest known key.

    Args:
        known: keys that are taken in its place.
        more: text for a key that is near to none.
    """
    if instead := OTHER_TOOLS.get(key) or _elsewhere(key):
        return f"unknown key; {instead}"
    near = difflib.get_close_matches(key[:100], known, 1, NEAR)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}{more}"
    return f"unknown key; {hint}"


def _elsewhere(key: str) -> str | None:
    """Hint at the part of the run file where a misplaced key belongs; None for an unknown key."""
    places: dict[str, type[BaseModel]] = {
        "a job's data.": DataConfig, "a job's adapter.": AdapterConfig, "a job's train.": TrainConfig, "a job's ": JobConfig,
        "the run's ": Run, "the run's plans.": PlansConfig,
        "a job's rollout.": next(_models_of(JobConfig.model_fields["rollout"])),
    }  # fmt: skip
    return next((f"see {place}{key}" for place, model in places.items() if key in model.model_fields), None)


def _model_at(loc: Loc) -> type[BaseModel]:
    """The model of the mapping at a location, or of each item of the list there."""
    model: type[BaseModel] = Run
    for part in loc:
        if part in model.model_fields:
            model = next(_models_of(model.model_fields[str(part)]), model)
    return model


def _models_of(field: FieldInfo) -> Iterator[type[BaseModel]]:
    yield from (section.model() for section in field.metadata if isinstance(section, Section))
    kinds = [field.annotation]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
        kinds += get_args(kind)
