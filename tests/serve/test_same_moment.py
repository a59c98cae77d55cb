"""The same request from several connections at the same moment, as clients send it that lost an answer, is one request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from serving import NAME, Talk, datum, host, leave
from starlette.testclient import TestClient

from packlora.serve.app import Keys, application
from packlora.serve.errors import Refused
from packlora.serve.host import Host
from packlora.serve.rest import Rest
from packlora.serve.service import Service

__all__ = ["host"]

THREADS = 6


@pytest.fixture
def talk(host: Host, tmp_path: Path) -> Iterator[Talk]:
    found = Talk(Service({NAME: host}, tmp_path))
    yield found
    leave(found.service)
    found.service.journal.close()


def at_once(talk: Talk, monkeypatch: pytest.MonkeyPatch, looks: str, ask: Callable[[], Any]) -> list[Any]:
    """What several threads get that ask for the same. looks: method of the desk before which all have found no promise."""
    meet, look, found = threading.Barrier(THREADS, timeout=60), getattr(talk.desk, looks), list[Any]()
    met = threading.local()

    def looked(*args: Any) -> Any:
        result = look(*args)
        if not hasattr(met, "once"):
            met.once = meet.wait()
        return result

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:
            found.append(error)

    monkeypatch.setattr(talk.desk, looks, looked)
    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    return found


def test_a_session_is_opened_once(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_once(talk, monkeypatch, "_make_room", talk.session)
    assert len(found) == THREADS and len(set(found)) == 1, found
    assert [row["id"] for row in talk.service.journal.all("select id from sessions")] == found[:1]
    assert talk.desk.session(talk.owner, found[0])["ended"] is None and talk.session() == found[0]


def test_a_request_that_is_refused_is_refused_to_all(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = talk.model(talk.session())
    found = at_once(talk, monkeypatch, "_known", lambda: talk.step(model, seq=1, beta1=2.0))
    assert {type(error) for error in found} == {Refused} and len({error.text for error in found}) == 1, found
    talk.seqs[model] = 1
    step = talk.step(model)
    talk.run()
    assert "metrics" in talk.result(step), "nothing waits for the number"


def test_each_kind_of_promise_is_given_once_and_kept_once(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    session = talk.session()
    model = talk.model(session)
    saved = [talk.call(model, kind, path="one") for kind in ("save_weights_for_sampler", "save_weights")]
    talk.run()
    path, state = (talk.result(own)["path"] for own in saved)
    open_ = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = talk.desk.create_sampling_session(talk.owner, open_)
    sample = {
        "sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9]}]},
        "sampling_params": {"max_tokens": 2},
    }  # fmt: skip
    made = {
        "session_id": session,
        "model_seq_id": 1,
        "base_model": NAME,
        "lora_config": {"rank": 4, "train_unembed": False},
    }
    asks: dict[str, Callable[[], Any]] = {
        "rows": lambda: talk.forward_backward(model, [datum(1, 9)], seq=3),
        "step": lambda: talk.step(model, seq=4),
        "model": lambda: talk.desk.create_model(talk.owner, made),
        "loaded model": lambda: talk.desk.load_as_new(talk.owner, made | {"model_seq_id": 2, "path": state}),
        "sampling session": lambda: talk.desk.create_sampling_session(
            talk.owner, open_ | {"sampling_session_seq_id": 1}
        ),
        "sample": lambda: talk.desk.asample(talk.owner, sample)[0],
        "unload": lambda: talk.desk.unload(talk.owner, {"model_id": model}),
    }
    for kind, ask in asks.items():
        before = talk.service.journal.all("select id from requests")
        with mock.patch.object(talk.service.stores, "copy", wraps=talk.service.stores.copy) as copy:
            found = at_once(talk, monkeypatch, "_known", ask)
        assert len(found) == THREADS and len(set(found)) == 1, (kind, found)
        assert copy.call_count == (kind in ("sampling session", "loaded model")), kind
        assert len(talk.service.journal.all("select id from requests")) == len(before) + 1, kind
        assert talk.service.queue.waiting == (kind in ("rows", "step"))
        talk.run()
        assert kind == "sampling session" or talk.result(found[0]) is not None
    assert not talk.service.queue.waiting and not talk.service.queue.bytes
    assert len(talk.service.tenants) == 2


def test_a_checkpoint_is_copied_once(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rest = talk.model(talk.session()), Rest(talk.desk)
    saved = talk.call(model, "save_weights", path="one")
    talk.run()
    other = talk.call(talk.model(talk.session(), 1), "save_weights", path="one")
    talk.run()
    source = talk.result(saved)["path"]

    def copy(key: str | None = "first", owner: str = talk.owner, source: str = source) -> Any:
        return rest.answer(owner, "POST", "copy_weights", {"source_path": source}, {}, "", key)["tinker_path"]

    found = at_once(talk, monkeypatch, "checkpoint", copy)
    assert len(found) == THREADS and len(set(found)) == 1, found
    assert len({*found, copy(), copy("second"), copy(None), copy(None)}) == 4
    assert len(talk.service.journal.all("select path from checkpoints")) == 6
    assert copy(source=talk.result(other)["path"]) not in found, "a key is of one checkpoint"
    rest.answer(talk.owner, "POST", f"training_runs/{model}/checkpoints/weights/one/publish", {}, {}, "")
    assert copy(owner="other") not in found, "a key is its owner's"


def test_a_checkpoint_that_is_overwritten_while_it_is_copied_is_copied_again(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy never has files of both: the request is answered with a time to wait, and then taken."""
    model, number = talk.model(talk.session()), 0

    def save() -> str:
        nonlocal number
        number += 1
        talk.forward_backward(model, [datum(number, 20)])
        talk.step(model, 1e-1)
        promise = talk.call(model, "save_weights", path="one", overwrite=True)
        talk.run()
        return str(talk.result(promise)["path"])

    path, link = save(), os.link
    body = {"session_id": talk.session(), "model_seq_id": 5, "path": path, "optimizer": True}

    def linked(file: Any, into: Any) -> None:
        link(file, into)
        if number == 1:
            save()

    monkeypatch.setattr(os, "link", linked)
    http = TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-one"})
    monkeypatch.setattr(Keys, "owner", lambda *own: talk.owner)
    answer = http.post("/api/v1/load_weights", json=body)
    assert answer.status_code == 429 and "was overwritten" in answer.text, answer.text
    again = http.post("/api/v1/load_weights", json=body)
    talk.run()
    twin = talk.result(again.json()["request_id"])["model_id"]
    checkpoint, start = talk.service.stores.checkpoint(path), talk.service.stores.model(twin) / "start"
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (start / file).samefile(checkpoint / file)


