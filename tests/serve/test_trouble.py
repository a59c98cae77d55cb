"""Full disks, clocks that are set, restarts in float16, and state folders that are not the service's own."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from serving import NAME, Talk, datum, forward_backward_body, host, host_of, leave
from starlette.testclient import TestClient

from packlora.engine.loss_scale import LossScale
from packlora.errors import InputError, WriteError
from packlora.serve import core, stores, tenant
from packlora.serve import host as host_module
from packlora.serve.app import Keys, application
from packlora.serve.desk import Desk
from packlora.serve.host import Host
from packlora.serve.rest import Rest
from packlora.serve.service import Service

__all__ = ["host"]

PROTO = {"content-type": "application/x-protobuf", "x-api-key": "tml-one"}
DAY = 86400.0


def end(talk: Talk) -> None:
    leave(talk.service)
    talk.service.journal.close()


def fill_disk(service: Service, full: bool = True) -> None:
    """Let the journal's file grow no further, or again; SQLite says so as where the disk has no room."""
    pages = service.journal.one("pragma page_count")
    assert pages is not None
    service.journal.all(f"pragma max_page_count = {pages[0] if full else 1 << 30}")


def test_a_request_that_cannot_be_written_down_is_refused_and_taken_once_there_is_space(
    host: Host, tmp_path: Path
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path), Keys().owner("tml-one"))
    http = TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-one"})
    model = talk.model(talk.session())
    big = forward_backward_body(model, 1, [datum(n, 200) for n in range(20)])
    rows = talk.service.journal.all("select * from requests")
    fill_disk(talk.service)
    answers = [
        http.post("/api/v1/forward_backward", content=big, headers=PROTO),
        http.post("/api/v1/create_session", json={"sdk_version": "0.38.0", "user_metadata": {"a": "b" * 9000}}),
    ]
    for answer in answers:
        assert answer.status_code == 429 and "disk is full" in answer.json()["error"], answer.text
        assert int(answer.headers["retry-after"]) > 1
    assert talk.service.journal.all("select * from requests") == rows and not talk.service.queue.waiting
    fill_disk(talk.service, full=False)
    promise = http.post("/api/v1/forward_backward", content=big, headers=PROTO).json()["request_id"]
    talk.run()
    assert talk.result(promise)[0]["datums:sum"] == 20
    end(talk)


