"""Texts of tokens that come one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"
"""Character in the place of bytes that are not all there yet."""


class TextStream:
    """Text of a sample as its tokens come, special tokens included; a character comes with its last byte.

    Args:
        tokenizer: of transformers; tokenizers' own decoding in steps is used where it has one.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = False) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens) if self._backend is not None else None
        self._ids: list[int] = []
        self._told = ""

    def push(self, token: int) -> str:
        """The text that became complete with this token."""
        if self._stream is not None:
            return self._stream.step(self._backend, token) or ""
        self._ids.append(token)
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skips))
        if text.endswith(UNFINISHED) or not text.startswith(self._told):
            return ""
        new, self._told = text[len(self._told) :], text
        return new


@dataclass(slots=True)
class StopStrings:
    """Looks for stop strings in a text that comes in pieces."""

    strings: tuple[str, ...]
    _tail: str = ""

    def found(self, text: str) -> bool:
        """Whether one ends, or lies, in the text so far, with this new piece."""
        if not text:
            return False
        self._tail += text
        hit = any(string in self._tail for string in self.strings)
        self._tail = self._tail[-max(map(len, self.strings), default=1) :]
        return hit
