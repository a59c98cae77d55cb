"""Microbatches that share a graph: what changes between them is in buffers, and nothing else. Recorded graphs: tests/gpu."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import graph_runs
import numpy as np
import pytest
import torch
from graph_runs import COLUMNS, JOBS, MICROBATCHES, Fixed, Pretended, Run, attention_by_starts
from packed import PackedSample, parts

from packlora.data.encode import Sample
from packlora.engine import recorded
from packlora.engine.collate import collate
from packlora.engine.graphs import MOST, GraphedDevice
from packlora.engine.passes import SingleDevice
from packlora.engine.recorded import Body, Shape
from packlora.engine.rows import NO_ADAPTER
from packlora.ops import launcher
from packlora.ops.attention.blocks import most_blocks, table_of
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import Prepared
from packlora.ops.lora_linear.tables import SegmentTables
from packlora.runtime.run import deterministic


class Always(Fixed):
    def plan_of(self, x: Any, layers: Any, segments: Any, known: bool = True) -> Plan:
        assert known
        return self.plan


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that read one input, and one by itself; one job has none of the latter."""
    own = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    fewer = {"some modules": JOBS["some modules"] | {"target_modules": ["q_proj", "v_proj"]}}
    monkeypatch.setattr(graph_runs, "JOBS", {name: own | job for name, job in (JOBS | fewer).items()})


def test_microbatches_of_one_shape_train_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runs, "MICROBATCHES", [*MICROBATCHES[:4], MICROBATCHES[-1]])
    want = Run(None, shrink=4).train()
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Fixed(ROUTED), shrink=4)
    got = run.train()
    assert not run.told and isinstance(run.executor, GraphedDevice)
    assert run.executor._recorder.recorded == 3  # forward, backward and copies of the shape that came more than twice
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("lora", CHAIN), ("dora with dropout", CHAIN), ("dora", ROUTED),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("dora", CHAIN), ("lora", ROUTED))),
    ],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_one_job_owns_the_tokens_of_nobody_and_trains_as_without_them(
    monkeypatch: pytest.MonkeyPatch, job: str, plan: Plan
) -> None:
    """Any plan, DoRA with dropout too, which has no kernels for two base products: no boundary has to be looked up."""
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:5])
    monkeypatch.setitem(graph_runs.JOBS, "dora with dropout", graph_runs.JOBS["dora"] | {"lora_dropout": 0.2})
    want = Run(None, shrink=4, jobs=(job,)).train()
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Always(plan), shrink=4, jobs=(job,))
    got = run.train()
    assert not run.told and run.executor._recorder is not None
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "jobs", [pytest.param(("lora", "some modules"), marks=pytest.mark.soak), ("lora",)], ids=["two jobs", "one job"]
)
def test_a_rehearsal_in_which_no_kernel_writes_anything_leaves_nothing_behind(
    jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[: 4 if len(jobs) > 1 else 5])
    with deterministic():  # memory that nobody has written to is full of NaN
        want = Run(Pretended, Always(ROUTED) if len(jobs) == 1 else Fixed(ROUTED), shrink=4, jobs=jobs).train()
        left_out = list[str]()

        class Rehearsal:
            def __init__(self, pool: Any) -> None:
                pass

            def take(self, kernel: Any, *rest: Any) -> None:
                left_out.append(str(kernel))

        monkeypatch.setattr(launcher, "_Rehearsal", Rehearsal)
        monkeypatch.setattr(GraphedDevice, "_can_rehearse", lambda self: True)
        run = Run(Pretended, Always(ROUTED) if len(jobs) == 1 else Fixed(ROUTED), shrink=4, jobs=jobs)
        got = run.train()
    assert not run.told and run.executor._recorder is not None
    assert len(set(left_out)) >= 4
    assert all(p.isfinite().all() for p in got)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@cache
