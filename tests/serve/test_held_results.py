"""Results of a slot that are published once the next one is launched, as where slots are replays of graphs."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, Talk, datum, host, leave

from packlora.engine.engine import Engine
from packlora.errors import WriteError
from packlora.serve import core
from packlora.serve.host import Host
from packlora.serve.publisher import Publisher
from packlora.serve.service import Service
from packlora.serve.tenant import Tenant

__all__ = ["host"]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "replays", lambda *_: True)


def talk_of(host: Host, state: Path) -> Talk:
    talk = Talk(Service({NAME: host}, state))
    talk.service._look_at = math.inf  # for models that are to be put aside
    return talk


def test_a_device_has_the_next_slot_before_results_of_the_last_one_are_published(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients then send their next requests while it computes. Nothing else comes before they are published."""
    order: list[str] = []
    take_steps, commit = Engine.take_steps, Publisher.commit

    def stepping(self: Engine, steps: Any, meanwhile: Callable[[], None]) -> Any:
        def launched() -> None:
            order.append(f"{len(steps)} steps")
            meanwhile()

        return take_steps(self, steps, launched)

    def committed(self: Publisher, *args: Any, **more: Any) -> None:
        commit(self, *args, **more)
        order.append("published")

    monkeypatch.setattr(Engine, "take_steps", stepping)
    monkeypatch.setattr(Publisher, "commit", committed)
    talk = talk_of(host, tmp_path)
    models = [talk.model(talk.session(), number) for number in range(2)]
    promises: list[str] = []

    def ordered(steps: int, *own: str) -> list[str]:
        """What has happened when each of these models has taken so many steps."""
        for seed in range(steps):
            for model in own:
                promises.extend([talk.forward_backward(model, [datum(5 + seed, 13)]), talk.step(model)])
        order.clear()
        talk.run()
        return list(order)

    assert ordered(2, *models) == ["2 steps", "2 steps", "published", "published"]
    assert ordered(1, *models) == ["2 steps", "published"], "nothing follows"
    with monkeypatch.context() as patch:
        patch.setattr(Tenant, "wants_snapshot", True)
        assert ordered(2, models[0]) == ["1 steps", "published", "1 steps", "published"], "a snapshot is of each step"
    with monkeypatch.context() as patch:
        patch.setattr(Host, "samples", 1)
        assert ordered(2, models[0]) == ["1 steps", "published"] * 2, "samples are drawn in between"
    promises += [talk.forward_backward(models[0], [datum(7, 13)]), talk.step(models[0])]
    promises.append(talk.call(models[0], "save_weights", path="s"))
    order.clear()
    talk.run()
    assert order == ["1 steps", "published", "published"], "the slot's results, and then what was saved"
    assert all("error" not in str(talk.result(promise)) for promise in promises)
    leave(talk.service)


@pytest.fixture
def held(host: Host, tmp_path: Path) -> tuple[Talk, list[str], list[str]]:
    """A service whose first model's step is held, two models whose rows come next, and the promises of all."""
    talk = talk_of(host, tmp_path)
    models = [talk.model(talk.session(), number, seed=number) for number in range(3)]
    promises = [talk.forward_backward(models[0], [datum(1, 60)]), talk.step(models[0])]
    promises += [talk.forward_backward(model, [datum(2, 30)]) for model in models[1:]]
    talk.service.turn()
    assert [request.id for _, request, _ in talk.service._held] == promises[:2]
    return talk, models, promises


def test_a_disk_that_is_full_at_a_stop_is_told_and_the_next_start_has_all_results(
    held: tuple[Talk, list[str], list[str]], monkeypatch: pytest.MonkeyPatch, host: Host, tmp_path: Path
) -> None:
    """It is no failure of the slot beside which they were to be published."""
    talk, _, promises = held

    def full() -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(talk.service.journal, "commits", full)
    monkeypatch.setattr(core.time, "sleep", lambda _: setattr(talk.service, "stopping", True))
    with pytest.raises(WriteError, match="the journal cannot be written"):
        talk.service.turn()
    monkeypatch.undo()
    leave(talk.service)
    talk.service.journal.close()
    again = talk_of(host, tmp_path)
    again.run()
    assert all("error" not in str(again.result(promise)) for promise in promises)
    leave(again.service)


def test_results_wait_neither_for_samples_nor_for_models_that_wake(
    held: tuple[Talk, list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, models, promises = held
    order: list[str] = []
    sampling = type(talk.service.hosts[NAME].sampling)
    tell, wake, step = Publisher.tell, Tenant.wake, sampling.step
    monkeypatch.setattr(Publisher, "tell", lambda self, own: order.extend(own) or tell(self, own))

    def waking(self: Tenant) -> Any:
        order.extend([] if self.is_awake else ["wakes"])
        return wake(self)

    monkeypatch.setattr(Tenant, "wake", waking)
    monkeypatch.setattr(sampling, "step", lambda self: order.append("samples") or step(self))
    talk.service.tenants[models[1]].sleep()
    talk.service.turn()
    assert order[:3] == [*promises[:2], "wakes"]
    talk.run()
    body = {"session_id": talk.session(), "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = talk.desk.create_sampling_session(talk.owner, body)
    promises = [talk.forward_backward(models[0], [datum(1, 60)]), talk.step(models[0])]
    promises += [talk.forward_backward(models[0], [datum(2, 60)])]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9]}]}
    asked = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 2, "seed": 1},
    }
    talk.desk.asample(talk.owner, asked | {"num_samples": 1})
    order.clear()
    talk.service.turn()
    assert order[:3] == [*promises[:2], "samples"]
    talk.run()
    leave(talk.service)
