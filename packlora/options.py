"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. jobs.0.adapter.r=8. May be repeated."),
]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Stop every job after this many optimizer steps.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output folder of a run that trains now.")]
BaseModel = Annotated[
    str | None, typer.Option(help="Base model, where the one that the adapter names is not the place to load from.")
]
Adapter = Annotated[Path, typer.Argument(metavar="RUN/JOB", help="A finished adapter or a checkpoint.")]
Dtype = Annotated[
    str, typer.Option(help="Of the base model: auto (as the run that trained it), float32, bfloat16, float16.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:<number> or mps.")]
CheckOption = Annotated[
    str,
    typer.Option(
        "--check",
        help="Load what is written as programs that serve do, and compare its logits with the adapter's: always, never; auto: "
        "of models up to 2 billion parameters.",
    ),
]
System = Annotated[str | None, typer.Option(help="A message of the system at the beginning.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token each time.")]
Seed = Annotated[int, typer.Option(min=0, help="Of tokens that are drawn.")]
Image = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="Shown with the prompt, by models that see images. May be repeated."),
]
