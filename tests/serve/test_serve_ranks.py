"""Rank 0 and another rank in one process, each computing when the test lets it: placing, messages, what goes wrong."""

from __future__ import annotations

import itertools
import os
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeds import SOAK
from serving import NAME, Killed, Talk, datum, host_of, leave
from starlette.testclient import TestClient
from test_retention import make_old
from test_serve_journal import Story, same, told
from waiting import SECONDS, wait_for

from packlora.engine.generate import Sampler
from packlora.engine.sampling import SampledToken, SampleRequest
from packlora.errors import InputError, ProcessError
from packlora.serve import tenant
from packlora.serve.app import Keys, application
from packlora.serve.errors import Failed, Refused
from packlora.serve.host import Host
from packlora.serve.ranks import meeting
from packlora.serve.ranks.channel import Channel, packed, unpacked
from packlora.serve.ranks.leader import Leader
from packlora.serve.ranks.meeting import Place, gathered, joined, place_of
from packlora.serve.ranks.records import Rank
from packlora.serve.ranks.worker import RankService, follow
from packlora.serve.samplers import Source
from packlora.serve.service import Service

DORA = {"rank": 7, "seed": 2, "use_dora": True, "lora_dropout": 0.2}


@pytest.fixture(scope="module")
def hosts(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> list[Host]:
    return [host_of(tiny_base("llama"), tmp_path_factory.mktemp("serve"), budget=64) for _ in range(2)]


class Two(Talk):
    """A client of a service on two ranks, whose threads are the test's."""

    def __init__(self, hosts: list[Host], state: Path) -> None:
        own, other = (Channel(end) for end in Pipe())
        self.rank = Rank(1, own, pid=7, device="cpu")
        self.worker = RankService({NAME: hosts[1]}, state, other)
        self.worker.start = lambda: None  # type: ignore[method-assign]
        self.follower = threading.Thread(target=self._follow, daemon=True)
        self.ended: BaseException | None = None
        self.is_dead = False
        super().__init__(leader := Leader({NAME: hosts[0]}, state, [self.rank]))
        self.leader = leader
        self.follower.start()
        leader.begin()

    def _follow(self) -> None:
        try:
            follow(self.worker)
        except BaseException as error:
            self.ended = error

    def run(self) -> None:
        """Do all that is due, on both ranks."""
        wait_for(lambda: not self._goes_on(), "a result did not come")
        while self.worker.turn() or self.leader.turn():
            pass

    def _goes_on(self) -> bool:
        """Take turns on both ranks as long as there is something to do."""
        waiting = True
        while waiting:
            if self.is_dead:
                raise Killed
            waiting = bool(self.leader.queue.waiting or self.leader.samplers.placed or self.worker.queue.waiting)
            if waiting and not any([self.leader.turn(), self.worker.turn()]):
                return True
        return False

    def die_at(self, write: int) -> None:
        """Let both processes end at this write of the journal, before it is committed."""
        left = write

        def commits() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                self.is_dead = True
                cut_off(self.rank.channel)
                raise Killed

        self.leader.journal.commits = commits  # type: ignore[method-assign]

    def end(self) -> None:
        self.rank.channel.send("stop")
        self.worker._run()
        self.leader.stop()
        self.rank.channel.close()
        self.follower.join(SECONDS)
        for service in (self.leader, self.worker):
            leave(service)


def tell(talk: Talk) -> dict[str, Any]:
    """Two models learn, are saved, loaded and sampled; their results and tensors."""
    session, found = talk.session(), dict[str, Any]()
    models = [talk.model(session), talk.model(session, 1, **DORA)]
    promises = {}
    for number, model in enumerate(models):
        for step in range(3):
            rows = [datum(100 * number + 10 * step + n, 20 + n) for n in range(3)]
            promises[number, step] = talk.forward_backward(model, rows), talk.step(model)
            path = talk.call(model, "save_weights", path=f"s{step}")
        talk.run()
        load = talk.call(model, "load_weights", path=f"tinker://{model}/weights/s1", optimizer=True)
        again = talk.forward_backward(model, rows)
        promises[number, 3] = again, talk.step(model), path, load
        promises[number, 4] = (talk.call(model, "save_weights_for_sampler"),)
        promises[number, 5] = (talk.call(model, "save_weights_for_sampler", kind="inflight"),)
    talk.run()
    for number, _ in enumerate(models):
        for kind in (4, 5):
            sampler = talk.result(promises[number, kind][0])["sampling_session_id"]
            body = {
                "sampling_session_id": sampler, "seq_id": 0, "num_samples": 2,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [60, 61, 62]}]},
                "sampling_params": {"max_tokens": 4, "seed": 5, "temperature": 1.0},
            }  # fmt: skip
            promises[number, 10 + kind] = (talk.desk.asample(talk.owner, body)[0],)
    talk.run()
    for key, own in promises.items():
        found[str(key)] = [_plain(talk.result(promise)) for promise in own]
    found["tensors"] = [talk.tensors(model) for model in models]
    return found


