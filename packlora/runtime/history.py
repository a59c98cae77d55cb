"""A long log history in pieces, so that a checkpoint holds the newest lines alone and costs the same at any step.

    <job>/history/<step>-<sha256>.jsonl    {"earlier": name of the piece before}, then lines up to a step, the oldest first

A piece is written once and never changed. Its name holds the SHA-256 of its bytes, and a checkpoint names its newest piece, so
a checkpoint knows all lines before its own to the bit. Jobs of few steps have no pieces.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.files import make_folder, write_file
from packlora.report.follow import opened

FOLDER = "history"
PIECE = 250
"""A checkpoint holds at least so many of the newest lines, and less than twice as many."""
NAME = re.compile(r"\d{1,16}-([0-9a-f]{64})\.jsonl", re.ASCII)


@dataclass(slots=True)
class Pieces:
    """Part of a job's log history that is in pieces: so many lines from the first one on, and the name of the newest piece.
    lost: step up to which it could not be read; what the logs say of these steps stays."""

    lines: int = 0
    newest: str | None = None
    lost: int = 0


def seal(folder: Path, lines: Sequence[Mapping[str, Any]], earlier: str | None) -> tuple[int, str | None]:
    """Write the lines that a checkpoint need not hold itself, as one piece.

    Args:
        folder: of the job.
        lines: those that are in no piece.
        earlier: name of the piece before them.

    Returns:
        How many of the lines are in the newest piece, from the first one on; and its name.
    """
    count = max(0, len(lines) // PIECE - 1) * PIECE
    if not count:
        return 0, earlier
    text = "".join(json.dumps(line) + "\n" for line in ({"earlier": earlier}, *lines[:count])).encode()
    name = f"{lines[count - 1]['step']}-{hashlib.sha256(text).hexdigest()}.jsonl"
    make_folder(folder / FOLDER)
    write_file(folder / FOLDER / name, lambda file: _write(file, text))
    return count, name


def _write(file: Path, text: bytes) -> None:
    file.write_bytes(text)


def read(folder: Path, newest: str | None) -> tuple[list[dict[str, Any]], Path | None]:
    """The lines of a piece and of all before it, the oldest first.

    Returns:
        They; and the newest piece that is not what was written, whose lines and all before them are lost.
    """
    pieces: list[list[dict[str, Any]]] = []
    name, lost = newest, None
    while name is not None:
        file = folder / FOLDER / name
        text = _bytes(file) if NAME.fullmatch(name) else None
        if text is None or hashlib.sha256(text).hexdigest() != name[-70:-6]:
            lost = file
            break
        first, *lines = map(json.loads, text.splitlines())
        pieces.append(lines)
        name = first["earlier"]
    return [line for piece in reversed(pieces) for line in piece], lost


def _bytes(path: Path) -> bytes | None:
    try:
        with opened(path) as file:
            return None if file is None else file.read()
    except OSError:
        return None
