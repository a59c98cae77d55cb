"""`packlora init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.terminal import show

app = App()


@app.command(light=True)
def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A data file, as data.path of a run file.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="RUN.yaml", help="The file to write; must not exist.")
    ] = Path("run.yaml"),
    base_model: Annotated[str, typer.Option(help="A folder or a Hugging Face model id.")] = "smollm2-135m",
) -> None:
    """Write a run file with comments from a data file."""
    from packlora.commands.init import write_run_file

    show(write_run_file(data, out, base_model))
    file = shlex.quote(str(out))
    show(f"{out}: read it, then `packlora train {file}`; `packlora plan {file}` shows what it would do")
