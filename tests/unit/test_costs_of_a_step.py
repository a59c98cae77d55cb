"""What a step and a save point cost does not grow with the jobs beside them, nor with the length of a run. Work is counted in
bytecodes, calls and lines, never in seconds."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_progress import began, job, stepped

from packlora.config import Run
from packlora.engine.engine import Confirmed, Done, Engine, Slot, Step, StepDone
from packlora.engine.passes import MicrobatchResult
from packlora.events import CheckpointBegins, Evaluated, RunBegan, SavePointReached
from packlora.ops.lora_linear import prepared
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.parallel.alone import ALONE, Alone
from packlora.report.metrics import METRICS, BestEffort, Logs
from packlora.report.progress import Progress
from packlora.report.screen import Screen
from packlora.report.trackers import Tracker
from packlora.runtime.evaluate import Evaluator
from packlora.runtime.events import Emitter, StopRequest
from packlora.runtime.flow import Flow
from packlora.runtime.sampling import Sampler
from packlora.runtime.stream import Stream
from packlora.runtime.tally import Tally
from packlora.runtime.team import Team
from packlora.runtime.trainer import Trainer
from packlora.runtime.windows import Plan
from packlora.schedule.types import Microbatch, Placed
from packlora.sweep.candidates import Sweep, Trial

FEW, MANY = 5, 30


def work(run: Callable[[], object]) -> int:
    """Bytecodes that Python runs in a call, the second time that it is made."""
    count = 0

    def traced(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return traced

    run()
    before = sys.gettrace()
    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def a_job(number: int, step: int = 1) -> Any:
    """What the loop looks at of a job: it is evaluated every second step and takes nine."""
    train = SimpleNamespace(eval_steps=2, eval_on_start=True)
    out = mock.MagicMock(eval_samples=[], prompts=[], status="running")
    out.name, out.step, out.joined = f"job-{number}", step, 0
    out.config.train, out.data.num_steps, out.adapter.number = train, 9, number
    out.learning.lacks_estimate.return_value = False
    out.is_due.return_value = True
    out.next_step.return_value = Step(number, 1.0)
    out.state.step.return_value = torch.ones(4, dtype=torch.float64)
    out.state.has_gradient, out.state.adapter.number = True, number
    out.log_history = [
        {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": 4, "seconds": 1.0, "elapsed": 1.0}
    ]
    out.log_history[0]["step"] = step
    out.confirm.return_value = None
    return out


def trainer_of(jobs: list[Any], save_every: int = 1, executor: Any = None, group: Any = ALONE) -> Any:
    """The loop, without a model or files."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer.jobs, trainer.by_name, trainer.by_number = jobs, {}, {}
    trainer.run, trainer.folder = SimpleNamespace(save_every=save_every, eval_every=0), mock.MagicMock()
    trainer.events, trainer.flow, trainer.members = Emitter(), Flow(), None
    trainer.team = Team(group, trainer.events.stop, jobs)
    trainer.stop = trainer.team.stop
    trainer.evaluator = Evaluator(SimpleNamespace(over=None), (), 0)  # type: ignore[arg-type]
    budget = mock.MagicMock(tokens=9, device=torch.device("cpu"))
    budget.attempt = lambda tokens, compute, **how: compute()
    trainer.engine = Engine(executor, group, budget)
    trainer._follow()
    trainer.tally = Tally(trainer.by_name, budget, mock.MagicMock(), 0, lambda: 0.0, trainer.flow)
    return trainer


def test_a_quiet_moment_looks_at_the_jobs_alone_for_which_something_is_due() -> None:
    costs = []
    for count in (FEW, MANY):
        jobs = [a_job(number) for number in range(count)]
        trainer = trainer_of(jobs)
        costs.append(work(lambda trainer=trainer, jobs=jobs: trainer._after_steps([jobs[1]])))  # type: ignore[misc]
        assert [call.args[0] for call in trainer.folder.save_checkpoint.call_args_list] == [jobs[1]] * 2
    assert costs[0] == costs[1]


def test_a_job_is_saved_once_that_has_stepped_several_times() -> None:
    job = a_job(0)
    trainer = trainer_of([job], save_every=4)
    stream: Any = SimpleNamespace(waiting={}, is_ending=False)
    for job.step in (3, 4):
        trainer.tally.began[job.name] = 0.0
        trainer._take(Done(Slot(), (StepDone(0, 1.0, 1.0, torch.ones(1)),)), stream)
        trainer._take(Done(Slot(), (Confirmed(0, 1.0, True),)), stream)
    assert stream.waiting == {job.name: job}
    trainer._after_steps(list(stream.waiting.values()))
    trainer.folder.save_checkpoint.assert_called_once_with(job)


