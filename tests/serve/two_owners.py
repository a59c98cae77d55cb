"""A service with two owners, who have one of everything each, and all calls with values that their fields never take."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import NAME, Talk, host_of, leave
from starlette.testclient import TestClient

from packlora.serve.app import Keys, application
from packlora.serve.limits import Limits
from packlora.serve.service import Service

PROTO = {"content-type": "application/x-protobuf"}
LORA = {"rank": 4, "seed": 1}
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
NO_TEXTS = [None, 7, True, 1.5, [], {}, ["a"], 10**30, -1]
ODD_TEXTS = [
    "",
    "../../etc/passwd",
    "a/b",
    "a\x00b",
    "é\u202e",
    "\ud800",
    "x" * 2000,
    "'; drop table models; --",
    "%2e%2e",
]
NO_OBJECTS = ["x", 7, [1], True, 1.5]
BAD: Mapping[str, list[Any]] = {
    "id": [*NO_TEXTS, *ODD_TEXTS, "nobody:train:0"],
    "name": [*NO_TEXTS[1:], *ODD_TEXTS, ".hidden", "-x"],
    "path": [*NO_TEXTS, *ODD_TEXTS, "tinker://", "file:///etc/passwd", "tinker://a/weights/..", "tinker://a/b/c/d"],
    "count": [-1, 1.5, "1", True, [], {}, 2**80, float("nan"), float("inf"), -(2**70)],
    "number": ["1", True, [], {}, -1, float("nan"), float("inf"), float("-inf"), 10**400],
    "switch": ["false", 1, 0, 2.5, [], {}],
    "object": NO_OBJECTS,
    "tokens": ["x", 7, {}, [[1]], ["1"], [1.5], [True], [-1], [4000], [2**40], [2**70]],
    "stop": [7, {}, [None], [1.5], [[1]], [""], [-1], [2**40], True],
    "text": NO_TEXTS[1:],
    "list": ["x", 1.5, [], {}, [1], 10**30],
}  # fmt: skip
"""Values that a field of a kind never takes."""


@dataclass(frozen=True, slots=True)
class Call:
    """A POST: a body that is good, and its fields with their kinds."""

    path: str
    body: Mapping[str, Any]
    fields: Mapping[str, str]


class World:
    """A service with two owners, who have one of everything each."""

    def __init__(self, folder: str, state: Path) -> None:
        host = host_of(folder, state)
        self.service = Service({NAME: host}, state, Limits(body_bytes=20_000, samples=8))
        self.talks = [Talk(self.service, Keys().owner(f"tml-{number}")) for number in range(2)]
        self.https = [
            TestClient(
                application(talk.desk, Keys(), hold=0.0), headers={"x-api-key": f"tml-{number}"}, raise_server_exceptions=False
            )
            for number, talk in enumerate(self.talks)
        ]  # fmt: skip
        self.ids = [self._one_of_everything(talk) for talk in self.talks]
        self.seq = 1000

    def _one_of_everything(self, talk: Talk) -> dict[str, str]:
        session, over = talk.session(), talk.session("over")
        model, twin = talk.model(session), talk.model(session, 1)
        ids = {"session": session, "over": over, "model": model, "twin": twin}
        kinds = ("weights", "sampler_weights", "external_weights", "old")
        calls = ("save_weights", "save_weights_for_sampler", "save_weights_external", "save_weights")
        promises = {
            kind: talk.call(model, call, path=f"{kind}-{talk.owner[:6]}")
            for kind, call in zip(kinds, calls, strict=True)
        }
        talk.seqs[twin] = talk.seqs[model]
        for number in range(len(calls)):
            talk.call(twin, "optim_step", number + 1)
        talk.run()
        ids |= {kind: talk.result(promise)["path"] for kind, promise in promises.items()} | {"promise": promises["old"]}
        with self.service.journal.write() as db:
            db.execute("update checkpoints set expires = 1 where path = ?", (ids["old"],))
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": ids["sampler_weights"]}
        ids["sampler"] = talk.desk.create_sampling_session(talk.owner, body)
        talk.desk.finish_session(talk.owner, over, "over")
        talk.run()
        return ids

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def state(self) -> Any:
        """All that is on the disk but numbers whose requests were refused, and what is in memory."""
        tables = ("facts", "sessions", "models", "samplers", "checkpoints")
        rows = [list(map(tuple, self.service.journal.all(f"select * from {table}"))) for table in tables]
        requests = self.service.journal.all("select * from requests where state != 'refused'")
        files = sorted((str(file), file.stat().st_mtime_ns) for file in self.service.state.glob("*s/**/*"))
        flats = [
            (tenant.id, None if tenant.adapter is None else tenant.adapter.flat.clone())
            for tenant in self.service.tenants.values()
        ]
        return rows, list(map(tuple, requests)), files, flats

    def post(self, path: str, body: Any, owner: int = 0, **more: Any) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.https[owner].post(f"/api/v1/{path}", content=content, **more)

    def calls(self, owner: int = 0) -> dict[str, Call]:
        """Every POST of JSON."""
        own = self.ids[owner]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        of_model = {"model_id": own["model"], "seq_id": 0}
        save = {**of_model, "path": "new", "ttl_seconds": 60, "overwrite": False, "user_metadata": {}}
        saves = {
            "model_id": "id", "seq_id": "count", "path": "name", "ttl_seconds": "count", "overwrite": "switch",
            "user_metadata": "object",
        }  # fmt: skip
        found = [
            Call(
                "create_session", {"sdk_version": "0.38.0", "user_metadata": {}, "display_name": "x"},
                {"sdk_version": "id", "user_metadata": "object", "display_name": "text"},
            ),
            Call("session_heartbeat", {"session_id": own["session"]}, {"session_id": "id"}),
            Call(
                "create_model",
                {
                    "session_id": own["session"], "model_seq_id": 7, "base_model": NAME, "lora_config": LORA,
                    "user_metadata": {"packlora": {"lora_alpha": 8, "lora_dropout": 0.0, "use_dora": False}},
                    "optimizer_config": {"type": "adamw"},
                },
                {
                    "session_id": "id", "model_seq_id": "count", "base_model": "id", "lora_config": "object",
                    "lora_config.rank": "count", "lora_config.seed": "count", "lora_config.train_mlp": "switch",
                    "user_metadata": "object", "user_metadata.packlora.lora_alpha": "number",
                    "user_metadata.packlora.lora_dropout": "number", "user_metadata.packlora.use_dora": "list",
                    "optimizer_config": "object", "optimizer_config.type": "name",
                },
            ),
            Call("get_info", {"model_id": own["model"]}, {"model_id": "id"}),
            Call("unload_model", {"model_id": own["model"]}, {"model_id": "id"}),
            Call(
                "optim_step", {**of_model, "adam_params": ADAM},
                {
                    "model_id": "id", "seq_id": "count", "adam_params": "object",
                    **{f"adam_params.{key}": "number" for key in ADAM},
                },
            ),
            Call("save_weights", save, saves),
            Call(
                "save_weights_for_sampler", {**save, "kind": "snapshot"},
                saves | {"kind": "name"},
            ),
            Call("save_weights_external", save, saves),
            Call(
                "load_weights", {**of_model, "path": own["weights"], "optimizer": True},
                {"seq_id": "count", "path": "path", "optimizer": "switch"},
            ),
            Call(
                "load_weights", {"session_id": own["session"], "model_seq_id": 8, "path": own["weights"], "optimizer": False},
                {
                    "session_id": "id", "model_seq_id": "count", "path": "path", "optimizer": "switch", "base_model": "text",
                    "user_metadata": "object",
                },
            ),
            Call(
                "create_sampling_session",
                {"session_id": own["session"], "sampling_session_seq_id": 9, "model_path": own["sampler_weights"]},
                {"session_id": "id", "sampling_session_seq_id": "count", "base_model": "text"},
            ),
            Call(
                "create_sampling_session", {"session_id": own["session"], "sampling_session_seq_id": 9, "base_model": NAME},
                {"session_id": "id", "sampling_session_seq_id": "count", "base_model": "id"},
            ),
            Call(
                "asample",
                {
                    "sampling_session_id": own["sampler"], "seq_id": 5, "num_samples": 1, "prompt": prompt,
                    "sampling_params": {"max_tokens": 2, "temperature": 1.0},
                },
                {
                    "sampling_session_id": "id", "seq_id": "count", "num_samples": "count", "prompt": "object",
                    "prompt.chunks": "object", "prompt.chunks.0.tokens": "tokens", "prompt.chunks.0.type": "id",
                    "sampling_params": "object", "sampling_params.max_tokens": "count", "sampling_params.temperature": "number",
                    "sampling_params.top_p": "number", "sampling_params.top_k": "list", "sampling_params.stop": "stop",
                    "sampling_params.seed": "list", "topk_prompt_logprobs": "count", "topk_sample_logprobs": "count",
                    "prompt_logprobs": "switch", "prompt_logprobs_last_n": "count", "prompt_alt_tokens_k": "object",
                },
            ),
            Call(
                "asample",
                {
                    "sampling_session_id": own["sampler"], "seq_id": 6, "prompt": prompt,
                    "target_prompt_logprobs": {"data": [1, 2], "shape": [2, 1]},
                },
                {
                    "target_prompt_logprobs": "object", "target_prompt_logprobs.shape": "object",
                    "target_prompt_logprobs.data": "tokens", "target_prompt_logprobs.sparse_crow_indices": "tokens",
                },
            ),
            Call("retrieve_future", {"request_id": own["promise"]}, {"request_id": "id"}),
            Call("weights_info", {"tinker_path": own["weights"]}, {"tinker_path": "path"}),
            Call(
                "copy_weights", {"source_path": own["weights"], "ttl_seconds": 60},
                {"source_path": "path", "ttl_seconds": "count"},
            ),
        ]  # fmt: skip
        return {f"{call.path} {number}": call for number, call in enumerate(found)}


def changed(body: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A body with another value of a field, which is given by its path."""
    out = copy.deepcopy(dict(body))
    at: Any = out
    *parents, last = [int(part) if part.isdecimal() else part for part in field.split(".")]
    for parent in parents:
        at = at[parent] if isinstance(at, list) else at.setdefault(parent, {})
    at[last] = value
    return out


def check_refused(answer: Any, field: str, where: Any) -> None:
    assert 400 <= answer.status_code < 500 and answer.status_code not in (402, 408, 409, 429), (where, answer.text)
    text = answer.json()["error"]
    names = [part for part in field.split(".") if not part.isdecimal()]
    assert "the body" in text or any(name in text for name in names), (where, text)
    assert "Traceback" not in text and "/tmp" not in text and len(text) < 1000, (where, text)


def equal(before: Any, after: Any) -> bool:
    *tables, flats = before
    *tables_after, flats_after = after
    same = all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for (_, a), (_, b) in zip(flats, flats_after, strict=False)
    )
    return tables == tables_after and same and [id for id, _ in flats] == [id for id, _ in flats_after]


@pytest.fixture(scope="module")
def world(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found = World(tiny_base("llama"), tmp_path_factory.mktemp("serve"))
    yield found
    leave(found.service)