def wanted(jobs: tuple[str, ...]) -> list[torch.Tensor]:
    return Run(Pretended, Fixed(ROUTED), shrink=4, jobs=jobs).train()


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (Prepared, "_make_room", 2), pytest.param(torch.nn.functional, "silu", 1, marks=pytest.mark.soak),
        pytest.param(torch, "_foreach_copy_", 1, marks=pytest.mark.soak),
        pytest.param(SegmentTables, "write", 1, marks=pytest.mark.soak),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_rehearsal_that_fails_as_the_microbatch_does_not_leaves_nothing_half_made(
    owner: Any, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:4])
    jobs, calls, original = ("lora", "some modules"), 0, getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += launcher._rehearsal is not None
        if launcher._rehearsal is not None and calls == at:
            raise torch.OutOfMemoryError("in the rehearsal alone")
        return original(*args, **kwargs)

    with deterministic():
        want = wanted(jobs)
        monkeypatch.setattr(launcher, "_Rehearsal", lambda pool: mock.Mock())
        monkeypatch.setattr(GraphedDevice, "_can_rehearse", lambda self: True)
        monkeypatch.setattr(owner, name, failing)
        run = Run(Pretended, Fixed(ROUTED), shrink=4, jobs=jobs)
        got = run.train()
    assert calls >= at and not run.told and run.executor._recorder is not None
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_neither_cpus_nor_jobs_with_magnitudes_rehearse() -> None:
    for jobs, may in ((("lora", "dora"), False), (("lora",), True)):
        device = Run(Pretended, jobs=jobs).executor
        assert device._can_rehearse() is False
        device.single.base.device = torch.device("cuda")
        assert device._can_rehearse() is may


def test_recordings_share_a_stream_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service drops its graphs with each model that comes or leaves; libraries keep memory for every stream."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    recorded._stream.cache_clear()
    one, other = (recorded.Recorder(torch.device("cuda:3")) for _ in range(2))
    recorded._stream.cache_clear()
    assert one._stream is other._stream and one._pool is not other._pool


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_graph_is_recorded(enabled: bool) -> None:
    thresholds, was, gone, made = gc.get_threshold(), gc.isenabled(), list[int](), list[list[int]]()
    cycle: list[Any] = [Gone(gone)]
    cycle.append(cycle)
    (gc.enable if enabled else gc.disable)()
    try:
        with recorded.uncollected():
            del cycle
            gc.set_threshold(1)
            made.extend([] for _ in range(99))
            assert not gone
        assert gc.isenabled() == enabled
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was else gc.disable)()
    gc.collect()
    assert gone


class Gone:
    """Tells when it is destroyed."""

    def __init__(self, gone: list[int]) -> None:
        self.gone = gone

    def __del__(self) -> None:
        self.gone.append(1)


def test_shapes_are_few_and_hold_their_microbatches() -> None:
    generator, shapes = np.random.default_rng(0), Counter[Shape]()
    for _ in range(500):
        lengths = generator.integers(1, 300, generator.integers(1, 70)).tolist()
        shape = Shape.of(lengths, 8192)
        shapes[shape] += 1
        samples = [PackedSample(0, Sample(np.full(n, 5, np.int32), np.arange(n) > 0), 0, 0, None) for n in lengths]
        batch = collate(parts(samples), torch.device("cpu"), total=shape.tokens)
        assert (
            sum(lengths) <= shape.tokens <= max(1.125 * sum(lengths), sum(lengths) + 511)
            and batch.owners.total == shape.tokens
        )
        assert len(batch.sample_lengths) <= shape.samples
        assert table_of(batch.sample_lengths).shape[2] <= most_blocks(shape.tokens, shape.samples)
        assert batch.owners.segments == ((0, 0, sum(lengths)),) and batch.num_tokens == {0: sum(lengths)}
    full = {Shape.of([170] * 48 + [rest], 8192) for rest in range(1, 32)}
    assert len(full) == 1  # microbatches that are as good as full share theirs
    assert len({shape.tokens for shape in shapes if shape.tokens <= 8192}) <= 16
    assert len({shape for shape in shapes if shape.tokens <= 8192}) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("when", [pytest.param("forward", marks=pytest.mark.soak), "backward"])
