"""Settings with which a run fits into the free memory of one GPU: `fit` of the run file.

The choice is by the estimate (estimate.py), before the model is loaded: smaller microbatches first, then gradient
checkpointing, then the embedding and the layers' inputs on the host, then, for `fit: auto`, a base of int8 or nf4. It never
touches a key that is written. The trainer owns what happens where memory runs out in training all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from packlora.base.host_embedding import why_on_device
from packlora.config import Run
from packlora.engine.memory import memory_room
from packlora.errors import InputError
from packlora.form import LIGHTER, choices
from packlora.form import chosen as values_of
from packlora.given import given
from packlora.runtime.estimate import memory_parts
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import BUDGETS
from packlora.runtime.profiles import MEASURES, ROOM_SHARE

GIB = 2**30
MICROBATCH = "max_tokens_per_microbatch"


def fitted(prepared: PreparedRun, device: torch.device, again: Callable[[Run], PreparedRun]) -> PreparedRun:
    """The run with the first settings that fit, in the order of what they cost; with the last ones where none does. What was
    chosen, and what is predicted, is in its `fit` and in a warning.

    Args:
        again: prepares the run once more, with another form of the base (form.py).
    """
    room, run = memory_room(device), prepared.run
    known: dict[tuple[Any, ...], PreparedRun] = {(): prepared}
    first: tuple[dict[str, Any], int] | None = None
    for form, keys in _settings(prepared):
        name, own = tuple(form.items()), keys | form
        if name not in known:
            try:
                known[name] = again(run.with_chosen(values_of(form)))
            except InputError:  # not on this device, or not beside something else of the run
                continue
        changed = run.model_copy(update={key: own[key] for key in MEASURES})
        taken, out, size = own, known[name], predicted(changed, known[name], own[MICROBATCH])
        first = first or (own, size)
        if size <= ROOM_SHARE * room:
            break
    assert first is not None
    chosen = {key: value for key, value in taken.items() if value != first[0].get(key)}
    if measures := {key: chosen[key] for key in MEASURES if key in chosen}:
        out.run = out.run.with_chosen(measures)
    out.budget = chosen.get(MICROBATCH, out.budget)
    if chosen:
        out.warnings.append(_why(chosen, first, size, room))
    elif size > ROOM_SHARE * room:
        out.warnings.append(
            f"fit: {_of(size, room)} are needed by the estimate; this may be too much, and nothing is left to choose"
        )
    out.fit = {**chosen, "predicted_bytes": size}
    return out


def _settings(prepared: PreparedRun) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings that may be taken: first those of the run file and the defaults, then what costs more and needs less. Each is
    keys of the base's form and the others."""
    run, budget, longest = prepared.run, prepared.budget, prepared.longest
    budgets = [budget]
    if run.leaves(MICROBATCH):
        between = {own for own in BUDGETS if longest < own < budget and filled(prepared, own) == own}
        budgets = sorted({budget, longest} | between, reverse=True)
    elif run.max_tokens_per_microbatch == "auto":
        budgets = [longest]  # larger ones are measured
    for form, measures, tokens in product(_forms(prepared), measures_of(run, _possible(prepared)), budgets):
        yield form, {MICROBATCH: tokens, **measures}


def measures_of(run: Run, possible: Mapping[str, bool]) -> list[dict[str, bool]]:
    """Values of MEASURES that may be taken, each with less memory than the one before; first those of the run.

    Args:
        possible: by key, whether the model and the jobs allow it.
    """
    out: list[dict[str, bool]] = [{key: getattr(run, key) for key in MEASURES}]
    for key in MEASURES:
        needs = key != "activation_offloading" or out[-1]["gradient_checkpointing"]
        if possible[key] and run.leaves(key) and not out[-1][key] and needs:
            out.append(out[-1] | {key: True})
    return out


def _possible(prepared: PreparedRun) -> dict[str, bool]:
    checkpoints = can_checkpoint(prepared)
    return dict(zip(MEASURES, (checkpoints, _can_offload(prepared), checkpoints), strict=True))


