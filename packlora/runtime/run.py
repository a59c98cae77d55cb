"""Training a run: everything from the run file to a loop that is ready, which is trainer.py's.

packlora train run.yaml          or          packlora.train("run.yaml")
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from packlora.activity import Activity
from packlora.adapters.attach import attach
from packlora.adapters.files import load_adapter
from packlora.adapters.kept_outputs import keep_outputs
from packlora.adapters.linear import Router
from packlora.base.fingerprint import Fingerprint, fingerprint
from packlora.base.model import Base, load_base
from packlora.config import Run, load_run, run_from
from packlora.data.dataset import configured_steps
from packlora.errors import InputError
from packlora.files import lock_folder, remove_leftovers, write_json
from packlora.result import Result
from packlora.runtime import checkpoint, profiler
from packlora.runtime.job import Job
from packlora.runtime.prepare import Prepared, SavedRun, check_output, make_output, prepare
from packlora.runtime.profiler import Profile
from packlora.runtime.record import earlier_warnings, run_record, start_hash
from packlora.runtime.trainer import Trainer

FLOAT16_SCALE = 4096.0
"""Losses are multiplied with this before a float16 backward and gradients divided after it, so that small ones survive."""


def train(
    run: Run | Mapping[str, Any] | str | Path,
    *,
    overrides: list[str] | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    resume_from: list[str] | None = None,
) -> Result:
    """Train all jobs of a run.

    Args:
        run: a run file, a dict of the same keys, or a Run. Relative paths in the latter two start at the current folder.
        overrides: dotted.key=value changes to a run file or a dict.
        resume: continue the run in output_dir (a folder without one starts afresh).
        max_steps: stop every job after this many optimizer steps.
        resume_from: go on from these checkpoints instead of the newest: "STEP" for all jobs, "JOB=STEP" for one; step 0 begins
            a job again. What lies beyond is put aside.

    Raises:
        InputError: something is wrong with the input; nothing was trained.
    """
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
    with _unmake_folder(Path(run.output_dir)), contextlib.ExitStack() as held:
        make_output(Path(run.output_dir))
        held.enter_context(lock_folder(Path(run.output_dir)))  # then look: another run may have just ended there
        saved = check_output(run, resume)
        held.enter_context(deterministic())
        trainer = _set_up(run, saved, max_steps, resume_from)
        return trainer.fit()


def _set_up(run: Run, saved: SavedRun | None, max_steps: int | None, resume_from: list[str] | None = None) -> Trainer:
    """Everything before the first step; run.json is the first thing that is written. saved: that of the run to resume."""
    output_dir = Path(run.output_dir)

    # 1. Check everything that can be wrong.
    starts = starting_steps(run, resume_from or [])
    with Activity() as told:
        prepared = prepare(run, max_steps, resumed=saved is not None, told=told)
        if lost := sorted(starts.keys() & prepared.left_out.keys()):
            raise InputError(
                f"--from: job {lost[0]!r} cannot be sent back, since {prepared.left_out[lost[0]]}; put that back, or name the "
                "jobs to send back with --from JOB=STEP"
            )

        # 2. Load the base model once and put all adapters on it.
        told(f"loading {run.base_model}")
        base = load_base(run, prepared.tokenizer, prepared.longest_by_job)
        found = fingerprint(base.model, base.path, run.revision)
    if saved is not None:
        _same_base(base.path, saved.model.fingerprint, found)
    router, adapters = attach(
        base.model,
        {job.config.name: job.spec for job in prepared.jobs},
        {job.config.name: job.data.seed for job in prepared.jobs},
    )
    jobs = []
    for item, adapter in zip(prepared.jobs, adapters, strict=True):
        if item.config.adapter.init_from is not None:
            load_adapter(item.config.adapter.init_from, adapter)
        scale = FLOAT16_SCALE if run.dtype == "float16" else 1.0
        jobs.append(Job(item.config, item.data, item.eval_encoded.samples, adapter, scale))
    if run.keep_outputs:
        base.kept_outputs = keep_outputs(base.model)

    # 3. Choose the size of microbatches where that is left to us.
    known = _choose_budget(run, prepared, base, router, jobs, saved)

    # 4. Continue where checkpoints say, or start.
    record = run_record(prepared, base, jobs, known, saved)
    record["model"]["fingerprint"] = found.model_dump()
    if saved is not None:
        for own in [own for own in run.jobs if own.name in prepared.left_out]:
            wanted = configured_steps(own.train, saved.jobs[own.name].samples)
            record["jobs"][own.name]["steps"] = min(wanted, max_steps or wanted)
        _same_data(saved, record)
        record["warnings"] += _restore(output_dir, jobs, saved, starts)
        record["saved"] |= starts
        if starts:  # known before anything is put aside: broken off in between, --resume alone goes on all the same
            write_json(output_dir / "run.json", record)
        record["warnings"] += _put_aside(output_dir, jobs, starts)
    notes: list[str] = record["warnings"]
    record["warnings"] = earlier_warnings(saved, notes) + notes
    remove_leftovers(output_dir)
    write_json(output_dir / "run.json", record)
    return Trainer(run, prepared, base, router, jobs, record, known, notes)


def starting_steps(run: Run, words: list[str]) -> dict[str, int]:
    """The checkpoints to go on from, by job; jobs that are not there go on from their newest.

    Args:
        run: its output_dir holds the checkpoints.
        words: "STEP" goes for every job that has got so far, "JOB=STEP" for one; step 0 begins a job again.

    Raises:
        InputError: a word is neither, or there is no such checkpoint.
    """
    have = {job.name: checkpoint.steps(Path(run.output_dir) / job.name) for job in run.jobs}
    starts: dict[str, int] = {}
    for word in sorted(words, key=lambda word: "=" not in word):  # jobs that are named come first
        name, _, number = word.rpartition("=")
        if not re.fullmatch(r"\d{1,15}", number, re.ASCII):
            raise InputError(f"--from {word!r}: give the step of a checkpoint, or JOB=STEP")
        if name and name not in have:
            raise InputError(f"--from {word!r}: there is no job {name!r}; there are {', '.join(have)}")
        step = int(number)
        asked = [name] if name else [other for other in have if other not in starts]
        there = {other for other in asked if step == 0 or step in have[other]}
        for other in asked:
            if other not in there and (name or not there or max(have[other], default=0) > step):
                listed = ", ".join(map(str, have[other])) or "none"
                raise InputError(
                    f"--from {word!r}: job {other!r} has no checkpoint of step {step}; its checkpoints: {listed}"
                )
        starts |= dict.fromkeys(there, step)
    return starts


def _restore(output_dir: Path, jobs: list[Job], saved: SavedRun, starts: dict[str, int]) -> list[str]:
    """Bring every job to where it goes on from. Returns what the user should know.

    Raises:
        InputError: a checkpoint cannot be used; all of them are named, and nothing was changed.
    """
    notes, problems = [], []
    for job in jobs:
        folder, reached = output_dir / job.name, saved.saved.get(job.name, 0)
        try:
            note = checkpoint.restore(folder, job, saved.id, reached, starts.get(job.name))
            notes += [note] if note else []
            before = saved.jobs[job.name].start_hash
            if job.step == 0 and before is not None and start_hash(job.config) != before:
                problems.append(
                    f"job {job.name!r}: {job.config.adapter.init_from} is not the adapter that the run began with; put that "
                    "one back, or start a new run in another output_dir"
                )
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    return notes


def _put_aside(output_dir: Path, jobs: list[Job], starts: dict[str, int]) -> list[str]:
    """What lies beyond the steps that jobs were sent back to, and what a crash has left. Returns what the user should know."""
    notes = []
    for job in jobs:
        folder = output_dir / job.name
        if job.name in starts and folder.exists():
            aside = checkpoint.go_back(folder, starts[job.name])
            became = f"; what lay beyond is now {', '.join(aside)}" if aside else ""
            notes.append(f"job {job.name!r} goes on from step {starts[job.name]}, as --from says{became}")
        remove_leftovers(folder)
    return notes


def _choose_budget(
    run: Run, prepared: Prepared, base: Base, router: Router, jobs: list[Job], saved: SavedRun | None
) -> Profile:
    """What is known of the model on this device; sets the budget where the run file leaves it to the profiler.

    A resumed run keeps the budget that it had. On a CPU, where a larger one brings nothing, it is the usual one.
    """
    if run.max_tokens_per_microbatch != "auto":
        return profiler.profile(run, prepared)
    if saved is not None and saved.config.max_tokens_per_microbatch == "auto":
        prepared.budget = max(saved.schedule.budget, prepared.longest)
        return profiler.profile(run, prepared)
    known = profiler.profile(run, prepared, base, router, jobs)
    if base.device.type == "cuda":
        prepared.budget = profiler.choose(profiler.predictions(prepared, [known])).budget
    return known


def _same_base(path: str, before: Fingerprint, now: Fingerprint) -> None:
    """A run goes on only on the base model that it began with."""
    changed = [
        name
        for name, same in (("weights", before.weights == now.weights), ("config.json", before.config == now.config))
        if not same
    ]
    if changed:
        raise InputError(
            f"base_model {path}: this is not the model that the run began with, its {' and '.join(changed)} changed; put that "
            "model back, or start a new run in another output_dir"
        )


def _same_data(saved: SavedRun, record: dict[str, Any]) -> None:
    """A run goes on only with the samples that it began with."""
    for name, now in record["jobs"].items():
        before = saved.jobs[name]
        if before.data_hash != now["data_hash"]:
            raise InputError(
                f"job {name!r}: its data has changed since the run began ({before.samples} training and "
                f"{before.eval_samples} held-out samples then, {now['samples']} and {now['eval_samples']} now)"
            )


@contextlib.contextmanager
def _unmake_folder(folder: Path) -> Iterator[None]:
    """Bad input leaves no trace: an output folder that was made for this run goes again if nothing was written to it."""
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        yield
    except InputError:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


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
