"""Training a run: everything from the run file to a loop that is ready, which is trainer.py's.

packlora train run.yaml          or          packlora.train("run.yaml")
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from packlora.changes import check
from packlora.config import Run
from packlora.data.reader import Reader
from packlora.errors import InputError, quoted
from packlora.events import Subscriber
from packlora.files import lock_folder
from packlora.parallel.alone import OneProcess
from packlora.parallel.start import started
from packlora.result import Result
from packlora.run_file import load_run, run_from
from packlora.runtime.events import name_of
from packlora.runtime.folder import make_output, unmake_folder
from packlora.runtime.session import Session


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
        subscribers: functions of one event (packlora.events) that hear what the run tells: its steps with their losses,
            evaluations, checkpoints, its end. One that returns Stop(job) ends that job with its adapter as it is, Stop() ends
            the run as SIGTERM does: this is how trackers, searches and stopping rules come in. They are called in the training
            loop, one after the other, after logs and screen; what one raises costs the run a note, and it hears nothing more.

    Raises:
        packlora.InputError: something is wrong with the input; nothing was trained. Of what is read while jobs train, a stream
            that cannot be read any more: what could be saved was.
        packlora.ProcessError: another process of the run failed or does not answer; `resume` goes on from the last checkpoints.
        packlora.WriteError: a checkpoint or an adapter cannot be written; what could be saved was.
        OSError: run.json cannot be written, and nothing was trained; or the system failed in the middle, and what could be
            saved was, as after any other error: a note of it says what was kept.
        FileNotFoundError: the output folder was deleted or replaced while the run was writing to it.
        MemoryError: out of memory, and nothing smaller is left to go on with, or no room for a sweep's only candidate;
            what could be saved was.
        KeyboardInterrupt: SIGTERM or Ctrl-C came twice; `resume` goes on from the last checkpoints.
    """
    return train_read(Reader(), run, overrides, resume, max_steps, resume_from, subscribers)


def train_read(
    reader: Reader,
    run: Run | Mapping[str, Any] | str | Path,
    overrides: list[str] | None,
    resume: bool,
    max_steps: int | None,
    resume_from: list[str] | None,
    subscribers: Sequence[Subscriber] = (),
    last: Callable[[Result], None] = lambda result: None,
) -> Result:
    """`train` of a run whose rows a reader may have read already, as the command does before it loads libraries. `last` hears
    how the run ended before any of its processes ends: torchrun ends all others once one has ended with an exit code."""
    _check_texts("overrides", overrides, "dotted.key=value")
    _check_texts("resume_from", resume_from, "STEP or JOB=STEP")
    if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
        raise InputError(f"max_steps is a number of optimizer steps, at least 1, or None; got {quoted(max_steps)}")
    subscribers = _callable(subscribers)
    lacking = InputError("--from says where to go on, so it needs --resume") if resume_from and not resume else None
    read = lacking or _run_or_why(run, overrides)
    with started(joining=None if isinstance(read, InputError) else read.parallel.timeout_s) as mesh:
        asked = mesh.together(lambda: _checked(read, mesh, max_steps))
        mesh.timeout = asked.parallel.timeout_s
        session = Session(asked, mesh, resume or mesh.restarted, max_steps, resume_from or [], reader)
        mesh.same(session.must_be_the_same())
        with contextlib.ExitStack() as held:
            mesh.together(lambda: held.enter_context(_output_folder(Path(asked.output_dir))) if mesh.is_first else None)
            held.enter_context(deterministic())
            held.callback(session.release)
            result = session.train(subscribers)
            last(result)
            return result


@contextlib.contextmanager
def _output_folder(path: Path) -> Iterator[None]:
    """Make the output folder, for this run alone."""
    with unmake_folder(path):
        make_output(path)
        with lock_folder(path):
            yield


def _checked(run: Run | InputError, mesh: OneProcess, max_steps: int | None) -> Run:
    if isinstance(run, InputError):
        raise run
    run.parallel.check(mesh.size)
    if run.trackers:
        from packlora.report.trackers import check_trackers

        check_trackers(run.trackers)
    check(run, mesh.size, max_steps)
    if mesh.size > 1 and run.device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device: {run.device!r} is one device, but {mesh.size} processes were started; use auto")
    if mesh.no_gpu and run.device != "cpu":
        raise InputError(mesh.no_gpu)
    return run


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same bits every time, also on a GPU; put back afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only torch's own attention would stay as it is
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


def _run_or_why(run: Run | Mapping[str, Any] | str | Path, overrides: list[str] | None) -> Run | InputError:
    """The run, or what is wrong with it, which is said when the other processes are there."""
    try:
        return _run_of(run, overrides)
    except InputError as error:
        return error


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
