"""Benchmarks on several processes: which cases are measured is decided once, and each runs at toy sizes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ranks import Ranks

from benchmarks import harness
from benchmarks.__main__ import main
from benchmarks.harness import Benchmark, Case, Options, case
from benchmarks.pipeline import TOGETHER, WAYS

Groups = Callable[[int], Ranks]


def measured(rank: int, out: str, asked: dict[str, Any]) -> list[str]:
    """Cases that a rank measures of three. Ranks after the first have no file, and a clock on which hours have gone by."""
    labels: list[str] = []

    def measure(one: Case, names: list[str], options: Options) -> dict[str, Any]:
        labels.append(one.label)
        return {"failed": {}}

    cases = [case(label) for label in ("a", "b", "c")]
    bench = Benchmark(lambda _: cases, measure, lambda _: {}, "how", ["frozen"], by_case=True, where="processes")
    path, began = Path(out) if not rank else Path(out).with_name("none.json"), time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: began + rank * 3600 * len(labels))
    with mock.patch.object(harness, "time", clock):
        assert harness.run("toy", bench, path, quick=True, device="cpu", **asked) == 0
    return labels


def test_the_first_process_decides_for_all_which_cases_are_measured(ranks: Groups, tmp_path: Path) -> None:
    out = str(tmp_path / "toy.json")
    assert ranks(2).run(measured, out, {"seconds": -1.0}) == [["a"]] * 2
    assert ranks(2).run(measured, out, {"resume": True, "seconds": 60.0}) == [["b", "c"]] * 2
    assert "not_measured" not in json.loads(Path(out).read_text())
    assert ranks(2).run(measured, out, {"resume": True}) == [[]] * 2


def on_ranks(rank: int, words: list[str]) -> int:
    return main(words)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["replicas", "pipeline", "tensor-parallel", "experts"])
def test_benchmarks_of_processes_run_at_toy_sizes(name: str, ranks: Groups, tmp_path: Path) -> None:
    """Divided jobs have the bits of one device; all ways of a pipeline train on the same tokens; a step sends one message more
    than the frozen layers do, with sequence parallelism too."""
    out = tmp_path / f"{name}.json"
    words = [name, "--quick", "--device", "cpu", "--out", str(out)]
    assert ranks(2).run(on_ranks, words) == [0, 0]
    content = json.loads(out.read_text())
    rows, summary = content["rows"], {key.removeprefix("part_"): value for key, value in content["summary"].items()}
    assert rows and all(not row["failed"] for row in rows)
    if name == "replicas":
        assert summary["bits_equal_jobs"] is True and summary["fsdp2_over_replica"] > 0
    elif name == "pipeline":
        assert all(len({row[way]["tokens"] / (3 if way in TOGETHER else 1) for way in WAYS}) == 1 for row in rows)
        assert 0 < summary["bubble_4jobs_2gpu"] < 1
    elif name == "tensor-parallel":
        assert (summary["extra_collectives_per_step"], summary["extra_collectives_per_step_sp"]) == (1, 1)
    else:
        assert all(row["messages"]["frozen"] == row["messages"]["packlora"] for row in rows)
