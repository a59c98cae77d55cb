"""Bad requests: each is refused in words that name the field, and changes nothing but the number that it had.

make soak: every value in every field, and protobuf bodies with wrong bytes
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from seeds import SEED, SOAK, some
from serving import datum, forward_backward_body
from two_owners import BAD, PROTO, World, changed, check_refused, equal, world

from packlora.serve.messages import message

__all__ = ["world"]

REQUESTS = 100_000 if SOAK else 300


def test_fuzzed_bodies_are_refused_in_words_and_change_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    calls, other = world.calls(), world.ids[1]
    cases = [
        (name, field, value)
        for name, call in calls.items()
        for field, kind in call.fields.items()
        for value in BAD[kind]
    ]
    for name, call in calls.items():  # of another owner, ended and expired
        for field, kind in call.fields.items():
            ours = call.body.get(field)
            key = (
                next((key for key, own in world.ids[0].items() if own == ours), None)
                if kind in ("id", "path")
                else None
            )
            if key is not None:
                cases.append((name, field, other[key]))
                cases += [(name, field, own) for own in ((world.ids[0]["old"],) if kind == "path" else ())]
        if "session_id" in call.fields:
            cases.append((name, "session_id", world.ids[0]["over"]))
    rng = random.Random(SEED)
    rng.shuffle(cases)
    before = world.state()
    with caplog.at_level(logging.WARNING):
        for name, field, value in cases[:REQUESTS]:
            call = calls[name]
            body = dict(call.body)
            if "seq_id" in body and "model_id" in body:
                body["seq_id"] = world.next_seq()
            answer = world.post(call.path, changed(body, field, value))
            check_refused(answer, field, (SEED, name, field, value))
    assert not caplog.records, caplog.text
    assert equal(before, world.state())


@pytest.mark.soak
def test_bodies_of_wrong_bytes_end_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Flipped, cut and inserted bytes may make another good request; nothing else is answered than a promise or a refusal, the
    thread that computes goes on, and the twin of the model learns nothing of it."""
    rng, talk = random.Random(SEED), world.talks[0]
    model = talk.model(world.ids[0]["session"], 50)
    good = [datum(1, 9, weights=np.ones(9)), datum(2, 5)]
    for _ in range(5000):
        body = bytearray(forward_backward_body(model, world.next_seq(), good))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[at] ^= 1 << rng.randrange(8)
                case 1:
                    del body[at : at + rng.randint(1, 8)]
                case _:
                    body[at:at] = rng.randbytes(rng.randint(1, 8))
        answer = world.post("forward_backward", bytes(body), headers=PROTO)
        assert answer.status_code < 500, (SEED, bytes(body), answer.text)
    talk.run()
    assert not [record for record in caplog.records if record.exc_info]


def tensors(request: Any) -> Any:
    return request.data[0].loss_fn_inputs


def csr(request: Any, starts: list[int], columns: list[int], shape: tuple[int, ...] = (9, 3)) -> None:
    field = tensors(request)["weights"]
    field.ClearField("dense")
    own = field.sparse_csr
    own.values, own.crow_indices = np.ones(2, "<f4").tobytes(), np.array(starts, "<i8").tobytes()
    own.col_indices = np.array(columns, "<i8").tobytes()
    del field.shape[:]
    field.shape.extend(shape)