def test_a_microbatch_and_its_step_cost_the_same_beside_many_jobs() -> None:
    costs = []
    for count in (FEW, MANY):
        jobs, executor = [a_job(number) for number in range(count)], mock.MagicMock()
        executor.backward.return_value = MicrobatchResult({1: torch.ones(1)}, {1: 4}, {1: 1}, torch.ones(4))
        trainer = trainer_of(jobs, 0, executor)
        window: Any = SimpleNamespace(
            first_round=0, num_rounds=1, microbatches=[Microbatch((Placed("job-1", 1, 0, 4),), (("job-1", 1),))]
        )
        parts = (trainer.by_name, trainer.team, 9, trainer.evaluator, trainer.tally)

        def run_once(trainer: Any = trainer, parts: Any = parts, window: Any = window) -> None:
            stream = Stream(Plan(iter([window]), None), *parts)
            steps = [done for done in trainer.engine.run(stream) if done.events or trainer._take(done, stream)]
            assert len(steps) == 1
            trainer._take(steps[0], stream)

        costs.append(work(run_once))
        jobs[1].stepped.assert_called()
    assert costs[0] == costs[1]


def test_processes_agree_on_as_many_numbers_beside_many_jobs() -> None:
    class Two(Alone):
        processes = 2

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def most(self, numbers: Any) -> list[int]:
            self.sizes.append(len(numbers))
            return list(numbers)

    told = []
    for count in (FEW, MANY):
        asked, group = StopRequest(), Two()
        team = Team(group, asked, [a_job(number) for number in range(count)])
        for _ in range(3):
            team.agree()
        told.append(list(group.sizes))
        asked.jobs["job-3"] = "a callback"
        team.agree()
        assert team.stop.jobs == {"job-3": "a callback"} and asked.jobs == {}
        team.agree()
        assert group.sizes == [3, 3, 3, 3, count, 3]
    assert told[0] == told[1]


def test_a_step_s_line_and_texts_cost_the_same_beside_many_jobs() -> None:
    lines, texts = [], []
    for count in (FEW, MANY):
        progress = Progress(Screen(file=io.StringIO(), width=300))
        progress(began(*(job(f"job-{number}", 200) for number in range(count))))
        for number in range(count):
            progress(stepped(f"job-{number}", 1))
        progress.console.print = lambda *_, **__: None  # type: ignore[method-assign]
        lines.append(work(lambda progress=progress: progress(stepped("job-1", 2))))  # type: ignore[misc]
        jobs = {f"job-{number}": a_job(number) for number in range(count)}
        sampler = Sampler(mock.MagicMock(), jobs, 1, Emitter(), ())
        texts.append(work(lambda sampler=sampler: sampler(stepped("job-1", 2))))  # type: ignore[misc]
    assert lines[0] == lines[1] and texts[0] == texts[1]


def test_at_a_save_point_logs_are_flushed_once_and_where_they_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")))
    logs = Logs(tmp_path, BestEffort(lambda text: pytest.fail(text)))
    for step in (1, 2):
        logs(stepped("job-0", step))
        for number in range(MANY):
            logs(CheckpointBegins(f"job-{number}", step))
    assert flushed == [str(tmp_path / METRICS)] * 2
    logs(CheckpointBegins("job-0", 2))
    logs(Evaluated("job-0", 2, 1.0))
    logs(CheckpointBegins("job-0", 3))
    assert [Path(name).name for name in flushed[2:]] == ["evals.jsonl"]


def test_lines_that_could_not_be_flushed_are_flushed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    logs = Logs(tmp_path, BestEffort(said.append))
    logs(stepped("job-0", 1))
    monkeypatch.setattr(os, "fsync", fails)
    logs(CheckpointBegins("job-0", 1))
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    logs(CheckpointBegins("job-0", 2))
    assert len(said) == len(flushed) == 1


def test_at_a_save_point_a_tracker_flushes_the_jobs_that_have_new_numbers() -> None:
    runs: dict[str, Any] = {}
    tracker = Tracker(lambda run, group, name, config, step: runs.setdefault(name, mock.MagicMock()))
    starts = [job(f"job-{number}") for number in range(MANY)]
    tracker(RunBegan("id", Path("out"), {"jobs": [{"name": one.name} for one in starts]}, tuple(starts), ()))

    def flushes() -> dict[str, int]:
        return {name: run.flush.call_count for name, run in runs.items() if run.flush.call_count}

    for _ in range(2):
        tracker(SavePointReached())
    tracker(stepped("job-3", 1))
    for _ in range(2):
        tracker(SavePointReached())
    assert flushes() == {"job-3": 1}
    tracker(stepped("job-3", 2))
    tracker(Evaluated("job-4", 1, 1.0))
    tracker(SavePointReached())
    assert flushes() == {"job-3": 2, "job-4": 1}


