"""What a process says and waits for where others of its run end, hang or fail."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from packlora.errors import InputError, ProcessError
from packlora.events import Event, Note, StopAsked
from packlora.parallel import mesh as meshes
from packlora.parallel.layout import Layout
from packlora.parallel.start import started
from packlora.runtime import relay
from packlora.runtime.events import Emitter, StopRequest


class Beside:
    """The second of two processes, whose timeout is 20 s: a look of it takes 5 s, and the first one gives signs of life for
    100 s and sets a value at 90."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = 0.0
        self.happens: tuple[str, str] | None = None
        self.mesh = meshes.Mesh.__new__(meshes.Mesh)
        self.mesh.rank, self.mesh.size, self.mesh.timeout = 1, 2, 20.0
        self.mesh.store, self.mesh._heard = HashStore(), {}
        time = types.SimpleNamespace(sleep=self.look, monotonic=lambda: self.clock)
        for module in (relay, meshes):
            monkeypatch.setattr(module, "time", time)

    def look(self, seconds: float) -> None:
        self.clock += 5
        if self.clock < 100:
            self.mesh.store.set("alive/0", str(self.clock))
        if self.clock == 90 and self.happens is not None:
            self.mesh.store.set(*self.happens)


@pytest.mark.parametrize(("stopping", "timeout", "waits"), [(True, 600, 15), (True, 8, 8), (False, 600, 600)])
def test_a_silent_process_is_given_up_after_a_while_that_is_shorter_when_the_run_stops(
    stopping: bool, timeout: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(relay, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(meshes, "time", types.SimpleNamespace(monotonic=lambda: clock))
    mesh = meshes.Mesh.__new__(meshes.Mesh)  # without a process group
    mesh.rank, mesh.size, mesh.timeout, mesh.store, mesh._heard = 0, 2, timeout, HashStore(), {}
    hub = relay.Hub(mesh, Layout((("a",), ("b",))), Emitter(), Emitter(), ["a", "b"], 0)
    if stopping:
        hub.outer.stop.ask(15)
    with pytest.raises(ProcessError, match="process 1 of 2 gives no sign of life"):
        hub.finish()
    assert waits < clock < waits + 1
    clock, mesh._heard = 0.0, {}
    with pytest.raises(ProcessError, match="process 0 of 2 gives no sign of life"):
        relay.await_end(mesh, hub.outer.stop)
    assert waits < clock < waits + 1


def test_a_process_that_hangs_stops_those_that_still_train_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: they save what they have, and end with the reason."""
    clock = 0.0
    monkeypatch.setattr(meshes, "time", types.SimpleNamespace(monotonic=lambda: clock))
    layout, told = Layout((("a",), ("b",), ("c",))), list[Event]()

    def mesh_of(rank: int) -> meshes.Mesh:
        mesh = meshes.Mesh.__new__(meshes.Mesh)
        mesh.rank, mesh.size, mesh.timeout, mesh.store, mesh._heard = rank, 3, 20.0, HashStore(), {}
        return mesh

    outer, inner, events = Emitter([told.append]), Emitter(), Emitter()
    hub = relay.Hub(mesh_of(0), layout, outer, inner, ["a", "b", "c"], 0)
    inner.subscribe(hub)
    events.subscribe(own := relay.Relay(mesh_of(2), 2, events))
    for beat in range(20):  # two and more seconds apart, as microbatches end
        clock += 2.5
        hub.mesh.store.set("alive/1", str(min(beat, 3)))  # hangs from the fourth on
        hub.mesh.store.set("alive/2", str(beat))
        own.mesh.store.set("alive/0", str(min(beat, 9)))
        inner.emit(Note("a"))
        events.emit(Note("c"))
        assert inner.stop.asked == (beat >= 3 + 9)
        assert events.stop.asked == (beat >= 9 + 9)
    assert [event.text for event in told if isinstance(event, StopAsked)] == [
        "process 1 of 3 gives no sign of life: finishing the present microbatch, then saving"
    ]
    with pytest.raises(ProcessError, match="process 0 of 3 gives no sign of life; --resume goes on"):
        relay.await_end(own.mesh, events.stop)


def test_a_process_without_jobs_waits_for_the_end_as_long_as_the_first_one_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Beside(monkeypatch)
    beside.happens = relay.ENDED, ""
    relay.await_end(beside.mesh, StopRequest())
    assert beside.clock == 90
    beside.mesh.store.delete_key(relay.ENDED)
    beside.clock, beside.happens = 0.0, None
    with pytest.raises(ProcessError, match="process 0 of 2 gives no sign of life"):
        relay.await_end(beside.mesh, StopRequest())
    assert 100 < beside.clock < 130


def test_a_signal_to_one_process_stops_the_jobs_of_all_others() -> None:
    """Also where its own jobs have ended."""
    told = list[Event]()
    mesh = meshes.Mesh.__new__(meshes.Mesh)
    mesh.rank, mesh.size, mesh.timeout, mesh.store, mesh._heard = 0, 3, 600.0, HashStore(), {}
    mesh._looked = math.inf
    outer, inner = Emitter([told.append]), Emitter()
    hub = relay.Hub(mesh, Layout((("a",), ("b",), ("c",))), outer, inner, ["a", "b", "c"], 0)
    hub._began = dict.fromkeys(range(3))  # type: ignore[assignment]
    mesh.store.set("event/1/0", relay.encoded(StopAsked("SIGTERM")))
    hub(Note("a"))
    assert [type(event) for event in told] == [Note, StopAsked]
    assert (outer.stop.asked, inner.stop.asked, outer.stop.signal, inner.stop.signal) == (True, True, 15, 15)
    assert [mesh.store.get(f"ask/{group}/0") for group in (1, 2)] == [b'[null, "", 15]'] * 2


@pytest.mark.parametrize("has", [0, 1])
def test_what_one_process_alone_has_is_not_the_same(has: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"triton": "3.7"} if rank == has else {} for rank in range(2)]
    mesh = meshes.Mesh.__new__(meshes.Mesh)
    monkeypatch.setattr(meshes.Mesh, "gather", lambda mesh, value: found)
    with pytest.raises(InputError, match="the same triton: process 0 has"):
        mesh.same(found[0])


def test_a_value_of_a_process_is_awaited_as_long_as_it_lives_and_none_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = Beside(monkeypatch)
    beside.happens = "plan", "first"
    assert (beside.mesh.awaited("plan", 0), beside.clock) == (b"first", 90)
    beside.clock, beside.happens = 0.0, None
    with pytest.raises(ProcessError, match="process 0 of 2 gives no sign of life"):
        beside.mesh.awaited("none", 0)
    assert 100 < beside.clock < 130
    beside.clock, beside.happens = 0.0, ("failed", "process 0 of 2 failed: of something")
    with pytest.raises(ProcessError, match="of something"):
        beside.mesh.awaited("none", 0)
    assert beside.clock == 90


def test_the_first_process_that_hears_of_a_failure_speaks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    asked = []
    for _ in range(3):
        mesh = meshes.Mesh.__new__(meshes.Mesh)
        mesh.store = store
        asked.append(mesh.speaks_of_failure())
    assert asked == [True, False, False]
    monkeypatch.setattr(mesh, "store", None)  # whoever held it is gone
    assert mesh.speaks_of_failure()


def test_a_process_that_cannot_join_the_others_says_so_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("address already in use")

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "TCPStore", taken)
    with pytest.raises(ProcessError) as caught, started():
        pass
    assert str(caught.value) == (
        "process 1 of 2 could not join the others, for which it waits 600 s at node0:29500: address already in use"
    )
    assert caught.value.is_news
