"""`packlora.train` with `parallel: {pipeline: N}`: stages train what one device trains, and leave what it leaves."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankFailed, Ranks
from seeds import SOAK, some
from steps import change_steps
from test_replicas import heard, lines, on_ranks, refused_on_all, whole
from test_tensor_train import five_jobs, same, saved_base
from test_training import adapter, distance, steps, train
from waiting import SECONDS

import packlora
from packlora.commands.plan import make_plan
from packlora.config import Run
from packlora.errors import InputError, ProcessError
from packlora.pipeline.passes import StageDevice
from packlora.pipeline.timeline import end_times
from packlora.runtime import checkpoint
from packlora.runtime.job import Job
from packlora.runtime.stream import Stream
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import Planner
from packlora.schedule.types import Window

__all__ = ["whole"]

Groups = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def tree(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return five_jobs(tmp_path_factory.mktemp("pipeline"), tokenizer, num_hidden_layers=5 if SOAK else 3)


@pytest.mark.parametrize(
    ("processes", "parallel", "checkpointing"),
    [
        (2, {"pipeline": 2}, True),
        pytest.param(4, {"pipeline": 4}, False, marks=pytest.mark.soak),
        pytest.param(4, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, False, marks=pytest.mark.soak),
    ],
)
def test_a_run_gives_what_one_device_gives(
    processes: int, parallel: dict[str, Any], checkpointing: bool, tree: dict[str, Any], whole: Path, ranks: Groups,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What is told, recorded and drawn of a pipeline, also of one whose stages are cut."""
    asked = {**tree, "output_dir": str(tmp_path / "out"), "gradient_checkpointing": checkpointing, "parallel": parallel}
    (status, told), *others = ranks(processes).run(heard, asked, None, 0, {})
    assert [status, *others] == ["done"] + [("done", [])] * (processes - 1), "only the first process has subscribers"
    assert (told[0], told[-1]) == ("RunBegan", "RunEnded")
    counts = {"TrainingBegan": 1, "Stepped": len(steps(whole)), "JobDone": 5, "Evaluated": len(lines(whole, "evals"))}
    assert {kind: told.count(kind) for kind in counts} == counts
    assert told.count("CheckpointSaved") == told.count("CheckpointBegins") > 5
    same(tmp_path / "out", whole)
    record, alone = (json.loads((out / "run.json").read_text()) for out in (tmp_path / "out", whole))
    assert record["schedule"]["layout"]["pipeline"] == parallel["pipeline"]
    assert (record["jobs"], record["model"]["fingerprint"]) == (alone["jobs"], alone["model"]["fingerprint"])
    ran = lines(tmp_path / "out", "microbatches")
    assert sorted(line["index"] for line in ran) == list(range(len(ran)))
    assert sum(sum(line["tokens"].values()) for line in ran) == sum(line["tokens"] for line in steps(whole))
    replicas = range(0, processes, parallel["pipeline"] * parallel.get("tensor", 1))
    assert {line["rank"] for line in ran} == set(replicas), "the first process of each pipeline"
    check_timelines(tmp_path / "out", parallel["pipeline"], [line for line in ran if line["rank"] == 0])
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def check_timelines(out: Path, stages: int, ran: list[dict[str, Any]]) -> None:
    """What pipeline.jsonl says of the first pipeline: a stage does one thing at a time, and nothing before what it needs."""
    told = [line for line in lines(out, "pipeline") if line["group"] == 0]
    assert sum(line["slots"] - line["noops"] for line in told) == len(ran)
    assert sum(line["tokens"] for line in told) == sum(sum(line["tokens"].values()) for line in ran)
    for line in told:
        assert len(line["busy"]) == len(line["peak_memory"]) == stages and line["mfu"] > 0
        assert line["bubble"] == pytest.approx(1 - sum(line["busy"]) / (stages * line["seconds"]))
        assert 0 <= line["bubble"] < 1 and 0 <= line["predicted_bubble"] < 1 and line["predicted_seconds"] > 0
        ends = {(stage, kind, slot): end for stage, kind, slot, _, end in line["spans"]}
        for stage in range(stages):
            own = [(start, end) for at, _, _, start, end in line["spans"] if at == stage]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
        for stage, kind, slot, start, _ in line["spans"]:
            before = (stage - 1, "forward", slot) if kind == "forward" else (stage + 1, "backward", slot)
            assert start >= ends.get(before, 0.0) - 1e-3
        drawn, foreseen = ({tuple(own[:3]) for own in line[key]} for key in ("spans", "predicted_spans"))
        assert drawn == foreseen
        if line["spans"]:
            assert 0 < simulated(line, stages) <= line["seconds"] + 1e-3
    assert any(line["spans"] for line in told)
    page = (out / "report.html").read_text()
    assert "<h2>Pipeline</h2>" in page and "backward of slot 0 on stage 1" in page