def can_checkpoint(prepared: PreparedRun) -> bool:
    """Whether the layers of the base model can be computed again in the backward."""
    return prepared.encoder is None or bool(prepared.encoder.skeleton.supports_gradient_checkpointing)


def _can_offload(prepared: PreparedRun) -> bool:
    """Whether the embedding may lie on the host. A model that was handed over keeps its own all the same."""
    if prepared.encoder is None or given().model is not None:
        return False
    return (
        why_on_device(prepared.encoder.skeleton, {path for job in prepared.jobs for path in job.spec.modules}) is None
    )


def _forms(prepared: PreparedRun) -> list[dict[str, Any]]:
    """Forms of the base that may be taken, as keys of the run: first its own. A model that was handed over keeps it."""
    if prepared.run.fit != "auto" or prepared.encoder is None or given().model is not None:
        return [{}]
    return [{}, *choices(prepared.run, prepared.encoder.skeleton.config)]


def predicted(run: Run, prepared: PreparedRun, tokens: int) -> int:
    """Bytes at the peak of a microbatch of so many tokens, or of all samples where they have fewer."""
    return sum(memory_parts(run, prepared, filled(prepared, tokens)).values())


def filled(prepared: PreparedRun, tokens: int) -> int:
    """Most tokens that the samples can fill in a microbatch of at most so many: whole samples, where all have one length."""
    if any(job.most for job in prepared.jobs):  # there are streams, of which the first samples alone are known
        return tokens
    lengths = [job.data.planned.lengths for job in prepared.jobs]
    alike = {int(end) for own in lengths for end in (own.min(), own.max())}
    if len(alike) == 1:
        tokens = max(1, tokens // (length := alike.pop())) * length
    return min(tokens, sum(int(own.sum()) for own in lengths))


def would_fit(prepared: PreparedRun, device: torch.device, tokens: int, now: Any) -> str:
    """Words for an error: what to do where a microbatch of so many tokens ran out of memory and no key may be changed.

    Args:
        now: value of gradient_checkpointing by now.
    """
    room, run, longest = memory_room(device), prepared.run, prepared.longest
    remedies = ["lower max_tokens_per_microbatch"] * (longest < tokens)
    remedies += ["set gradient_checkpointing: true"] * (now is False and can_checkpoint(prepared))
    budgets = [tokens, longest] if longest < tokens else [tokens]
    ways = [now, True] if now is False and can_checkpoint(prepared) else [now]
    for how, budget in product(ways, budgets):
        if (how, budget) == (now, tokens):
            continue
        size = predicted(run.model_copy(update={"gradient_checkpointing": how}), prepared, budget)
        if size <= ROOM_SHARE * room:
            own = words({MICROBATCH: budget, "gradient_checkpointing": how})
            fits = f"Predicted to fit, {_of(size, room)}: {own}; fit: memory takes it where that is left out"
            return f"{' or '.join(remedies)}. {fits}"
    remedies += ["set offload_embedding: true"] * (not run.offload_embedding and _can_offload(prepared))
    remedies.append(LIGHTER if prepared.form is None else "take a smaller base model")
    return " or ".join([*remedies, "shorten the samples (data.max_length)"])


# --- words -----------------------------------------------------------------------------------------------------------------


def words(own: Mapping[str, Any]) -> str:
    """Settings as they stand in a run file."""
    shown = {
        key: str(value).lower() if isinstance(value, bool) else value for key, value in own.items() if value is not None
    }
    return ", ".join(f"{key}: {value}" for key, value in shown.items())


def _of(size: int, room: int) -> str:
    return f"{size / GIB:.1f} of {ROOM_SHARE * room / GIB:.1f} GiB"


def _why(chosen: Mapping[str, Any], first: tuple[Mapping[str, Any], int], size: int, room: int) -> str:
    same = chosen.keys() <= {MICROBATCH, *MEASURES}
    cost = "no number changes" if same else "the base is rounded, so numbers change"
    more = "" if size <= ROOM_SHARE * room else "; this may be too much, and nothing else is left to choose"
    return (
        f"fit: {words(chosen)}, which needs {_of(size, room)} by the estimate, since {words(first[0])} needs "
        f"{first[1] / GIB:.1f}; {cost}{more}"
    )
