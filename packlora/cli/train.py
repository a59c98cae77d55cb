"""`packlora train`."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any, cast

import typer

from packlora.command_line import App, again, alone, loading, loads, speaks, without_resume
from packlora.options import MaxSteps, RunFile, Set
from packlora.terminal import say

app = App()


@app.command(stopped="stopped at once; --resume continues from the last checkpoints", light=True)
def train(
    run: RunFile,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in output_dir.")] = False,
    resume_from: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="[JOB=]STEP",
            help="With --resume: go on from this checkpoint instead of the newest. May be repeated.",
        ),
    ] = None,
    max_steps: MaxSteps = None,
) -> None:
    """Train all jobs of a run file together."""
    if first := loads() and speaks():
        say(f"reading {run} and its data")
    from packlora.data.reader import Reader

    reader, config = Reader(), cast(Any, run)
    if alone():  # first: a slip is refused before what takes seconds is loaded; several processes find it together
        from packlora.run_file import load_run
        from packlora.runtime.early import read_early

        config, overrides = load_run(run, overrides), None
        reader = read_early(config, resume)
    if first:
        say("loading PyTorch and Transformers")
    with loading():
        from packlora.report.summary import print_summary
        from packlora.result import Result
        from packlora.runtime.run import train_read

    if first:
        say(f"checking the run and loading the base model; packlora watch {shlex.quote(str(run))} shows its curves")

    def last(result: Result) -> None:
        words = sys.argv[1:]
        if speaks():
            print_summary(result, again(without_resume(words)), again(without_resume(words, "--max-steps")))

    result = train_read(reader, config, overrides, resume, max_steps, resume_from, last=last)
    raise typer.Exit(result.exit_code)
