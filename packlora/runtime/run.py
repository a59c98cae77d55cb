"""Training a run: everything from the run file to a loop that is ready, which is trainer.py's.

packlora train run.yaml          or          packlora.train("run.yaml")
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from packlora.adapters.attach import attach
from packlora.adapters.files import load_adapter
from packlora.adapters.kept_outputs import keep_outputs
from packlora.base.fingerprint import fingerprint
from packlora.base.model import Base, load_base
from packlora.config import Run
from packlora.errors import InputError, quoted
from packlora.files import lock_folder, remove_leftovers, write_json
from packlora.plans.cache import PlanCache
from packlora.plans.select import PlanChooser
from packlora.report.events import Note, Subscriber
from packlora.report.metrics import Logs
from packlora.report.progress import Progress
from packlora.report.report import ReportPage
from packlora.result import Result
from packlora.run_file import load_run, run_from
from packlora.runtime import profiler
from packlora.runtime.events import Emitter, name_of
from packlora.runtime.folder import OutputFolder, make_output, unmake_folder
from packlora.runtime.graphs import graphed
from packlora.runtime.job import Job
from packlora.runtime.microbatch import Executor, SingleDevice
from packlora.runtime.prepare import PreparedRun, prepare
from packlora.runtime.profiler import Profile
from packlora.runtime.record import RunRecord, earlier_warnings, run_record
from packlora.runtime.resume import (
    SavedRun,
    check_output,
    check_sent_back,
    left_out_results,
    left_out_steps,
    resume_jobs,
    same_base,
    starting_steps,
)
from packlora.runtime.trainer import Trainer
from packlora.terminal import Activity

FLOAT16_SCALE = 4096.0
"""Losses are multiplied with this before a float16 backward and gradients divided after it, so that small ones survive."""


def train(
    run: Run | Mapping[str, Any] | str | Path,
    *,
    overrides: list[str] | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    resume_from: list[str] | None = None,
    subscribers: Sequence[Subscriber] = (),
) -> Result:
    """Train all jobs of a run.

    Args:
        run: a run file, a dict of the same keys, or a Run. Relative paths in the latter two start at the current folder.
        overrides: dotted.key=value changes to a run file or a dict.
        resume: continue the run in output_dir (a folder without one starts afresh).
        max_steps: stop every job after this many optimizer steps.
        resume_from: go on from these checkpoints instead of the newest: "STEP" for all jobs, "JOB=STEP" for one; step 0 begins
            a job again. What lies beyond is put aside.
        subscribers: functions of one event (packlora.report.events) that hear what the run tells: its steps with their losses,
            evaluations, checkpoints, its end. One that returns Stop(job) ends that job with its adapter as it is, Stop() ends
            the run as SIGTERM does: this is how trackers, searches and stopping rules come in. They are called in the training
            loop, one after the other, after logs and screen; what one raises costs the run a note, and it hears nothing more.

    Raises:
        packlora.InputError: something is wrong with the input; nothing was trained.
        packlora.WriteError: a checkpoint or an adapter cannot be written; what could be saved was.
        OSError: run.json cannot be written; nothing was trained.
        FileNotFoundError: the output folder was deleted or replaced while the run was writing to it.
        MemoryError: out of memory, and there is no smaller microbatch to go on with.
        KeyboardInterrupt: SIGTERM or Ctrl-C came twice; `resume` goes on from the last checkpoints.
    """
    _check_texts("overrides", overrides, "dotted.key=value")
    _check_texts("resume_from", resume_from, "STEP or JOB=STEP")
    if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
        raise InputError(f"max_steps is a number of optimizer steps, at least 1, or None; got {quoted(max_steps)}")
    run = _run_of(run, overrides)
    if resume_from and not resume:
        raise InputError("--from says where to go on, so it needs --resume")
    if run.schedule.padding_multiple != 1:
        raise InputError(
            f"schedule: padding_multiple is {run.schedule.padding_multiple}, but training packs samples without padding, "
            "which no kernel here needs; leave it at 1. `packlora plan` shows what padding would cost"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("started on several processes, but this version trains on one device")
    subscribers = _callable(subscribers)
    output_dir = Path(run.output_dir)
    with unmake_folder(output_dir), contextlib.ExitStack() as held:
        make_output(output_dir)
        held.enter_context(lock_folder(output_dir))  # then look: another run may have just ended there
        saved = check_output(run, resume)
        held.enter_context(deterministic())
        trainer = _set_up(run, saved, max_steps, resume_from)
        progress = held.enter_context(Progress())
        trainer.events.subscribe(progress, *subscribers)
        return trainer.fit()


def _set_up(run: Run, saved: SavedRun | None, max_steps: int | None, resume_from: list[str] | None = None) -> Trainer:
    """Everything before the first step; run.json is the first thing that is written. saved: that of the run to resume."""
    output_dir = Path(run.output_dir)

    # 1. Check everything that can be wrong.
    starts = starting_steps(run, resume_from or [])
    with Activity() as told:
        prepared = prepare(run, max_steps, resumed=saved is not None, told=told)
        check_sent_back(starts, prepared.left_out)

        # 2. Load the base model once and put all adapters on it.
        told(f"loading {run.base_model}")
        base = load_base(run, prepared.tokenizer, prepared.longest_by_job)
        found = fingerprint(base.model, base.path, run.revision)
    if saved is not None:
        same_base(base.path, saved.model.fingerprint, found)
    single, jobs = _attach(prepared, base)

    # 3. Choose the size of microbatches where that is left to us.
    known = _choose_budget(run, prepared, base, single, jobs, saved)
    events = Emitter()
    executor = graphed(run, base, single, jobs, lambda text: events.emit(Note(text)))

    # 4. Continue where checkpoints say, or start.
    record = run_record(prepared, base, jobs, known, saved)
    record["model"]["fingerprint"] = found.model_dump()
    if saved is not None:
        for name in prepared.left_out:
            record["jobs"][name]["steps"] = left_out_steps(run, name, saved, max_steps)
        resume_jobs(output_dir, jobs, saved, starts, record)
    notes: list[str] = record["warnings"]
    record["warnings"] = earlier_warnings(saved, notes) + notes
    remove_leftovers(output_dir)
    write_json(output_dir / "run.json", record)

    # 5. The loop, and who writes files of what it tells.
    folder = OutputFolder(output_dir, record["id"], run.save_total_limit, events)
    left_out = left_out_results(output_dir, prepared.left_out, record)
    trainer = Trainer(run, prepared, base, executor, jobs, known, folder, events, notes, left_out)
    events.subscribe(  # after the trainer, which replaces logs that an interruption has left
        Logs(output_dir, folder.files),
        RunRecord(output_dir, record, executor.plans, folder.files),
        ReportPage(output_dir, folder.files),
    )
    return trainer


def _attach(prepared: PreparedRun, base: Base) -> tuple[SingleDevice, list[Job]]:
    """Put an adapter of each job onto the model."""
    cache = PlanCache(base.device)
    choosers = {ask: PlanChooser(base.device, cache, ask) for ask in dict.fromkeys(prepared.asks.values())}
    attached, adapters = attach(
        base.model,
        {job.config.name: job.spec for job in prepared.jobs},
        {job.config.name: job.data.seed for job in prepared.jobs},
        {path: choosers[ask] for path, ask in prepared.asks.items()},
        base.storage,
    )
    jobs = []
    for item, adapter in zip(prepared.jobs, adapters, strict=True):
        if item.config.adapter.init_from is not None:
            load_adapter(item.config.adapter.init_from, adapter)
        scale = FLOAT16_SCALE if prepared.run.dtype == "float16" else 1.0
        jobs.append(Job(item.config, item.data, item.eval_encoded.samples, adapter, scale))
    if prepared.run.keep_outputs:
        base.kept_outputs = keep_outputs(base.model)
    return SingleDevice(base, attached), jobs


def _choose_budget(
    run: Run, prepared: PreparedRun, base: Base, executor: Executor, jobs: list[Job], saved: SavedRun | None
) -> Profile:
    """What is known of the model on this device; sets the budget where the run file leaves it to the profiler.

    A resumed run keeps the budget that it had. On a CPU, where a larger one brings nothing, it is the usual one.
    """
    if run.max_tokens_per_microbatch != "auto":
        return profiler.profile(run, prepared)
    if saved is not None and saved.config.max_tokens_per_microbatch == "auto":
        prepared.budget = max(saved.schedule.budget, prepared.longest)
        return profiler.profile(run, prepared)
    known = profiler.profile(run, prepared, base, executor, jobs)
    if base.device.type == "cuda":
        prepared.budget = profiler.choose(profiler.predictions(prepared, [known])).budget
    return known


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same bits every time, also on a GPU; put back afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only the attention kernels would stay as they are
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


def _check_texts(name: str, value: Any, form: str) -> None:
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
        raise InputError(f"{name} is a list of texts of the form {form}; got {quoted(value)}")


def _callable(subscribers: Any) -> list[Subscriber]:
    if not isinstance(subscribers, Iterable) or isinstance(subscribers, str | Mapping):
        raise InputError(f"subscribers are a list of functions of one event; got {type(subscribers).__name__}")
    listed = list(subscribers)
    for subscriber in listed:
        if not callable(subscriber):
            raise InputError(f"subscribers are functions of one event; got {type(subscriber).__name__}")
        if any(map(inspect.iscoroutinefunction, (subscriber, type(subscriber).__call__))):
            raise InputError(f"subscribers are called and not awaited; {name_of(subscriber)} is async")
    return listed


def _run_of(run: Run | Mapping[str, Any] | str | Path, overrides: list[str] | None) -> Run:
    if isinstance(run, str | Path):
        return load_run(run, overrides)
    if isinstance(run, Mapping):
        return run_from(run, overrides)
    if not isinstance(run, Run):
        raise InputError(f"a run is the path of a run file, a dict or a packlora.Run; got {type(run).__name__}")
    if overrides:
        raise InputError("overrides change a run file or a dict; change the Run itself")
    return run
