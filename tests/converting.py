"""A process of test_demo_model_lock.py: it gets the demo model, whose conversion writes a line to a log and takes a while.

converting CACHE TOGETHER: it begins when so many such processes are ready.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from packlora.base import demo_conversion, demo_model


def main() -> None:
    cache, together = Path(sys.argv[1]), int(sys.argv[2])

    def convert(source: Path, out: Path) -> None:
        with (cache / "conversions").open("a") as log:
            log.write("one\n")
        for name in demo_model.FILES:
            time.sleep(0.15)
            (out / name).write_text(name)

    replaced: Any = demo_conversion
    replaced._convert, replaced._gguf_folder = convert, lambda scratch, *_: scratch
    (cache / f"ready-{os.getpid()}").touch()
    while len(list(cache.glob("ready-*"))) < together:
        time.sleep(0.01)
    folder = demo_model.demo_model_folder()
    assert all((folder / name).read_text() == name for name in demo_model.FILES)
    print(folder)
