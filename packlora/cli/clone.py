"""`packlora clone`."""

from __future__ import annotations

from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import RunDir
from packlora.terminal import show

app = App()


@app.command(light=True)
def clone(
    run_dir: RunDir,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job whose settings are taken.")],
    name: Annotated[str, typer.Argument(metavar="NEW_NAME", help="Of the new job.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the job, e.g. train.learning_rate=1e-4; repeatable."),
    ] = None,
    weights: Annotated[bool, typer.Option("--from-weights", help="Begin with the job's present adapter.")] = False,
) -> None:
    """Let a job join a run that trains now which differs from another in some keys."""
    from packlora.commands.control import clone_job

    show(clone_job(run_dir, job, name, overrides, weights))
