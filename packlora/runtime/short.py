"""Memory that runs out while a run trains: it goes on with less, or ends and says what would fit."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, NoReturn

import torch

from packlora.base.model import Base
from packlora.base.packing import checkpoint_layers
from packlora.config import Run
from packlora.engine.memory import free_memory
from packlora.errors import InputError, WriteError, reason_of
from packlora.events import MemoryRanOut
from packlora.runtime.fit import would_fit
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import profile_key
from packlora.runtime.profiles import Point, ProfileCache

if TYPE_CHECKING:
    from packlora.runtime.trainer import Trainer


def go_on_with_less(trainer: Trainer, tokens: int) -> None:
    """After a microbatch of so many tokens did not fit: nothing of the present global batches is kept. What follows is planned
    in smaller microbatches, or, where these hold one sample each, with gradient checkpointing. All processes decide alike."""
    budget, base = trainer.budget, trainer.base
    for job in trainer.jobs:
        job.discard()
    trainer.tally.began.clear()
    before, taken = budget.tokens, None
    if budget.can_lower(tokens):
        budget.tokens = budget.below(tokens)
    else:
        taken = budget.measures.pop(0)
        checkpoint_layers(base.model)
        trainer.executor.checkpointed()
    free_memory(base.device)
    remember_failure(trainer.run, trainer.prepared, base, tokens)
    trainer.events.emit(MemoryRanOut(tokens, before, budget.tokens, taken))


def remember_failure(run: Run, prepared: PreparedRun, base: Base, tokens: int) -> None:
    """A microbatch ran out of memory while training: the next run of this kind will not try as many tokens."""
    cache, key = ProfileCache(base.device), profile_key(run, prepared, base)
    points = [point for point in cache.get(key) if point.tokens < tokens]
    if points:
        with contextlib.suppress(OSError):
            cache.put(key, [*points, Point(tokens, tokens, None, None)])


def advice(run: Run, prepared: PreparedRun, base: Base, tokens: int, now: bool | str) -> str:
    """Words on what to do where a microbatch of so many tokens did not fit. now: value of gradient_checkpointing by now."""
    fits = would_fit(prepared, base.device, tokens, now)
    if (
        not base.storage.is_whole
        and base.device.type == "cuda"
        and base.storage.can_record
        and run.cuda_graphs is not False
    ):
        return f"set cuda_graphs: false, as graphs keep memory of their own; or {fits}"
    return fits


def raise_with(kept: str, error: Exception, trainer: Trainer) -> NoReturn:
    """Raise the error of a run that ends, which says what was saved. Memory that is used up is a MemoryError, whoever says it.
    An error that was not foreseen stays itself, with a note."""
    said = f"Kept: {kept}. Then continue with --resume"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        words = (
            reason_of(error)
            if isinstance(error, MemoryError)
            else _outside(error, trainer.prepared, trainer.base.device)
        )
        raise MemoryError(f"{words}. {said}") from error
    kind = next((own for own in (WriteError, InputError, OSError) if isinstance(error, own)), None)
    if kind is not None:
        raise kind(f"{error}. {said}") from error
    error.add_note(said)
    raise error


def _outside(error: Exception, prepared: PreparedRun, device: torch.device) -> str:
    """Words on memory that ran out elsewhere than in a microbatch: neither a smaller one nor checkpointing mends that."""
    asked = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
    reason = asked[0][0].lower() + asked[0][1:] if asked else str(error).partition(". ")[0].rstrip(".")
    words = (
        f"out of memory on {device} outside of a microbatch ({reason}); lower adapter.r or train fewer jobs at a time"
    )
    with contextlib.suppress(Exception):  # what was kept is said whatever else fails
        words += f", or {would_fit(prepared, device, prepared.longest, True)}"
    return words
