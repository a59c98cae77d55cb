"""How many checkpoints may be on their way from a run's folder, and when they are told of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import SECONDS

from packlora.errors import WriteError
from packlora.events import CheckpointSaved
from packlora.runtime import checkpoint
from packlora.runtime.events import Emitter
from packlora.runtime.folder import WRITERS, OutputFolder


class Case:
    """A folder whose checkpoints are written when they may be. copied: names of jobs, as they are copied."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self.copied, self.saved = dict[str, threading.Event](), list[str](), list[tuple[str, int]]()
        events = Emitter()
        events.subscribe(self.hear)
        self.folder = OutputFolder(path, "run", None, events)
        monkeypatch.setattr(checkpoint.Snapshot, "of", self.copy)
        monkeypatch.setattr(checkpoint, "save_checkpoint", self.write)

    def hear(self, event: Any) -> None:
        if isinstance(event, CheckpointSaved):
            self.saved.append((event.job, event.step))

    def copy(self, job: Any) -> Any:
        self.copied.append(job.name)
        return SimpleNamespace(step=job.step)

    def write(self, folder: Path, job: Any, snapshot: Any, run: str, keep: int | None) -> Path:
        assert self.may[job.name].wait(SECONDS)
        if snapshot.step == 13:
            raise OSError("no luck")
        return folder / f"checkpoint-{snapshot.step}"

    def save(self, name: str, step: int = 2) -> None:
        self.may.setdefault(name, threading.Event())
        self.folder.save_checkpoint(SimpleNamespace(name=name, step=step))  # type: ignore[arg-type]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, monkeypatch)


def beside(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_so_many_jobs_are_on_their_way_and_the_next_one_waits_for_the_oldest(case: Case) -> None:
    names = [f"job{number}" for number in range(WRITERS)]
    for name in names:
        case.save(name)  # which waits for nothing
    assert case.copied == names and case.saved == []
    thread = beside(lambda: case.save("one more"))
    thread.join(0.2)
    assert thread.is_alive() and case.copied == names
    case.may[names[0]].set()
    thread.join(SECONDS)
    assert case.copied == [*names, "one more"] and case.saved == [(names[0], 2)]
    for may in case.may.values():
        may.set()
    case.folder.finish()
    assert sorted(case.saved) == sorted((name, 2) for name in [*names, "one more"])
    case.folder.close()


def test_a_job_s_next_checkpoint_waits_for_its_own_and_one_that_fails_is_told_then(case: Case) -> None:
    case.save("a", 13)
    thread = beside(lambda: case.save("b"))
    thread.join(SECONDS)
    assert not thread.is_alive()  # the other job does not wait
    case.may["a"].set()
    with pytest.raises(WriteError, match="'a': step 13 cannot be written"):
        case.save("a", 14)
    assert case.copied == ["a", "b"]
    case.save("a", 14)  # told once
    case.may["b"].set()
    case.folder.finish()
    case.folder.close()
    assert sorted(case.saved) == [("a", 14), ("b", 2)]
