"""`packlora serve` and `packlora serve status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packlora.command_line import App, guarded

app = App(invoke_without_command=True)


@app.callback()
def serve(
    context: typer.Context,
    base: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A base model, by the name that clients ask for; may be repeated."),
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of all that was promised and saved.")] = Path("serve"),
    host: Annotated[str, typer.Option(help="Address; any but this machine's own needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    keys: Annotated[Path | None, typer.Option(metavar="FILE", help="API keys, one a line.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Of the base models: nf4, fp4 or int8.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the run file, e.g. device=cpu. May be repeated."),
    ] = None,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="How long a microbatch with room waits for more tenants.")
    ] = 0.0,
    context_length: Annotated[int, typer.Option(min=2, help="Most tokens of a sample.")] = 8192,
) -> None:
    """Serve training of adapters and samples to clients of the Tinker protocol, all tenants mixed on one base model.

    On several GPUs: torchrun --standalone --nproc-per-node 4 -m packlora serve
    """
    if context.invoked_subcommand is not None:
        return

    def action() -> None:
        from packlora.serve.command import serve as run

        run(base or [], state, host, port, keys, quantization, overrides or [], max_wait_ms, context_length)

    guarded(action, "stopped; the same command goes on")


@app.command(light=True)
def status(
    host: Annotated[str, typer.Option(help="Address of the service.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Show sessions, models, what waits and tokens a second of a service."""
    from packlora.serve.command import status as show_status

    show_status(host, port)
