"""What a run writes while it trains: metrics.jsonl, evals.jsonl, microbatches.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from packlora.files import write_file


class JsonLines:
    """An append-only jsonl file; each line reaches the file before `write` returns. NaN becomes null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._file.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Lines of a jsonl file that hold all the keys; one that is cut short, by a crash or while it is being written, is left
    out. A missing file has none.
    """
    if not path.exists():
        return []
    out = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and all(key in line for key in keys):
            out.append(line)
    return out


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite a jsonl file with the lines to keep: what came after the checkpoint that a run resumes from goes."""
    lines = [line for line in read_lines(path) if keep(line)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    if path.exists():
        write_file(path, write)
    return lines
