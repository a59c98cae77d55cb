"""`packlora doctor`."""

from __future__ import annotations

import typer

from packlora.command_line import App

app = App()


@app.command()
def doctor() -> None:
    """Show versions and devices, and what of packlora is usable here and what is not, and why."""
    from packlora.commands.doctor import print_doctor

    raise typer.Exit(0 if print_doctor() else 1)
