"""`packlora schema`."""

from __future__ import annotations

from packlora.command_line import App
from packlora.terminal import show

app = App()


@app.command(light=True)
def schema() -> None:
    """Print the JSON schema of the run file, for editors."""
    import json

    from packlora.commands.schema import run_file_schema

    show(json.dumps(run_file_schema(), indent=2))
