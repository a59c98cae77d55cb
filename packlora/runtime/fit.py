"""Settings with which a run fits into the free memory of one GPU: `fit` of the run file.

The choice is by the estimate (estimate.py), before the model is loaded: smaller microbatches first, then gradient
checkpointing, then the embedding and the layers' inputs on the host, then, for `fit: auto`, a base of int8 or nf4. It never
touches a key that is written. The trainer owns what happens where memory runs out in training all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from packlora.base.demo_model import base_path
from packlora.base.device import choose_device
from packlora.base.host_embedding import why_on_device
from packlora.config import Run
from packlora.engine.memory import free_memory, memory_room
from packlora.errors import InputError
from packlora.form import LIGHTER, choices, prepared_form
from packlora.form import chosen as values_of
from packlora.given import given
from packlora.runtime.estimate import by_kernels, memory_parts
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import BUDGETS
from packlora.runtime.profiles import MEASURES, ROOM_SHARE

GIB = 2**30
MICROBATCH = "max_tokens_per_microbatch"
KEEP_SHARE = 0.6
"""Share of a device's memory up to which keep_activations keeps them, where all activations fit twice as well: CUDA graphs hold
them beside microbatches that are not recorded, and are given up where memory runs out."""


def settled(
    prepared: PreparedRun, device: torch.device, again: Callable[[Run], PreparedRun] | None
) -> PreparedRun:  # fmt: skip
    """The run with all that `fit` chooses. again: see fitted; None where an earlier session has chosen."""
    if again is not None:
        prepared = fitted(prepared, device, again)
    keep_activations(prepared, device)
    return prepared


def fitted(prepared: PreparedRun, device: torch.device, again: Callable[[Run], PreparedRun]) -> PreparedRun:
    """The run with the first settings that fit, in the order of what they cost; with the last ones where none does. What was
    chosen, and what is predicted, is in its `fit` and in a warning.

    Args:
        again: prepares the run once more, with another form of the base (form.py).
    """
    room, run = memory_room(device), prepared.run
    known: dict[tuple[Any, ...], PreparedRun] = {(): prepared}
    first: tuple[dict[str, Any], int] | None = None
    refused = ""
    for form, keys in _settings(prepared, device):
        name, own = tuple(form.items()), keys | form
        if name not in known:
            try:
                known[name] = again(run.with_chosen(values_of(form)))
            except InputError as error:  # not on this device, or not beside something else of the run
                refused = f"; {error}"
                continue
        changed = run.model_copy(update={key: own[key] for key in MEASURES})
        taken, out, size = own, known[name], predicted(changed, known[name], own[MICROBATCH])
        first = first or (own, size)
        if size <= ROOM_SHARE * room:
            break
    assert first is not None
    chosen = {key: value for key, value in taken.items() if value != first[0].get(key)}
    less = "" if size <= ROOM_SHARE * room else refused or _told_of_more(prepared, device, room)
    if measures := {key: chosen[key] for key in MEASURES if key in chosen}:
        out.run = out.run.with_chosen(measures)
    out.budget = chosen.get(MICROBATCH, out.budget)
    if chosen:
        out.warnings.append(_why(chosen, first, size, room) + less)
    elif size > ROOM_SHARE * room:
        out.warnings.append(
            f"fit: {_of(size, room)} are needed by the estimate; this may be too much, and nothing is left to choose{less}"
        )
    out.fit = {**chosen, "predicted_bytes": size}
    return out


def keep_activations(prepared: PreparedRun, device: torch.device) -> None:
    """Keep the outputs of norms and gated products for the backward where a GPU has plenty of memory: 1.5 to 3 % less time for
    a fifth more memory, and the same numbers. Not where a measurement chooses the size of microbatches, which is worth more;
    where completions are generated, whose cache takes a share of the free memory; where memory was short before; or where
    nothing may be changed if it runs out."""
    run = prepared.run
    if (
        device.type == "cuda"
        and by_kernels(run)
        and not (run.gradient_checkpointing or run.generates or run.parallel.divided)
        and run.max_tokens_per_microbatch != "auto"
        and prepared.fit.keys() <= {"predicted_bytes"}
        and (run.leaves(MICROBATCH) or (run.leaves("gradient_checkpointing") and can_checkpoint(prepared)))
    ):
        prepared.recompute = False
        parts, room = memory_parts(run, prepared, filled(prepared, prepared.budget)), memory_room(device)
        size = sum(parts.values())
        prepared.recompute = size > KEEP_SHARE * room or size + parts["activations"] > ROOM_SHARE * room
        if not prepared.recompute:
            prepared.fit = {**prepared.fit, "predicted_bytes": size}


def _settings(prepared: PreparedRun, device: torch.device) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings that may be taken: first those of the run file and the defaults, then what costs more and needs less. Each is
    keys of the base's form and the others."""
    run, possible = prepared.run, _possible(prepared, device)
    ways = measures_of(run, {key: own and run.leaves(key) for key, own in possible.items()})
    for form, measures, tokens in product(_forms(prepared), ways, _budgets(prepared)):
        yield form, {MICROBATCH: tokens, **measures}


def _budgets(prepared: PreparedRun) -> list[int]:
    """Tokens of a microbatch that may be taken, the most first."""
    run, budget, longest = prepared.run, prepared.budget, prepared.longest
    if run.leaves(MICROBATCH):
        between = {own for own in BUDGETS if longest < own < budget and filled(prepared, own) == own}
        return sorted({budget, longest} | between, reverse=True)
    return [longest if run.max_tokens_per_microbatch == "auto" else budget]  # of auto larger ones are measured


