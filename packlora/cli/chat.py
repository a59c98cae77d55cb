"""`packlora chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import BaseModel, Device, Dtype, Image, NewTokens, Seed, System, Temperature

app = App()


@app.command()
def chat(
    adapters: Annotated[list[Path], typer.Argument(metavar="RUN/JOB...", help="Adapters of one base model.")],
    with_base: Annotated[bool, typer.Option("--with-base", help="The base model answers too.")] = False,
    system: System = None,
    image: Image = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Talk to one or several adapters side by side: each line of standard input is a turn."""
    from packlora.answers.talk import Sampling, chat

    how = Sampling(max_new_tokens, temperature, seed)
    chat(adapters, with_base, system, how, base_model, dtype, device, images=image or [])
