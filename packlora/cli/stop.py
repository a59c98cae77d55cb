"""`packlora stop`."""

from __future__ import annotations

from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import RunDir
from packlora.terminal import show

app = App()


@app.command(light=True)
def stop(run_dir: RunDir, job: Annotated[str, typer.Argument(metavar="JOB", help="Its name.")]) -> None:
    """End one job of a run that trains now, with its adapter saved; the others go on."""
    from packlora.commands.control import stop_job

    show(stop_job(run_dir, job))
