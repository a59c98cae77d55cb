"""Two owners: what one has is to the other as what there never was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import datum, forward_backward_body, leave
from two_owners import PROTO, World, changed

PATHS = ("weights", "sampler_weights", "external_weights", "old")


@pytest.fixture(scope="module")
def world(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found = World(tiny_base("llama"), tmp_path_factory.mktemp("serve"))
    talk, own = found.talks[1], found.ids[1]
    own["gone"] = talk.model(own["session"], 30)
    talk.desk.unload(talk.owner, {"model_id": own["gone"]})
    body = {"session_id": own["session"], "sampling_session_seq_id": 30, "base_model": next(iter(found.service.hosts))}
    own["closed"] = talk.desk.create_sampling_session(talk.owner, body)
    with found.service.journal.write() as db:
        db.execute("update samplers set state = 'closed' where id = ?", (own["closed"],))
    talk.run()
    yield found
    leave(found.service)


def never(id: str) -> str:
    """An id of the same form that nobody has."""
    head, dash, tail = id.partition("-")
    return f"{head}{dash}{'0' * 24}{tail[24:]}"


def same(answers: list[Any], ids: tuple[str, str], where: Any) -> None:
    texts = [answer.text.replace(id, "ID") for answer, id in zip(answers, ids, strict=True)]
    codes = {answer.status_code for answer in answers}
    assert len(codes) == 1 and codes <= {400, 404, 410} and texts[0] == texts[1], (where, codes, texts)


def test_an_id_of_another_is_answered_as_one_that_never_was(world: World) -> None:
    mine, theirs = world.ids
    asked = 0
    for call in world.calls().values():
        for field, kind in call.fields.items():
            if kind not in ("id", "path") or not any(call.body.get(field) == own for own in mine.values()):
                continue
            for key, id in theirs.items():
                if (key in PATHS) != (kind == "path"):
                    continue
                answers = []
                for own in (id, never(id)):
                    body = changed(call.body, field, own)
                    body |= {"seq_id": world.next_seq()} if "model_id" in body else {}
                    answers.append(world.post(call.path, body))
                same(answers, (id, never(id)), (call.path, field, key))
                asked += 1
    assert asked > 70
    for key in ("model", "gone"):
        ids = theirs[key], never(theirs[key])
        bodies = [forward_backward_body(id, 3, [datum(1, 9)]) for id in ids]
        same([world.post("forward_backward", body, headers=PROTO) for body in bodies], ids, key)
        same([world.post("optim_step", {"model_id": id, "seq_id": 1}) for id in ids], ids, "a number that it has used")


def test_an_address_of_another_is_answered_as_one_that_never_was(world: World) -> None:
    http, theirs = world.https[0], world.ids[1]
    for key in ("session", "over", "model", "gone", "sampler", "closed", "promise"):
        id = theirs[key]
        names = [theirs[kind].partition("//")[2].partition("/")[2] for kind in PATHS]
        for method, path in (
            ("GET", "sessions/{}"), ("POST", "sessions/{}/finish"), ("GET", "samplers/{}"), ("GET", "training_runs/{}"),
            ("GET", "training_runs/{}/checkpoints"),
            *((method, f"training_runs/{{}}/checkpoints/{name}{tail}") for name in names for method, tail in (
                ("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish"), ("PUT", "/ttl"),
                ("GET", "/external_weights_urls"),
            )),
        ):  # fmt: skip
            ids = id, never(id)
            same([http.request(method, f"/api/v1/{path.format(own)}") for own in ids], ids, (method, path, key))
    bearer = {"authorization": "Bearer tml-0"}
    for kind in PATHS:
        name = theirs[kind].rpartition("/")[2]
        for ids in ((theirs[kind], never(theirs[kind])), (name, "x" * len(name))):
            ask = {"prompt": "a", "max_tokens": 1}
            same([http.post("/v1/completions", json=ask | {"model": id}, headers=bearer) for id in ids], ids, kind)
            same([http.get(f"/v1/models/{id}", headers=bearer) for id in ids], ids, kind)


def test_no_listing_page_or_figure_names_what_another_has(world: World) -> None:
    owners = [talk.owner for talk in world.talks]
    for number, http in enumerate(world.https):
        other = [*world.ids[1 - number].values(), owners[1 - number], f"tml-{1 - number}"]
        names = [id.rpartition("/")[2] for id in other if id.startswith("tinker://")]
        pages = {
            path: http.get(path, headers={"authorization": f"Bearer tml-{number}"})
            for path in (
                "/", "/metrics", "/status", "/v1/models", "/api/v1/healthz", "/api/v1/get_server_capabilities",
                *(f"/api/v1/{listing}?limit=1000" for listing in ("sessions", "training_runs", "checkpoints")),
            )
        }  # fmt: skip
        pages["search"] = world.post("sessions/search", {"limit": 1000}, number)
        for path, answer in pages.items():
            assert answer.status_code == 200, (path, answer.text)
            found = [id for id in [*other, *names] if id in answer.text]
            assert not found or path == "/status", (path, found)
        assert world.ids[number]["session"] in pages["/api/v1/sessions?limit=1000"].text, "one's own are there"


def test_a_key_of_a_retry_and_a_public_checkpoint_are_of_their_owner(world: World) -> None:
    body = {"sdk_version": "0.38.0"}
    sessions = {
        world.post("create_session", body, owner, headers={"x-idempotency-key": "same"}).json()["session_id"]
        for owner in (0, 1, 0, 1)
    }
    assert len(sessions) == 2
    run, _, name = world.ids[1]["weights"].removeprefix("tinker://").partition("/")
    address = f"/api/v1/training_runs/{run}/checkpoints/{name}"
    http, other = world.https
    assert other.post(f"{address}/publish").status_code == 204
    assert world.post("weights_info", {"tinker_path": world.ids[1]["weights"]}).status_code == 200
    copied = world.post("copy_weights", {"source_path": world.ids[1]["weights"]}).json()["tinker_path"]
    refused = [
        http.delete(address),
        http.post(f"{address}/publish"),
        http.put(f"{address}/ttl", json={"ttl_seconds": 1}),
    ]
    assert [answer.status_code for answer in refused] == [404, 404, 404], "it may be read, and no more"
    assert other.delete(f"{address}/publish").status_code == 204
    assert world.post("weights_info", {"tinker_path": world.ids[1]["weights"]}).status_code == 404
    info = json.loads(world.post("weights_info", {"tinker_path": copied}).text)
    assert info["lora_rank"] == 4
    assert world.post("weights_info", {"tinker_path": copied}, 1).status_code == 404
