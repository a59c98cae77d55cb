"""Steps and microbatches of a run that a test watches or spoils."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from packlora.engine import engine
from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Engine, StepDone
from packlora.parallel.alone import ALONE
from packlora.runtime.job import Job

Change = Callable[[Job, Callable[[], torch.Tensor]], torch.Tensor]


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Call `change` in the place of each step of a job that trains, with the job and a function that takes the step. Both
    return AdapterState.step's numbers."""
    jobs: dict[int, Job] = {}
    next_step, step = Job.next_step, AdapterState.step

    def noted(job: Job) -> Any:
        jobs[id(job.state)] = job
        return next_step(job)

    monkeypatch.setattr(Job, "next_step", noted)
    monkeypatch.setattr(AdapterState, "step", lambda state, *args: change(jobs[id(state)], lambda: step(state, *args)))


def before_steps(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Job], None]) -> None:
    """Call `spoil` before each step of a job that trains."""

    def changed(job: Job, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        spoil(job)
        return step()

    change_steps(monkeypatch, changed)


def after_microbatch(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], None]) -> None:
    """Call `do` after the number-th microbatch of a run on one device, before the steps that it completes."""
    original, seen = engine.run_microbatch, 0

    def run(*args: Any) -> Any:
        nonlocal seen
        result = original(*args)
        seen += 1
        if seen == number:
            do()
        return result

    monkeypatch.setattr(engine, "run_microbatch", run)


def terminate() -> None:
    """The signal that asks a run to stop."""
    signal.raise_signal(signal.SIGTERM)


def crash() -> None:
    raise RuntimeError("crash")


def take_steps(jobs: Sequence[Job], meanwhile: Callable[[], None] = lambda: None) -> list[StepDone]:
    """Steps of jobs whose global batches are complete, on one device, as the training loop takes them."""
    own: Any = Engine(None, ALONE, None)  # type: ignore[arg-type]
    own.follow({job.adapter.number: job.state for job in jobs})
    by_number, out = {job.adapter.number: job for job in jobs}, []
    for event in own.take_steps([job.next_step() for job in jobs], meanwhile):
        job = by_number[event.adapter]
        if isinstance(event, StepDone):
            out.append(event)
            job.stepped(event, 0.0, 0.0)
        else:
            job.confirm(event)
    return out