def measures_of(run: Run, possible: Mapping[str, bool]) -> list[dict[str, bool]]:
    """Values of MEASURES, each with less memory than the one before; first those of the run.

    Args:
        possible: by key, whether it may be made true.
    """
    out: list[dict[str, bool]] = [{key: getattr(run, key) for key in MEASURES}]
    for key in MEASURES:
        needs = key != "activation_offloading" or out[-1]["gradient_checkpointing"]
        if possible[key] and not out[-1][key] and needs:
            out.append(out[-1] | {key: True})
    return out


def _possible(prepared: PreparedRun, device: torch.device) -> dict[str, bool]:
    """Whether the model and the jobs allow each of MEASURES; on a GPU alone the host has memory of its own."""
    checkpoints, apart = can_checkpoint(prepared), device.type == "cuda" and not prepared.run.parallel.divided
    return dict(zip(MEASURES, (checkpoints, apart and _can_offload(prepared), apart and checkpoints), strict=True))


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


def lighter(prepared: PreparedRun, device: torch.device) -> Iterator[tuple[dict[str, Any], PreparedRun]]:
    """The run on each form of the base that `fit: auto` may choose and that can be made here, the largest first. Its sizes are
    what they would be; nothing else of the run is checked against the form."""
    run, encoder = prepared.run.model_copy(update={"fit": "auto"}), prepared.encoder
    if prepared.form is not None or encoder is None or given().model is not None or run.parallel.divided:
        return
    for keys in choices(run, encoder.skeleton.config):
        own = run.model_copy(update=values_of(keys))
        with contextlib.suppress(InputError):
            form = prepared_form(own, encoder.skeleton, base_path(run.base_model), device)
            yield keys, replace(prepared, run=own, form=form)


def no_room(prepared: PreparedRun, said: str, processes: int) -> MemoryError | InputError:
    """Error of a base model that does not fit. said: the device's own words. Nothing refers any more to what was loaded.

    Of several processes it is one that ends all of them (OneProcess.together).
    """
    free_memory(device := choose_device(prepared.run.device))
    short = f"out of memory on {device} while the base model and its adapters are loaded: {said.rstrip('.')}"
    if processes > 1:
        return InputError(short)
    advice = would_fit(prepared, device, prepared.budget, prepared.run.gradient_checkpointing)
    return MemoryError(f"{short}. {advice[0].upper()}{advice[1:]}")


def would_fit(prepared: PreparedRun, device: torch.device, tokens: int, now: Any) -> str:
    """Words for an error: what to do where a microbatch of so many tokens ran out of memory and no key may be changed.

    Args:
        now: value of gradient_checkpointing by now.
    """
    room, run = memory_room(device), prepared.run.model_copy(update={"gradient_checkpointing": now})
    longest, ways = min(prepared.longest, tokens), measures_of(run, _possible(prepared, device))
    remedies = ["lower max_tokens_per_microbatch"] * (longest < tokens)
    remedies += [f"set {key}: true" for key, value in ways[-1].items() if value and not getattr(run, key)]
    budgets = dict.fromkeys((tokens, longest))
    if told := _told_of_measures(prepared, run, room, list(product(ways, budgets))[1:]):
        return f"{' or '.join(remedies)}{told}"
    remedies += [LIGHTER if prepared.form is None else "take a smaller base model"]
    return " or ".join([*remedies, "shorten the samples (data.max_length)"]) + _told_of_codes(prepared, device, room)


def _told_of_more(prepared: PreparedRun, device: torch.device, room: int) -> str:
    """Words on the first settings that are predicted to fit, also against keys that are written, to be added to others."""
    ways, budgets = measures_of(prepared.run, _possible(prepared, device)), (prepared.budget, prepared.longest)
    told = _told_of_measures(prepared, prepared.run, room, list(product(ways, dict.fromkeys(budgets))))
    return told or _told_of_codes(prepared, device, room)


def _told_of_measures(
    prepared: PreparedRun, run: Run, room: int, settings: Sequence[tuple[Mapping[str, bool], int]]
) -> str:
    """Words on the first of some settings, measures and tokens of a microbatch, that is predicted to fit; "" where none is."""
    for how, budget in settings:
        size = predicted(run.model_copy(update=how), prepared, budget)
        if size <= ROOM_SHARE * room:
            keys = words({MICROBATCH: budget} | {key: value for key, value in how.items() if value})
            return f". Predicted to fit, {_of(size, room)}: {keys}; fit: memory takes it where that is left out"
    return ""


def _told_of_codes(prepared: PreparedRun, device: torch.device, room: int) -> str:
    """Words on the first settings that are predicted to fit on a base in codes, to be added to others; "" where none is."""
    possible = _possible(prepared, device)
    for form, own in lighter(prepared, device):
        for how, budget in product(measures_of(own.run, possible), dict.fromkeys((prepared.budget, prepared.longest))):
            size = predicted(own.run.model_copy(update=how), own, budget)
            if size <= ROOM_SHARE * room:
                keys = words({MICROBATCH: budget} | {key: value for key, value in how.items() if value} | form)
                found = f"Predicted to fit, {_of(size, room)}, with other numbers: {keys}"
                return f". {found}; fit: auto takes it where that is left out"
    return ""


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
