"""The `packlora` command. Each of its commands is a module of this folder: arguments and nothing else.

A module is found by its name and imported when the command is called, or help lists them all. It has an `app` with one command,
whose docstring is its help; what the command does is imported in its body.

Exit codes: 0 done, 1 a job failed (the others finished), memory ran out or a disk is full, 2 bad input (before any training),
128 + n stopped by signal n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

import typer

import packlora
from packlora.command_line import App, Group
from packlora.terminal import show, tame_streams

FIRST = ("demo", "init", "plan", "preview", "train", "watch")
"""Commands of a first run, which help shows first; the others follow by name."""


class _Commands(Mapping[str, Any]):
    """Commands by name, imported when they are asked for."""

    def __init__(self) -> None:
        found = {module.name for module in iter_modules(__path__)}
        self.names = [*FIRST, *sorted(found.difference(FIRST))]

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        command = typer.main.get_command(import_module(f"{__name__}.{name}").app)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class _Packlora(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]


app = App(
    cls=_Packlora,
    name="packlora",
    help="Train one or many LoRA / DoRA adapters on one frozen language model, all at once.",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        show(packlora.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """packlora: fast LoRA / DoRA fine-tuning of many adapters at once."""


def command() -> None:
    """The `packlora` command, in a process of its own."""
    tame_streams()
    app()
