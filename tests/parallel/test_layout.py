"""Layouts of a run on several devices: where jobs go, which microbatches may run at once, what is predicted and chosen."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import tiny_model
from ranks import Ranks
from schedule_cases import some_jobs
from seeds import SEED, SOAK
from test_preference import pairs as write_pairs
from test_training import config
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.commands.plan import PlannedRun, make_plan
from packlora.commands.plan_layouts import sentences
from packlora.config import Run, TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.parallel.layout import Layout, waves
from packlora.parallel.layouts import Prediction, choose, layouts, place, predict
from packlora.pipeline import layouts as pipelines
from packlora.pipeline.checks import needs_all_layers
from packlora.pipeline.layouts import StagedReplica
from packlora.runtime import choose as choosing
from packlora.runtime import estimate, profiler, profiles
from packlora.runtime.choose import Replica, Work, base_bytes
from packlora.runtime.choose import choose as chosen
from packlora.runtime.prepare import prepare
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch, Placed

Base = Callable[[str], str]
Rows = Callable[..., str]


def microbatch(*samples: tuple[str, int, int], completes: tuple[tuple[str, int], ...] = ()) -> Microbatch:
    """samples: job, global batch, length."""
    return Microbatch(
        tuple(Placed(job, batch, number, length) for number, (job, batch, length) in enumerate(samples)), completes
    )


def tokens(one: Microbatch) -> float:
    return float(one.num_tokens)


def at_once(waves: Sequence[Sequence[Microbatch]]) -> tuple[float, float]:
    return Replica().times(waves, tokens, CostModel())


# --- jobs on groups ----------------------------------------------------------------------------------------------------


def test_the_longest_job_goes_first_to_the_group_that_has_least_to_do() -> None:
    work = {"a": 3.0, "b": 5.0, "c": 4.0, "d": 2.0}
    assert place(work, 2) == (("b", "d"), ("a", "c"))  # b 5; c 4; a to c: 7; d to b: 7; each in the order of the run
    assert place(work, 1) == (("a", "b", "c", "d"),)
    assert place({"a": 1.0, "b": 1.0}, 3) == (("a",), ("b",), ())


def test_every_number_of_devices_that_divides_all_of_them_is_a_layout() -> None:
    work = {"a": 3.0, "b": 1.0}
    found = layouts(work, 12)
    assert [(own.split, len(own.groups)) for own in found] == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert all(own.processes == 12 for own in found)
    assert [found[2].group_of(rank) for rank in (0, 2, 3, 11)] == [0, 0, 1, 3] and found[2].ranks(1) == range(3, 6)


def test_processes_that_hold_the_model_together_are_laid_out_as_one_device() -> None:
    work = {"a": 3.0, "b": 1.0}
    found = layouts(work, 12, tensor=2)
    assert [own.groups for own in found] == [own.groups for own in layouts(work, 6)]
    assert all((own.processes, own.replicas) == (12, 6) for own in found)
    assert [(own.split, own.devices_per_job) for own in found] == [(1, 2), (2, 4), (3, 6), (6, 12)]
    assert [found[1].group_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2] and found[1].ranks(1) == range(4, 8)
    planned = [[[microbatch(("a", 0, 9))]], *[[] for _ in range(5)]]
    assert predict(found[0], planned, [1.0] * 6, at_once).idle == 1 - 9 / (9 * 6)


def test_no_placement_takes_over_four_thirds_of_the_best() -> None:
    """Graham's bound, 4/3 - 1/3m, against all placements."""
    draw = random.Random(SEED)
    for _ in range(40):
        work = {f"job{number}": draw.uniform(0.1, 10) for number in range(draw.randint(1, 6))}
        groups = draw.randint(1, 3)
        placed = place(work, groups)
        assert sorted(name for own in placed for name in own) == sorted(work) and len(placed) == groups
        best = min(
            max(
                sum(value for value, at in zip(work.values(), where, strict=True) if at == group)
                for group in range(groups)
            )
            for where in itertools.product(range(groups), repeat=len(work))
        )
        took = max(sum(work[name] for name in own) for own in placed)
        assert took <= (4 / 3 - 1 / (3 * groups)) * best + 1e-9, (work, SEED)


# --- waves -------------------------------------------------------------------------------------------------------------


