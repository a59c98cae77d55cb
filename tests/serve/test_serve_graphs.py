"""Models of a service whose microbatches go by graphs, on a CPU, with a recorder whose replays run the functions again.

Recorded graphs: tests/gpu/test_serve_graphs_gpu.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import tiny_model
from graph_runs import attention_by_starts, replay_of
from graphed import Story
from serving import datum, host_of

from packlora.engine import generate, recorded, recorded_decode
from packlora.engine import graphs as engine_graphs
from packlora.engine.adapters import AdapterState
from packlora.engine.passes import SingleDevice
from packlora.engine.recorded import Body, Recorder
from packlora.ops.attention import attention
from packlora.ops.lora_linear.plan import CHAIN, ROUTED
from packlora.ops.lora_linear.prepared import Prepared
from packlora.plans.select import PlanChooser
from packlora.serve import graphs as serve_graphs
from packlora.serve import slots
from packlora.serve.host import Host
from packlora.serve.tenant import Tenant


class Count:
    """What has run: functions that were recorded, their replays, bodies without a graph, microbatches without any body."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.bare = self.single = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    own = Count()

    def record(self: Recorder, function: Callable[[], None]) -> Callable[[], None]:
        own.recorded += 1
        replay = replay_of(function)

        def counted() -> None:
            own.replayed += 1
            replay()

        return counted

    def bare(self: Body, *args: Any) -> Any:
        own.bare += not self.recorded
        return run_forward(self, *args)

    def forward(self: SingleDevice, *args: Any) -> Any:
        own.single += 1
        return single(self, *args)

    @contextmanager
    def nothing_waits(device: Any, checked: bool) -> Iterator[None]:
        """What is made at a first call, the host waits for."""
        with pytest.MonkeyPatch.context() as patch:
            if checked:
                patch.delattr(Prepared, "__init__")
            yield

    monkeypatch.setattr(engine_graphs, "_nothing_waits", nothing_waits)
    run_forward, single = Body.forward, SingleDevice.forward
    monkeypatch.setattr(Body, "forward", bare)
    monkeypatch.setattr(SingleDevice, "forward", forward)
    monkeypatch.setattr(Recorder, "__init__", lambda self, device: None)
    monkeypatch.setattr(Recorder, "record", record)
    return own


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def graphed_host(base: str, state: Path, monkeypatch: pytest.MonkeyPatch, patience: int) -> Host:
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(attention, "uses_kernels", lambda *_: True)
    monkeypatch.setattr(serve_graphs, "why_base_has_none", lambda *_: None)
    monkeypatch.setattr(serve_graphs, "PATIENCE", patience)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 32)
    monkeypatch.setattr(PlanChooser, "plan_for", lambda self, case: ROUTED if case.moving else CHAIN)
    return host_of(base, state, budget=64)


def test_models_that_come_and_go_have_the_bits_of_the_same_passes_without_graphs(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tenant, "kind", None)  # all share microbatches, as on a GPU
    with pytest.MonkeyPatch.context() as patch:
        host = graphed_host(base, tmp_path, patch, 1)
        got = Story(host, tmp_path / "graphs").run()
        assert (count.recorded, count.replayed, count.bare, count.single) == (9, 17, 5, 2)
        assert len(host.seats.empty) == 3
        adapters = [own.state.adapter for own in host.seats.empty]
        tensors = [weakref.ref(t) for own in adapters for t in (own.flat, *own.named_parameters().values())]
        del adapters
        sampler = host.attach("a sampler", host.seats.empty[0].state.adapter.spec, 0)
        assert sampler.number not in host.graphs.adapters
        host.detach(sampler)
        host.tidy(0)
        gc.collect()
        assert not any(tensor() is not None for tensor in tensors) and not host.graphs.adapters
    with pytest.MonkeyPatch.context() as patch:
        eager = Story(graphed_host(base, tmp_path, patch, 1000), tmp_path / "eager").run()
    plain = Story(host_of(base, tmp_path, budget=64), tmp_path / "plain").run()
    assert not [record for record in caplog.records if record.name.startswith("packlora")]
    for one, other, third in zip(got, eager, plain, strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, third, rtol=2e-4, atol=2e-5)


