"""Rewards for examples/rewards.yaml: functions of texts, as TRL calls them."""

from typing import Any


def _text(completion: Any) -> str:
    """A completion is a text, or a list with one message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def brevity(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """The shorter the better, but not empty."""
    return [-abs(len(_text(one).split()) - 8) / 8 for one in completions]


def questions(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """Answers that end with a question."""
    return [1.0 if "?" in _text(one) else 0.0 for one in completions]
