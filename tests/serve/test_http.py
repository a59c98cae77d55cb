"""Keys, owners, bad input and the command's options."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, Talk, host_of, leave
from starlette.testclient import TestClient
from typer.testing import CliRunner

from packlora.cli import app
from packlora.errors import InputError
from packlora.serve.app import Keys, application
from packlora.serve.command import bases_of, keys_of, listening, make_state
from packlora.serve.limits import Limits
from packlora.serve.messages import _pool
from packlora.serve.queue import Lane, Request, Shares
from packlora.serve.service import Service

PROTO = {"content-type": "application/x-protobuf"}


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
    keys.write_text("tml-0123456789\n", encoding="utf-8-sig")  # as editors on Windows write it
    assert keys_of(keys, "0.0.0.0") == ["tml-0123456789"]
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
    for host in ("no-such-host.invalid", "192.0.2.1"):
        with pytest.raises(InputError, match=f"--host {host} .*; give another --host"):
            listening(host, 0)
    for state, words in ((keys, "it is a file"), (keys / "a", "cannot be made"), (tmp_path / "a/b", "No such file")):
        with pytest.raises(InputError, match=f"--state {state}: .*{words}"):
            make_state(state)
    make_state(tmp_path / "state")
    make_state(tmp_path / "state")
    with pytest.raises(Exception, match="not one of this service's keys"):
        Keys(["tml-0123456789"]).owner("tml-other")


@pytest.mark.parametrize("wait", ["inf", "1e300"])
def test_a_wait_without_an_end_is_refused(wait: str) -> None:
    out = CliRunner().invoke(app, ["serve", "--base", "x", "--max-wait-ms", wait], env={"COLUMNS": "200"})
    assert out.exit_code == 2 and "Invalid value for '--max-wait-ms'" in out.output, out.output


def test_a_body_of_json_is_bounded_closer_than_one_of_protobuf(
    talk: Talk, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is answered while JSON is read."""
    monkeypatch.setattr(talk.desk, "limits", Limits(body_bytes=20_000, json_bytes=1000))
    large = b'{"a":"' + b"x" * 1000 + b'"}'
    refused = http.post("/api/v1/telemetry", content=large)
    assert refused.status_code == 413 and "the limit json_bytes of 1000" in refused.text
    assert "protobuf" in http.post("/api/v1/forward_backward", content=large, headers=PROTO).text
    assert Limits().json_bytes < Limits().body_bytes


def test_small_answers_are_sent_at_once() -> None:
    """Else the second part of an answer waits for the receipt of its first, which clients delay by 40 ms."""

    async def without_delay() -> bool:
        found = asyncio.Queue[bool]()

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            found.put_nowait(bool(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        at = listening("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=at):
            _, writer = await asyncio.open_connection(*at.getsockname())
            writer.close()
            return await found.get()

    assert asyncio.run(without_delay())


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