def test_results_wait_for_space_or_for_the_next_start(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    model = talk.model(talk.session())
    long = [datum(n, 200) for n in range(8)]
    first, step = talk.forward_backward(model, long), talk.step(model)
    fill_disk(talk.service)
    said = []

    def sleep(seconds: float) -> None:
        said.append(talk.service.status())
        fill_disk(talk.service, full=False)

    monkeypatch.setattr(core.time, "sleep", sleep)
    talk.run()
    assert len(said) == 1 and said[0]["status"] == "waits" and "disk is full" in said[0]["failure"]
    assert talk.service.status()["status"] == "ok" and talk.result(step)["metrics"]["step"] == 1
    second = talk.forward_backward(model, long)
    fill_disk(talk.service)
    talk.service.stopping = True
    with pytest.raises(WriteError, match="disk is full; the next start computes it again"):
        talk.run()
    end(talk)
    again = Talk(Service({NAME: host}, tmp_path))
    again.seqs = talk.seqs
    again.run()
    assert again.result(second)[0]["datums:sum"] == again.result(first)[0]["datums:sum"] == 8
    assert again.result(second)[0]["loss:sum"] < again.result(first)[0]["loss:sum"]
    end(again)


def test_a_save_that_cannot_be_written_down_at_a_stop_is_made_by_the_next_start(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not refused, though there is room again a moment later."""
    talk, full = Talk(Service({NAME: host}, tmp_path)), [True]
    model = talk.model(talk.session())
    promises = [talk.forward_backward(model, [datum(1, 20)]), talk.step(model)]
    talk.run()
    promises.append(talk.call(model, "save_weights", path="s"))

    def commits() -> None:
        if full:
            full.pop()
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(talk.service.journal, "commits", commits)
    talk.service.stopping = True
    with pytest.raises(WriteError, match="disk is full; the next start computes it again"):
        talk.run()
    end(talk)
    again = Talk(Service({NAME: host}, tmp_path))
    again.run()
    assert again.result(promises[-1])["path"].endswith("/weights/s")
    assert all("error" not in str(again.result(promise)) for promise in promises)
    end(again)


@pytest.mark.parametrize("restarts", [False, True])
def test_files_that_find_no_room_leave_nothing_and_cost_nothing(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Saves and loads are refused in words; a snapshot of a step is left out; bits are as without."""
    found = []
    for full in (False, True):
        state = tmp_path / str(full)
        state.mkdir()
        talk = Talk(Service({NAME: host}, state))
        model = talk.model(talk.session())
        talk.forward_backward(model, [datum(0, 20)])
        talk.step(model)
        saved = talk.call(model, "save_weights", path="kept")
        talk.run()
        path = talk.result(saved)["path"]
        monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 1)
        if full:
            monkeypatch.setattr(safetensors.torch, "save_file", no_space)
            before = files_of(state)
            refused = [talk.call(model, "save_weights", path="more"), talk.call(model, "load_weights", path=path)]
            talk.run()
            for promise in refused:
                assert "No space left on device" in talk.result(promise)["error"]
                assert talk.result(promise)["category"] == "server"
            assert files_of(state) == before
        else:
            talk.seqs[model] += 2
            talk.desk.service.queue.lanes[model].next += 2
        for step in (1, 2):
            talk.forward_backward(model, [datum(step, 20)])
            promise = talk.step(model)
            talk.run()
        assert talk.result(promise)["metrics"]["step"] == 3
        monkeypatch.undo()
        if restarts and full:
            end(talk)
            seqs, talk = talk.seqs, Talk(Service({NAME: host}, state))
            talk.seqs = seqs
        found.append(talk.tensors(model))
        end(talk)
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


def no_space(tensors: Any, file: Path, *more: Any) -> None:
    file.write_bytes(b"half")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("last_done", ["step", "put aside", "save"])
def test_what_is_on_the_disk_after_a_loss_of_power_has_all_that_goes_on(
    last_done: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is as it was when it was flushed last, and of files all that was done to them is there."""
    monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 1 if last_done == "step" else 1 << 18)
    talk, on_disk = Talk(Service({NAME: host}, tmp_path)), dict[Path, bytes]()
    write = talk.service.journal.write

    @contextlib.contextmanager
    def written(flush: bool = True) -> Iterator[sqlite3.Connection]:
        with write(flush) as db:
            yield db
        if flush:
            on_disk.update((file, file.read_bytes()) for file in tmp_path.glob("journal.db*"))

    monkeypatch.setattr(talk.service.journal, "write", written)
    model = talk.model(talk.session())
    for step in range(2):
        talk.forward_backward(model, [datum(step, 9)])
        last = talk.step(model)
        talk.run()
        if last_done == "put aside":
            lane, own = talk.service.queue.lanes[model], talk.service.tenants[model]
            talk.service._snapshot_before(lane, own)
            talk.service._set_aside(lane)
    assert talk.service.tenants[model].snapshot == (None if last_done == "save" else 4)
    if last_done == "save":
        last = talk.call(model, "save_weights", path="named")
        talk.run()
    seen = talk.result(last)
    end(talk)
    for file, content in on_disk.items():
        file.write_bytes(content)
    talk.service = Service({NAME: host}, tmp_path)
    talk.desk = Desk(talk.service)
    if last_done == "save":
        assert talk.desk.checkpoint(talk.owner, seen["path"]), "it was said to be there"
    talk.run()
    assert talk.result(last) == seen
    talk.step(model)
    talk.run()
    assert talk.service.tenants[model].steps == 2
    end(talk)


def test_a_clock_that_is_set_changes_nothing(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Days back and forth between any two calls: promises, sessions, listings, shares and downloads are as before."""
    jumps = itertools.cycle([0.0, 30 * DAY, -400 * DAY, 5 * DAY])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    talk = Talk(Service({NAME: host}, tmp_path), Keys().owner("tml-one"))
    http = TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-one"})
    session = talk.session()
    models = [talk.model(session, number) for number in range(2)]
    sent = {}
    for number in range(6):
        model = models[number % 2]
        sent[model, number] = talk.forward_backward(model, [datum(number, 20)])
        sent[model, -number] = talk.step(model)
        promise = talk.call(model, "save_weights_external", path=f"s{number}")
        if number < 4:
            talk.run()
    end(talk)
    seqs, talk = talk.seqs, Talk(Service({NAME: host}, tmp_path), talk.owner)
    http = TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-one"})
    talk.run()
    assert [talk.result(own)["metrics"]["step"] for (_, number), own in sent.items() if number <= 0][-2:] == [3, 3]
    assert talk.session() == session and talk.step(models[0], seq=2) == sent[models[0], 0]
    listed = http.get("/api/v1/checkpoints").json()["checkpoints"]
    assert [own["checkpoint_id"][-2:] for own in listed[-4:]] == ["s3", "s2", "s1", "s0"] and len(listed) == 6
    path = talk.result(promise)["path"].removeprefix("tinker://")
    run, _, kind = path.partition("/")
    urls = http.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/external_weights_urls").json()["urls"]
    assert all(http.get(url).status_code == 200 for url in urls.values())
    assert talk.service.status()["seconds"] < DAY and seqs
    end(talk)


def test_a_float16_model_keeps_its_loss_scale(
    tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose gradients overflow are skipped until the scale fits, once: also where a restart comes between."""
    half = host_of(tiny_base("llama"), tmp_path, "dtype=float16", budget=64)
    monkeypatch.setattr(host_module, "LossScale", lambda: LossScale(2.0**14))
    found = []
    for restarts in (False, True):
        state = tmp_path / str(restarts)
        state.mkdir()
        talk = Talk(Service({NAME: half}, state))
        model = talk.model(talk.session())
        metrics = []
        for step in range(6):
            for number in range(2):
                talk.forward_backward(model, [datum(2 * step + number, 20)])
            promise = talk.step(model)
            talk.run()
            metrics.append(talk.result(promise)["metrics"])
            if step == 3:
                path = talk.result(talk_saved(talk, model))["path"]
            if restarts and step in (1, 4):
                lane, own = talk.service.queue.lanes[model], talk.service.tenants[model]
                if step == 4:
                    talk.service._snapshot_before(lane, own)
                end(talk)
                seqs, talk = talk.seqs, Talk(Service({NAME: half}, state))
                talk.seqs = seqs
        scale = talk.service.tenants[model].state.scale  # type: ignore[union-attr]
        assert scale is not None
        found.append((metrics, talk.tensors(model), scale.state()))
        body = {"session_id": talk.session(), "model_seq_id": 1, "path": path, "optimizer": True}
        talk.desk.load_as_new(talk.owner, body)
        other = talk.service.tenants[model.replace(":0", ":1")].wake()[1].scale
        assert other is not None and other.value == scale.value < 2.0**14
        end(talk)
    skipped = [one.get("skipped", 0.0) for one in found[0][0]]
    assert skipped[0] == 1 and skipped[-1] == 0 and found[0][0] == found[1][0] and found[0][2] == found[1][2]
    assert found[0][0][-1]["step"] == skipped.count(0)
    assert all(torch.equal(own, found[1][1][name]) for name, own in found[0][1].items())


def talk_saved(talk: Talk, model: str) -> str:
    promise = talk.call(model, "save_weights", path="middle")
    talk.run()
    return promise


def test_a_state_folder_that_is_not_its_own_is_refused_and_not_touched(
    host: Host, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    states = {name: tmp_path / name for name in ("weights", "base", "version", "other", "text")}
    for state in states.values():
        state.mkdir()
    for name in ("weights", "base", "version"):
        talk = Talk(Service({NAME: host}, states[name]))
        talk.model(talk.session())
        end(talk)
    db = sqlite3.connect(states["version"] / "journal.db")
    db.execute("update facts set value = '0' where name = 'version'")
    db.commit()
    db.close()
    db = sqlite3.connect(states["other"] / "journal.db")
    db.execute("create table theirs (a)")
    db.commit()
    db.close()
    (states["text"] / "journal.db").write_text("no database " * 100)
    mistral = host_of(tiny_base("mistral"), tmp_path, budget=64)
    renamed = host_of(tiny_base("llama"), tmp_path, name="another", budget=64)
    before = {file: file.read_bytes() for file in sorted(tmp_path.rglob("journal.db"))}
    for name, hosts, words in (
        ("weights", {NAME: mistral}, "other weights of"),
        ("base", {"another": renamed}, "which is not served now; add --base"),
        ("version", {NAME: host}, "is of version 0 of the journal"),
        ("other", {NAME: host}, "is of version None of the journal"),
        ("text", {NAME: host}, "is no journal of packlora serve"),
    ):
        with pytest.raises(InputError, match=words):
            Service(hosts, states[name])
    for name in ("version", "other", "text"):
        file = states[name] / "journal.db"
        assert file.read_bytes() == before[file], name
    assert json.dumps(sorted(file.name for file in states["other"].iterdir()))


def files_of(state: Path) -> list[Path]:
    return sorted(file for file in state.rglob("*") if file.is_file() and "journal" not in file.name)


@pytest.mark.parametrize("waits", [True, False])
def test_a_model_that_cannot_be_loaded_is_no_end_whatever_comes_meanwhile(
    waits: bool, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come while those that wait are looked at; or none waits, and samples have roused it."""
    talk = Talk(Service({NAME: host}, tmp_path))
    model = talk.model(talk.session())
    first = talk.forward_backward(model, [datum(1, 9)])
    talk.run()
    lane, own = talk.service.queue.lanes[model], talk.service.tenants[model]
    talk.service._set_aside(lane)
    late, threads = list[str](), list[threading.Thread]()

    class Watched(dict[int, Any]):
        def values(self) -> Any:
            for found in super().values():
                if not threads:
                    threads.append(threading.Thread(target=lambda: late.append(talk.step(model))))
                    threads[0].start()
                    threads[0].join(0.3)
                yield found

    if waits:
        refused = talk.forward_backward(model, [datum(2, 9)])
        lane.requests = Watched(lane.requests)
    else:
        lane.is_roused = True
    with monkeypatch.context() as patch:
        patch.setattr(own, "wake", mock.Mock(side_effect=MemoryError("none is left")))
        assert talk.service.turn()
        for thread in threads:
            thread.join(60)
        assert waits or not talk.service.turn(), "samples that roused it find it again"
    talk.run()
    if waits:
        assert "none is left" in talk.result(refused)["error"] and "error" in talk.result(late[0])
    talk.forward_backward(model, [datum(3, 9)])
    step = talk.step(model)
    talk.run()
    assert "metrics" in talk.result(step) and talk.result(first)
    end(talk)


@pytest.mark.parametrize("file", ["optimizer.safetensors", "adapter_model.safetensors", "snapshot"])
def test_damaged_files_of_a_model_end_no_service(file: str, host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    session = talk.session()
    model = talk.model(session)
    talk.forward_backward(model, [datum(1, 9)])
    talk.step(model)
    saved = talk.call(model, "save_weights", path="one")
    talk.run()
    path = talk.result(saved)["path"]
    if file == "snapshot":
        other = talk.model(session, 1)
        talk.call(other, "load_weights", path=path, optimizer=True)
        talk.run()
        talk.service._set_aside(talk.service.queue.lanes[other])
        (damaged,) = talk.service.stores.model(other).glob("*.safetensors")
    else:
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        other = talk.result(talk.desk.load_as_new(talk.owner, body))["model_id"]
        damaged = talk.service.stores.model(other) / "start" / file
    whole = damaged.read_bytes()
    damaged.unlink()  # it is a link to the checkpoint's
    damaged.write_bytes(whole[: len(whole) // 2])
    refused, step = talk.forward_backward(other, [datum(2, 9)]), talk.step(model)
    talk.run()
    error = talk.result(refused)["error"]
    assert "the model cannot be loaded" in error and damaged.name in error and "metrics" in talk.result(step)
    damaged.write_bytes(whole)
    rows = talk.forward_backward(other, [datum(2, 9)])
    talk.run()
    assert talk.result(rows)[0]["datums:sum"] == 1
    end(talk)


def test_a_checkpoint_whose_files_cannot_be_removed_can_be_deleted_later(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    model = talk.model(talk.session())
    saved = talk.call(model, "save_weights", path="one")
    talk.run()
    folder = talk.service.stores.checkpoint(talk.result(saved)["path"])
    call = (talk.owner, "DELETE", f"training_runs/{model}/checkpoints/weights/one", {}, {}, "")
    rest = Rest(talk.desk)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "remove_folder", mock.Mock(side_effect=OSError("the disk cannot be written")))
        with pytest.raises(OSError, match="cannot be written"):
            rest.answer(*call)
    assert folder.exists()
    rest.answer(*call)
    assert not folder.exists() and not talk.service.journal.all("select * from checkpoints")
    end(talk)


def test_a_model_made_after_one_that_could_not_be_written_down_does_not_begin_with_its_checkpoint(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    session = talk.session()
    model, new = talk.model(session), talk.model(session, 1)
    talk.forward_backward(model, [datum(1, 9)])
    talk.step(model)
    saved = talk.call(model, "save_weights", path="one")
    talk.run()
    body = {"session_id": session, "model_seq_id": 2, "path": talk.result(saved)["path"]}
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
        patch.setattr(talk.service.journal, "add", full)
        with pytest.raises(sqlite3.OperationalError):
            talk.desk.load_as_new(talk.owner, body)
    assert not list((tmp_path / "models").glob("*/start"))
    other = talk.model(session, 2)
    want, found = talk.tensors(new), talk.tensors(other)
    assert all(torch.equal(want[name], own) for name, own in found.items())
    end(talk)