def assign(tree: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(tree, name, value)


def put(request: Any, name: str, values: Any) -> None:
    array = np.asarray(values)
    field = tensors(request)[name]
    del field.shape[:]
    kind = array.dtype.kind
    field.dense, field.dtype = array.astype("<f4" if kind == "f" else "<i8").tobytes(), 1 if kind == "f" else 2
    field.shape.extend(array.shape)


def text_config(request: Any, name: str, text: str) -> None:
    request.loss_fn_config_v2[name].text = text


MESSAGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("model_id", lambda r: assign(r, model_id="nobody:train:0")),
    ("model_id", lambda r: assign(r, model_id="../../etc")),
    ("seq_id", lambda r: assign(r, seq_id=0)),
    ("seq_id", lambda r: assign(r, seq_id=-5)),
    ("loss_fn", lambda r: assign(r, loss_fn="../secret")),
    ("loss_fn", lambda r: assign(r, loss_fn="")),
    ("loss_fn_config", lambda r: r.loss_fn_config.update({"beta": 1.0})),
    ("loss_fn_config", lambda r: (assign(r, loss_fn="ppo"), r.loss_fn_config.update({"clip_low_threshold": float("nan")}))),
    ("loss_fn_config", lambda r: (assign(r, loss_fn="ppo"), r.loss_fn_config.update({"clip_low_threshold": 3.0}))),
    ("loss_fn_config", lambda r: (assign(r, loss_fn="dro"), text_config(r, "beta", "x"))),
    ("data", lambda r: r.ClearField("data")),
    ("model_input", lambda r: r.data[0].ClearField("model_input")),
    ("model_input", lambda r: r.data[0].model_input.add()),
    ("model_input", lambda r: assign(r.data[0].model_input.add().image, data=b"x", format="png")),
    ("tokens", lambda r: assign(r.data[0].model_input[0].encoded_text, tokens=b"123")),
    ("vocabulary", lambda r: assign(r.data[0].model_input[0].encoded_text, tokens=np.full(9, -1, "<i4").tobytes())),
    ("vocabulary", lambda r: assign(r.data[0].model_input[0].encoded_text, tokens=np.full(9, 4000, "<i4").tobytes())),
    ("context", lambda r: assign(r.data[0].model_input[0].encoded_text, tokens=np.ones(257, "<i4").tobytes())),
    ("target_tokens", lambda r: tensors(r).pop("target_tokens")),
    ("target_tokens", lambda r: put(r, "target_tokens", np.full(9, 1.5))),
    ("target_tokens", lambda r: put(r, "target_tokens", np.full(9, 2**40))),
    ("target_tokens", lambda r: put(r, "target_tokens", np.full(8, 5))),
    ("target_tokens", lambda r: put(r, "target_tokens", np.zeros((9, 0), int))),
    ("dtype", lambda r: assign(tensors(r)["weights"], dtype=4)),
    ("dtype", lambda r: assign(tensors(r)["weights"], dtype=0)),
    ("weights", lambda r: assign(tensors(r)["weights"], dense=b"123")),
    ("weights", lambda r: tensors(r)["weights"].shape.extend([1, 1])),
    ("weights", lambda r: (put(r, "weights", np.ones(9)), tensors(r)["weights"].shape.__setitem__(0, -9))),
    ("weights", lambda r: (put(r, "weights", np.ones(0)), tensors(r)["weights"].shape.__setitem__(0, 2**62))),
    ("weights", lambda r: (put(r, "weights", np.ones((0, 0))), tensors(r)["weights"].shape.__setitem__(0, 2**62))),
    ("weights", lambda r: put(r, "weights", np.ones(8))),
    ("weights", lambda r: put(r, "weights", np.ones((9, 2)))),
    ("weights", lambda r: put(r, "weights", np.full(9, np.nan))),
    ("weights", lambda r: put(r, "weights", np.full(9, np.inf))),
    ("weights", lambda r: tensors(r)["weights"].ClearField("dense")),
    ("advantages", lambda r: put(r, "advantages", np.ones(9))),
    ("logprobs", lambda r: assign(r, loss_fn="importance_sampling")),
    ("crow_indices", lambda r: csr(r, [0, 2], [0, 1])),
    ("crow_indices", lambda r: csr(r, [0, 2, 1, 1, 1, 1, 1, 1, 1, 2], [0, 1])),
    ("crow_indices", lambda r: csr(r, [0, 2**63 - 1, -2, 1, 1, 1, 1, 1, 1, 2], [0, 1])),
    ("crow_indices", lambda r: csr(r, [], [0, 1])),
    ("col_indices", lambda r: csr(r, [0, 2, *[2] * 8], [0, 3])),
    ("col_indices", lambda r: csr(r, [0, 2, *[2] * 8], [-1, 0])),
    ("col_indices", lambda r: csr(r, [0, 2, *[2] * 8], [0])),
    ("sparse_csr", lambda r: csr(r, [0, 2, *[2] * 8], [0, 1], (9,))),
    ("soft_targets", lambda r: csr(r, [0, 2, *[2] * 8], [0, 1], (2**40, 2**40))),
]  # fmt: skip
"""Words of the refusal, and what is wrong with a forward_backward."""


def test_bad_protobuf_is_refused_in_words_and_changes_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    before, model = world.state(), world.ids[0]["model"]
    for number, (words, spoil) in enumerate(MESSAGES):
        body = forward_backward_body(model, world.next_seq(), [datum(1, 9, weights=np.ones(9))])
        request = message("ForwardBackwardRequest").FromString(body)
        spoil(request)
        check_refused(
            world.post("forward_backward", request.SerializeToString(), headers=PROTO), words, (number, words)
        )
    assert not caplog.records, caplog.text
    assert equal(before, world.state())


