"""Keys, owners, bad input and the command's options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, Talk, datum, forward_backward_body, host_of, leave
from starlette.testclient import TestClient

from packlora.errors import InputError
from packlora.serve.app import Keys, application
from packlora.serve.command import bases_of, keys_of, listening
from packlora.serve.limits import Limits
from packlora.serve.messages import _pool
from packlora.serve.queue import Lane, Request, Shares
from packlora.serve.service import Service

PROTO = {"content-type": "application/x-protobuf"}
LORA = {"rank": 4, "seed": 1}


@pytest.fixture(scope="module")
def talk(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    state = tmp_path_factory.mktemp("serve")
    host = host_of(tiny_base("llama"), state)
    service = Service({NAME: host}, state, Limits(body_bytes=20_000))
    found = Talk(service, Keys().owner("tml-one"))
    yield found
    leave(service)


@pytest.fixture(scope="module")
def http(talk: Talk) -> TestClient:
    return TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-one"})


def post(http: TestClient, path: str, body: Any, **more: Any) -> Any:
    return http.post(f"/api/v1/{path}", json=body, **more)


def test_an_owner_sees_nothing_of_another(talk: Talk, http: TestClient) -> None:
    session = talk.session("owners")
    model = talk.model(session)
    promise = talk.call(model, "save_weights", path="mine")
    talk.run()
    path = talk.result(promise)["path"]
    other = {"headers": {"x-api-key": "tml-two"}}
    body = forward_backward_body(model, 2, [datum(1, 9)])
    answers = [
        post(http, "session_heartbeat", {"session_id": session}, **other),
        post(http, "get_info", {"model_id": model}, **other),
        post(http, "optim_step", {"model_id": model, "seq_id": 1}, **other),
        post(http, "retrieve_future", {"request_id": promise}, **other),
        post(http, "weights_info", {"tinker_path": path}, **other),
        post(http, "load_weights", {"session_id": session, "model_seq_id": 5, "path": path}, **other),
        http.post("/api/v1/forward_backward", content=body, headers={**PROTO, **other["headers"]}),
        http.get(f"/api/v1/training_runs/{model}", **other),
        http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/mine", **other),
    ]
    unknown = post(http, "get_info", {"model_id": "nobody:train:0"}, **other)
    for answer in answers:
        assert answer.status_code in (404, 410) and "of yours" in answer.json()["error"], answer.text
    assert unknown.status_code == answers[1].status_code
    for listing in ("sessions", "training_runs", "checkpoints"):
        assert http.get(f"/api/v1/{listing}").json()[listing], "one's own are there"
        assert not http.get(f"/api/v1/{listing}", **other).json()[listing]
    assert http.get("/api/v1/sessions", headers={"x-api-key": ""}).status_code == 401
    assert session not in http.get("/status").text and "packlora_models" in http.get("/metrics").text


def test_bad_requests_are_refused_in_words_and_change_nothing(talk: Talk, http: TestClient) -> None:
    session = talk.session("bad")
    model = talk.model(session)
    create = {"session_id": session, "model_seq_id": 1, "base_model": NAME}
    step = {"model_id": model, "seq_id": 7}

    def with_ours(own: Any) -> dict[str, Any]:
        return create | {"lora_config": LORA, "user_metadata": {"packlora": own}}

    cases: list[tuple[str, Any, str]] = [
        ("client/config", {"sdk_version": "0.24.1"}, "tinker>=0.38,<0.39"),
        ("create_model", create, "full fine-tuning"),
        ("create_model", create | {"lora_config": {"rank": 0}}, "lora_config.rank"),
        ("create_model", create | {"lora_config": LORA, "base_model": "x"}, "served are"),
        ("create_model", with_ours({"lora_alfa": 1}), "lora_alfa"),
        ("create_model", with_ours("{"), "no JSON"),
        (
            "create_model",
            create | {"lora_config": LORA, "user_metadata": {"packlora": {"target_modules": ["zzz"]}}},
            "zzz",
        ),
        ("create_model", create | {"lora_config": LORA, "model_seq_id": -1}, "model_seq_id"),
        ("optim_step", step | {"adam_params": {"learning_rate": "a"}}, "learning_rate"),
        ("optim_step", step | {"seq_id": 0}, "seq_id"),
        ("optim_step", step | {"seq_id": 8, "adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
        ("save_weights", step | {"seq_id": 9, "path": "../../etc"}, "path"),
        ("load_weights", step | {"seq_id": 10, "path": "file:///etc"}, "tinker://"),
        ("retrieve_future", {"request_id": 7}, "request_id"),
        ("asample", {"sampling_session_id": "x", "seq_id": 0}, "sampling_session_id"),
        ("no_such_call", {}, "not served"),
    ]
    for path, body, words in cases:
        answer = post(http, path, body)
        assert 400 <= answer.status_code < 500 and answer.status_code != 409, (path, answer.text)
        assert words in answer.json()["error"], (path, answer.text)
    url = "/api/v1/forward_backward"
    assert http.post(url, content=b"\xff\xff", headers=PROTO).status_code == 400
    assert http.post(url, content=b"{}", headers={"content-type": "application/json"}).status_code == 415
    assert http.post(url, content=b"0" * 30_000, headers=PROTO).status_code == 413
    assert http.post(url, content=b"", headers={**PROTO, "content-encoding": "zstd"}).status_code == 415
    deep = "[" * 10000 + "]" * 10000
    assert http.post("/api/v1/get_info", content=deep).status_code == 400
    rows = {
        "weights": [datum(1, 9, weights=[float("nan")] * 9)],
        "shape": [datum(1, 9, weights=[1.0] * 8)],
        "context": [datum(1, 400)],
    }
    for number, (words, own) in enumerate(rows.items(), 1):
        answer = http.post(url, content=forward_backward_body(model, number, own), headers=PROTO)
        assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    talk.run()
    good = talk.forward_backward(model, [datum(1, 9)], seq=4)
    talk.run()
    assert talk.result(good)[0]["datums:sum"] == 1
    first = post(http, "optim_step", {"model_id": model, "seq_id": 5}).json()["request_id"]
    assert post(http, "retrieve_future", {"request_id": first}).status_code == 408
    talk.run()
    assert "before it failed" in json.loads(post(http, "retrieve_future", {"request_id": first}).text)["error"]


def test_who_has_one_request_does_not_wait_behind_many_of_another() -> None:
    shares, lanes = Shares(), {}
    for owner, count in (("busy", 8), ("calm", 1)):
        for number in range(count):
            lane = lanes[owner, number] = Lane(owner, f"{owner} {number}", "base")
            lane.put(Request("", lane.model, 1, "forward_backward", b"", 1))
    given = {"busy": 0, "calm": 0}
    for turn in range(60):
        due = shares.order(
            lanes.values() if turn >= 30 else [own for (owner, _), own in lanes.items() if owner == "busy"]
        )
        shares.charge(due[0], 100)
        given[due[0].owner] += turn >= 30
    assert given == {"busy": 15, "calm": 15}, (
        "equal shares from when it came on, and nothing for what it did not use before"
    )


def test_options_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\ntml-0123456789\n")
    assert keys_of(keys, "0.0.0.0") == ["tml-0123456789"] and keys_of(None, "127.0.0.1") is None
    assert bases_of(["a/b=/x=y"]) == {"a/b": "/x=y"} and bases_of([])
    taken = listening("127.0.0.1", 0)
    keys.write_text("secret\n")
    for call in (
        lambda: keys_of(None, "0.0.0.0"),
        lambda: keys_of(keys, "127.0.0.1"),
        lambda: keys_of(tmp_path / "none", "127.0.0.1"),
        lambda: bases_of(["x"]),
        lambda: bases_of(["x=1", "x=2"]),
    ):
        with pytest.raises(InputError):
            call()
    with pytest.raises(InputError, match=r"--port \d+: Address already in use; give another --port"):
        listening("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(Exception, match="not one of this service's keys"):
        Keys(["tml-0123456789"]).owner("tml-other")


def test_the_messages_are_those_of_the_public_client() -> None:
    """Numbers, types and names of all fields that both have, and the client has none that is missing here."""
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    checked = 0
    for name, theirs in pb.DESCRIPTOR.message_types_by_name.items():
        try:
            ours = _pool().FindMessageTypeByName(f"tinker_public.{name}")
        except KeyError:
            continue
        for field in theirs.fields:
            own = ours.fields_by_number.get(field.number)
            assert own is not None, (name, field.name)
            assert own.type == field.type and own.name == field.name, (name, field.name, own.name)
            checked += 1
    assert checked > 20
