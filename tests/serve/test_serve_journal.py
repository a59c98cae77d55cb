"""What was promised is kept, once, with the same bits: whatever ends the process, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from serving import NAME, Killed, Talk, datum, host, host_of, leave

from packlora.serve import tenant
from packlora.serve.errors import Refused
from packlora.serve.host import Host
from packlora.serve.service import Service

__all__ = ["host"]


class Story:
    """What two models of a client go through, each request sent once or, after an end in the middle, again."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.results = talk, dict[str, Any]()

    def tell(self) -> None:
        talk = self.talk
        session = talk.session()
        models = [talk.model(session, 0, lora_dropout=0.2), talk.model(session, 1, 7, use_dora=True)]
        promises = {}
        for number, model in enumerate(models):
            for step in range(3):
                seq = 4 * step + 1
                rows = [datum(100 * number + 10 * step + n, 20 + n) for n in range(3)]
                promises[model, seq] = talk.forward_backward(model, rows, seq=seq)
                promises[model, seq + 1] = talk.step(model, seq=seq + 1)
                promises[model, seq + 2] = talk.forward_backward(model, rows[:1], seq=seq + 2)
                kind, more = "save_weights", {"path": f"s{step}"}
                if step == 2:
                    kind, more = "load_weights", {"path": f"tinker://{model}/weights/s0", "optimizer": True}
                if step == 2:
                    talk.run()
                promises[model, seq + 3] = talk.call(model, kind, seq + 3, **more)
        talk.run()
        for model in models:
            talk.seqs[model] = 12
        self.results = {f"{model[-1]} {seq}": talk.result(promise) for (model, seq), promise in promises.items()}
        self.tensors = [talk.tensors(model) for model in models]


def end_at(talk: Talk, write: int) -> None:
    """Let the process end at this write of the journal, before it is committed."""
    left = write

    def commits() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    talk.service.journal.commits = commits  # type: ignore[method-assign]


def test_an_end_at_any_write_changes_no_bit_of_what_comes(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant, "SNAPSHOT_TOKENS", 100)
    whole = told(host, tmp_path / "whole")
    for write in (1, 2, 3, 5, 8, 13, 19, 26, 33, 41):
        state = tmp_path / str(write)
        state.mkdir()
        service = Service({host.facts.name: host}, state)
        talk = Talk(service)
        end_at(talk, write)
        with pytest.raises(Killed):
            Story(talk).tell()
        leave(service)
        service.journal.close()
        again = told(host, state)
        assert again.results.keys() == whole.results.keys()
        for name, found in again.results.items():
            same(found, whole.results[name], (write, name))
        for own, want in zip(again.tensors, whole.tensors, strict=True):
            assert all(torch.equal(own[name], want[name]) for name in want), write


def told(host: Host, state: Path) -> Story:
    state.mkdir(exist_ok=True)
    service = Service({host.facts.name: host}, state)
    story = Story(Talk(service))
    story.tell()
    leave(service)
    service.journal.close()
    return story


def same(found: Any, want: Any, where: Any) -> None:
    if isinstance(want, tuple):
        assert found[0] == want[0] and found[1].tobytes() == want[1].tobytes(), where
    else:
        known = {key: own for key, own in want.items() if key != "path"}
        assert {key: own for key, own in found.items() if key != "path"} == known, where


def test_what_waits_of_a_model_that_was_unloaded_just_before_the_end_is_refused(host: Host, tmp_path: Path) -> None:
    service = Service({host.facts.name: host}, tmp_path)
    talk = Talk(service)
    model = talk.model(talk.session(), 0)
    promise = talk.forward_backward(model, [datum(1, 9)])
    talk.desk.unload(talk.owner, {"model_id": model})
    leave(service)
    service.journal.close()
    again = Talk(Service({host.facts.name: host}, tmp_path))
    assert "unloaded" in again.result(promise)["error"] and model not in again.service.tenants
    leave(again.service)
    again.service.journal.close()


