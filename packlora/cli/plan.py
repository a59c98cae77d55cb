"""`packlora plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.errors import InputError
from packlora.options import Set

app = App()


@app.command()
def plan(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.yaml|MODEL", help="The run file; with --gpu the folder or name of a model.")
    ],
    overrides: Set = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=2**14, help="Also show how jobs and microbatches spread over so many devices."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the simulated timeline (.png, .svg, .pdf).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="MEMORY", help='Of a MODEL: which settings fit on a card of so much, "24 GB".')
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--r", min=1, max=2**16, help="With --gpu: rank of the adapter; else 16.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, max=2**24, help="With --gpu: tokens of a sample; else 2048, or the model's context."),
    ] = None,
) -> None:
    """Show what a run would do, without training: samples, microbatches, predicted time and memory."""
    if gpu is not None:
        from packlora.commands.plan_model import print_card

        refused = {"--set": overrides, "--gpus": gpus, "--plot": plot}
        more = [key for key, value in refused.items() if value]
        return print_card(str(run), gpu, rank or 16, length, json_file, more)
    if (run.is_dir() or not run.exists()) and run.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise InputError(f'{run} is no run file; of a model say what card it is for: packlora plan {run} --gpu "24 GB"')
    for key, value in {"--r": rank, "--length": length}.items():
        if value is not None:
            raise InputError(f"{key} is of a model on a card (--gpu); of a run its run file says it; leave {key} out")
    from packlora.run_file import load_run

    config = load_run(run, overrides)
    from packlora.commands.plan import print_plan

    print_plan(config, json_file, plot, gpus)
