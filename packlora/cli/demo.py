"""`packlora demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App, loading
from packlora.options import MaxSteps

app = App()


@app.command(stopped="stopped at once; the same command continues from the last checkpoints")
def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the run; where one is finished already, a numbered one beside it.")
    ] = Path("runs/demo"),
    max_steps: MaxSteps = None,
) -> None:
    """Train four adapters on three real data sets with a real small model, and show what they learnt."""
    with loading():
        from packlora.commands.demo import run_demo

    raise typer.Exit(run_demo(output_dir, max_steps))
