"""A process of test_demo_model_lock.py: it gets the demo model, whose conversion writes a line to a log and takes a while.

converting CACHE TOGETHER: it begins when so many such processes are ready, and converts until the others wait for it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from waiting import wait_for

from packlora.base import demo_conversion, demo_model


def main() -> None:
    cache, together = Path(sys.argv[1]), int(sys.argv[2])

    def convert(source: Path, out: Path) -> None:
        with (cache / "conversions").open("a") as log:
            log.write("one\n")
        wait_for(lambda: len(list(cache.glob("waits-*"))) == together - 1)
        for name in demo_model.FILES:
            time.sleep(0.02)
            (out / name).write_text(name)

    def say(text: str) -> None:
        original(text)
        if text.startswith("waiting"):
            (cache / f"waits-{os.getpid()}").touch()

    replaced: Any = demo_conversion
    original = demo_conversion.say
    replaced._convert, replaced._gguf_folder, replaced.say = convert, lambda scratch, *_: scratch, say
    (cache / f"ready-{os.getpid()}").touch()
    wait_for(lambda: len(list(cache.glob("ready-*"))) >= together)
    folder = demo_model.demo_model_folder()
    assert all((folder / name).read_text() == name for name in demo_model.FILES)
    print(folder)


if __name__ == "__main__":
    main()
