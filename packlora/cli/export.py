"""`packlora export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import BaseModel, CheckOption
from packlora.terminal import say, show

app = App()


@app.command()
def export(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A PEFT adapter folder, as RUN/job.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, for gguf the file; must not exist.")],
    target: Annotated[
        str, typer.Option("--for", metavar="PROGRAM", help="vllm, sglang, gguf (llama.cpp), ollama or peft.")
    ],
    base_model: BaseModel = None,
    dtype: Annotated[
        str, typer.Option(help="Of the tensors: float32, bfloat16, float16, auto (as the base).")
    ] = "float32",
    check: CheckOption = "auto",
) -> None:
    """Write an adapter as another program reads it, with the same numbers."""
    from packlora.export.export import export_adapter, serve_command

    for note in export_adapter(adapter, out, target, base_model, dtype, check):
        say(f"note: {note}")
    show(f"adapter for {target}: {out}")
    if (command := serve_command(out, target)) is not None:
        show(f"serve it: {command}")
