"""Promises that are old: which go, which stay, and what is answered of those that went."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from serving import NAME, Talk, datum, host, leave

from packlora.serve import retention, tenant
from packlora.serve.errors import Refused
from packlora.serve.host import Host
from packlora.serve.journal import add_request
from packlora.serve.retention import KEPT
from packlora.serve.saves import GRACE
from packlora.serve.service import Service

__all__ = ["host"]
SAMPLE = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7, 8]}]}, "sampling_params": {"max_tokens": 2}}


def learn(talk: Talk, model: str, seed: int) -> None:
    talk.forward_backward(model, [datum(seed, 9)])
    talk.step(model)
    talk.run()


def numbers(talk: Talk, model: str) -> list[int]:
    """Numbers of a model's promises that are there."""
    return [
        row["seq"] for row in talk.service.journal.all("select seq from requests where model = ? order by seq", model)
    ]


def make_old(talk: Talk, days: float = 2.0) -> None:
    """Let all promises so far have been given some days ago, and so seen."""
    with talk.service.journal.write() as db:
        db.execute("update requests set created = created - ?", (86400 * days,))
    talk.service._retention._began -= GRACE


def test_promises_before_a_snapshot_go_after_a_day_and_a_restart_has_the_bits_of_a_service_that_kept_them(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 27)  # at every third step
    monkeypatch.setattr(retention, "MOST", 2)
    found: list[dict[str, torch.Tensor]] = []
    for name, days in (("kept", 0.5), ("gone", 2.0)):
        (tmp_path / name).mkdir()
        talk = Talk(Service({NAME: host}, tmp_path / name))
        session = talk.session()
        model = talk.model(session)
        for seed in range(4):
            learn(talk, model, seed)
        talk.forward_backward(model, [datum(5, 4)], only=True)  # behind the snapshot: a restart passes over it
        talk.run()
        make_old(talk, days)
        talk.run()
        assert numbers(talk, model) == ([7, 8, 9] if days > 1 else [1, 2, 3, 4, 5, 6, 7, 8, 9])
        if days > 1:
            with pytest.raises(Refused, match=r"seq_id: number 3 was used long ago; the next one is 10 or later"):
                talk.forward_backward(model, [datum(1, 9)], seq=3)
            assert talk.step(model, seq=8) == talk.service.journal.one("select id from requests where seq = 8")["id"]
        leave(talk.service)
        talk.service.journal.close()
        again = Talk(Service({NAME: host}, tmp_path / name))
        again.seqs = talk.seqs
        learn(again, model, 6)
        assert again.session() == session and again.model(session) == model  # what makes something stays
        found.append(again.tensors(model))
        leave(again.service)
        again.service.journal.close()
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_promises_of_samples_and_of_models_that_are_over_go_after_a_day(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    session = talk.session()
    model, other = talk.model(session), talk.model(session, 1)
    learn(talk, model, 0)
    learn(talk, other, 1)
    sampler = talk.desk.create_sampling_session(
        talk.owner, {"session_id": session, "sampling_session_seq_id": 1, "base_model": NAME}
    )
    sample, _ = talk.desk.asample(talk.owner, {"sampling_session_id": sampler, "seq_id": 1, **SAMPLE})
    talk.run()
    assert talk.result(sample).sequences
    talk.desk.unload(talk.owner, {"model_id": model})
    talk.run()
    make_old(talk)
    talk.run()
    assert numbers(talk, model) == [] and numbers(talk, other) == [1, 2]
    with pytest.raises(Refused, match="results are kept for a day"):
        talk.result(sample)
    leave(talk.service)


def test_a_clock_that_jumps_ahead_and_back_takes_no_promise_away(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    model = talk.model(talk.session())
    learn(talk, model, 0)
    talk.desk.unload(talk.owner, {"model_id": model})
    talk.run()
    old, now = talk.service._retention, retention.time.time()
    with mock.patch.object(retention.time, "time", return_value=now + 10 * KEPT):
        talk.run()
        old._wait()
        talk.run()
        assert numbers(talk, model) == [1, 2]  # it has been so for a moment
    old._began -= GRACE
    talk.run()
    assert numbers(talk, model) == [1, 2]
    with mock.patch.object(retention.time, "time", return_value=now + 10 * KEPT):
        old._wait()
        old._began -= GRACE
        talk.run()
        assert numbers(talk, model) == []
    leave(talk.service)


def test_a_result_that_came_late_is_kept_for_a_day_too(host: Host, tmp_path: Path) -> None:
    """As of a service that was stopped for days."""
    talk = Talk(Service({NAME: host}, tmp_path))
    session = talk.session()
    sampler = talk.desk.create_sampling_session(
        talk.owner, {"session_id": session, "sampling_session_seq_id": 1, "base_model": NAME}
    )
    sample, _ = talk.desk.asample(talk.owner, {"sampling_session_id": sampler, "seq_id": 1, **SAMPLE})
    make_old(talk)
    talk.run()
    talk.service._retention._began -= GRACE
    talk.run()
    assert talk.result(sample).sequences
    leave(talk.service)


def test_a_look_passes_over_few_of_the_promises_that_stay(host: Host, tmp_path: Path) -> None:
    """Nobody reads or writes meanwhile."""
    talk = Talk(Service({NAME: host}, tmp_path))
    model, steps = talk.model(talk.session()), 0
    learn(talk, model, 0)
    learn(talk, model, 1)
    with talk.service.journal.write(flush=False) as db:
        for seq in range(5, 60_000):
            add_request(db, f"id {seq}", "owner", f"key {seq}", "optim_step", b"", None, model, seq, "done", b"")
        db.execute("update models set snapshot = 3")
        db.execute("update requests set created = created - 200000 + seq where seq > 4")

    def step() -> None:
        nonlocal steps
        steps += 1

    make_old(talk)
    talk.service.journal._db.set_progress_handler(step, 1000)
    looks, most = 0, 0
    while talk.service._retention.look(talk.service):
        looks, most, steps = looks + 1, max(most, steps), 0
    assert looks >= 12 and most < 200, (looks, most)
    assert numbers(talk, model) == [*range(4, 60_000)]
    talk.service.journal._db.set_progress_handler(None, 0)
    leave(talk.service)
