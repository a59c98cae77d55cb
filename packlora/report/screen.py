"""The screen that tables and notes are printed on: rich's console, on which texts of others move nothing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from packlora.errors import spelt_out


class Screen(Console):
    """Console that spells out every text and cell on a terminal (errors.spelt_out); output to a file stays as it is."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return super().render(_spelt_out(renderable) if self.is_terminal else renderable, options)


def table_screen() -> Screen:
    """Screen of a command that prints tables; wide where it is no terminal."""
    console = Screen()
    return console if console.is_terminal else Screen(width=160)


def _spelt_out(renderable: RenderableType) -> RenderableType:
    if isinstance(renderable, str):
        return spelt_out(renderable)
    if not isinstance(renderable, Text) or (plain := spelt_out(renderable.plain)) == renderable.plain:
        return renderable
    own = renderable
    return Text(plain, own.style, justify=own.justify, overflow=own.overflow, no_wrap=own.no_wrap, end=own.end)