def _plain(result: Any) -> Any:
    """A result without ids, which differ."""
    if isinstance(result, tuple):
        return result[0], result[1].tobytes()
    if not isinstance(result, dict):
        return result.SerializeToString(deterministic=True)
    return {key: own for key, own in result.items() if key not in ("path", "sampling_session_id")}


@pytest.mark.slow
def test_two_ranks_give_each_model_the_bits_of_one_process_and_any_number_goes_on(
    hosts: list[Host], tmp_path: Path
) -> None:
    found, states = [], [tmp_path / "one", tmp_path / "two"]
    for state in states:
        state.mkdir()
        talk = Two(hosts, state) if state.name == "two" else Talk(Service({NAME: hosts[0]}, state))
        found.append(tell(talk))
        if isinstance(talk, Two):
            assert [talk.leader.rank_of(model) for model in talk.seqs] == [0, 1]
            standing = talk.leader.status()
            assert standing["models_on_the_base"] == 2 and [own["steps"] for own in standing["training"]] == [3, 3]
            assert standing["ranks"][1].startswith("rank 1 (process 7, cpu): 1 models, load ")
            assert all(own.tokens > 0 for own in talk.leader.recent)
            talk.end()
            assert talk.ended is None and talk.leader.failure is None
        else:
            leave(talk.service)
            talk.service.journal.close()
    _check_same(found)
    after = []
    for state in states:  # each goes on with the other's number of ranks
        talk = Two(hosts, state) if state.name == "one" else Talk(Service({NAME: hosts[0]}, state))
        models = [row["id"] for row in talk.service.journal.all("select id from models order by id")]
        talk.seqs = dict.fromkeys(models, 15)
        promises = [
            promise for model in models for promise in (talk.forward_backward(model, [datum(1, 9)]), talk.step(model))
        ]
        talk.run()
        results = [_plain(talk.result(promise)) for promise in promises]
        after.append({"results": results, "tensors": [talk.tensors(model, "after") for model in models]})
        if isinstance(talk, Two):
            talk.end()
        else:
            leave(talk.service)
    _check_same(after)


def _check_same(found: list[dict[str, Any]]) -> None:
    tensors = [own.pop("tensors") for own in found]
    assert found[0] == found[1]
    for own, want in zip(*tensors, strict=True):
        assert own.keys() == want.keys() and all(torch.equal(own[name], want[name]) for name in want)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_of_two_ranks_at_any_write_changes_no_bit_of_what_one_process_does_next(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 100)
    whole = told(hosts[0], tmp_path / "whole")
    for write in range(1, 49) if SOAK else (14, 34):
        state = tmp_path / str(write)
        state.mkdir()
        two = Two(hosts, state)
        two.die_at(write)
        with pytest.raises((Killed, ProcessError)):
            Story(two).tell()
        two.follower.join(SECONDS)
        for service in (two.leader, two.worker):
            leave(service)
        two.leader.journal.close()
        again = told(hosts[1], state)
        assert again.results.keys() == whole.results.keys()
        for name, found in again.results.items():
            same(found, whole.results[name], (write, name))
        for own, want in zip(again.tensors, whole.tensors, strict=True):
            assert all(torch.equal(own[name], want[name]) for name in want), write