def test_bytes_that_wait_are_counted_behind_an_end_too(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    model = talk.model(talk.session(), 0)
    talk.forward_backward(model, [datum(1, 9)])
    waiting = talk.service.queue.bytes
    assert waiting > 0
    leave(talk.service)
    talk.service.journal.close()
    again = Talk(Service({host.facts.name: host}, tmp_path))
    assert again.service.queue.bytes == waiting
    again.run()
    assert again.service.queue.bytes == 0
    leave(again.service)
    again.service.journal.close()


def test_a_request_that_meets_the_end_of_its_model_or_session_is_answered(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes between the look at the model, or session, and the promise."""
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    session, other = talk.session("one"), talk.session("other")
    model = talk.model(session, 0)
    original, ends = talk.desk.promise, [lambda: talk.desk.unload(talk.owner, {"model_id": model})]

    def late(*own: Any, **more: Any) -> Any:
        while ends:
            ends.pop()()
            talk.run()
        return original(*own, **more)

    monkeypatch.setattr(talk.desk, "promise", late)
    promise = talk.forward_backward(model, [datum(1, 9)])
    assert "unloaded" in talk.result(promise)["error"] and not talk.service.queue.waiting
    body = {"session_id": other, "base_model": NAME}
    lora = {"model_seq_id": 0, "lora_config": {"rank": 4, "seed": 1}}
    ends.append(lambda: talk.desk.finish_session(talk.owner, other, "success"))
    with pytest.raises(Refused, match="has ended"):
        talk.desk.create_model(talk.owner, body | lora)
    third = talk.session("third")
    ends.append(lambda: talk.desk.finish_session(talk.owner, third, "success"))
    with pytest.raises(Refused, match="has ended"):
        talk.desk.create_sampling_session(talk.owner, body | {"session_id": third, "sampling_session_seq_id": 0})
    assert not talk.service.tenants and not talk.service.journal.all("select * from samplers where state = 'open'")
    leave(talk.service)
    talk.service.journal.close()


def test_a_retry_gets_the_first_promise_and_another_request_under_its_number_is_refused(
    host: Host, tmp_path: Path
) -> None:
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    session = talk.session()
    assert talk.session() == session
    model = talk.model(session)
    assert talk.model(session) == model
    first = talk.forward_backward(model, [datum(1, 9)], seq=1)
    assert talk.forward_backward(model, [datum(1, 9)], seq=1) == first
    with pytest.raises(Refused, match="number 1 was used for another request"):
        talk.forward_backward(model, [datum(2, 9)], seq=1)
    saved = talk.call(model, "save_weights_for_sampler", 2, sampling_session_seq_id=0, kind="snapshot")
    assert talk.call(model, "save_weights_for_sampler", 2, sampling_session_seq_id=1, kind="snapshot") == saved
    talk.run()
    assert talk.service.figures.slots._value.get() == 1
    leave(talk.service)


def test_a_retry_of_what_was_refused_is_refused_alike(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    model, found = talk.model(talk.session()), set[tuple[int, str]]()
    for restarts in (False, False, True):
        if restarts:
            leave(talk.service)
            talk.service.journal.close()
            talk = Talk(Service({host.facts.name: host}, tmp_path))
        with pytest.raises(Refused) as refused:
            talk.call(model, "load_weights", 1, path=f"tinker://{model}/weights/nothing")
        found.add((refused.value.status, refused.value.text))
    assert {status for status, _ in found} == {404} and len(found) == 1, found
    leave(talk.service)


def test_requests_wait_for_earlier_numbers_and_not_for_refused_ones(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    model = talk.model(talk.session())
    late = talk.step(model, seq=3)
    talk.run()
    assert talk.desk.result(talk.owner, late) is None
    with pytest.raises(Refused, match="target_tokens"):
        talk.forward_backward(model, [datum(1, 9, target_tokens=datum(1, 8).inputs["target_tokens"])], seq=2)
    first = talk.forward_backward(model, [datum(1, 9)], seq=1)
    talk.run()
    assert talk.result(first)[0]["tokens:sum"] == 9
    assert "forward_backward 2" in talk.result(late)["error"], "never a step on a part of a batch"
    leave(talk.service)


def restarted(talk: Talk, host: Host, state: Path) -> Talk:
    """A service on the same state folder, which has done what is due."""
    leave(talk.service)
    talk.service.journal.close()
    again = Talk(Service({host.facts.name: host}, state))
    again.seqs = talk.seqs
    assert len(list(itertools.islice(iter(again.service.turn, False), 100))) < 100, "it does something without end"
    return again


def test_what_was_promised_under_a_longer_context_is_done(
    host: Host, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    """And what was done is done again: no step that was told is lost."""
    shorter, found = Host(NAME, host_of(tiny_base("llama"), tmp_path).run, 64, 64), []
    for second in (host, shorter):
        state = tmp_path / str(second.facts.context)
        state.mkdir()
        talk = Talk(Service({NAME: host}, state))
        model = talk.model(talk.session())
        for seed in (1, 2):
            talk.forward_backward(model, [datum(seed, 200)])
            last = talk.step(model)
            if seed == 1:
                talk.run()
        talk = restarted(talk, second, state)
        assert talk.result(last)["metrics"]["step"] == 2
        found.append(talk.tensors(model))
        leave(talk.service)
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


@pytest.mark.parametrize("part", ["work_of", "run_slot"])
def test_a_model_that_cannot_be_made_again_refuses_what_waits_and_loses_no_step(
    part: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back once it can."""
    found = []
    for fails in (False, True):
        state = tmp_path / str(fails)
        state.mkdir()
        talk = Talk(Service({host.facts.name: host}, state))
        model = talk.model(talk.session())
        talk.forward_backward(model, [datum(1, 200), datum(2, 20)])
        first = talk.step(model)
        talk.run()
        if fails:
            waiting = talk.forward_backward(model, [datum(3, 9)])
            with monkeypatch.context() as patch:
                patch.setattr(f"packlora.serve.service.{part}", mock.Mock(side_effect=RuntimeError("for this test")))
                talk = restarted(talk, host, state)
                said = talk.result(waiting)["error"]
            assert "the model cannot be made again: forward_backward 1: " in said and "for this test" in said
            refused = talk.step(model)
            talk.run()
            assert "forward_backward 3 before it failed" in talk.result(refused)["error"]
        talk.forward_backward(model, [datum(4, 20)])
        last = talk.step(model)
        talk.run()
        assert [talk.result(own)["metrics"]["step"] for own in (first, last)] == [1, 2]
        found.append(talk.tensors(model))
        leave(talk.service)
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


def test_a_model_without_work_is_put_aside_and_goes_on_with_the_same_bits(host: Host, tmp_path: Path) -> None:
    found = []
    for aside in (False, True):
        state = tmp_path / str(aside)
        state.mkdir()
        talk = Talk(Service({host.facts.name: host}, state))
        model = talk.model(talk.session(), lora_dropout=0.2)
        for step in range(3):
            talk.forward_backward(model, [datum(step, 20)])
            talk.run()
            if aside:
                talk.service._set_aside(talk.service.queue.lanes[model])
            talk.step(model)
            talk.run()
            if aside:
                lane, own = talk.service.queue.lanes[model], talk.service.tenants[model]
                talk.service._snapshot_before(lane, own)
                talk.service._set_aside(lane)
                assert not own.is_awake and own.snapshot == 2 * step + 2
        found.append(talk.tensors(model))
        leave(talk.service)
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


def test_models_without_work_leave_a_base_whose_others_always_have_some(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a turn, the one that has been without work for longest first; not one that samples follow."""
    talk = Talk(Service({host.facts.name: host}, tmp_path))
    session = talk.session()
    idle, followed, later, busy = (talk.model(session, number) for number in range(4))
    for model in (idle, followed, later):
        talk.forward_backward(model, [datum(1, 9)])
        talk.step(model)
        talk.run()
    saved = talk.result(_saved(talk, followed))
    body = {"sampling_session_id": saved["sampling_session_id"], "seq_id": 0, "num_samples": 1}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}}
    body["sampling_params"] = {"max_tokens": 200, "seed": 1, "stop": []}  # no token ends it
    talk.desk.asample(talk.owner, body)
    monkeypatch.setattr("packlora.serve.publisher.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("packlora.serve.service.LOOK_SECONDS", -1.0)
    talk.service._look_at, awake = 0.0, []
    for _ in range(4):
        talk.forward_backward(busy, [datum(1, 9)])
        assert talk.service.turn()
        awake.append([talk.service.tenants[model].is_awake for model in (idle, followed, later)])
    assert awake[0] == [False, True, True] and awake[1:] == [[False, True, False]] * 3
    leave(talk.service)


def _saved(talk: Talk, model: str) -> str:
    """An inflight sampler of a model."""
    promise = talk.call(model, "save_weights_for_sampler", kind="inflight", sampling_session_seq_id=0)
    talk.run()
    return promise
