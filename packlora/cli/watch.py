"""`packlora watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App

app = App()


@app.command(stopped="watching has ended", light=True)
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of runs, or their run files.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve the page of a run on this machine, with curves that grow while it trains; several runs stand side by side."""
    from packlora.commands.watch import watch as serve

    serve(runs, port, browser)