def test_a_request_that_comes_with_the_journal_too_is_done_once(hosts: list[Host], tmp_path: Path) -> None:
    two = Two(hosts, tmp_path)
    session = two.session()
    two.model(session)
    model = two.model(session, 1)
    two.forward_backward(model, [datum(1, 9)])
    step = two.step(model)  # both are in the journal before the rank has opened the model
    two.run()
    assert two.result(step)["metrics"]["step"] == 1 and two.worker.tenants[model].steps == 1
    lane = two.worker.queue.lanes[model]
    assert (lane.waiting, lane.next, two.leader.queue.lanes[model].waiting) == (0, 3, 0)
    two.end()


def test_bytes_that_wait_for_any_rank_are_counted_behind_an_end_too(hosts: list[Host], tmp_path: Path) -> None:
    one = Talk(Service({NAME: hosts[0]}, tmp_path))
    session = one.session()
    models = [one.model(session), one.model(session, 1)]
    for model in models:
        one.forward_backward(model, [datum(1, 9)])
    waiting = one.service.queue.bytes
    leave(one.service)
    one.service.journal.close()
    two = Two(hosts, tmp_path)
    assert [two.leader.rank_of(model) for model in models] == [0, 1]
    assert two.leader.queue.bytes == waiting > 0
    two.run()
    assert two.leader.queue.bytes == 0
    two.end()


def test_a_number_whose_promise_is_gone_is_refused_on_any_rank_behind_a_restart(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 9)  # at every step
    two = Two(hosts, tmp_path)
    session = two.session()
    models = [two.model(session), two.model(session, 1)]
    for model in models:
        two.forward_backward(model, [datum(1, 9)])
        two.step(model)
    two.run()
    make_old(two)
    two.run()
    two.end()
    again = Two(hosts, tmp_path)
    assert [again.leader.rank_of(model) for model in models] == [0, 1]
    for model in models:
        with pytest.raises(Refused, match="seq_id: number 1 was used long ago; the next one is 3 or later"):
            again.forward_backward(model, [datum(1, 9)], seq=1)
    again.seqs = two.seqs
    steps = [(again.forward_backward(model, [datum(2, 9)]), again.step(model))[1] for model in models]
    again.run()
    assert [again.result(step)["metrics"]["step"] for step in steps] == [2, 2]
    again.end()


