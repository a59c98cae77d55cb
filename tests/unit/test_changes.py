"""The seam of jobs that join and leave: when the plug-in is used, and what of it the rest of the package reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packlora.base.fingerprint import Fingerprint
from packlora.changes import FOLDER, REQUEST, Changed, JobSet, UntilAsked, check, job_set
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import Layout
from packlora.runtime.resume import check_output
from packlora.sweep.config import RESERVED_BY_SWEEPS, RangeConfig, StoppingConfig, SweepConfig


class Group:
    """Processes of which the first one has found `found`; counts what is told."""

    def __init__(self, leads: bool = True, found: bool = False) -> None:
        self.leads, self.found, self.told_so_far = leads, found, 0

    def told(self, value: Any) -> Any:
        self.told_so_far += 1
        return value if self.leads else self.found


def ask(out: Path) -> None:
    (out / FOLDER).mkdir(exist_ok=True)
    (out / FOLDER / f"{REQUEST}{1:016x}.json").write_text("{}")


def made(out: Path, group: Group) -> tuple[UntilAsked, mock.MagicMock, mock.MagicMock]:
    """The changes of a run, what makes those of the plug-in, and these."""
    plugin = mock.MagicMock()
    make = mock.MagicMock(return_value=plugin)
    return UntilAsked(make, out, group), make, plugin


def test_nothing_is_made_and_nobody_joins_or_leaves_while_nobody_asks(tmp_path: Path) -> None:
    changes, make, _ = made(tmp_path, Group())
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"answer-{1:016x}.json").write_text("{}")
    ends = {"a": "done"}
    assert not changes.pending(4, ["a"]) and changes.change(4, ["a"], None) is None
    assert changes.take_off(["a"], 4) == [] and changes.first(["a"]) is None and changes.judged(ends) is ends
    changes.end(["a"], None)
    make.assert_not_called()


@pytest.mark.parametrize("leads", [True, False])
def test_the_first_request_makes_them_once_on_every_process(leads: bool, tmp_path: Path) -> None:
    """Whoever does not lead does not look itself: its file system may show the request later."""
    group = Group(leads, found=True)
    changes, make, plugin = made(tmp_path, group)
    if leads:
        ask(tmp_path)
    plugin.pending.return_value, plugin.change.return_value = True, Changed(["a"])
    assert changes.pending(4, ["a"])
    assert changes.change(4, ["a"], None) == Changed(["a"])
    make.assert_called_once_with()
    assert group.told_so_far == 1, "who is made is not asked for again"
    changes.take_off(["a"], 4)
    plugin.take_off.assert_called_once_with(["a"], 4)


def test_a_folder_of_requests_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    ask(elsewhere)
    (out / FOLDER).symlink_to(elsewhere / FOLDER)
    changes, make, _ = made(out, Group())
    assert not changes.pending(4, [])
    make.assert_not_called()


def test_what_is_asked_as_the_run_ends_is_heard_without_a_word_to_other_processes(tmp_path: Path) -> None:
    """Where an error ends a run, one process may be alone: it would wait for an answer for ever."""
    group = Group()
    changes, _, plugin = made(tmp_path, group)
    ask(tmp_path)
    changes.end(["a"], None)
    plugin.end.assert_called_once_with(["a"], None)
    assert group.told_so_far == 0
    other, make_other, _ = made(tmp_path, Group(leads=False))
    other.end(["a"], None)
    make_other.assert_not_called()


# --- run files and run.json ----------------------------------------------------------------------------------------------


SWEPT = {
    "base_model": "-", "output_dir": "-", "jobs": [{"name": "a", "data": {"path": "x", "eval_path": "y"}}],
    "sweep": {"job": "a", "parameters": {"seed": [1, 2]}},
}  # fmt: skip


def run_of(folder: Path, *names: str) -> Run:
    jobs = [{"name": name, "data": {"path": "x"}} for name in names or ["a"]]
    return Run.model_validate({"base_model": "-", "output_dir": str(folder), "jobs": jobs})


def saved(folder: Path, changes: Any) -> Path:
    """Write a run.json with these changes."""
    config = run_of(folder)
    fingerprint = dict.fromkeys(Fingerprint.model_fields, "0")
    record = {
        "id": "0", "created": "2026-01-01T00:00:00+00:00", "config": config.model_dump(mode="json"), "versions": {},
        "warnings": [], "jobs": {"a": {"data_hash": "0", "samples": 1, "eval_samples": 0, "seed": 0}}, "saved": {"a": 0},
        "schedule": {"budget": 64}, "model": {"fingerprint": fingerprint}, "changes": changes,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{"round": -1, "by": "request", "leave": "a"}], "changes.0.round: Input should be greater than or equal to 0"),
        ([{"round": 1, "by": "sweep"}, {"round": 1, "by": "me"}], "changes.1.by: Input should be 'request'"),
        ([{"round": 1, "by": "request", "join": {"name": "../b", "data": {"path": "x"}}}], "changes.0.join.name: "),
        ({}, "changes: Input should be a valid "),
    ],
)
def test_a_damaged_change_of_a_run_is_refused_by_its_place(changes: Any, said: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, changes)
    with pytest.raises(InputError) as caught:
        check_output(run_of(folder), resume=True)
    assert f"run.json cannot be read: {said}" in str(caught.value)


def test_a_run_file_without_new_jobs_goes_on_without_the_plug_in_and_one_with_new_jobs_keeps_the_order_of_the_run(
    tmp_path: Path,
) -> None:
    before = check_output(run_of(saved(tmp_path, [])), resume=True)
    run = run_of(tmp_path)
    assert type(job_set(run, before)) is JobSet and job_set(run, before).run == run
    more = run_of(tmp_path, "new", "a")
    found = job_set(more, before)
    assert type(found) is not JobSet and [job.name for job in found.run.jobs] == ["a", "new"]


def test_jobs_that_would_join_or_leave_on_processes_that_do_not_share_all_jobs_are_refused(tmp_path: Path) -> None:
    layout = Layout.of_one_device(["a"])
    before = check_output(run_of(saved(tmp_path, [])), resume=True)
    job_set(run_of(tmp_path), before).check_layout(layout, 2)
    with pytest.raises(InputError, match="jobs have joined this run or left it while it trained, or are to do so now"):
        job_set(run_of(tmp_path, "a", "new"), before).check_layout(layout, 2)
    left = check_output(run_of(saved(tmp_path, [{"round": 2, "by": "request", "leave": "a", "step": 2}])), resume=True)
    with pytest.raises(InputError, match=re.escape(f"output_dir {tmp_path}: jobs have joined this run or left it")):
        job_set(run_of(tmp_path), left).check_layout(layout, 2)
    swept = Run.model_validate({**SWEPT, "output_dir": str(tmp_path)})
    with pytest.raises(InputError, match=r"but parallel\.devices_per_job is 1; set it to 2"):
        job_set(swept, None).check_layout(layout, 2)
    with pytest.raises(InputError, match=r"but 2 were started; start one, or set parallel\.pipeline"):
        check(swept, 2, None)
    check(Run.model_validate({**SWEPT, "parallel": {"pipeline": 2}}), 2, None)
    check(run_of(tmp_path), 2, 3)


def test_a_model_of_a_sweep_is_taken_as_it_is() -> None:
    assert {"best", "sweep.json"} == RESERVED_BY_SWEEPS and RangeConfig(min=1, max=2).max == 2
    sweep = SweepConfig(job="a", parameters={"seed": [1, 2]}, stopping=StoppingConfig())
    assert Run.model_validate({**SWEPT, "sweep": sweep}).sweep is sweep