def lengths(found: list[list[Microbatch]]) -> list[list[list[int]]]:
    return [[[placed.length for placed in part.samples] for part in wave] for wave in found]


def test_a_wave_is_a_planned_microbatch_in_as_many_parts_as_there_are_processes() -> None:
    one = microbatch(("a", 0, 9), ("a", 0, 7), ("b", 1, 5), ("b", 1, 3), completes=(("a", 0),))
    assert waves([one], 1, 24) == [[one]]
    assert lengths(waves([one], 2, 12)) == [[[9, 3], [7, 5]]]  # the longest first; then in the order of the microbatch
    assert lengths(waves([one], 4, 9)) == [[[9], [7], [5], [3]]]
    assert lengths(waves([one], 6, 9)) == [[[9], [7], [5], [3], [], []]]
    assert waves([], 3, 9) == []


def test_samples_that_do_not_fit_in_one_wave_make_more_and_the_step_comes_after_the_last() -> None:
    one = microbatch(("a", 0, 9), ("a", 0, 9), ("a", 0, 9), completes=(("a", 0),))
    found = waves([one], 2, 10)
    assert lengths(found) == [[[9], [9]], [[9]]]
    assert [[part.completes for part in wave] for wave in found] == [[(), ()], [(("a", 0),)]]


@pytest.mark.parametrize("number", range(400 if SOAK else 60))
def test_waves_hold_every_sample_once_and_none_before_the_step_that_it_needs(number: int) -> None:
    draw = random.Random(SEED + number)
    capacity, size = draw.randint(8, 60), draw.randint(1, 5)
    jobs = some_jobs(draw, capacity)
    found = [
        wave
        for window in Planner(jobs, capacity * size, method="greedy").windows()
        for wave in waves(window.microbatches, size, capacity)
    ]
    seen = Counter(
        (placed.job, placed.batch, placed.sample) for wave in found for one in wave for placed in one.samples
    )
    every = {
        (job.name, batch, sample) for job in jobs for batch in range(job.num_batches) for sample, _ in job.batch(batch)
    }
    assert seen == Counter(every), SEED + number
    assert all(1 <= len(wave) <= size for wave in found)
    assert all(one.num_tokens <= capacity for wave in found for one in wave)
    stepped: dict[str, int] = {}  # by job, the last global batch that was completed in an earlier wave
    left = {(job.name, batch): len(job.batch(batch)) for job in jobs for batch in range(job.num_batches)}
    for wave in found:
        for placed in (placed for one in wave for placed in one.samples):
            assert stepped.get(placed.job, -1) == placed.batch - 1, f"{placed}, seed {SEED + number}"
            left[placed.job, placed.batch] -= 1
        steps = [step for one in wave for step in one.completes]
        assert all(left[step] == 0 for step in steps), f"a step before its last sample, seed {SEED + number}"
        stepped |= dict(steps)
    assert stepped == {job.name: job.num_batches - 1 for job in jobs if job.num_batches}


# --- what is predicted, and chosen -------------------------------------------------------------------------------------


def test_a_wave_takes_what_its_costliest_microbatch_does() -> None:
    long, short = microbatch(("a", 0, 9)), microbatch(("a", 0, 3), completes=(("a", 0),))
    other = microbatch(("b", 0, 8), completes=(("b", 0),))
    layout = Layout((("a",), ("b",)), 2)
    found = predict(layout, [[[long, short], [short]], [[other]]], [0.5, 1.0], at_once)
    assert (found.time, found.busy, found.waves) == (24.0, 30.0 + 8.0, 4)  # of a one half was planned
    assert found.idle == 1 - 38 / (24 * 4)
    nothing = predict(Layout((("a",), ()), 1), [[[long]], []], [1.0, 1.0], at_once)
    assert (nothing.time, nothing.idle) == (9.0, 0.5)


