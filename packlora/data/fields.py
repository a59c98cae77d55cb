"""Names of the fields that decide what kind of row a row is, and the trainers of pairs."""

from __future__ import annotations

KINDS: tuple[tuple[str, ...], ...] = (
    ("prompt", "completion"), ("messages",), ("text",), ("input_ids",), ("conversations",), ("instruction", "output"),
    ("chosen", "rejected"),
)  # fmt: skip
"""Fields of a row of each kind; a row with the fields of two kinds is refused."""
FIELDS = (
    "prompt", "completion", "messages", "text", "input_ids", "conversations", "instruction", "output", "chosen", "rejected",
)  # fmt: skip
OF_PAIRS = ("dpo", "orpo")
"""Trainers that compare two completions of a row."""