def simulated(line: dict[str, Any], stages: int) -> float:
    """The end of the order that ran, were stages to wait for one another alone, from how long everything took."""
    took = {(stage, kind, slot): end - start for stage, kind, slot, start, end in line["spans"]}
    times = [
        [
            (took.get((stage, "forward", slot), 0.0), took.get((stage, "backward", slot), 0.0))
            for slot in range(line["slots"])
        ]
        for stage in range(stages)
    ]
    return max(ends[-1] for ends in end_times(times)[1])


def on_stages(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A run, with what happens on a stage counted: forwards that wait for their backward, by their roots that are alive."""
    waiting: list[weakref.ref[torch.Tensor]] = []
    most, runs, noops = 0, 0, 0
    forward, following, run_slots = StageDevice.forward, Stream.next, Trainer.run_slots

    def counted(self: StageDevice, *args: Any) -> Any:
        nonlocal most
        pending = forward(self, *args)
        waiting.append(weakref.ref(pending.root))
        most = max(most, sum(one() is not None for one in waiting))
        return pending

    def entered(self: Stream) -> Any:
        nonlocal noops
        found = following(self)
        noops += found is not None and not found.parts
        return found

    def dry(self: Trainer, stream: Stream) -> None:
        nonlocal runs
        runs += 1
        run_slots(self, stream)

    with (
        mock.patch.object(Stream, "next", entered),
        mock.patch.object(Trainer, "run_slots", dry),
        mock.patch.object(StageDevice, "forward", counted),
    ):
        result = packlora.train(tree, **options)
    return {"status": result.status, "most": most, "noops": noops, "runs": runs}


def in_bits(tree: dict[str, Any], out: Path, names: list[str]) -> dict[str, Any]:
    """The jobs of those names with global batches of one sample and no clipping: every sum has one order."""
    jobs = json.loads(json.dumps([job for job in tree["jobs"] if job["name"] in names]))
    for job in jobs:
        job["train"] |= {"global_batch_size": 1, "max_grad_norm": 0.0, "max_steps": 5}
    changes = {"dtype": "float32", "eval_every": 0, "save_every": 0, "schedule": {"method": "solo"}}
    return {**tree, **changes, "jobs": jobs, "output_dir": str(out)}


@pytest.mark.soak
@pytest.mark.parametrize("names", [["dropped"], ["dora", "lora", "dora.drop"]])
def test_where_sums_have_one_order_it_has_the_bits_of_one_device(
    names: list[str], tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """One job alone, which leaves a pipeline without work between its steps, and three; without a flush."""
    asked = in_bits(tree, tmp_path / "alone", names)
    train(asked)
    two = {**asked, "output_dir": str(tmp_path / "out"), "parallel": {"pipeline": 2}}
    first, second = ranks(2).run(on_stages, two, {})
    assert (first["status"], first["most"], second["most"]) == ("done", 2 - (len(names) == 1), 1)
    assert first["runs"] == second["runs"] <= len(names), "it runs dry where jobs end, and else nowhere"
    assert (first["noops"] > 0) == (second["noops"] > 0) == (len(names) == 1)
    for name in names:
        file = Path(name, "adapter_model.safetensors")
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), name


# --- stops, resuming ---------------------------------------------------------------------------------------------------


def asked_on_one(rank: int, tree: dict[str, Any], last: int) -> str:
    """A run that the last process alone is asked to stop, at its second step."""
    original, count = Job.stepped, 0

    def stepped(job: Job, *numbers: Any) -> Any:
        nonlocal count
        count += 1
        if rank == last and count == 2:
            signal.raise_signal(signal.SIGTERM)
        return original(job, *numbers)

    with mock.patch.object(Job, "stepped", stepped):
        return packlora.train(tree).status


@pytest.mark.parametrize(
    ("processes", "parallel"),
    some(
        [(3, {"pipeline": 3}), (4, {"pipeline": 2, "tensor": 2}), (4, {"pipeline": 2, "devices_per_job": 4})], one_in=3
    ),
)
def test_all_processes_stop_where_one_of_them_is_asked(
    processes: int, parallel: dict[str, Any], tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """Of a chain the last process alone hears of it, of two chains one; nothing else lets the pipeline run dry there."""
    asked = in_bits(tree, tmp_path / "out", ["lora", "rs"])
    for job in asked["jobs"]:
        job["train"]["max_steps"] = 12
        job["data"].pop("eval_path", None)
    told = ranks(processes).run(asked_on_one, {**asked, "parallel": parallel}, processes - 1)
    assert told == ["interrupted"] * processes


def killed(rank: int, tree: dict[str, Any]) -> str:
    """A run in which the second process dies at its fifth step."""
    original, count = Job.stepped, 0

    def stepped(job: Job, *numbers: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 1 and count == 5:
            os._exit(9)
        return original(job, *numbers)

    with mock.patch.object(Job, "stepped", stepped):
        return packlora.train(tree).status


@pytest.mark.soak
@pytest.mark.parametrize("key", ["pipeline", "tensor"])
def test_a_run_that_was_killed_ends_with_a_reason_and_goes_on_with_the_bits_of_one_that_was_not(
    key: str, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    jobs = tree["jobs"][:2]
    asked, other = (
        {**tree, "jobs": jobs, "save_every": 1, "output_dir": str(tmp_path / name), "parallel": {key: 2}}
        for name in ("out", "other")
    )
    with pytest.raises(RankFailed, match="rank 1: the process ended with 9") as caught:
        ranks(2).run(killed, asked, after=SECONDS)
    assert "process 0 of 2 waited in vain for another one of the run" in str(caught.value)
    assert list((tmp_path / "out").glob("*/checkpoint-1"))
    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    assert ranks(2).run(on_ranks, asked, {"resume": True})[0][0] == "done"
    assert ranks(2).run(on_ranks, other, {})[0][0] == "done"
    alone = {**asked, "output_dir": str(tmp_path / "alone"), "parallel": "auto"}
    assert train(alone, resume=True).status == "done"
    for job in jobs:
        files = [tmp_path / name / job["name"] / "adapter_model.safetensors" for name in ("out", "other")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert distance(adapter(tmp_path / "alone", job["name"]), adapter(whole, job["name"])) < 1e-10


def killed_in_a_save(rank: int, tree: dict[str, Any], resume: bool) -> str:
    """A run whose first process dies while it writes its third checkpoint: the adapter is there, the rest is not."""
    original, count = checkpoint.write_tensors, 0

    def write_tensors(path: Path, tensors: Any) -> None:
        nonlocal count
        count += path.name == checkpoint.OPTIMIZER
        if count == 3:
            while len(list(Path(tree["output_dir"]).glob("*/checkpoint-*/manifest.json"))) < 2:
                time.sleep(0.01)  # others are written by threads of their own
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, tensors)

    with mock.patch.object(checkpoint, "write_tensors", write_tensors):
        return packlora.train(tree, resume=resume).status


def test_a_run_that_is_killed_in_the_middle_of_a_save_loses_nothing_that_was_saved(
    tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    """On two stages; in `make soak` on two of two processes each, and then on processes that hold each layer together. Then on
    two stages, to the end."""
    out = tmp_path / "out"
    asked = {**tree, "jobs": tree["jobs"][: 3 if SOAK else 2], "save_every": 1, "output_dir": str(out)}
    kinds: list[tuple[int, dict[str, Any]]] = [(2, {"pipeline": 2})]
    if SOAK:
        kinds = [(4, {"pipeline": 2, "tensor": 2}), (2, {"tensor": 2, "sequence_parallel": True})]
    before: dict[str, int] = {}
    for number, (processes, parallel) in enumerate(kinds):
        with pytest.raises(RankFailed, match="rank 0: the process ended with -9"):
            ranks(processes).run(killed_in_a_save, {**asked, "parallel": parallel}, number > 0)
        saved = {path: path.stat().st_mtime_ns for path in out.glob("*/checkpoint-*/manifest.json")}
        assert len(saved) >= 2 and list(out.glob("**/.tmp-*")), "it was in the middle of a save"
        reached = {path.parent.parent.name: max(checkpoint.steps(path.parent.parent)) for path in saved}
        assert all(reached[name] >= step for name, step in before.items())
        before = reached
    assert ranks(2).run(on_ranks, {**asked, "parallel": {"pipeline": 2}}, {"resume": True})[0][0] == "done"
    for job in asked["jobs"]:
        assert distance(adapter(out, job["name"]), adapter(whole, job["name"])) < 1e-10, job["name"]


def unplanned(rank: int, tree: dict[str, Any]) -> str:
    """The error of a pipeline whose first process cannot plan a second window, as where a stream cannot be read any more."""

    windows = Planner.windows

    def failing(self: Planner, start_round: int = 0) -> Iterator[Window]:
        yield next(windows(self, start_round))
        raise InputError("job 'a': cannot be read any more")

    with mock.patch.object(Planner, "windows", failing), pytest.raises((InputError, ProcessError)) as caught:
        packlora.train(tree)
    return str(caught.value)


def test_stages_that_wait_for_a_plan_end_when_the_first_process_has_failed(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": {"pipeline": 2}}
    first, other = ranks(2).run(unplanned, asked, seconds=30)
    assert first.startswith("job 'a': cannot be read any more")
    assert other.startswith("process 0 of 2 failed: InputError: job 'a': cannot be read any more")


def test_a_job_can_be_ended_from_the_first_process(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    jobs = json.loads(json.dumps(tree["jobs"]))[1:4:2]
    jobs[1]["train"]["num_train_epochs"] = 20
    asked = {**tree, "jobs": jobs, "output_dir": str(tmp_path / "out"), "parallel": {"pipeline": 2}}
    assert ranks(2).run(heard, asked, "rs", 1, {})[0][0] == "done"
    ends = {
        job["name"]: max(line["step"] for line in steps(tmp_path / "out") if line["job"] == job["name"]) for job in jobs
    }
    assert ends["lora"] == 4
    assert ends["rs"] < 20
    assert "enough" in json.loads((tmp_path / "out" / "rs" / "trainer_state.json").read_text())["stopped"]


# --- jobs that fail ------------------------------------------------------------------------------------------------------


def infinite(rank: int, tree: dict[str, Any], on: int) -> dict[str, str | None]:
    """A run in which a parameter on one stage is not finite after the second step of job "lora"."""

    def spoilt(job: Job, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        numbers = step()
        if rank == on and job.name == "lora" and job.step == 1:
            numbers[2] = math.inf
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        change_steps(patch, spoilt)
        return {name: job.failure for name, job in packlora.train(tree).jobs.items()}


def failures(rank: int, tree: dict[str, Any]) -> dict[str, str | None]:
    return {name: job.failure for name, job in packlora.train(tree).jobs.items()}


@pytest.mark.parametrize(
    ("rate", "says"),
    some([(None, "after step 2: the update made parameters infinite"), (1e25, "after step 1: loss nan")], one_in=2),
)
def test_a_job_fails_alike_on_all_stages_and_the_others_go_on(
    rate: float | None, says: str, tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """One which a step gives no finite loss, and one whose parameters become infinite: the step before is kept."""
    jobs = json.loads(json.dumps(tree["jobs"]))[:3]
    if rate is not None:
        jobs[1]["train"]["learning_rate"] = rate
    changes = {"jobs": jobs, "save_every": 0, "eval_every": 0, "dtype": "float32" if rate else "float64"}
    asked = {**tree, **changes, "output_dir": str(tmp_path / "whole")}
    two = {**asked, "output_dir": str(tmp_path / "out"), "parallel": {"pipeline": 2}}
    alone = failures(0, asked) if rate else infinite(0, asked, 0)
    told = ranks(2).run(failures, two) if rate else ranks(2).run(infinite, two, 1)
    assert says in str(alone["lora"])
    assert told == [alone] * 2
    for job in jobs:
        bound = 1e-4 if rate else 1e-10
        assert distance(adapter(tmp_path / "out", job["name"]), adapter(tmp_path / "whole", job["name"])) < bound
    states = [json.loads((tmp_path / name / "lora" / "trainer_state.json").read_text()) for name in ("out", "whole")]
    assert states[0]["global_step"] == states[1]["global_step"]
    assert [line["step"] for line in states[0]["log_history"]] == [line["step"] for line in states[1]["log_history"]]


# --- negative controls -------------------------------------------------------------------------------------------------


def planned_for_one_stage(rank: int, tree: dict[str, Any]) -> str:
    def for_one(*args: Any, **settings: Any) -> Planner:
        return Planner(*args, **settings | {"lag": 1, "cost": None})

    with mock.patch("packlora.runtime.windows.Planner", for_one):
        return packlora.train(tree).status


def test_a_job_without_a_step_that_did_not_overflow_goes_on(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """Of no stage's parameters has its checkpoint moments."""
    asked = {**tree, "output_dir": str(tmp_path / "out"), "dtype": "float16", "jobs": tree["jobs"][:1]}
    both = asked | {"parallel": {"pipeline": 2}}
    assert [told[0] for told in ranks(2).run(on_ranks, both, {"max_steps": 1})] == ["done"] * 2
    assert steps(tmp_path / "out")[0]["overflow"]
    assert train(asked, resume=True).status == "done"


def test_a_step_that_comes_too_late_is_no_run(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    asked = {**tree, "jobs": tree["jobs"][:2], "output_dir": str(tmp_path / "stale"), "parallel": {"pipeline": 2}}
    with pytest.raises(RankFailed, match="a global batch would begin before the step it follows"):
        ranks(2).run(planned_for_one_stage, asked)


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_on_every_process(
    tree: dict[str, Any], tokenizer: Any, ranks: Groups, tmp_path: Path
) -> None:
    fresh = {**tree, "jobs": tree["jobs"][1:], "output_dir": str(tmp_path / "out")}
    sweep = {"job": fresh["jobs"][0]["name"], "parameters": {"train.learning_rate": [1e-3]}}
    few = saved_base(tmp_path / "few", tokenizer, num_hidden_layers=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parallel": {"pipeline": 2}, "cuda_graphs": True}, "cuda_graphs: true cannot be met"),
        ({"parallel": {}, "sweep": sweep}, "sweep: candidates join and leave on one process, or on the stages"),
        ({"parallel": {"pipeline": 2}, "base_model": few}, "parallel.pipeline is 2, but the model has 1 layer;"),
    ]
    for changes, says in cases:
        refused_on_all(ranks, fresh | changes, says)


def test_plan_predicts_what_is_trained(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    """Microbatches and no-ops; and the time that the windows say, each of which is taken to begin with an empty pipeline."""
    asked = {**tree, "jobs": tree["jobs"][1:3], "output_dir": str(tmp_path / "out"), "parallel": {"pipeline": 2}}
    plan = make_plan(Run.model_validate(asked))
    used = plan.methods[-1]
    assert (plan.known.cost.devices, plan.to_json()["stages"]) == (2, 2)
    assert 0 < used.bubble < 1 and used.seconds > 0
    ranks(2).run(on_ranks, asked, {})
    windows = lines(tmp_path / "out", "windows")
    assert (
        used.microbatches
        == sum(line["microbatches"] for line in windows)
        == len(lines(tmp_path / "out", "microbatches"))
    )
    assert used.noops == sum(line["noops"] for line in windows)
    with pytest.raises(packlora.InputError, match=r"parallel\.pipeline is 2, but 3 processes were started"):
        make_plan(Run.model_validate(asked), gpus=3)
    found = make_plan(Run.model_validate(asked), gpus=4).layouts
    assert found is not None and [(row.layout.pipeline, row.layout.devices_per_job) for row in found.rows] == [
        (2, 2),
        (2, 4),
    ]
    assert found.taken.layout.pipeline == 2 and 0 < found.taken.idle < 1 and found.taken.seconds > 0
