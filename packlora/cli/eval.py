"""`packlora eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from packlora.command_line import App
from packlora.errors import plural
from packlora.options import Adapter, BaseModel, Device, Dtype
from packlora.terminal import say, show

app = App()


@app.command()
def evaluate(
    adapter: Adapter,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Held-out samples, as data.path of a run file.")],
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest sample in tokens; default is that of its run.")
    ] = None,
    truncate: Annotated[
        str | None, typer.Option(help="error, drop or right: what to do with longer ones; default is that of its run.")
    ] = None,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Show the held-out cross entropy of an adapter on a data file, computed as training computes it."""
    from math import exp

    from packlora.commands.held_out import evaluate_adapter

    found = evaluate_adapter(adapter, data, max_length, truncate, base_model, dtype, device)
    for note in found.notes:
        say(f"note: {note}")
    show(f"loss        {found.loss:.6f}\nperplexity  {exp(min(found.loss, 700)):.4f}")
    show(f"labels      {found.label_tokens:,} of {found.tokens:,} tokens, {plural(found.samples, 'sample')}")