def test_one_model_that_leaves_lets_nothing_be_recorded_anew(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Its seat stays for the next one while others work; two seats do not, nor one beside nobody."""
    host = graphed_host(base, tmp_path, monkeypatch, 1)
    story = Story(host, tmp_path / "state")
    story.enter("plain", "dropped", "dora")
    for name in story.models:
        story.learn(name)
    story.leave("dropped")
    assert not host.tidy(1e-9) and len(host.graphs.adapters) == 3
    for adapters, tokens in ((2, 64), (2, 48)):  # where memory lacks its room is taken before microbatches shrink
        story.service._lower_budget(host, mock.Mock(requests=[]), 64)
        assert (len(host.graphs.adapters), host.budget.tokens) == (adapters, tokens)
    story.leave("dora")
    story.enter("heir")
    story.learn("heir")
    story.leave("heir")
    assert host.tidy(1e-9) and len(host.graphs.adapters) == 1
    story.leave("plain")
    assert host.tidy(1e-9) and not host.graphs.adapters and not host.tidy(0)


def test_graphs_of_samples_hold_no_weights_of_a_model_that_has_left(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Though no sample comes after it."""
    monkeypatch.setattr(generate, "why_no_decode_graphs", lambda *_: None)
    host = graphed_host(base, tmp_path, monkeypatch, 1)
    story, asked = Story(host, tmp_path / "state"), {"kind": "inflight", "sampling_session_seq_id": 0}
    story.enter("plain", "dora")
    promise = story.talk.call(story.models["plain"], "save_weights_for_sampler", **asked)
    story.talk.run()
    body = {"sampling_session_id": story.talk.result(promise)["sampling_session_id"], "seq_id": 0}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}}
    body["sampling_params"] = {"max_tokens": recorded_decode.UNRECORDED + 4, "seed": 1, "stop": []}
    story.talk.desk.asample(story.talk.owner, body)
    story.talk.run()
    own = story.service.tenants[story.models["plain"]].adapter
    tensors = [weakref.ref(tensor) for tensor in own.named_parameters().values()]
    assert [shape.adapters for shape in host.sampling._passes._bodies] == [(own.number,)]
    del own
    story.leave("plain")
    host.tidy(0)
    story.learn("dora")
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors) and host.sampling._passes.why_not is None
    story.leave("dora")


def test_graphs_hold_no_weights_of_what_was_beside_them_when_they_were_recorded(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """A model and a snapshot that leave: graphs of training and of samples serve on without them."""
    monkeypatch.setattr(Tenant, "kind", None)
    monkeypatch.setattr(generate, "why_no_decode_graphs", lambda *_: None)
    host = graphed_host(base, tmp_path, monkeypatch, 1)
    story, asked = Story(host, tmp_path / "state"), {"kind": "inflight", "sampling_session_seq_id": 0}
    story.enter("plain", "dora")
    story.learn("dora")
    promise = story.talk.call(story.models["plain"], "save_weights_for_sampler", **asked)
    story.talk.run()
    own, other = (story.service.tenants[story.models[name]].adapter for name in ("plain", "dora"))
    assert own is not None and other is not None
    snapshot = host.attach("a sampler", own.spec, 0)
    tensors = [weakref.ref(t) for one in (other, snapshot) for t in one.named_parameters().values()]
    body: dict[str, Any] = {"sampling_session_id": story.talk.result(promise)["sampling_session_id"], "seq_id": 0}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}}
    body["sampling_params"] = {"max_tokens": recorded_decode.UNRECORDED + 4, "seed": 1, "stop": []}
    story.talk.desk.asample(story.talk.owner, body)
    story.talk.run()
    (decoded,) = host.sampling._passes._bodies.values()
    assert decoded.is_recorded
    host.detach(snapshot)
    del snapshot, other
    story.leave("dora")
    host.tidy(0)  # what was recorded of both models is gone, with all that is of training
    snapshot = host.attach("another sampler", own.spec, 0)
    tensors += [weakref.ref(t) for t in snapshot.named_parameters().values()]
    for _ in range(4):
        story.learn("plain")
    bodies = [body for body in host.graphs._bodies.values() if body.recorded]
    host.detach(snapshot)
    del snapshot
    gc.collect()
    assert bodies == [body for body in host.graphs._bodies.values() if body.recorded] and bodies
    assert list(host.sampling._passes._bodies.values()) == [decoded]
    assert not any(tensor() is not None for tensor in tensors)
    replayed = count.replayed
    story.learn("plain")
    assert count.replayed == replayed + 2
    story.leave("plain")