# --- sweeps --------------------------------------------------------------------------------------------------------------


class Watched(list[Any]):
    """A log history that counts its lines as they are read."""

    read = 0

    def __iter__(self) -> Any:
        for line in super().__iter__():
            self.read += 1
            yield line

    def __reversed__(self) -> Any:
        for line in super().__reversed__():
            self.read += 1
            yield line


def lines_of(first: int, last: int, every: int = 2) -> list[dict[str, Any]]:
    out = list[dict[str, Any]]()
    for step in range(first, last + 1):
        out.append({"step": step, "loss": 1.0})
        if step % every == 0:
            out.append({"step": step, "eval_loss": 3.0 - step / 1000})
    return out


def test_a_candidate_is_seen_by_each_line_of_its_history_once() -> None:
    trial, history = Trial(0, "a-000", {}, 0), Watched()
    for last in range(10, 201, 10):
        history += lines_of(last - 9, last)
        trial.see(last, "running", 400, history)
    assert history.read <= len(history) + 20 * 5  # those of the last step of the look before are read again
    assert trial.evals == {line["step"]: line["eval_loss"] for line in history if "eval_loss" in line}
    assert trial.value(101, 4) == trial.evals[100] and trial.last == trial.evals[200]
    trial.see(199, "failed", 400, Watched(lines_of(1, 199)))  # its last step is taken back
    assert max(trial.evals) == 198 and trial.last is None


@pytest.mark.parametrize(
    "rule",
    [
        {"method": "median", "n_startup_trials": 3}, {"method": "successive_halving", "min_resource": 2},
        {"method": "patience", "patience": 900}, {"method": "target", "target": 1.0}, {"method": "none"},
    ],
    ids=lambda rule: str(rule["method"]),
)  # fmt: skip
def test_a_window_s_decisions_cost_a_candidate_the_same_beside_many_others(rule: dict[str, Any]) -> None:
    costs = []
    for count in (FEW, MANY):
        template = {"name": "a", "data": {"path": "x", "eval_path": "y"}, "train": {"max_steps": 99}}
        sweep = Sweep(
            Run.model_validate(
                {
                    "base_model": "-", "output_dir": "-", "eval_every": 2, "jobs": [template],
                    "sweep": {
                        "job": "a", "parameters": {"seed": list(range(count))}, "stopping": rule, "concurrent": count,
                    },
                }
            )
        )  # fmt: skip
        sweep.follow(sweep.begin())
        for trial in sweep.trials.values():
            trial.see(16, "running", 99, lines_of(1, 16))

        def decide(sweep: Sweep = sweep) -> None:
            assert sweep.decide(16) == {} and sweep.successors() == []

        costs.append(work(decide) / count)
    assert costs[1] < 1.1 * costs[0]


# --- layers --------------------------------------------------------------------------------------------------------------


def test_a_layer_costs_the_same_beside_many_adapters_that_own_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the backward, whose node has an edge to each operand that it is given."""
    costs, edges, looks = [], [], []
    stamped = prepared.stamp

    def counted(tensor: torch.Tensor) -> Any:
        looks[-1] += 1
        return stamped(tensor)

    monkeypatch.setattr(prepared, "stamp", counted)
    for count in (FEW, MANY):
        adapters = {
            number: LowRank(torch.ones(2, 8, requires_grad=True), torch.ones(16, 2, requires_grad=True), 1.0)
            for number in range(count)
        }
        layers, state = (Layer(Dense(torch.ones(16, 8)), None, adapters),), GroupState(version_counted=True)
        x_TK, made = torch.ones(20, 8), list[torch.Tensor]()

        def call(layers: Any = layers, state: Any = state, x_TK: Any = x_TK, made: Any = made) -> None:
            (y_TN,) = lora_group(x_TK, layers, (Segment(1, 0, 12), Segment(3, 12, 20)), state=state)
            made.append(y_TN)
            y_TN.sum().backward()

        looks.append(0)
        call()
        with torch.no_grad():
            for low in adapters.values():
                assert low.A is not None
                low.A.add_(1)  # all jobs have stepped
        looks[-1] = 0
        costs.append(work(call))
        assert made[-1].grad_fn is not None
        edges.append(len([1 for node, _ in made[-1].grad_fn.next_functions if node is not None]))
        assert [number for number, low in adapters.items() if low.A is not None and low.A.grad is not None] == [1, 3]
        assert made[-1][0, 0] == 8 + 2 * 2 * 8 and made[-1][19, 0] == 8 + 2 * 2 * 8
    assert costs[0] == costs[1] and edges == [4, 4] and looks == [8, 8]
