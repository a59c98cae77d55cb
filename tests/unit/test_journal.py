"""run.json and its journal: what a change costs, and what is known after a crash or an error at any moment."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from packlora.events import CheckpointSaved, Note, SavePointReached
from packlora.files import write_json
from packlora.report.journal import EDITION, JOURNAL, RECORD, DamagedLine, Journal, lines_since, read_record
from packlora.report.metrics import BestEffort
from packlora.report.run_files import FollowedRun
from packlora.runtime import record
from packlora.runtime.record import PAID, RunRecord, write_record
from packlora.sweep.changes import Change


def about(jobs: int) -> dict[str, Any]:
    """A run.json."""
    names = [f"job-{number}" for number in range(jobs)]
    return {
        "id": "0", "config": {"jobs": [{"name": name, "data": {"path": "x" * 1000}} for name in names]},
        "jobs": {name: {"steps": 9} for name in names}, "saved": dict.fromkeys(names, 0), "warnings": ["first"],
        "changes": [], "schedule": {"budget": 64}, "result": None,
    }  # fmt: skip


class Written:
    """A run's record as it is kept, and the bytes that were written."""

    def __init__(self, folder: Path, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bytes, self.notes = folder, 0, list[str]()
        folder.mkdir()
        append = Journal.append

        def appended(journal: Journal, line: Any) -> None:
            append(journal, line)
            self.bytes += len(json.dumps(line))

        def written(path: Path, value: Any) -> None:
            write_json(path, value)
            self.bytes += path.stat().st_size

        monkeypatch.setattr(Journal, "append", appended)
        monkeypatch.setattr("packlora.runtime.record.write_json", written)
        monkeypatch.setattr(os, "fsync", lambda handle: None)
        own = about(jobs)
        write_record(folder, own)
        self.keeper = RunRecord(folder, own, list, BestEffort(self.notes.append))

    def save(self, job: int, step: int) -> None:
        self.keeper(CheckpointSaved(f"job-{job}", step, self.folder))


def test_a_checkpoint_costs_as_many_bytes_beside_three_hundred_jobs_as_beside_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for jobs in (10, 300):
        run = Written(tmp_path / str(jobs), jobs, monkeypatch)
        run.save(0, 1)  # the first one of a session is whole
        before = run.bytes
        for step in range(2, 152):
            run.save(0, step)
        costs.append((run.bytes - before) / 150)
        assert read_record(run.folder)["saved"]["job-0"] == 151
    assert 10_000 < costs[0] < PAID and costs[1] < PAID + 100


def test_a_small_record_is_whole_at_every_checkpoint_and_has_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Written(tmp_path / "run", 3, monkeypatch)
    for step in (1, 2, 3):
        run.save(1, step)
        assert json.loads((run.folder / RECORD).read_text())["saved"]["job-1"] == step
        assert [path.name for path in run.folder.iterdir()] == [RECORD]


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Of so many jobs that run.json is not written whole for a while."""
    monkeypatch.setattr(record, "PAID", 1)
    run = Written(tmp_path / "run", 2, monkeypatch)
    run.save(0, 1)
    return run


def test_what_the_journal_says_is_known_to_who_resumes_and_to_the_page(long: Written) -> None:
    page = FollowedRun(long.folder)
    page.look()
    long.keeper(Note("second"))
    long.save(1, 7)
    late = {"joined": [{"name": "late"}], "jobs": {"late": {"steps": 1}}, "saved": {"late": 0}}
    long.keeper.amend({"changes": [Change(round=3, by="request", leave="job-1", step=7).record()], **late})
    long.keeper(Note("third"))
    long.keeper(SavePointReached())
    assert page.look() and not page.look()
    assert json.loads((long.folder / RECORD).read_text())["saved"]["job-1"] == 0
    for known in (read_record(long.folder), page.about, long.keeper.record):
        assert known["saved"] == {"job-0": 1, "job-1": 7, "late": 0}
        assert known["warnings"] == ["first", "second", "third"]
        assert known["changes"] == [{"round": 3, "by": "request", "leave": "job-1", "step": 7}]
        assert [job["name"] for job in known["config"]["jobs"]] == ["job-0", "job-1", "late"]
        assert known["jobs"].keys() == {"job-0", "job-1", "late"}
    edition = long.keeper.record[EDITION]
    (long.folder / JOURNAL).rename(long.folder / "aside")
    write_record(long.folder, {**long.keeper.record})
    (long.folder / "aside").rename(long.folder / JOURNAL)  # a crash between the two: each change counts once
    assert read_record(long.folder) == {**long.keeper.record, EDITION: edition + 1}
    assert page.look() and page.about["warnings"] == ["first", "second", "third"]


@pytest.mark.parametrize("name", ["write", "fsync", "open"])
def test_a_line_that_cannot_be_written_is_no_change_and_is_written_with_the_next(
    name: str, long: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    long.save(0, 2)
    before, original = read_record(long.folder), getattr(os, name)

    def full(*args: Any, **kwargs: Any) -> Any:
        if name == "write":
            original(args[0], args[1][:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left"):
        long.keeper.amend({"changes": [Change(round=3, by="request", leave="job-1", step=7).record()]})
    monkeypatch.setattr(os, name, original)
    assert read_record(long.folder) == before and long.keeper.record["changes"] == []
    monkeypatch.setattr(os, name, full)
    for step in (3, 4):
        long.save(0, step)
    monkeypatch.setattr(os, name, original)
    if name != "write":  # run.json, which comes next, is not written by that
        assert read_record(long.folder) == before and len(long.notes) == 1
    long.save(1, 5)
    assert read_record(long.folder)["saved"] == {"job-0": 4, "job-1": 5}


def test_a_line_that_is_torn_was_never_promised_and_one_that_is_damaged_is_named(long: Written) -> None:
    for step in (2, 3):
        long.save(0, step)
    file, edition = long.folder / JOURNAL, long.keeper.record[EDITION]
    text = file.read_bytes()
    for end in range(len(text) - len(text.splitlines()[-1]) - 1, len(text) - 1):
        file.write_bytes(text[:end] + bytes(end % 3))  # zeros, as a file system may leave after a power loss
        assert [line["saved"] for line in lines_since(long.folder, edition)] == [{"job-0": 2}]
    file.write_bytes(text[:5] + b"\0" + text[5:])
    with pytest.raises(DamagedLine, match="line 1 is damaged"):
        lines_since(long.folder, edition)