def test_pipelines_side_by_side_wait_for_the_slowest_stage_of_each_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, two waves: forwards of 4 and 1, backwards alike; and one where another replica has none."""
    replica, cost = StagedReplica.__new__(StagedReplica), CostModel(per_token=1.0)
    monkeypatch.setattr(pipelines, "on_stages", lambda cost, *_: replace(cost, stage_shares=(0.5, 0.5)))
    replica.prepared, replica.lag = mock.MagicMock(), 2
    layout = Layout((("a",),), 2, pipeline=2)
    waves = [[microbatch(("a", 0, 8)), microbatch(("a", 0, 2))], [microbatch(("a", 0, 2))]]
    found = predict(layout, [waves], [0.5], lambda own: replica.times(own, tokens, cost))
    # stage 0: forwards to 4, 5; stage 1: 4 to 8 and back to 12, 13 and 14; stage 0: back from 12 to 16, then to 17
    assert (found.time, found.busy, found.waves) == (34.0, 48.0, 4)
    assert found.idle == 1 - 48 / (34 * 4)
    assert (layout.processes, layout.is_in_parts) == (4, True)


def test_the_fewest_devices_per_job_that_leave_a_twentieth_idle_are_chosen_else_the_first_to_be_done() -> None:
    def of(split: int, time: float, busy: float) -> Prediction:
        return Prediction(Layout((("a",),) * (4 // split), split), 1, time, busy)

    little = [of(1, 10, 38.1), of(2, 9.9, 38.1), of(4, 9.8, 38.1)]
    assert choose(little).layout.split == 1
    assert choose([of(1, 10, 37.9), *little[1:]]).layout.split == 2
    assert choose([of(1, 10, 20.0), of(2, 8, 20.0), of(4, 7, 20.0)]).layout.split == 4
    assert choose([of(1, 8, 20.0), of(2, 8, 20.0), of(4, 9, 20.0)]).layout.split == 1  # nothing is won by more


def test_the_reason_counts_devices_per_job_as_the_table_does() -> None:
    one = Prediction(Layout((("a",), ()), 1, tensor=2), 1, 5.0, 5.0)
    both = Prediction(Layout((("a",),), 2, tensor=2), 1, 5.0, 10.0)
    reason = choosing._choose_as_asked([one, both], "auto").reason
    assert reason.endswith("with fewer devices per job it is more than 5% (2: 50%)")


# --- packlora plan -----------------------------------------------------------------------------------------------------


def jobs_of(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows and global batch size of each."""
    return [
        {"name": f"job{number}", "adapter": {"r": 2 + number}, "train": {"global_batch_size": size}, "rows": rows}
        for number, (rows, size) in enumerate(sizes)
    ]


