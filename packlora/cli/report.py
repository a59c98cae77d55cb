"""`packlora report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.terminal import show

app = App()


@app.command(light=True)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run, or its run file.")],
) -> None:
    """Write report.html of a run again from what is in its folder, also of one that was killed."""
    from packlora.commands.watch import report_again

    show(f"report: {report_again(run)}")
