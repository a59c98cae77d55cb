"""`packlora merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App
from packlora.options import BaseModel, CheckOption
from packlora.terminal import say, show

app = App()


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER_DIR", help="A PEFT adapter folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the merged model to; must not exist.")],
    base_model: BaseModel = None,
    dtype: Annotated[
        str, typer.Option(help="Of the merged weights: auto (as the base), float32, bfloat16, float16.")
    ] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="Fold into what codes of the base stand for: nf4, fp4, int8; none: into its weights; auto: as it was trained."
        ),
    ] = "auto",
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="With nf4 or fp4: scales are quantised too.")
    ] = False,
    requantize: Annotated[
        str,
        typer.Option(
            help="Save the merged model in codes, and say how far they are off: nf4, nf4-double, fp4, fp4-double, int8, or "
            "torchao's int4_weight_only, int8_weight_only, float8_weight_only."
        ),
    ] = "none",
    check: CheckOption = "auto",
) -> None:
    """Fold an adapter into its base model's weights and save a plain Hugging Face model."""
    from packlora.export.merge import merge_adapter

    if note := merge_adapter(adapter, out, base_model, dtype, quantization, double_quant, requantize, check):
        say(f"note: {note}")
    show(f"merged model: {out}")
