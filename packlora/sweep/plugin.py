"""Jobs that join and leave, and sweeps, as the rest of the package asks for them; see packlora/changes.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packlora.config import Run

if TYPE_CHECKING:
    from packlora.changes import JobSet
    from packlora.runtime.prepared_run import PreparedRun
    from packlora.runtime.resume import SavedRun
    from packlora.sweep.open_members import OpenMembers


def config() -> Any:
    """Models of the section `sweep` of a run file."""
    from packlora.sweep import config

    return config


def page() -> Any:
    """What report.html and the last words on the terminal show."""
    from packlora.sweep import page

    return page


def saved_run(saved: SavedRun, folder: Path) -> SavedRun:
    """The run of a run.json with its changes as they are used, see sweep/changes.py. Raises pydantic.ValidationError."""
    from packlora.sweep.changes import with_changes

    return with_changes(saved, folder)


def whole_run(run: Run, saved: SavedRun) -> Run:
    """See sweep/changes.py."""
    from packlora.sweep.changes import whole_run

    return whole_run(run, saved)


def job_set(run: Run, saved: SavedRun | None) -> JobSet:
    """See sweep/job_set.py."""
    from packlora.sweep.job_set import ChangedJobSet

    return ChangedJobSet(run, saved)


def open_members(changes: Sequence[Any], **parts: Any) -> OpenMembers:
    """See sweep/open_members.py."""
    from packlora.sweep.open_members import OpenMembers

    return OpenMembers(changes, **parts)


def refusal(output_dir: Path, processes: int) -> Any:
    """See sweep/control.py."""
    from packlora.sweep.control import Refusal

    return Refusal(output_dir, processes)


def check(run: Run, processes: int, max_steps: int | None) -> None:
    """Raises InputError where a sweep cannot be made as a run is asked for."""
    from packlora.sweep.checks import check

    check(run, processes, max_steps)


def check_prepared(prepared: PreparedRun, resumed: bool) -> None:
    """See sweep/checks.py."""
    from packlora.sweep.checks import check_prepared

    check_prepared(prepared, resumed)