@pytest.fixture
def make(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(*sizes: tuple[int, int], **changes: Any) -> dict[str, Any]:
        jobs = jobs_of(*sizes)
        for job in jobs:
            job["data"] = {"path": write_rows(f"rows of {job['name']}", job.pop("rows"), seed=3, longest=4)}
        return config(tiny_base(), tmp_path / "out", write_rows, jobs, **changes)

    return make


def planned(tree: dict[str, Any], gpus: int) -> PlannedRun:
    return make_plan(Run.model_validate(tree), gpus=gpus)


def test_equal_jobs_are_whole_on_a_device_each_and_one_large_job_is_shared(make: Callable[..., dict[str, Any]]) -> None:
    equal = planned(make((8, 2), (8, 2), (8, 2), (8, 2)), 4).layouts
    assert equal is not None and [row.layout.devices_per_job for row in equal.rows] == [1, 2, 4, 4, 2, 2]
    assert [row.layout.shard for row in equal.rows] == [1, 1, 1, 4, 2, 1]
    assert [row.layout.pipeline for row in equal.rows] == [1, 1, 1, 1, 1, 2]  # the model has two layers
    assert equal.taken.layout.devices_per_job == 1 and equal.taken.speedup > 2
    assert equal.taken.idle < 0.02  # of equal samples; ranks are 2 to 5
    assert sorted(equal.taken.layout.groups) == [("job0",), ("job1",), ("job2",), ("job3",)]
    large = planned(make((200, 200), max_tokens_per_microbatch=160), 4).layouts
    assert large is not None and large.taken.layout.devices_per_job == 4 and large.taken.speedup > 2
    assert large.taken.idle < 0.3 < large.rows[0].idle == 0.75
    assert large.rows[0].layout.groups == (("job0",), (), (), ())


def test_the_plan_names_the_layout_that_training_takes(
    make: Callable[..., dict[str, Any]], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for number, sizes in enumerate((((6, 3), (6, 2), (9, 3)), ((12, 12),))):
        tree = make(*sizes, max_tokens_per_microbatch=48, output_dir=str(tmp_path / f"out{number}"))
        found = planned(tree, 2).layouts
        assert found is not None
        ranks(2).run(trained, tree)
        record = json.loads((tmp_path / f"out{number}" / "run.json").read_text())["schedule"]["layout"]
        assert (record["split"], record["groups"]) == (
            found.taken.layout.devices_per_job,
            [list(own) for own in found.taken.layout.groups],
        )


def trained(rank: int, tree: dict[str, Any]) -> str:
    return packlora.train(tree).status


def test_all_processes_find_the_same_layout(make: Callable[..., dict[str, Any]]) -> None:
    tree = make((8, 2), (20, 5), (3, 3), max_tokens_per_microbatch=60)
    prepared = [prepare(Run.model_validate(tree)) for _ in range(3)]
    assert len({repr(chosen(own, 4, profiler.profile(own.run, own)).layout) for own in prepared}) == 1


def test_a_long_run_is_scaled_up_from_its_beginning(
    make: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make((80, 2), (80, 4), max_tokens_per_microbatch=60)
    whole = planned(tree, 2).layouts
    monkeypatch.setattr("packlora.runtime.choose.SAMPLES", 16)
    part = planned(tree, 2).layouts
    assert whole is not None and part is not None
    for one, other in zip(whole.rows, part.rows, strict=True):
        if one.layout.pipeline > 1:  # one job outlasts the other, and leaves it waiting: not so at the beginning
            continue
        assert other.layout.groups == one.layout.groups
        assert (other.waves, other.seconds, other.idle) == pytest.approx(
            (one.waves, one.seconds, one.idle), rel=0.15, abs=0.05
        )


def test_a_device_holds_its_own_jobs_and_a_part_of_a_sharded_base(
    make: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(make((8, 2), (8, 4)), 2)
    assert run.layouts is not None
    apart, together, sharded, staged = run.layouts.rows
    assert base_bytes(run.prepared)[0] // 2 < staged.bytes < together.bytes - base_bytes(run.prepared)[0] // 3
    known, shape = run.known, run.prepared.shape
    each, gradient = estimate.TRAINABLE_BYTES, estimate.GRADIENT_BYTES
    size = estimate.memory_parts(run.prepared.run, run.prepared, 1)["adapters and optimizer"]
    trainable = {job.config.name: job.trainable for job in run.prepared.jobs}
    assert each <= size / sum(trainable.values()) <= each + gradient
    assert apart.bytes < together.bytes - each * min(trainable.values()) + known.bytes_per_token * 96
    base = 4 * shape.parameters
    others = 4 * (shape.parameters - shape.linear_parameters)  # whole from one end of a microbatch to the other
    layers = 4 * 2 * shape.linear_parameters // shape.layers
    assert together.bytes - sharded.bytes == base - base // 2 - others - layers
    monkeypatch.setattr(estimate, "BYTES_PER_SECOND", base / 5.0)  # five seconds for all of it
    slow = planned(make((8, 2), (8, 4)), 2).layouts
    assert slow is not None
    assert slow.rows[2].seconds == pytest.approx(slow.rows[2].waves * 5.0, rel=0.1)  # half of it, twice a wave
    monkeypatch.undo()
    parallel = {"shard_base": True, "offload_base": True}
    before, kept = (planned(make((8, 2), (8, 4), parallel=own), 2).layouts for own in ({"shard_base": True}, parallel))
    assert before is not None and kept is not None and any("the host keeps" in text for text in sentences(kept, 9))
    layers = 4 * shape.linear_parameters // 2  # of each of two devices
    assert (kept.rows[0].host_bytes, before.rows[0].bytes - kept.rows[0].bytes) == (layers, layers)
    monkeypatch.setattr(choosing, "OFFLOAD_BYTES_PER_SECOND", layers / 5.0)
    copied = planned(make((8, 2), (8, 4), parallel=parallel), 2).layouts
    assert copied is not None
    assert copied.rows[0].seconds == pytest.approx(copied.rows[0].waves * 10.0, rel=0.1)  # all of it, twice a wave
    monkeypatch.setattr(estimate, "memory_room", lambda device: 1000)
    tight = planned(make((8, 2), (8, 4), parallel={"pipeline": 1}), 2).layouts
    assert tight is not None and not any(row.fits for row in tight.rows) and tight.taken.status == "taken, does not fit"


def test_the_table_fits_80_columns_and_the_json_has_all_of_it(
    make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file, figures = tmp_path / "run.yaml", tmp_path / "plan.json"
    file.write_text(json.dumps(make((8, 2), (9, 3), (4, 1))))
    plain = CliRunner().invoke(app, ["plan", str(file)], env={"COLUMNS": "80"})
    out = CliRunner().invoke(app, ["plan", str(file), "--gpus", "4", "--json", str(figures)], env={"COLUMNS": "80"})
    assert (plain.exit_code, out.exit_code) == (0, 0), out.output
    assert "on 4 devices" in out.output and "devices per job" not in plain.output
    lines = out.output.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("devices per job"))
    assert all(len(line) <= 80 for line in lines[start : start + 5])
    told = json.loads(figures.read_text())["parallel"]
    assert told["devices"] == 4 and len(told["layouts"]) == 6
    (taken,) = (row for row in told["layouts"] if row["taken"])
    assert sorted(name for group in taken["groups"] for name in group) == ["job0", "job1", "job2"]
    assert f"training takes {taken['devices_per_job']}, so each job is" in out.output.replace("\n", " ")
    assert "taken" in lines[start + 1 + [row["taken"] for row in told["layouts"]].index(True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "Invalid value for '--gpus'"),
        (["--gpus", "-2"], "Invalid value for '--gpus'"),
        (["--gpus", "two"], "Invalid value for '--gpus'"),
        (["--gpus", "3", "--set", "parallel.pipeline=2"], "parallel.pipeline is 2, but 3 processes were started"),
        (
            ["--gpus", "4", "--set", "parallel.devices_per_job=3"],
            "parallel.devices_per_job is 3, which does not divide 4",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(
    options: list[str], message: str, make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(make((8, 2))))
    out = CliRunner().invoke(app, ["plan", str(file), *options], env={"COLUMNS": "200"})
    assert out.exit_code == 2 and message in " ".join(out.stderr.split()), out.stderr


def test_devices_per_job_of_the_run_file_goes(make: Callable[..., dict[str, Any]]) -> None:
    found = planned(make((8, 2), (8, 2), parallel={"devices_per_job": 2}), 4).layouts
    assert found is not None and found.taken.layout.devices_per_job == 2 and "devices_per_job is 2" in found.reason
    assert [(row.layout.sharded, row.layout.pipeline) for row in found.rows] == [(False, 1), (True, 1), (False, 2)]
    alone = planned(make((8, 2), (8, 2)), 1).layouts
    assert alone is not None and [row.speedup for row in alone.rows] == [pytest.approx(1, rel=0.05)]


# --- by predicted time -------------------------------------------------------------------------------------------------


def test_jobs_of_equal_tokens_are_placed_by_what_their_samples_take(make: Callable[..., dict[str, Any]]) -> None:
    """Samples that are short, or long, with a loss on all tokens but one or on a single one."""
    kinds = {"short": (10, 9), "long": (60, 59), "few labels": (10, 1), "long, few labels": (60, 1)}
    prepared = prepare(Run.model_validate(make(*[(8, 2)] * 4, max_tokens_per_microbatch=60)))
    for job, (length, labels) in zip(prepared.jobs, kinds.values(), strict=True):
        sample = Sample(np.zeros(length, np.int32), np.arange(length) >= length - labels)
        job.data = JobData(job.data.name, [sample] * (240 // length), job.config.train, 0)
        job.trainable = job.active = 10
    assert {job.data.tokens for job in prepared.jobs} == {240}

    shape, work = prepared.shape, Work(prepared)
    forward, backward = 2 * shape.linear_parameters + 2 * 10, 2 * shape.linear_parameters + 4 * 10
    attention = 2.5 * 2 * shape.layers * shape.attention * (1 + backward / forward)
    head = 2 * 2 * shape.hidden * shape.vocabulary
    wanted = [(forward + backward) * n + attention * n * n + head * labels for n, labels in kinds.values()]
    found = [own.tolist() for own in work.samples.values()]
    assert [len(set(own)) for own in found] == [1] * 4
    assert [own[0] * estimate.PLANNED_FLOPS["cpu"] for own in found] == pytest.approx(wanted, rel=1e-9)

    most = microbatch(("job0", 0, 10), ("job1", 0, 60))
    assert work.of(most) == pytest.approx(work.fixed + found[0][0] + found[1][0]) and work.of(Microbatch()) == 0.0
    jobs = work.jobs()
    assert list(jobs.values()) == [
        pytest.approx(240 // n * own[0] + work.fixed * 240 / 60)
        for own, (n, _) in zip(found, kinds.values(), strict=True)
    ]
    names = dict(zip(jobs, kinds, strict=True))
    taken = chosen(prepared, 2, profiler.profile(prepared.run, prepared)).layout
    groups = {tuple(names[name] for name in own) for own in taken.groups}
    assert groups == {("long", "few labels"), ("short", "long, few labels")}  # by tokens: in their order, 1 3 and 2 4


def test_all_steps_of_a_job_count_with_their_own_samples() -> None:
    train = TrainConfig(global_batch_size=3, num_train_epochs=2.5, drop_last=False)
    lengths = [3, 5, 7, 11, 13, 17, 19]
    data = JobData("job", [Sample(np.zeros(n, np.int32), np.ones(n, bool)) for n in lengths], train, 3)
    values = np.array(lengths) ** 2.0
    assert data.total(values) == sum(
        values[number] for step in range(data.num_steps) for number in data.global_batch(step)
    )
    assert data.tokens == sum(lengths[number] for step in range(data.num_steps) for number in data.global_batch(step))


# --- by memory ---------------------------------------------------------------------------------------------------------


def trained_in(rank: int, tree: dict[str, Any], room: int) -> str:
    """On devices of so many bytes, the second of which has one less than the first."""
    with mock.patch.object(estimate, "memory_room", return_value=room - rank):
        return packlora.train(tree).status


def test_auto_shares_nothing_that_a_job_or_a_key_needs_whole_and_takes_no_stages_for_optimizers_of_whole_jobs(
    make: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    def parts(of_run: dict[str, Any] | None = None, **keys: Any) -> tuple[bool, bool]:
        tree = make((8, 2), (8, 2)) | (of_run or {})
        tree["jobs"][1] = {**tree["jobs"][1], **keys}
        prepared = prepare(Run.model_validate(tree))
        return bool(choosing.sharded_layouts(prepared, 2, {"job0": 1.0, "job1": 1.0})), bool(
            choosing.piped(prepared, 2, {"job0": 1.0, "job1": 1.0})
        )

    assert parts() == (True, True)
    assert parts(adapter={"target_modules": ["q_proj", "embed_tokens"]}) == (False, True)
    assert parts(adapter={"target_modules": ["q_proj"], "modules_to_save": ["norm"]}) == (False, True)
    pairs = {"path": write_pairs(tmp_path / "pairs.jsonl")}
    preferring = {"data": pairs, "train": {"trainer": "orpo", "global_batch_size": 2}}
    assert parts(sample_prompts=["one"], **preferring) == (True, True)
    assert parts(train={"optim": "adafactor", "global_batch_size": 2}) == (True, False)
    checkpoints = {"gradient_checkpointing": True}
    assert parts(checkpoints) == (True, True)
    assert parts({"activation_offloading": True} | checkpoints) == (False, False)
    assert parts({"offload_embedding": True}) == (False, False)


def test_a_job_whose_optimizer_steps_whole_jobs_does_not_join_stages(make: Callable[..., dict[str, Any]]) -> None:
    """Which a run may have found by itself, so that its run file does not say so."""
    tree = make((8, 2), (8, 2))
    tree["jobs"][1]["train"] = {"optim": "adafactor", "global_batch_size": 2}
    prepared = prepare(Run.model_validate(tree))
    found = [needs_all_layers(job) for job in prepared.jobs]
    assert found[0] is None and "its train.optim is adafactor, which steps whole jobs" in str(found[1])


def test_a_base_that_no_device_can_hold_is_sharded_by_itself_and_the_plan_says_so(
    write_rows: Rows, tokenizer: Any, ranks: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", num_hidden_layers=12, intermediate_size=768).save_pretrained(tmp_path / "deep")
    tokenizer.save_pretrained(tmp_path / "deep")
    jobs = [{"name": name, "adapter": {"r": 2}, "train": {"global_batch_size": 2, "max_steps": 1}} for name in "ab"]
    for job in jobs:
        job["data"] = {"path": write_rows(f"rows of {job['name']}", 2, seed=3, longest=4)}
    tree = config(str(tmp_path / "deep"), tmp_path / "out", write_rows, jobs, max_tokens_per_microbatch=48)
    free = planned(tree, 2).layouts
    assert free is not None and not free.taken.layout.sharded
    whole, sharded = min(row.bytes for row in free.rows[:2]), free.rows[2].bytes
    assert sharded < whole

    room = math.ceil(whole / profiles.ROOM_SHARE)  # the first process has it, the second one does not
    monkeypatch.setattr(estimate, "memory_room", lambda device: room - 1)
    tree |= {"parallel": {"pipeline": 1}}
    tight = planned(tree, 2).layouts
    assert (
        tight is not None and tight.taken.layout.sharded and tight.taken.fits and "is estimated to take" in tight.reason
    )
    assert [row.fits for row in tight.rows] == [False, False, True]
    assert ranks(2).run(trained_in, tree, room) == ["done", "done"]
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["schedule"]["layout"] == {
        "groups": [["a", "b"]],
        "split": 2,
        "tensor": 1,
        "pipeline": 1,
        "shard": 2,
        "expert": 1,
        "exchange": False,
        "own": ["", 1],
    }
    assert [text for text in record["warnings"] if text == f"parallel.shard_base is taken: {tight.reason}"]

    for changes in ({"shard_base": False, "pipeline": 1}, {"devices_per_job": 1}):
        kept = planned({**tree, "parallel": changes}, 2).layouts
        assert kept is not None and not kept.taken.layout.sharded and not kept.taken.fits
    staged = {**tree, "parallel": "auto", "output_dir": str(tmp_path / "staged")}
    piped = planned(staged, 2).layouts
    assert piped is not None and piped.taken.layout.pipeline == 2 and piped.taken.fits and 0 < piped.taken.idle < 1
    assert piped.taken.status == "taken, pipeline of 2" and piped.taken.layout.groups == (("a", "b"),)
    assert "is estimated to take" in piped.reason and "a sharded base takes 1." in piped.reason
    assert ranks(2).run(trained_in, staged, room) == ["done", "done"]
    record = json.loads((tmp_path / "staged" / "run.json").read_text())
    assert record["schedule"]["layout"]["pipeline"] == 2
    assert f"parallel.pipeline is 2: {piped.reason}" in record["warnings"]
    monkeypatch.setattr(estimate, "memory_room", lambda device: room)
    enough = planned(tree, 2).layouts
    assert enough is not None and not enough.taken.layout.sharded and enough.taken.fits
    asked = planned({**tree, "parallel": {"shard_base": True}}, 2).layouts
    assert asked is not None and asked.taken.layout.sharded and asked.reason == "parallel.shard_base is true"


def test_auto_shares_the_base_over_as_many_devices_as_it_takes_and_the_plan_lists_all(
    make: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering from fewer devices takes less time; it is done where the larger parts fit."""
    tree = make((8, 2), (8, 4), parallel={"pipeline": 1})
    base = 40 * base_bytes(prepare(Run.model_validate(tree)))[0]
    monkeypatch.setattr(choosing, "base_bytes", lambda prepared: (base, base // 8))  # as of a model of many layers
    monkeypatch.setattr(profiler, "profile", larger(profiler.profile, base))
    free = planned(tree, 4).layouts
    assert free is not None and not free.taken.layout.sharded
    assert [(row.layout.devices_per_job, row.layout.shard) for row in free.rows] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (4, 4),
        (2, 2),
    ]
    whole, (four, two) = min(row.bytes for row in free.rows[:3]), free.rows[3:]
    assert four.bytes < two.bytes < whole
    for room, shard in ((two.bytes, 2), (four.bytes, 4)):
        monkeypatch.setattr(estimate, "memory_room", lambda device, room=room: math.ceil(room / profiles.ROOM_SHARE))
        tight = planned(tree, 4).layouts
        assert (
            tight is not None
            and tight.taken.fits
            and (tight.taken.layout.shard, "is estimated to take" in tight.reason) == (shard, True)
        )
        assert tight.taken.status == f"taken, shard {shard}"


def larger(profile: Callable[..., Any], base: int) -> Callable[..., Any]:
    """A profile of a model whose weights take so many bytes more."""

    def made(*args: Any) -> Any:
        known = profile(*args)
        return replace(known, kept_bytes=known.kept_bytes + base)

    return made
