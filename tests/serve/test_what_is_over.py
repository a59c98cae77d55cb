"""What is over leaves nothing that grows: in the journal, on the disk, in the time of a request."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from serving import NAME, Talk, datum, host, leave

from packlora.serve import desk, promises, saves, stores
from packlora.serve.errors import Refused
from packlora.serve.host import Host
from packlora.serve.journal import Journal, add_request, drop_payloads
from packlora.serve.limits import Limits
from packlora.serve.ranks import records
from packlora.serve.ranks.records import Recent
from packlora.serve.service import Service

__all__ = ["host"]


def saved(talk: Talk, model: str, **more: Any) -> dict[str, Any]:
    promise = talk.call(model, "save_weights_for_sampler", sampling_session_seq_id=0, **more)
    talk.run()
    return talk.result(promise)  # type: ignore[no-any-return]


def sampled(talk: Talk, sampler: str, seq: int = 0) -> str:
    body: dict[str, Any] = {
        "sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [60, 61], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
    }  # fmt: skip
    promise, _ = talk.desk.asample(talk.owner, body)
    talk.run()
    return promise


def clocks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock on the wall and the monotonic one by which checkpoints are over; set by their elements."""
    own = [time.time(), 0.0]
    monkeypatch.setattr(saves, "time", SimpleNamespace(time=lambda: own[0], monotonic=lambda: own[1]))
    return own


def kept(talk: Talk) -> set[str]:
    """Promises of which the journal has what was sent."""
    return {row["id"] for row in talk.service.journal.all("select id from requests where length(payload) > 0")}


@pytest.mark.parametrize("killed", [False, True])
def test_the_journal_keeps_what_a_restart_does_again_and_no_more(killed: bool, host: Host, tmp_path: Path) -> None:
    """Of samples, of a forward alone, of what failed and of a model that is over there is the result alone. Killed: right after
    the model was unloaded."""
    talk = Talk(Service({NAME: host}, tmp_path))
    model = talk.model(talk.session())
    rows, alone = talk.forward_backward(model, [datum(1, 9)]), talk.forward_backward(model, [datum(2, 9)], only=True)
    bad = talk.forward_backward(model, [datum(3, 9)], "stable_reinforce")
    step = talk.step(model)
    talk.run()
    assert "error" in talk.result(bad) and "error" in talk.result(step)
    later = talk.forward_backward(model, [datum(4, 9)])
    again = talk.step(model)
    sampler = saved(talk, model)["sampling_session_id"]
    drawn = sampled(talk, sampler)
    assert {rows, later, again} <= kept(talk) and kept(talk).isdisjoint({alone, bad, step, drawn})
    want = {own: talk.desk.result(talk.owner, own)["result"] for own in (rows, alone, bad, step, later, again, drawn)}
    leave(talk.service)
    talk.service.journal.close()
    talk = Talk(Service({NAME: host}, tmp_path))
    talk.seqs[model] = 7
    assert len(talk.tensors(model)) and talk.service.tenants[model].steps == 1, "it is made again of what is kept"
    talk.desk.unload(talk.owner, {"model_id": model})
    if not killed:
        talk.run()
    leave(talk.service)
    talk.service.journal.close()
    talk = Talk(Service({NAME: host}, tmp_path))
    assert not kept(talk)
    assert want == {own: talk.desk.result(talk.owner, own)["result"] for own in want}
    leave(talk.service)


