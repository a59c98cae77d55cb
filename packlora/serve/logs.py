"""The service's log: a line an event, by fields that programs read too (logfmt).

    time=2026-11-27T18:00:00Z level=info event="model made" model=ab-12:train:0 base=smollm2-135m rank=8

No key and no content of a request is in it.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

LOG = logging.getLogger("packlora.serve")


def log(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Write an event down."""
    LOG.log(level, "%s", event, extra={"facts": facts})


class Logfmt(logging.Formatter):
    """Records as fields; a traceback follows on lines of its own.

    Args:
        always: fields of all records.
    """

    def __init__(self, **always: Any) -> None:
        super().__init__()
        self.always = always

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        fields |= self.always
        line = " ".join(f"{name}={_written(own)}" for name, own in (fields | getattr(record, "facts", {})).items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _written(value: Any) -> str:
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


def begin_logging(**always: Any) -> None:
    """Write records of all libraries to standard error from now on, with these fields."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(**always))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn.access", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
