"""`python -m benchmarks` on several processes: its files, what it counts, and figures computed right from known times."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks

from benchmarks import pipeline, replicas, tensor_parallel
from benchmarks.options import USUAL_SHAPES, Options
from benchmarks.plots import ways_by_case
from benchmarks.results import rows_of_other_parts
from benchmarks.run import run_bench
from benchmarks.schedule_cases import SETS, draw_lengths
from benchmarks.studies import short_jobs
from packlora.adapters.flat import ROW
from packlora.errors import InputError

Pool = Callable[[int], Ranks]


def benched(rank: int, name: str, out: Path, **options: Any) -> int:
    return run_bench(name, out, quick=True, device="cpu", **options)


def limited(rank: int, out: Path, options: dict[str, Any]) -> tuple[int, str]:
    """With what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return benched(rank, "pipeline", out, **options), said.getvalue()


def jobs_of_rank_1_at_another_rate(rank: int, out: Path) -> int:
    with mock.patch.object(replicas, "ShortJob", partial(short_jobs.ShortJob, lr=short_jobs.LR * (1 + rank))):
        return run_bench("replicas", out, quick=True, device="cpu", parts="jobs")


def file_of(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["protocol"] and all(row["failed"] == {} for row in content["rows"])
    assert all(key.startswith("part_") for key in content["summary"])
    return content


# --- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_pipeline_on_two_processes(ranks: Pool, tmp_path: Path) -> None:
    """All ways train on the same tokens; some have a pipeline that is empty between jobs."""
    out = tmp_path / "pipeline.json"
    assert ranks(2).run(benched, "pipeline", out) == [0, 0]
    content = file_of(out)
    assert content["name"] == "pipeline-cpu"
    keys = {"speedup_over_1f1b_2gpu", "speedup_over_unbalanced_2gpu", "bubble_4jobs_2gpu", "makespan_error"}
    keys |= {"tokens_per_s_per_gpu_70b", "fsdp2_over_1f1b_2gpu", "one_job_fixed_over_1f1b_2gpu"}
    assert all(content["summary"][f"part_{key}"] > 0 for key in keys)
    staged = [way for way in pipeline.WAYS if way != "fsdp2"]
    for row in content["rows"]:
        assert len({row[way]["tokens"] for way in pipeline.WAYS}) == 1
        assert all(0 < row[way]["bubble"] < 1 and row[way]["simulated_s"] < row[way]["s"] for way in staged)
        assert row["one_job"]["noops"] > row["no_flush"]["noops"]
        for way in staged:
            if way.startswith("eager_"):
                assert row[way]["slots"] == row[way.removeprefix("eager_")]["slots"]


@pytest.mark.soak
def test_replicas_on_two_processes(ranks: Pool, tmp_path: Path) -> None:
    """Divided jobs have the bits of one device, and every job of a process that trains otherwise is seen not to."""
    out = tmp_path / "replicas.json"
    assert ranks(2).run(benched, "replicas", out) == [0, 0]
    content = file_of(out)
    assert content["name"] == "replicas-cpu"
    keys = {"efficiency_jobs_2", "efficiency_samples_2", "fsdp2_over_replica", "bits_equal_jobs"}
    assert {f"part_{key}" for key in keys} <= content["summary"].keys()
    assert content["summary"]["part_bits_equal_jobs"] is True
    assert {row["part"] for row in content["rows"]} == {"jobs", "fsdp2"}

    ranks(2).run(jobs_of_rank_1_at_another_rate, tmp_path / "other.json")
    content = file_of(tmp_path / "other.json")
    assert content["summary"]["part_bits_equal_jobs"] is False
    assert sorted(content["rows"][0]["bits_equal"].values()) == [False, False, True, True]


@pytest.mark.soak
def test_experts_on_two_processes(ranks: Pool, tmp_path: Path) -> None:
    """Adapters send nothing: a layer's sum forward, and backward those of what experts read and of the routers' weights."""
    out = tmp_path / "experts.json"
    assert ranks(2).run(benched, "experts", out) == [0, 0]
    content = file_of(out)
    assert content["name"] == "experts-ep-cpu"
    assert [row["case"] for row in content["rows"]] == [
        "1job lora_r16 T32 ep2", "4jobs lora_r16 T32 ep2", "1job dora_r16 T32 ep2", "4jobs dora_r16 T32 ep2"
    ]  # fmt: skip
    for row in content["rows"]:
        assert row["messages"]["frozen"] == row["messages"]["packlora"]
        assert row["messages"]["packlora"]["collectives"] == 3
    assert content["summary"]["part_lora_1jobs_T32_over_frozen_ep2"] > 0


@pytest.mark.soak
def test_tensor_parallel_on_two_processes(ranks: Pool, tmp_path: Path) -> None:
    """One message more a step than the frozen layers send; where tokens are apart, each of the four blocks joins its input once
    more."""
    out = tmp_path / "tensor-parallel.json"
    assert ranks(2).run(benched, "tensor-parallel", out) == [0, 0]
    content = file_of(out)
    summary = content["summary"]
    assert content["name"] == "tensor-parallel-cpu"
    assert summary["part_extra_collectives_per_step"] == 1
    assert summary["part_extra_collectives_per_step_sp"] == 1 + 4
    # bytes of the hidden states, of which each process sends half in what is one half of a sum
    hidden = 4 * 16 * 64 * 2
    message = 4 * (ROW + 2 * 16 * 64 * 7)  # of two layers A of five projections and B of two
    assert summary["part_wire_of_base"] == pytest.approx(1 + message / (16 * hidden / 2))
    assert summary["part_over_frozen_tp2"] > 0
    for row in content["rows"]:
        sent = {name: own["collectives"] for name, own in row["messages"].items()}
        assert set(row["ms"]) == set(tensor_parallel.CONTENDERS)
        assert sent["packlora_stepped"] == sent["packlora"] + 1
        assert row["messages"]["frozen"]["sent"] == (16 + 2 * row["sequence"]) * hidden / 2


# --- figures -----------------------------------------------------------------------------------------------------------


def jobs_row(size: int, one: float, jobs: list[float], samples: list[float], equal: bool = True) -> dict[str, Any]:
    ways = {"one": ([one, 0.0], [120, 0]), "jobs": (jobs, [120 // size] * size), "samples": (samples, [120, 0])}
    row = {name: {"s": seconds, "tokens": tokens} for name, (seconds, tokens) in ways.items()}
    return {"part": "jobs", "processes": size, "bits_equal": {"a": True, "b": equal}, **row}


def fsdp2_row(size: int, replica: list[float], sharded: list[float]) -> dict[str, Any]:
    return {"part": "fsdp2", "processes": size, "replica": {"s": replica}, "sharded": {"s": sharded}}


def test_efficiency_of_known_times() -> None:
    """Jobs until the last process is done with all units, samples until each unit's slowest process is."""
    rows = [jobs_row(2, 10, [5, 7], [5, 6]), jobs_row(2, 10, [8, 5], [7, 6])]
    summary = replicas.summary([*rows, *(fsdp2_row(2, [1, 2], [3, s]) for s in (3, 5, 4))])
    assert summary["efficiency_jobs_2"] == pytest.approx(20 / (2 * 13))
    assert summary["efficiency_samples_2"] == pytest.approx(20 / (2 * 13))
    assert summary["busy_efficiency_jobs_2"] == pytest.approx((120 / 13 + 120 / 12) / 2 / (240 / 20))
    assert summary["one_of_2_tokens_per_s"] == pytest.approx(12)
    assert summary["fsdp2_over_replica"] == pytest.approx(4 / 2)
    assert summary["bits_equal_jobs"] is True
    more = replicas.summary([*rows, jobs_row(4, 8, [2, 2, 2, 4], [4, 2, 2, 2], equal=False)])
    assert more["efficiency_jobs_4"] == pytest.approx(8 / (4 * 4))
    assert more["efficiency_jobs_2"] == summary["efficiency_jobs_2"]
    assert more["bits_equal_jobs"] is False
    assert "fsdp2_over_replica" not in more


def cut_row(size: int, ratio: float, extra: int, sequence: bool = False, samples: int = 4) -> dict[str, Any]:
    frozen, stepped = {"collectives": 8, "sent": 100.0}, {"collectives": 8 + extra, "sent": 101.0}
    return {
        "processes": size, "shape": "8B", "sequence": sequence, "samples": samples, "over_frozen": {"packlora": ratio},
        "messages": {"frozen": frozen, "packlora_stepped": stepped},
    }  # fmt: skip


def test_the_worst_of_the_cases_that_are_quoted_counts() -> None:
    rows = [
        cut_row(2, 1.05, 1),
        cut_row(2, 1.1, 1),
        cut_row(4, 1.2, 1),
        cut_row(2, 1.3, 5, True),
        cut_row(2, 9, 9, samples=1),
    ]
    summary = tensor_parallel.summary(rows)
    assert (summary["over_frozen_tp2"], summary["over_frozen_tp4"], summary["over_frozen_tp2_sp"]) == (1.1, 1.2, 1.3)
    assert (summary["extra_collectives_per_step"], summary["extra_collectives_per_step_sp"]) == (1, 5)
    assert summary["wire_of_base"] == pytest.approx(1.01)
    assert summary["packlora_over_frozen_tp2_8B_1"] == 9


def test_a_file_keeps_the_rows_of_other_numbers_of_processes(tmp_path: Path) -> None:
    out, device = tmp_path / "a.json", "NVIDIA H200"
    rows = [jobs_row(2, 1, [1, 1], [1, 1]), fsdp2_row(2, [1], [1]), jobs_row(4, 1, [1] * 4, [1] * 4)]
    file = {"name": "replicas-h200", "device": device, "commit": "c", "date": "d", "rows": rows, "summary": {}}
    out.write_text(json.dumps(file))
    kept = rows_of_other_parts(out, "replicas-h200", device, ["jobs 2"], replicas.part_of)
    assert [(row["part"], row["processes"]) for row in kept] == [("fsdp2", 2), ("jobs", 4)]


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_what_needs_processes_is_refused_on_one_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2 -m benchmarks replicas"):
        run_bench("replicas", out, quick=True, device="cpu")
    with pytest.raises(InputError, match="--shape is for replicas"):
        run_bench("tensor-parallel", out, quick=True, device="cpu", shape="8B")
    with pytest.raises(InputError, match="--resume and --plots are not for it"):
        run_bench("replicas", out, quick=True, device="cpu", resume=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="bench layer runs on one process"):
        run_bench("layer", out, quick=True, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_words_that_mean_nothing_are_refused_on_every_process(ranks: Pool, tmp_path: Path) -> None:
    for answer in ranks(2).run(refusal, tmp_path / "out"):
        assert "must end in .json" in answer
    assert list(tmp_path.iterdir()) == []


def refusal(rank: int, out: Path) -> str:
    with pytest.raises(InputError) as caught:
        benched(rank, "tensor-parallel", out)
    return str(caught.value)


def test_figures_of_a_pipeline_are_those_of_known_times() -> None:
    """Two units on two processes and one on four, of which the second is twice as fast as one job after the other."""

    def row(size: int, s: float, bubble: float) -> dict[str, Any]:
        way = {"s": s, "bubble": bubble, "tokens": 1000, "simulated_s": 0.9 * s, "slots": 4, "noops": 0}
        others = {"one_job": way | {"s": 2 * s, "bubble": 0.5}, "fixed_samples": way | {"s": 1.5 * s}}
        others |= {
            "eager_one_job_fixed": way | {"s": 4 * s},
            "fsdp2": {"s": 3 * s, "tokens": 1000, "slots": 4, "noops": 0},
        }
        return {"case": "x", "processes": size, "layers": 8, "no_flush": way, "failed": {}, **others}

    found = pipeline.summary([row(2, 1.0, 0.1), row(2, 3.0, 0.2), row(4, 1.0, 0.05)])
    assert found["speedup_over_1f1b_2gpu"] == found["speedup_over_1f1b_4gpu"] == 4.0
    assert (found["speedup_over_one_job_2gpu"], found["speedup_over_fsdp2_4gpu"]) == (2.0, 3.0)
    assert found["one_job_over_1f1b_2gpu"] == 2.0 and found["eager_no_flush_over_1f1b_2gpu"] is None
    assert found["speedup_over_unbalanced_4gpu"] == pytest.approx(1.5)
    assert found["bubble_4jobs_2gpu"] == pytest.approx(0.15)
    assert found["bubble_1job_4gpu"] == 0.5
    assert found["makespan_error"] == pytest.approx(0.1)
    assert found["tokens_per_s_per_gpu_70b"] == pytest.approx(1000 / 4 * 8 / 80)
    assert len(pipeline.table([row(2, 1.0, 0.1)])) == 6 + (len(pipeline.table([])) - 1)
    other = row(4, 2.0, 0.3) | {"shape": "32B", "lengths": "het"}
    both = pipeline.summary([row(4, 1.0, 0.05), other])
    assert (both["bubble_4jobs_4gpu"], both["bubble_4jobs_4gpu_32b_het"]) == (0.05, 0.3)
    assert both["tokens_per_s_per_gpu_70b"] == pytest.approx(1000 / 4 * 8 / 80)
    assert both["tokens_per_s_per_gpu_32b_het"] == pytest.approx(1000 / 2 / 4 * 8 / 64)
    assert [pipeline.part_of(own) for own in (row(4, 1.0, 0.0), other)] == ["x4", "x4 32B het"]
    units = [row(2, s, 0.1 * s) | {"case": f"x2 unit {number}"} for number, s in enumerate((1.0, 2.0, 3.0), 1)]
    drawn = ways_by_case([*units, other | {"case": "x4 32B het unit 1"}])
    assert drawn["x2"]["no_flush"] == (500, pytest.approx(0.2)) and drawn["x2"]["fsdp2"] == (
        pytest.approx(1000 / 6),
        None,
    )
    assert list(drawn) == ["x2", "x4 32B het"] and len(drawn["x4 32B het"]) == 5


ONLY = "no_flush,one_job,fixed_samples"


def ended_early(rank: int, out: Path) -> None:
    """A run that ends at its second turn that is counted."""
    original, turns = pipeline.Piped.unit, 0

    def unit(self: pipeline.Piped, way: str) -> dict[str, Any]:
        nonlocal turns
        turns += 1
        if turns == 3 + 2:
            raise ValueError("the machine was taken away")
        return original(self, way)

    with mock.patch.object(pipeline.Piped, "unit", unit), pytest.raises(ValueError, match="taken away"):
        benched(rank, "pipeline", out, units=1, only=ONLY)
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.soak
def test_a_pipeline_s_turns_are_kept_and_a_run_that_was_ended_goes_on(ranks: Pool, tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    ranks(2).run(ended_early, out)
    part = json.loads((tmp_path / "pipeline.part.json").read_text())
    assert [row["case"] for row in part["rows"]] == ["x2 unit 1 one_job"]
    again = {"units": 1, "resume": True, "only": ONLY, "plots": True}
    (status, said), other = ranks(2).run(limited, out, again)
    assert {path.name for path in tmp_path.glob("*-ways.*")} == {"pipeline-ways.png", "pipeline-ways.svg"}
    assert (status, other) == (0, (0, ""))
    assert "on 2 stages (1, 1; the output layer" in said and "5 turns, those to warm up included, of about " in said
    assert [f"x2 unit 1 {way}: " in said for way in ONLY.split(",")] == [True, False, True]
    content = file_of(out)
    (row,) = content["rows"]
    assert row["one_job"] == part["rows"][0]["figures"] and {*ONLY.split(",")} < row.keys()
    assert not (tmp_path / "pipeline.part.json").exists()
    assert [told[0] for told in ranks(2).run(limited, out, {"units": 1, "only": "no_flush"})] == [0, 0]
    summary = file_of(out)["summary"]
    assert summary["part_bubble_4jobs_2gpu"] > 0 and summary["part_speedup_over_1f1b_2gpu"] is None
    other = {"units": 1, "only": "no_flush", "shape": "32B", "lengths": "het"}
    assert [told[0] for told in ranks(2).run(limited, out, other)] == [0, 0]
    content = file_of(out)
    assert content["summary"]["part_tokens_per_s_per_gpu_32b_het"] > 0
    assert [row["case"] for row in content["rows"]] == ["x2 32B het unit 1"]
    assert "2 layers of Qwen2.5-32B's shape" in content["protocol"] and "of at most 4096 (xsum" in content["protocol"]


def test_what_bench_pipeline_is_asked_for_is_checked(tmp_path: Path) -> None:
    assert pipeline.ways_of(["one_job", "no_flush"]) == ("no_flush", "one_job")
    labels = [turn.label for turn in pipeline.turns(2, ("no_flush", "one_job"), pipeline.case_of(4, "70B", "short"))]
    assert labels == ["x4 unit 1 one_job", "x4 unit 1 no_flush", "x4 unit 2 no_flush", "x4 unit 2 one_job"]
    with pytest.raises(InputError, match=r"only: 'flush' is none of no_flush, one_job, fixed_samples, .*, fsdp2"):
        pipeline.ways_of(["flush"])
    for key, value in (("units", 2), ("lengths", "het")):
        with pytest.raises(InputError, match=f"--{key} is for pipeline"):
            benched(0, "layer", tmp_path / "out.json", **{key: value})
    assert USUAL_SHAPES["replicas"] in short_jobs.SHAPES and USUAL_SHAPES["pipeline"] in pipeline.SHAPES
    with pytest.raises(InputError, match=r"--shape is for replicas \(8B, .*\) and pipeline \(70B, 32B\); got '8B'"):
        benched(0, "pipeline", tmp_path / "out.json", shape="8B")
    with pytest.raises(InputError, match=r"--lengths is one of short, xsum, .*, het, real; got 'long'"):
        benched(0, "pipeline", tmp_path / "out.json", lengths="long")


def test_lengths_of_a_set_are_those_of_bench_schedule(tmp_path: Path) -> None:
    sizes = replace(replicas.Sizes.of(Options(torch.device("cuda"))), longest=4096)
    for lengths in ("het", "real"):
        for number, (job, kind) in enumerate(zip(pipeline.jobs_of(sizes, lengths, 99), SETS[lengths], strict=True)):
            drawn, own = draw_lengths(kind, 1000, number), [sample.num_tokens for sample in job.samples]
            assert len(own) == job.batch * sizes.rounds and max(own) <= 4096
            assert sum(own) / len(own) == pytest.approx(drawn.clip(8).mean(), rel=0.05)
            assert job.batch == max(1, round(8192 / drawn.clip(8).mean()))