def test_what_cannot_be_recorded_is_computed_without_graphs_and_told_once(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A device that is waited for, in the forward of a microbatch or in its backward: no gradient is added twice."""
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:4])
    want = Run(None, shrink=4).train()
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Fixed(ROUTED), shrink=4)
    original, calls = getattr(Body, f"_run_{when}"), 0

    def failing(self: Body) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return original(self)

    monkeypatch.setattr(Body, f"_run_{when}", failing)
    got = run.train()
    (told,) = run.told
    assert told.startswith("no CUDA graphs") and told.endswith("RuntimeError: called a synchronizing CUDA operation")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_a_second_forward_before_the_backward_goes_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:3])  # the third is a replay
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Fixed(ROUTED), shrink=4)
    run.train()
    generator = np.random.default_rng(5)
    samples = [
        [
            PackedSample(
                o, Sample(generator.integers(3, 90, n).astype(np.int32), np.arange(n) > 2), 0, 0, 11 if o == 0 else None
            )
            for o, n in own
        ]
        for own in (run.owned(1), run.owned(2))
    ]
    packed = [parts(own, np.array([0.1, 0.1, 0.1])) for own in samples]
    for own in run.buffers.values():
        for parameter, buffer in own.values():
            parameter.grad = None
            buffer.zero_()
    run.executor.prepare(packed[0])
    ahead = run.executor._ready.waiting  # launched, and not again when it is asked for
    first, second = (run.executor.forward(own) for own in packed)
    assert type(first) is not type(second) and first is ahead
    for pending in (second, first):
        run.executor.backward(pending)
        run.collect({0, 1, 2}, step=False)
    other = Run(None, shrink=4)
    for mine, theirs in zip(other.parameters(), run.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    for own in packed:
        other.executor.backward(other.executor.forward(own))
    for (_, one), parameter in zip(
        (pair for own in run.buffers.values() for pair in own.values()), other.parameters(), strict=True
    ):
        torch.testing.assert_close(one, parameter.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dropout", [False, True])
def test_evaluations_go_by_a_recorded_graph_unless_one_drops(monkeypatch: pytest.MonkeyPatch, dropout: bool) -> None:
    """Of samples that the shape has room for, after the job has stepped, and after a forward that was launched ahead."""
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:4])
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Always(CHAIN), shrink=4, jobs=("dora",))
    run.executor = GraphedDevice(run.executor.single, run.buffers, dropout, 64, run.told.append, Pretended, COLUMNS)
    run.train(times=2)
    assert any(body.recorded for body in run.executor._bodies.values())
    first, *_, last = (run.packed(number) for number in range(4) if run.owned(number))
    of_base = [replace(first[-1], adapter=NO_ADAPTER)]  # a single adapter has all tokens of a graph
    got, want = (executor.evaluate(of_base, by_graph=True).sums for executor in (run.executor, run.executor.single))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    run.executor.prepare(first)
    for parts_ in (first, last[-1:]):
        want = run.executor.single.evaluate(parts_)
        assert torch.equal(run.executor.evaluate(parts_).losses_L, want.losses_L)
        with mock.patch.object(SingleDevice, "evaluate", side_effect=AssertionError("without a graph")) as by_itself:
            if dropout:
                with pytest.raises(AssertionError):
                    run.executor.evaluate(parts_, by_graph=True)
            else:
                got = run.executor.evaluate(parts_, by_graph=True)
                torch.testing.assert_close(got.losses_L, want.losses_L, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(got.sums, want.sums, rtol=1e-5, atol=1e-6)
        assert bool(by_itself.call_count) == dropout
    ahead = run.executor.forward(first)
    torch.testing.assert_close(
        ahead.pending.losses.losses_L, run.executor.single.forward(first).losses.losses_L, rtol=1e-5, atol=1e-6
    )
    assert not run.told


def test_a_size_runs_by_the_graphs_of_a_larger_one_until_its_filling_is_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses; then it has a body of its own, which is recorded after one microbatch, others after two."""
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 16)
    run = Run(Pretended, Always(CHAIN), jobs=("dora",))
    device = GraphedDevice(
        run.executor.single, run.buffers, False, 0, run.told.append, Pretended, COLUMNS, patience=2, lent=40
    )

    def microbatch(tokens: int) -> list[Any]:
        ids = np.random.default_rng(tokens).integers(3, 90, tokens).astype(np.int32)
        return parts([PackedSample(0, Sample(ids, np.arange(tokens) > 2), 0, 0, None)], np.array([0.1]))

    def shapes() -> list[int]:
        return sorted(shape.tokens for shape in device._bodies)

    for _ in range(3):
        device.backward(device.forward(microbatch(64)))
    assert shapes() == [64] and next(iter(device._bodies.values())).recorded
    for tokens, want in ((46, [64]), (46, [64]), (60, [64]), (46, [64]), (46, [48, 64]), (31, [32, 48, 64])):
        own = microbatch(tokens)
        got = device.backward(device.forward(own))
        torch.testing.assert_close(got.sums, run.executor.single.evaluate(own).sums, rtol=1e-4, atol=1e-5)
        assert shapes() == want
    for tokens in (46, 31):
        device.backward(device.forward(microbatch(tokens)))
    assert [shape.tokens for shape, body in device._bodies.items() if body.recorded] == [64, 48]
    assert (device.sizes.recorded, device.sizes.padding) == (2, 3 * 18 + 4 + 2 * 2 + 2 * 1)
    assert not run.told
