"""Stand-ins for terminals, and what may reach one."""

from __future__ import annotations

import io
import re

from packlora.errors import spelt_out

OURS = re.compile(r"\x1b\[\d*(;\d+)*m|\x1b\[\d*[AK]|\x1b\[\?25[hl]|\r(?=\x1b\[2K)")
"""What the live table itself sends."""


class Tty(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def is_tame(text: str) -> bool:
    """Whether nothing in a text moves a terminal but the live table's own sequences."""
    return all(char in "\n\t" or spelt_out(char) == char for char in OURS.sub("", text))
