"""`packlora generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.errors import InputError
from packlora.options import Adapter, BaseModel, Device, Dtype, Image, NewTokens, Seed, System, Temperature
from packlora.terminal import show

app = App()


@app.command()
def generate(
    adapter: Adapter,
    prompt: Annotated[str | None, typer.Option(help="What is asked; without it, standard input is read.")] = None,
    system: System = None,
    image: Image = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompt as plain text, without chat template.")
    ] = False,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base_model: BaseModel = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Let an adapter answer a prompt."""
    from packlora.answers.talk import Sampling, generate

    said, how = sys.stdin.read() if prompt is None else prompt, Sampling(max_new_tokens, temperature, seed)
    if prompt is None and not said.strip():
        raise InputError("there is no prompt on standard input; give one there, or by --prompt")
    show(generate(adapter, said, system, raw, how, base_model, dtype, device, image or []))