def test_checkpoints_whose_time_is_over_leave_the_disk_and_their_owners_room(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, clock = Talk(Service({NAME: host}, tmp_path, Limits(checkpoints=2))), clocks(monkeypatch)
    model = talk.model(talk.session())
    short, long = (saved(talk, model, path=f"of-{ttl}", ttl_seconds=ttl)["path"] for ttl in (60, 600))
    folders = [talk.service.stores.checkpoint(path) for path in (short, long)]
    for jump in (1e6, -1e6):  # a clock that is set right again has taken nothing away
        clock[:] = clock[0] + jump, clock[1] + 500
        talk.run()
        assert all(folder.exists() for folder in folders)
    clock[0] += 61
    talk.run()
    clock[1] += 601
    talk.run()
    assert [folder.exists() for folder in folders] == [False, True]
    assert [row["path"] for row in talk.service.journal.all("select path from checkpoints")] == [long]
    more = talk.service.stores.checkpoint(saved(talk, model, path="more", ttl_seconds=60)["path"])
    clock[0] += 61
    os.utime(more, (clock[0], clock[0]))
    talk.run()
    clock[1] += 601
    talk.run()
    assert more.exists(), "another rank has written it anew, and has yet to say so"
    leave(talk.service)


def test_no_request_reads_all_that_ever_was(host: Host, tmp_path: Path) -> None:
    """Queries of a session's life: each finds its rows by an index, and those of all that is open by one of these alone."""
    talk = Talk(Service({NAME: host}, tmp_path))
    asked: list[str] = []
    talk.service.journal._db.set_trace_callback(asked.append)
    session = talk.session()
    model = talk.model(session)
    talk.forward_backward(model, [datum(1, 9)])
    talk.step(model)
    talk.run()
    for seq in range(2):
        sampled(talk, saved(talk, model)["sampling_session_id"], seq)
    saved(talk, model, path="named", ttl_seconds=60)
    talk.service.status()
    talk.service.metrics()
    talk.desk.unload(talk.owner, {"model_id": model})
    talk.run()
    talk.desk.finish_session(talk.owner, session, "success")
    talk.run()
    talk.service.journal._db.set_trace_callback(None)
    assert not talk.desk._heard and not talk.service.samplers._used
    queries = [query for query in asked if re.match("select|update|delete", query)]
    assert len(queries) > 50
    for query in queries:
        for row in talk.service.journal.all(f"explain query plan {query}"):
            assert not row["detail"].startswith("SCAN") or "INDEX open_" in row["detail"], (query, row["detail"])
    leave(talk.service)


def test_models_of_sessions_that_were_silent_for_an_hour_make_room(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that ends without a word leaves its session open, and its models."""
    clock = [0.0]
    for module in (desk, promises):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0]))
    talk = Talk(Service({NAME: host}, tmp_path, Limits(models=2)))
    sessions = [talk.session(f"script {number}") for number in range(4)]
    models = [talk.model(session) for session in sessions[:2]]
    path = saved(talk, models[1], path="kept")["path"]
    with pytest.raises(Refused, match="2 open models, the limit models"):
        talk.model(sessions[2])
    clock[0] = promises.SILENCE + 1
    talk.desk.session(talk.owner, sessions[0])
    models.append(talk.model(sessions[2]))
    talk.run()
    found = talk.service.journal.all("select id, state from models")
    assert {row["id"]: row["state"] for row in found} == dict(zip(models, ("open", "closed", "open"), strict=True))
    ended = [talk.desk.session(talk.owner, session, ended=True)["ended"] for session in sessions]
    assert ended == [None, "silent", None, None], "the last one has no models that would make room"
    assert talk.desk.checkpoint(talk.owner, path)["model"] == models[1]
    with pytest.raises(Refused, match="2 open models, the limit models"):
        talk.model(sessions[2], number=1)
    leave(talk.service)


def test_a_folder_that_cannot_be_removed_ends_no_other_work(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program has one of its files open, or two threads remove it at once."""
    talk, clock = Talk(Service({NAME: host}, tmp_path, Limits(samplers=1))), clocks(monkeypatch)
    session = talk.session()
    model = talk.model(session)
    expired = talk.service.stores.checkpoint(saved(talk, model, path="expired", ttl_seconds=60)["path"])
    saved(talk, model)
    with mock.patch.object(stores, "remove_folder", side_effect=PermissionError(errno.EACCES, "it is in use")):
        assert "error" not in saved(talk, model), "its first sampler makes room"
        clock[0] += 61
        talk.run()
        clock[1] += 601
        talk.run()
        assert expired.exists() and talk.service.journal.one("select 1 from checkpoints") is not None
        for _ in range(2):
            talk.desk.finish_session(talk.owner, session, "success")
        talk.run()
    assert not talk.service.tenants and not talk.desk._heard
    clock[1] += 601
    talk.run()
    assert not expired.exists() and talk.service.journal.one("select 1 from checkpoints") is None
    leave(talk.service)
    talk.service.journal.close()
    leave(Service({NAME: host}, tmp_path))
    assert not list((tmp_path / "samplers").iterdir())


def test_a_snapshot_writes_the_requests_since_the_last_one_alone(tmp_path: Path) -> None:
    journal, dropped = Journal(tmp_path / "journal.db"), list[int]()
    for first, last in ((1, 4), (5, 6), (7, 7)):
        with journal.write() as db:
            for seq in range(first, last + 1):
                add_request(db, f"{seq}", "owner", f"{seq}", "optim_step", b"", b"{}", model="model", seq=seq)
            before = db.total_changes
            drop_payloads(db, "model", last)
            dropped.append(db.total_changes - before)
    assert dropped == [4, 2, 1]
    journal.close()


def test_a_rank_s_tokens_are_those_of_the_last_minute_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recent = [0.0], Recent()
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(1000):
        clock[0] += 10
        recent.add(5)
    assert len(recent._own) == 7 and recent.tokens == 35
