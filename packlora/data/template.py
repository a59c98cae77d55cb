"""Chat templates: those that take texts alone, and those of vision-language models, some of which take blocks alone."""

from __future__ import annotations

from typing import Any

from packlora.errors import InputError

PLACEHOLDER = "packlora-finds-this-turn"
"""Rendered in place of a message, to see where the template puts it."""

_BLOCKS_ALONE: dict[str, bool] = {}
"""By template."""


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, generation: bool) -> str:
    """A conversation as the tokenizer's chat template writes it. Raises InputError with what the template complains of.

    Args:
        messages: contents are texts, or lists of blocks where they have images.
        generation: with what an assistant's turn begins with.
    """
    if _in_blocks(tokenizer, messages):
        blocks = [_blocks(message["content"]) for message in messages]
        messages = [message | {"content": content} for message, content in zip(messages, blocks, strict=True)]
    try:
        return _apply(tokenizer, messages, tools, generation)
    except Exception as error:  # templates raise their own complaints, e.g. about the order of roles
        raise InputError(f"the chat template refuses the messages: {error}") from None


def _apply(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, generation: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation))


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _in_blocks(tokenizer: Any, messages: list[dict[str, Any]]) -> bool:
    """Whether contents are to be lists: one is, or the template shows no others."""
    if any(isinstance(message.get("content"), list) for message in messages):
        return True
    template = str(tokenizer.chat_template)
    if template not in _BLOCKS_ALONE:
        texts, blocks = (_shows(tokenizer, content) for content in (PLACEHOLDER, _blocks(PLACEHOLDER)))
        _BLOCKS_ALONE[template] = blocks and not texts
    return _BLOCKS_ALONE[template]


def _shows(tokenizer: Any, content: Any) -> bool:
    try:
        return PLACEHOLDER in _apply(tokenizer, [{"role": "user", "content": content}], None, False)
    except Exception:  # a template that wants other roles, or no such content
        return False
