"""`packlora preview`."""

from __future__ import annotations

from typing import Annotated

import typer

from packlora.command_line import App, loading
from packlora.options import RunFile, Set

app = App()


@app.command()
def preview(
    run: RunFile,
    overrides: Set = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each job, the first ones.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a sample, a line each.")] = False,
) -> None:
    """Show samples as they are trained on, with what is learnt in colour, or in ⟦marks⟧ without a terminal or colours.

    It counts tokens, and says what is cut or left out and why. A row that training would refuse is refused.
    """
    from packlora.run_file import load_run

    config = load_run(run, overrides)
    with loading():
        from packlora.commands.preview import print_preview

    print_preview(config, rows, as_json)