def test_rows_of_a_slot_that_failed_count_once_where_graphs_had_added_up_their_gradients(
    base: str, tmp_path: Path, count: Count
) -> None:
    """Also those of a model whose sums of losses were not touched yet."""
    norms: list[list[float]] = []
    with pytest.MonkeyPatch.context() as patch:
        host = graphed_host(base, tmp_path, patch, 1)
        for fails in (False, True):
            story = Story(host, tmp_path / f"fails {fails}")
            story.enter("dropped", "dora")
            story.step(0)
            collect, left = AdapterState.collect, [fails]

            def failing(state: AdapterState, *args: Any, left: list[bool] = left, collect: Any = collect) -> None:
                if left[0] and state.added:
                    left[0] = False
                    raise RuntimeError("once")
                collect(state, *args)

            with pytest.MonkeyPatch.context() as once:
                once.setattr(AdapterState, "collect", failing)
                talk, steps = story.talk, []
                for number, model in enumerate(story.models.values()):
                    talk.forward_backward(model, [datum(20 + number, 9)])
                    steps.append(talk.step(model))
                talk.run()
            assert not left[0]
            norms.append([talk.result(promise)["metrics"]["grad_norm"] for promise in steps])
            for name in tuple(story.models):
                story.leave(name)
    np.testing.assert_allclose(*norms, rtol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_weights_of_what_has_left_go_without_the_collector_of_cycles(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count, graphs: bool
) -> None:
    """In a process of half a million objects that may not look for hours."""
    host = graphed_host(base, tmp_path, monkeypatch, 1000) if graphs else host_of(base, tmp_path, budget=64)
    story = Story(host, tmp_path / "state")
    story.enter("dropped", "dora")
    story.step(0)
    adapters = [story.service.tenants[model].adapter for model in story.models.values()]
    adapters.append(host.attach("a sampler", adapters[0].spec, 0))
    tensors = [weakref.ref(tensor) for own in adapters for tensor in own.named_parameters().values()]
    story.step(1)
    gc.collect()
    gc.disable()
    try:
        host.detach(adapters.pop())
        for name in ("dropped", "dora"):
            story.service.close_model(story.models.pop(name))
        del adapters
        with mock.patch.object(gc, "collect"):
            host.tidy(0)
        assert not any(tensor() is not None for tensor in tensors)
    finally:
        gc.enable()


def send(story: Story) -> list[str]:
    """Three steps of a model whose rows fill two microbatches each."""
    promises = []
    for step in range(3):
        rows = [datum(10 * step + at, 30) for at in range(4)]
        promises.append(story.talk.forward_backward(story.models["plain"], rows))
        story.talk.step(story.models["plain"])
    return promises


def test_a_model_that_fills_microbatches_has_the_next_one_launched_before_results_are_told(
    base: str, tmp_path: Path, count: Count
) -> None:
    """No forward is computed twice: what was launched ahead is what comes next."""
    found = []
    for ahead in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            host = graphed_host(base, tmp_path, patch, 1)
            if not ahead:
                patch.setattr(slots, "_ahead", lambda *_: None)
            story = Story(host, tmp_path / str(ahead))
            story.enter("plain")
            promises, launched, before = send(story), 0, count.replayed
            while story.service.turn():
                launched += host.graphs._ready is not None and host.graphs._ready.waiting is not None
            assert launched == (3 if ahead else 0)
            assert count.replayed - before == 2 * 4, "all but the first two microbatches"
            tensors = story.talk.tensors(story.models["plain"])
            found.append([*(story.talk.result(promise)[1] for promise in promises), *tensors.values()])
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))


def test_nothing_is_launched_ahead_while_another_model_has_work(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, asked = Story(host_of(base, tmp_path, budget=64), tmp_path / "state"), list[bool]()
    ahead = slots._ahead
    monkeypatch.setattr(slots, "_ahead", lambda *args: asked.append(waits()) or ahead(*args))

    def waits() -> bool:
        return story.talk.service.queue.lanes[story.models["dora"]].waiting > 0

    story.enter("plain", "dora")
    send(story)
    for number in range(3):
        story.talk.forward_backward(story.models["dora"], [datum(number, 60)])
    story.talk.run()
    assert asked and not any(asked)


def test_a_size_runs_by_the_graphs_of_a_larger_one_before_it_has_its_own(
    base: str, tmp_path: Path, count: Count
) -> None:
    found, passes = [], []
    for lent in (60, 0):
        with pytest.MonkeyPatch.context() as patch:
            host = graphed_host(base, tmp_path, patch, 1)
            assert host.graphs is not None
            host.graphs.sizes.lent = lent
            story = Story(host, tmp_path / str(lent))
            story.enter("plain")
            promises, bare = [], []
            for number, tokens in enumerate([60, 60, 60, 40, 41, 42, 40, 43, 20]):
                before = count.bare, count.recorded
                promises.append(story.talk.forward_backward(story.models["plain"], [datum(number, tokens)]))
                story.talk.step(story.models["plain"])
                story.talk.run()
                bare.append((count.bare - before[0], count.recorded - before[1]))
            found.append([story.talk.result(promise)[1] for promise in promises])
            passes.append(bare)
    first, recorded, replayed = (1, 0), (0, 2), (0, 0)
    begun = [first, first, recorded]  # the second one is watched for waits
    assert passes[0] == [*begun, *[replayed] * 3, first, recorded, first], "20 tokens fill less than half of any"
    assert passes[1] == [*begun, first, recorded, *[replayed] * 3, first]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