def test_a_model_whose_client_sent_all_that_learns_as_its_twin(world: World) -> None:
    talk, found = world.talks[0], []
    world.service.turn()
    for model in (world.ids[0]["model"], world.ids[0]["twin"]):
        promise = talk.forward_backward(model, [datum(1, 9)])
        talk.step(model)
        talk.run()
        found.append((talk.result(promise), talk.tensors(model, "twins")))
    assert found[0][0][0] == found[1][0][0]
    assert all(torch.equal(own, found[1][1][name]) for name, own in found[0][1].items())


def test_a_text_that_is_no_utf8_is_refused_by_protobuf_in_plain_python_too() -> None:
    """Where there is no wheel for a machine, protobuf is in plain Python, and raises another error."""
    code = """
from google.protobuf.internal import api_implementation
from packlora.serve.errors import Refused
from packlora.serve.messages import parsed
try:
    parsed(bytes([10, 2, 0xC3, 0x28]))
except Refused as error:
    print(api_implementation.Type(), error.text)
"""
    words = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True)
    assert done.stdout.startswith("python the body is no ForwardBackwardRequest"), done.stderr


def test_odd_bodies_and_addresses_are_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    http, own = world.https[0], world.ids[0]
    before = world.state()
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    wrong = [b"{", b"[]", b"7", b'"x"', b"\xff\xfe", deep, b'{"a":' + b"9" * 5000 + b"}", b'{"a":"\\udfff"}']
    paths = [
        *dict.fromkeys(call.path for call in world.calls().values()),
        "client/config",
        "telemetry",
        "sessions/search",
    ]
    for path, body in some(list(itertools.product(paths, wrong)), 5):
        check_refused(world.post(path, body), "body", (path, body[:20]))
    for body in (b'{"session_id":"\xed\xa0\x80"}', '{"session_id":"\ud800"}'.encode("utf-16", "surrogatepass")):
        check_refused(world.post("session_heartbeat", body), "body", body)  # half of a surrogate pair
    for path, encoding in some(
        list(itertools.product([*paths, "forward_backward"], ["gzip", "zstd", "br", "x" * 200])), 5
    ):
        answer = world.post(path, b"{}", headers={"content-encoding": encoding, **PROTO})
        check_refused(answer, "content-encoding", path)
        assert answer.status_code == 415
        large = world.post(path, b'{"a":"' + b"x" * 30_000 + b'"}', headers=PROTO)
        check_refused(large, "body_bytes", path)
        assert large.status_code == 413
    for body in (b"", b"\xff\xff", b"{}", bytes(range(256))):
        check_refused(world.post("forward_backward", body, headers=PROTO), "model_id", body)
    run = f"training_runs/{own['model']}"
    for text in ("%2e%2e%2f", "%00", "é", "a%2Fb", "x" * 1500, "'%3b drop", "%ff", "weights"):
        for method, path in some(
            [
                ("GET", f"sessions/{text}"), ("POST", f"sessions/{text}/finish"), ("GET", f"samplers/{text}"),
                ("GET", f"training_runs/{text}"), ("GET", f"training_runs/{text}/checkpoints"),
                ("DELETE", f"{run}/checkpoints/weights/{text}"), ("POST", f"{run}/checkpoints/{text}/x/publish"),
                ("PUT", f"{run}/checkpoints/weights/{text}/ttl"), ("GET", f"{run}/checkpoints/{text}/x/external_weights_urls"),
                ("GET", f"{text}/{text}"), ("POST", text),
            ],
            2,
        ):  # fmt: skip
            answer = http.request(method, f"/api/v1/{path}")
            assert 400 <= answer.status_code < 500, (method, path, answer.text)
        for path in (f"/files/{text}/adapter_config.json", f"/files/x/{text}", f"/v1/models/{text}"):
            assert http.get(path, headers={"authorization": "Bearer tml-0"}).status_code == 404, path
    name = own["weights"].rpartition("/")[2]
    for ttl in some(BAD["count"], 3):
        answer = http.put(f"/api/v1/{run}/checkpoints/weights/{name}/ttl", content=json.dumps({"ttl_seconds": ttl}))
        check_refused(answer, "ttl_seconds", ttl)
    for query in ("limit=-1", "limit=x", "limit=1e3", "limit=99999999", "offset=-1", "offset=" + "9" * 4999, "limit="):
        check_refused(http.get(f"/api/v1/checkpoints?{query}"), query.partition("=")[0], query)
    assert not caplog.records, caplog.text
    assert equal(before, world.state())
    assert http.get("/api/v1/checkpoints").status_code == 200
