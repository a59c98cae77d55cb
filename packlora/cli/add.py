"""`packlora add`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import RunDir, Set
from packlora.terminal import show

app = App()


@app.command(light=True)
def add(
    run_dir: RunDir,
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="A file with jobs: alone, as in a run file.")],
    overrides: Set = None,
) -> None:
    """Let more jobs join a run that trains now."""
    from packlora.commands.control import add_jobs

    show(add_jobs(run_dir, jobs, overrides))