def test_a_request_that_comes_behind_one_that_failed_is_taken_on_any_rank(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one fails since its model cannot be put onto the base again."""
    two = Two(hosts, tmp_path)
    session = two.session()
    models = [two.model(session), two.model(session, 1)]
    for model in models:
        two.forward_backward(model, [datum(1, 9)])
    two.run()
    for service, model in zip((two.leader, two.worker), models, strict=True):
        service._set_aside(service.queue.lanes[model])
        with monkeypatch.context() as patched:
            patched.setattr(service.tenants[model], "wake", out_of_memory)
            late = two.step(model, seq=3)
            two.run()
        assert "cannot be loaded" in two.result(late)["error"]
        step = two.step(model, seq=2)
        two.run()
        assert two.result(step)["metrics"]["step"] == 1
    two.end()


def out_of_memory() -> None:
    raise MemoryError


def test_a_model_that_is_unloaded_is_gone_from_its_rank(hosts: list[Host], tmp_path: Path) -> None:
    two = Two(hosts, tmp_path)
    session = two.session()
    two.model(session)
    model = two.model(session, 1)
    waits = two.forward_backward(model, [datum(1, 9)])
    two.desk.unload(two.owner, {"model_id": model})
    two.leader.turn()
    wait_for(lambda: len(two.worker.queue._tasks) == 3)  # it is opened, gets the request, and is closed in one turn
    two.worker.turn()
    wait_for(lambda: two.desk.result(two.owner, waits) is not None and not two.leader.queue.waiting)
    assert not two.worker.tenants
    assert "unloaded" in two.result(waits)["error"] and model not in two.leader.tenants
    again = two.model(session, 2)
    assert two.leader.rank_of(again) == 1, "the rank with fewer models"
    two.end()


def test_samples_go_to_the_rank_with_the_least_load(hosts: list[Host], tmp_path: Path) -> None:
    two = Two(hosts, tmp_path)
    session = two.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = two.desk.create_sampling_session(two.owner, body)
    promises = []
    for seq, most in enumerate((30, 4, 4)):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [60, 61, 62]}]}
        params = {"max_tokens": most, "seed": 1, "temperature": 0.0}
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params}
        promises.append(two.desk.asample(two.owner, asked)[0])
    assert [two.leader.samplers.placed[promise].rank for promise in promises] == [0, 1, 1]
    two.run()
    drawn = [two.result(promise).sequences[0].tokens for promise in promises]
    assert drawn[0][: 4 * 4] == drawn[1] == drawn[2]
    two.end()


def turn(talk: Talk) -> None:
    talk.service.turn()
    if isinstance(talk, Two):
        talk.worker.turn()


def answers(talk: Talk, bodies: list[dict[str, Any]]) -> list[Any]:
    """Of the endpoint, asked for at once."""
    http = TestClient(application(talk.desk, Keys()), headers={"x-api-key": "tml-one"})
    found: list[Any] = [None] * len(bodies)

    def ask(number: int, body: dict[str, Any]) -> None:
        found[number] = http.post("/v1/completions", json=body).json()["choices"]

    threads = [threading.Thread(target=ask, args=own) for own in enumerate(bodies)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        turn(talk)
    return found


def trained_answers(talk: Talk) -> list[Any]:
    """A model learns, is saved, and completes a prompt, as does the base model; three times, twice each."""
    talk.owner = Keys().owner("tml-one")
    model = talk.model(talk.session())
    talk.forward_backward(model, [datum(1, 9)])
    talk.step(model)
    talk.call(model, "save_weights_for_sampler", path="tuned")
    talk.run()
    body = {"prompt": [60, 61, 62], "temperature": 0.8, "logprobs": 2, "echo": True, "max_tokens": 5, "n": 2}
    return answers(talk, [body | {"model": own, "seed": seed} for seed in range(3) for own in ("tuned", NAME)])


def test_answers_of_the_endpoint_are_drawn_on_all_ranks_as_on_one(hosts: list[Host], tmp_path: Path) -> None:
    states = [tmp_path / "one", tmp_path / "two"]
    for state in states:
        state.mkdir()
    talk, two, sent = Talk(Service({NAME: hosts[0]}, states[0])), Two(hosts, states[1]), Counter[str]()
    send = two.worker.channel.send
    two.worker.channel.send = lambda kind, **own: (sent.update([kind]), send(kind, **own))[1]  # type: ignore
    want, found = trained_answers(talk), trained_answers(two)
    leave(talk.service)
    assert sent["tokens"] >= 5, "the other rank has drawn too"
    for one, other in zip(want, found, strict=True):
        assert [own["text"] for own in one] == [own["text"] for own in other] and len(other) == 2
        for at, own in enumerate(one):
            scores = [np.array(some["logprobs"]["token_logprobs"][1:]) for some in (own, other[at])]
            assert len(scores[0]) == 7
            np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)
            likeliest = [[sorted(top) for top in some["logprobs"]["top_logprobs"][3:]] for some in (own, other[at])]
            assert likeliest[0] == likeliest[1] and len(likeliest[0]) == 5 and likeliest[0][0]
    two.run()
    wait_for(lambda: two.worker.turn() or not two.worker.samplers._streams)
    assert not two.leader.samplers._streams and not two.leader.samplers.placed and not two.worker.samplers._streams
    two.end()


class Asked:
    """A request of the endpoint; see samplers.Running."""

    def __init__(self, source: Source) -> None:
        self.owner, self.source, self.tokens, self.why = "owner", source, list[SampledToken](), ""

    def take(self, token: SampledToken) -> bool:
        self.tokens.append(token)
        return False

    def fail(self, why: Failed) -> None:
        self.why = f"{why.category}: {why.text}"


def test_streams_of_another_rank_end_where_they_are_left_or_refused(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, drawn = Sampler.step, itertools.count()
    monkeypatch.setattr(Sampler, "step", lambda own: step(own) if next(drawn) < 9 else [])  # no stream ends by itself
    two = Two(hosts, tmp_path)
    two.leader.recent[0].add(1000)  # so that the other rank has the least load
    request, samplers = SampleRequest((60, 61, 62), max_tokens=200, temperature=0.0), two.leader.samplers
    left, refused = Asked(Source(hosts[0])), Asked(Source(hosts[0], None, tmp_path / "gone", "gone"))
    for asked in (left, refused):
        samplers.enter(request, asked, lambda: None)
    assert two.leader.loads()[1][0] == 400, "tokens that are to be drawn"
    wait_for(lambda: two.worker.turn() and left.tokens and refused.why)
    assert refused.why.startswith("server: ") and "gone" in refused.why and hosts[1].samples == 1
    for asked in (left, refused):
        samplers.leave(asked)
    wait_for(lambda: not two.worker.turn())
    assert hosts[1].samples == 0 and not two.worker.samplers._streams and two.leader.loads()[1][0] == 0
    two.end()


def test_a_full_disk_is_waited_for_by_all_ranks(
    hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(hosts, tmp_path)
    session = two.session()
    two.model(session)
    model = two.model(session, 1)
    promise = two.step(model)
    said, fails = list[str | None](), 2

    def commits() -> None:
        nonlocal fails
        said.append(two.leader.trouble)
        fails -= 1
        if fails >= 0:
            raise sqlite3.OperationalError("disk is full")

    monkeypatch.setattr("packlora.serve.core.RETRY_SECONDS", 0.01)
    two.leader.journal.commits = commits  # type: ignore[method-assign]
    two.run()
    full = "the journal cannot be written: disk is full"
    assert said == [None, full, full] and two.leader.trouble is None
    assert two.result(promise)["metrics"]["step"] == 0
    fails = 1
    two.worker.commit(lambda db: db.execute("insert into facts values (?, ?)", ("waited", "for")) and None)
    assert said[3:] == [None, full] and two.leader.journal.fact("waited") == "for" and two.leader.trouble is None
    with pytest.raises(sqlite3.DatabaseError, match="UNIQUE"):
        two.worker.commit(lambda db: db.execute("insert into facts values (?, ?)", ("waited", "for")) and None)
    two.end()


def test_a_rank_that_fails_ends_the_service_with_its_reason(hosts: list[Host], tmp_path: Path) -> None:
    two, ends = Two(hosts, tmp_path), threading.Event()
    two.leader.on_failure = ends.set
    two.worker.turn = lambda: 1 / 0  # type: ignore
    two.worker._run()
    assert ends.wait(SECONDS)
    assert str(two.leader.failure).startswith("rank 1 (process 7, cpu) has failed: ZeroDivisionError")
    assert two.leader.status()["status"] == "failed"
    two.end()
    assert isinstance(two.ended, ProcessError) and not two.ended.is_news


def test_an_end_without_a_word_is_noticed_by_the_other(hosts: list[Host], tmp_path: Path) -> None:
    two, ends = Two(hosts, tmp_path), threading.Event()
    two.leader.on_failure = ends.set
    cut_off(two.rank.channel)
    assert ends.wait(SECONDS)
    assert "rank 1 (process 7, cpu) has ended without a word" in str(two.leader.failure)
    two.follower.join(SECONDS)
    assert two.ended is not None and "rank 0 has ended" in str(two.ended)
    with pytest.raises(ProcessError, match="rank 0 has ended"):
        two.worker.journal.all("select 1")
    two.leader.stop()
    for service in (two.leader, two.worker):
        leave(service)


def test_a_channel_that_its_writer_closes_while_it_is_read_is_at_its_end() -> None:
    own, other = Pipe()
    channel, receive = Channel(own), own._recv_bytes
    own._recv_bytes = lambda *size: (own.close(), receive(*size))[1]  # after a look at whether it is open
    with pytest.raises(EOFError):
        channel.read()
    other.close()


def cut_off(channel: Channel) -> None:
    """Let both ends see what they see of a process that was killed."""
    with socket.socket(fileno=os.dup(channel._connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


# --- meeting and messages ---------------------------------------------------------------------------------------------------


def test_messages_come_as_they_were_sent() -> None:
    values = {"a": [1, 2.5, None, "\u00fc", b"xyz", {"b": b""}], "c": b"\0" * 1000, "e": float("inf")}
    assert unpacked(packed("kind", values)) == ("kind", values)
    ends = [Channel(end) for end in Pipe()]
    for number in range(100):
        ends[0].send("count", number=number, more=bytes(number))
    assert [ends[1].read() for _ in range(100)] == [("count", {"number": n, "more": bytes(n)}) for n in range(100)]
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].read()
    with pytest.raises(TypeError):
        packed("kind", {"a": object()})


def test_ranks_meet_by_a_key_that_nobody_else_knows(tmp_path: Path) -> None:
    found: list[Any] = []

    def come() -> None:
        file = tmp_path / meeting.FILE
        wait_for(file.exists)
        assert file.stat().st_mode & 0o777 == 0o600
        port = meeting.json.loads(file.read_bytes())["port"]
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            Client(("127.0.0.1", port), authkey=b"guessed")
        found.append(joined(Place(1, 2, 1), tmp_path, SECONDS))

    (tmp_path / meeting.FILE).write_text('{"port": 1, "key": "00"}')  # left by a service that was killed
    thread = threading.Thread(target=come)
    (tmp_path / meeting.FILE).unlink()
    thread.start()
    with gathered(Place(0, 2, 0), tmp_path, SECONDS) as channels:
        assert [*channels] == [1] and not (tmp_path / meeting.FILE).exists()
        thread.join()
    assert found[0].read()[0] == "stop"
    with pytest.raises(EOFError):
        found[0].read()
    found[0].close()


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessError, match=r"rank 0 has waited 0\.05 s .* not come: \[1, 2\]"),
        gathered(Place(0, 3, 0), tmp_path, 0.05),
    ):
        pass
    (tmp_path / meeting.FILE).write_text('{"port": 1, "key": "00"}')  # left by a service that was killed
    with pytest.raises(ProcessError, match=r"rank 1 has waited 0\.05 s for rank 0"):
        joined(Place(1, 2, 1), tmp_path, 0.05)


def test_what_several_ranks_do_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place_of(two, []) == Place(1, 2, 1) and place_of({}, []) == Place()
    with pytest.raises(InputError, match=r"--set parallel\.shard_base=true: parallel\.shard_base is not served"):
        place_of(two, ["parallel.shard_base=true"])
    with pytest.raises(InputError, match="runs on one host"):
        place_of({**two, "WORLD_SIZE": "4"}, [])
    with pytest.raises(InputError, match="device=cuda:1: each of 2 ranks"):
        Place(1, 2, 1).settings(["device=cuda:1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Place(1, 2, 1).settings(["dtype=float32"]) == ["dtype=float32", "device=cuda:1"]
    assert Place(1, 2, 1).settings(["device=cpu"]) == ["device=cpu"] and Place().settings(["a=b"]) == ["a=b"]
    with pytest.raises(InputError, match="--nproc-per-node 3: this machine has 2 usable GPUs"):
        Place(2, 3, 2).settings([])
