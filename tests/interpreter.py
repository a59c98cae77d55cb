"""Triton's interpreter in half its time. It makes the language its own anew for every call inside a kernel, where once a launch
would do, and checks every sum of integers for overflow, which the sizes of tests are far from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seeds import SOAK
from triton.runtime import interpreter


def make_fast() -> None:
    """For the life of this process. Sums of integers are still checked under `make soak`."""
    original, call, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[tuple[bool, bool]]()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        call(self, *args, **kwargs)

    def patched(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        key = id(interpreter.tl) in seen, id(interpreter.tl.core) in seen
        if key in done:
            return None
        done.add(key)
        return original(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patched
    if not SOAK:
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