def test_a_model_whose_session_ends_while_it_is_made_is_over(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    session, add = talk.session(), talk.service.add_tenant

    def end(row: Any, host: Host) -> None:
        talk.desk.finish_session(talk.owner, session, "finished")
        talk.run()
        add(row, host)

    monkeypatch.setattr(talk.service, "add_tenant", end)
    model = talk.model(session)
    talk.run()
    assert not talk.service.tenants and not talk.service.queue.lanes
    with pytest.raises(Refused, match="was unloaded"):
        talk.forward_backward(model, [datum(1, 9)])


def test_a_model_that_is_made_while_its_session_ends_is_over(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    session, write, made = talk.session(), talk.service.journal.write, list[str]()

    def after(*args: Any) -> Any:
        monkeypatch.undo()
        made.append(talk.model(session))
        return write(*args)

    monkeypatch.setattr(talk.service.journal, "write", after)
    talk.desk.finish_session(talk.owner, session, "finished")
    talk.run()
    assert made and not talk.service.tenants and not talk.service.queue.lanes


def test_a_sampler_that_is_saved_while_its_session_ends_is_over(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    session = talk.session()
    model = talk.model(session)
    saved, own = talk.call(model, "save_weights_for_sampler"), talk.service.tenants[model]
    save = own.save

    def end(*args: Any, **words: Any) -> int:
        talk.desk.finish_session(talk.owner, session, "finished")
        return save(*args, **words)

    monkeypatch.setattr(own, "save", end)
    talk.run()
    assert "sampling_session_id" in talk.result(saved)
    assert [row["state"] for row in talk.service.journal.all("select state from samplers")] == ["closed"]
