"""Models of a service whose microbatches go by graphs, on a CPU, with a recorder whose replays run the functions again. Recorded
graphs: tests/gpu/test_serve_graphs_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from graph_runs import attention_by_starts, replay_of
from serving import Talk, datum, host_of

from packlora.engine import recorded
from packlora.engine.passes import SingleDevice
from packlora.engine.recorded import Body, Recorder
from packlora.ops.attention import attention
from packlora.ops.lora_linear.plan import CHAIN, ROUTED
from packlora.plans.select import PlanChooser
from packlora.serve import graphs as serve_graphs
from packlora.serve.host import Host
from packlora.serve.service import Service
from packlora.serve.tenant import Tenant

MODELS: dict[str, dict[str, Any]] = {
    "dropped": {"rank": 2, "lora_dropout": 0.3}, "dora": {"rank": 3, "use_dora": True},
    "heir": {"rank": 2, "lora_dropout": 0.3, "seed": 4}, "two products": {"rank": 2, "use_dora": True, "lora_dropout": 0.3}, "later": {"rank": 4, "target_modules": ["v_proj", "lm_head"]},
}  # fmt: skip
"""Models; what no graph can hold is among them."""
LENGTHS = {"dropped": [9, 4], "heir": [8, 5], "dora": [12], "two products": [5], "later": [6, 7]}


class Count:
    """What has run: functions that were recorded, their replays, bodies without a graph, microbatches without any body."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.bare = self.single = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
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

    run_forward, single = Body.forward, SingleDevice.forward
    monkeypatch.setattr(Body, "forward", bare)
    monkeypatch.setattr(SingleDevice, "forward", forward)
    monkeypatch.setattr(Recorder, "__init__", lambda self, device: None)
    monkeypatch.setattr(Recorder, "record", record)
    yield own


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
    plan: Any = lambda self, x, layers, segments, moving=False: ROUTED if moving else CHAIN  # noqa: E731
    monkeypatch.setattr(PlanChooser, "plan_of", plan)
    return host_of(base, state, budget=64)


class Story:
    """Models that train together, one of which comes later, and one leaves."""

    def __init__(self, host: Host, state: Path) -> None:
        state.mkdir()
        self.talk = Talk(Service({host.facts.name: host}, state))
        self.session, self.models = self.talk.session(), dict[str, str]()
        self.found: list[np.ndarray] = []

    def enter(self, *names: str) -> None:
        for name in names:
            more = {"target_modules": ["v_proj"], "seed": 3} | MODELS[name]
            self.models[name] = self.talk.model(self.session, [*MODELS].index(name), **more)

    def step(self, number: int) -> None:
        """Each model learns from its rows by two losses, whose gradients add up."""
        promises = []
        for name, model in self.models.items():
            own = [datum(10 * number + at, length) for at, length in enumerate(LENGTHS[name])]
            promises.append(self.talk.forward_backward(model, own))
            sampled = datum(99, 5, logprobs=np.full(5, -5.0), advantages=np.linspace(-1, 1, 5))
            promises.append(self.talk.forward_backward(model, [sampled], "ppo"))
            self.talk.step(model, grad_clip_norm=1.0)
        self.talk.run()
        self.found += [self.talk.result(promise)[1] for promise in promises]

    def leave(self, name: str) -> None:
        tensors = self.talk.tensors(self.models[name])
        self.found += [tensor.numpy() for tensor in tensors.values()]
        self.talk.service.close_model(self.models.pop(name))

    def run(self) -> list[np.ndarray]:
        """All log-probabilities, and what the models have become."""
        self.enter("dropped", "dora")
        self.step(0)
        self.step(1)
        self.enter("later")
        self.step(2)
        self.step(3)
        self.leave("dropped")
        self.enter("heir")
        self.step(4)
        self.enter("two products")
        self.step(5)
        for name in tuple(self.models):
            self.leave(name)
        return self.found


def test_models_that_come_and_go_have_the_bits_of_the_same_passes_without_graphs(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tenant, "kind", None)  # all share microbatches, as on a GPU
    with pytest.MonkeyPatch.context() as patch:
        host = graphed_host(base, tmp_path, patch, 1)
        got = Story(host, tmp_path / "graphs").run()
        assert (count.recorded, count.replayed, count.bare, count.single) == (6, 12, 4, 2)
        assert [adapter.name for adapter in host.seats.clear(0)]
    with pytest.MonkeyPatch.context() as patch:
        eager = Story(graphed_host(base, tmp_path, patch, 1000), tmp_path / "eager").run()
    plain = Story(host_of(base, tmp_path, budget=64), tmp_path / "plain").run()
    assert not caplog.records
    for one, other, third in zip(got, eager, plain, strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, third, rtol=2e-4, atol=2e-5)
