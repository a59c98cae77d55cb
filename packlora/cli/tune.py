"""`packlora tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.errors import InputError
from packlora.options import Set

app = App()


@app.command(stopped="stopped; what was measured is remembered, and the same command goes on with the rest")
def tune(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The run file; without one, usual layers.")
    ] = None,
    overrides: Set = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Measure for so long at most; another call goes on with what is left.")
    ] = 5.0,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Also plans that merge weights, which only runs with plans.lossy use.")
    ] = False,
) -> None:
    """Measure the kernels' sizes and the ways to compute a layer on this device now, and remember the fastest."""
    from packlora.run_file import load_run

    if run is None and overrides:
        raise InputError("--set changes keys of a run file, and none was given")
    config = load_run(run, overrides) if run else None
    from packlora.tune.plans import tune as measure_plans

    tuned = measure_plans(config, minutes=minutes, lossy=lossy)
    raise typer.Exit(0 if all(item.plan for item in tuned) else 1)
