"""A table of bad input: what is asked for, and the status and words of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from serving import NAME, datum, forward_backward_body
from two_owners import LORA, PROTO, World, world

from packlora.serve.messages import Datum

__all__ = ["world"]

ZSTD = {"content-encoding": "zstd"}
NO_REASONS = {"type": "client_finished", "reasons": 5}
CRASH = {"reason": {"type": "crash"}}


def of_model(world: World, **more: Any) -> dict[str, Any]:
    return {"model_id": world.ids[0]["model"], "seq_id": world.next_seq(), **more}


def send(world: World, rows: Sequence[Datum], loss: str = "cross_entropy", seq: int = 0, **config: float) -> Any:
    body = forward_backward_body(world.ids[0]["model"], seq or world.next_seq(), rows, loss, config=config)
    return world.post("forward_backward", body, headers=PROTO)


def make(world: World, metadata: Any = None, **more: Any) -> Any:
    body = {"session_id": world.ids[0]["session"], "model_seq_id": 60, "base_model": NAME, "lora_config": LORA, **more}
    return world.post("create_model", body | {"user_metadata": {"packlora": metadata}})


def result_of(world: World, answer: Any) -> Any:
    world.talks[0].run()
    return world.post("retrieve_future", {"request_id": answer.json()["request_id"]})


def again(world: World) -> Any:
    seq = world.next_seq()
    first, retry, other = (send(world, [datum(number, 9)], seq=seq) for number in (1, 1, 2))
    assert first.json() == retry.json(), "a retry is the same request"
    return other


def sample(world: World, **more: Any) -> Any:
    body = {"seq_id": 10**6, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {"max_tokens": 2}}
    return world.post("asample", {"sampling_session_id": world.ids[0]["sampler"], **body, **more})


def weighted(value: float, length: int = 9) -> Any:
    return [datum(1, 9, weights=np.full(length, value))]


def masked(name: str, there: float = 1.0) -> Any:
    """A sample with an array that is 0 at a token. there: the token's advantage."""
    ones = np.ones(9, np.float32)
    at = np.eye(9, dtype=np.float32)[4]
    return [datum(1, 9, logprobs=-ones, advantages=ones - at + there * at, **{name: ones - at})]


def encrypted(world: World) -> dict[str, Any]:
    return of_model(world, path="x", age_encryption_recipients=["age1"])


BAD_INPUT: list[tuple[str, int, str, Callable[[World], Any]]] = [
    ("a number before its turn waits", 408, "active", lambda w: result_of(w, send(w, [datum(1, 9)]))),
    ("a hole is waited for", 408, "active", lambda w: result_of(w, send(w, [datum(1, 9)], seq=w.next_seq() + 10**6))),
    ("a number twice, for something else", 400, "seq_id: number", again),
    ("no number", 400, "seq_id: 0", lambda w: w.post("optim_step", of_model(w, seq_id=0))),
    ("longer than the context", 400, "the model's context is 256", lambda w: send(w, [datum(1, 300)])),
    ("tokens of no vocabulary", 400, "0 to 319", lambda w: send(w, [Datum(np.full(3, 320, np.int32), datum(1, 3).inputs)])),
    ("shapes that disagree", 400, "weights: shape [8]", lambda w: send(w, weighted(1.0, 8))),
    ("weights that are NaN", 400, "data[0].loss_fn_inputs.weights", lambda w: send(w, weighted(float("nan")))),
    ("weights that are infinite", 400, "not finite", lambda w: send(w, weighted(float("inf")))),
    ("a loss that there is not", 400, "served are cross_entropy", lambda w: send(w, [datum(1, 9)], "magic")),
    ("a key of no loss", 400, "'beta' is no key of ppo", lambda w: send(w, [datum(1, 9)], "ppo", beta=1.0)),
    ("an input of no loss", 400, "'gain' is no input", lambda w: send(w, [datum(1, 9, gain=np.ones(9))])),
    ("weights of a loss without", 400, "weights: ppo does not read", lambda w: send(w, masked("weights"), "ppo")),
    ("a mask beside advantages", 400, "mask: cispo does not", lambda w: send(w, masked("mask"), "cispo")),
    ("a mask beside weights", 400, "mask: cross_entropy does not", lambda w: send(w, [datum(1, 9, mask=np.arange(9.0))])),
    ("a mask where nothing counts", 200, "request_id", lambda w: send(w, masked("mask", 0.0), "ppo")),
    ("a key of no adapter", 400, "'lora_alfa'", lambda w: make(w, {"lora_alfa": 1})),
    ("a module that there is not", 400, "zzz", lambda w: make(w, {"target_modules": ["zzz"]})),
    ("a model that is not served", 400, f"served are {NAME}", lambda w: make(w, base_model="no/such")),
    ("full fine-tuning", 400, "lora_config: full fine-tuning", lambda w: make(w, lora_config=None)),
    ("another optimizer", 400, "adamw is", lambda w: make(w, optimizer_config={"type": "dimuon", "version": 1})),
    ("a session that has ended", 410, "has ended", lambda w: make(w, session_id=w.ids[0]["over"])),
    ("an end for no reason", 400, "success, errored", lambda w: w.post(f"sessions/{w.ids[0]['session']}/finish", CRASH)),
    ("a prompt's last tokens unscored", 400, "prompt_logprobs: true", lambda w: sample(w, prompt_logprobs_last_n=2)),
    ("too many stop strings", 400, "stop_strings of 64", lambda w: sample(w, sampling_params={"stop": ["a"] * 65})),
    ("a long stop string", 400, "stop_characters of 1024", lambda w: sample(w, sampling_params={"stop": "a" * 1025})),
    ("a search for no status", 400, "statuses: ", lambda w: w.post("sessions/search", {"statuses": [{"type": "new"}]})),
    ("a search for no reasons", 400, "statuses: ", lambda w: w.post("sessions/search", {"statuses": [NO_REASONS]})),
    ("another owner's session", 404, "of yours", lambda w: make(w, session_id=w.ids[1]["session"])),
    ("a body above the limit", 413, "body_bytes", lambda w: w.post("optim_step", b"x" * 20_001)),
    ("a compressed body", 415, "content-encoding: 'zstd'", lambda w: w.post("telemetry", b"", headers=ZSTD)),
    ("a client of another release", 400, "tinker>=0.38,<0.39", lambda w: w.post("client/config", {"sdk_version": "0.24.1"})),
    ("JSON for protobuf", 415, "application/x-protobuf", lambda w: w.post("forward_backward", {})),
    ("an encrypted export", 400, "what save_weights_external saves", lambda w: w.post("save_weights_external", encrypted(w))),
    ("a name as a path", 400, "path: '../x'", lambda w: w.post("save_weights", of_model(w, path="../x"))),
    ("no key", 401, "TINKER_API_KEY", lambda w: w.post("telemetry", {}, headers={"x-api-key": ""})),
    ("a call that there is not", 404, "not served", lambda w: w.post("no_such_call", {})),
]  # fmt: skip
"""State folders of others are in test_trouble.py, ports in use in test_http.py."""


@pytest.mark.parametrize("case", BAD_INPUT, ids=[name for name, *_ in BAD_INPUT])
def test_bad_input_is_answered_in_words(world: World, case: tuple[str, int, str, Callable[[World], Any]]) -> None:
    _, status, words, ask = case
    answer = ask(world)
    assert answer.status_code == status and words in answer.text, answer.text
