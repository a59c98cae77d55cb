"""Requests of a client that means no good, or is broken: each is answered in words, and another owner notices nothing."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from serving import NAME, Talk, datum, forward_backward_body, host_of, leave
from starlette.testclient import TestClient

from packlora.serve.app import Keys, application
from packlora.serve.limits import Limits
from packlora.serve.service import Service

COUNT = 20_000 if os.environ.get("PACKLORA_SOAK") else 320
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**70, float("nan"), float("inf"), "", "x" * 5000, "../../etc/passwd", "tinker://x/weights/../..",
    "\u202e\x00", "é" * 40, [], [[]], ["a", 1], {}, {"a": {"b": []}}, "file:///etc", "'; drop table models; --", [1] * 500,
)  # fmt: skip
TABLES = ("sessions", "models", "requests", "samplers", "checkpoints")


@pytest.fixture(scope="module")
def talk(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    state = tmp_path_factory.mktemp("serve")
    service = Service({NAME: host_of(tiny_base("llama"), state)}, state, Limits(body_bytes=20_000))
    yield Talk(service, Keys().owner("tml-victim"))
    leave(service)


def bodies(session: str, model: str, promise: str, path: str, sampler: str, seq: int) -> dict[str, dict[str, Any]]:
    """A body of each call, right but for what is changed in it."""
    of_model = {"model_id": model, "seq_id": seq}
    return {
        "create_session": {"sdk_version": "0.38.0", "tags": [], "user_metadata": {}},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session, "model_seq_id": seq, "base_model": NAME, "lora_config": {"rank": 4, "seed": 1},
            "user_metadata": {"packlora": {"lora_alpha": 8}},
        },
        "get_info": {"model_id": model},
        "optim_step": of_model | {"adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}},
        "save_weights": of_model | {"path": "mine"},
        "save_weights_for_sampler": of_model | {"path": "mine"},
        "load_weights": of_model | {"path": path},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": seq, "model_path": path},
        "asample": {
            "sampling_session_id": sampler, "seq_id": seq, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "stop": []},
        },
        "retrieve_future": {"request_id": promise},
        "weights_info": {"tinker_path": path}, "copy_weights": {"source": path, "target": "other"},
        "unload_model": {"model_id": model}, "telemetry": {"events": []}, "sessions/search": {"query": "x"},
        f"sessions/{session}/finish": {},
    }  # fmt: skip


def changed(draw: random.Random, body: Any) -> Any:
    """The body with one of its values, at any depth, in the place of which there is something else, or nothing."""
    if not isinstance(body, dict) or not body or draw.random() < 0.15:
        return draw.choice(JUNK)
    key = draw.choice(list(body))
    if draw.random() < 0.15:
        return {name: value for name, value in body.items() if name != key}
    if draw.random() < 0.1:
        return body | {draw.choice(["lora_alfa", "x" * 300, "__class__", ""]): draw.choice(JUNK)}
    return body | {key: changed(draw, body[key])}


def rows_of(talk: Talk) -> list[tuple[Any, ...]]:
    return [
        (table, *row)
        for table in TABLES
        for row in talk.service.journal.all(f"select * from {table} where owner = ? order by 1", talk.owner)
    ]


def test_what_a_stranger_sends_is_answered_in_words_and_changes_nothing_of_another(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    session = talk.session("victim")
    model = talk.model(session)
    talk.forward_backward(model, [datum(1, 9)])
    talk.step(model)
    promise = talk.call(model, "save_weights_for_sampler", path="mine")
    talk.run()
    path = talk.result(promise)["path"]
    before, tensors = rows_of(talk), {name: own.clone() for name, own in talk.tensors(model).items()}
    before = rows_of(talk)

    stranger = Talk(talk.service, Keys().owner("tml-stranger"))
    theirs = stranger.session("stranger")
    own = stranger.model(theirs)
    http = TestClient(application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": "tml-stranger"})
    draw, refused = random.Random(0), 0
    victims = bodies(session, model, promise, path, "sampler-0", 4)
    own_ones = bodies(theirs, own, "nothing", "tinker://nothing/weights/x", "sampler-1", 1)
    listed = [
        f"sessions/{session}",
        f"training_runs/{model}",
        f"training_runs/{model}/checkpoints",
        "samplers/x",
        "x" * 300,
    ]
    caplog.set_level(logging.WARNING)
    for number in range(COUNT):
        known = victims if number % 2 else own_ones
        kind = number % 8
        if kind == 0:
            raw = bytearray(forward_backward_body(draw.choice([own, model]), number, [datum(number, 9)]))
            for _ in range(draw.randint(1, 4)):
                raw[draw.randrange(len(raw))] = draw.randrange(256)
            cut = bytes(raw[: draw.randint(0, len(raw))]) if draw.random() < 0.3 else bytes(raw)
            answer = http.post(
                "/api/v1/forward_backward", content=cut, headers={"content-type": "application/x-protobuf"}
            )
        elif kind == 1:
            what = draw.choice(["GET", "PUT", "DELETE", "POST"])
            answer = http.request(what, f"/api/v1/{draw.choice(listed)}", params={"limit": str(draw.choice(JUNK))[:50]})
        elif kind == 2:
            name = draw.choice(["chat/completions", "completions"])
            said = {"model": path, "messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2}
            sent = json.dumps(changed(draw, said))
            answer = http.post(f"/v1/{name}", content=sent, headers={"authorization": "Bearer tml-stranger"})
        else:
            call = draw.choice(list(known))
            sent = json.dumps(changed(draw, known[call]))
            answer = http.post(f"/api/v1/{call}", content=sent if draw.random() < 0.95 else sent[:-1])
        assert answer.status_code < 500, (number, answer.status_code, answer.text)
        if answer.status_code >= 400:
            refused += 1
            error = answer.json()["error"]
            words = error if isinstance(error, str) else error["message"]
            assert len(words) > 5 and "Traceback" not in words, (number, answer.text)
            assert len(words) < 2000
        if number % 40 == 39:
            talk.run()
    talk.run()
    assert refused > 0.7 * COUNT
    assert not [record for record in caplog.records if record.exc_info], caplog.text[-2000:]
    assert talk.service.failure is None
    assert rows_of(talk) == before
    after = talk.tensors(model, "again")
    assert all(torch.equal(after[name], own) for name, own in tensors.items())
    good = talk.forward_backward(model, [datum(3, 9)])
    talk.run()
    assert talk.result(good)[0]["datums:sum"] == 1
