"""Benchmarks on several processes: which cases are measured is decided once, and each runs at toy sizes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from graph_runs import Pretended, attention_by_starts
from ranks import Ranks
from tensor_runs import BOUND, difference

from benchmarks import harness, processes, tensor_parallel
from benchmarks.__main__ import main
from benchmarks.harness import Benchmark, Case, Options, case
from benchmarks.pipeline import TOGETHER, WAYS
from benchmarks.processes import counted, everyone
from benchmarks.shapes import SHORT, build, config_of
from benchmarks.tensor_parallel import Inputs, attached_job, recorded
from benchmarks.training import samples_of
from packlora.adapters.attach import attach
from packlora.base.packing import prepare_model
from packlora.engine.collate import collate
from packlora.engine.parts import Part
from packlora.engine.recorded import Body
from packlora.engine.rows import Row
from packlora.parallel.tensor import shard

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


def recorded_and_eager(rank: int, sequence: bool, frozen: bool) -> tuple[list[str], list[str], float]:
    """Messages of a forward and a backward of pretended graphs, those of the eager ones, and how far the gradients of the
    adapter are from theirs, which is 0 of frozen layers."""
    config = config_of(SHORT["8B"], True, 2, vocab_size=512)
    torch.manual_seed(0)
    model: Any = build(config, torch.device("cpu")).double()
    shard(model, everyone(), sequence, vocabulary=False)
    prepare_model(model, gradient_checkpointing=False)
    samples = samples_of(np.full(4, 64), 512, 0)
    batch = collate([Part(0, [Row(sample, (7, 0, at)) for at, sample in enumerate(samples)])], torch.device("cpu"))
    x = model.get_input_embeddings()(batch.input_ids_T)[None].detach().requires_grad_()
    inputs = Inputs(batch, x, torch.randn_like(x))
    job, attached = (None, attach(model, {}, 0)[0]) if frozen else attached_job(model, 4, 64)
    with pytest.MonkeyPatch.context() as patched:
        attention_by_starts(patched)
        patched.setattr(tensor_parallel, "Recorder", Pretended)
        run = recorded(model, attached, job, inputs)
        with counted() as replayed:
            run()
    buffers = {} if job is None else {name: own.clone() for name, own in job.state.gradient_buffers().items()}
    if job is not None:
        assert all(job.state.found(with_new=True).values()), "a step takes them"
        job.discard()
    with counted() as eager, nullcontext() if job is None else attached.active(batch.owners):
        inputs.forward(model).backward(inputs.dy)
    grads = {name: job.state.parameters[name].grad for name in buffers} if job is not None else {}
    return replayed.names, eager.names, max((difference(buffers[name], grads[name]) for name in buffers), default=0.0)


@pytest.mark.parametrize("sequence", [False, True])
def test_recorded_layers_compute_and_send_what_eager_ones_do(sequence: bool, ranks: Groups) -> None:
    """Down to the gradient of the first layer's input, frozen and with an adapter."""
    for frozen in (True, False):
        for replayed, eager, furthest in ranks(2).run(recorded_and_eager, sequence, frozen):
            assert replayed == eager and len(eager) == (2 * (4 + 1 + 4) if sequence else 2 * 4)
            assert furthest < BOUND


def graphs_at_the_end(rank: int, out: str, stopped: bool) -> tuple[int, int]:
    """Pretended graphs that a benchmark has made, and those that are there when its process group ends. stopped: by a signal,
    in the middle of a case."""
    made: list[int] = []
    alive: list[int] = []
    original = processes.started

    @contextmanager
    def watched(timeout: float) -> Iterator[Any]:
        with original(timeout) as mesh:
            try:
                yield mesh
            finally:
                alive.append(sum(isinstance(one, Body) for one in gc.get_objects()))

    class Counted(Pretended):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            made.append(1)
            return super().record(function)

    words = ["tensor-parallel", "--quick", "--device", "cpu", "--only", "plain,packlora_recorded"]
    record = tensor_parallel.recorded
    with pytest.MonkeyPatch.context() as patched:

        def recorded(*args: Any) -> Callable[[], None]:
            attention_by_starts(patched)  # not before the model is cut, for which it is looked at without weights
            return record(*args)

        patched.setattr(tensor_parallel, "recorded", recorded)
        patched.setattr(tensor_parallel, "Recorder", Counted)
        patched.setattr(tensor_parallel, "can_record", lambda device: True)
        patched.setattr(processes, "started", watched)
        if stopped:
            patched.setattr(tensor_parallel, "messages", mock.Mock(side_effect=KeyboardInterrupt))
        assert main([*words, "--out", out]) == (130 if stopped else 0)
    return len(made), alive[0]


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.soak), True])
def test_no_graph_is_left_when_the_processes_of_a_benchmark_end(stopped: bool, ranks: Groups, tmp_path: Path) -> None:
    """A process group does not end while graphs hold its messages."""
    assert ranks(2).run(graphs_at_the_end, str(tmp_path / "tensor.json"), stopped) == [(3, 0)] * 2


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
