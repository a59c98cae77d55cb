"""Rendering of conversations by a tokenizer's chat template.

Everything that is rendered goes through `Template`: what a job learns from, prompts and answers. All renderings with one
tokenizer see one clock (`set_clock`), so that a template that writes the date writes the same one everywhere.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from packlora.errors import EndlessError, InputError, quoted

PLACEHOLDER = "packlora-looks-for-this-text"
"""Stands for a content where it is tried how a template takes contents."""
CLOCK = "_packlora_clock"
"""Attribute of a tokenizer with the moment at which its clock stands."""

Spans = list[tuple[int, int]]

_BLOCKS_ALONE: dict[tuple[str, bool], bool] = {}
"""Results of trials, by template: whether it takes only blocks as contents; and whether it writes blocks as Python does."""


class EndlessTemplateError(InputError):
    """A chat template does not come to an end. It is no row's fault: rows are not skipped for it."""


def templated(tokenizer: Any, source: str | None) -> Any:
    """The tokenizer with another chat template, as a copy; itself where there is none."""
    if source is None:
        return tokenizer
    made = copy.copy(tokenizer)
    made.chat_template = source
    return made


def set_clock(tokenizer: Any, moment: datetime) -> None:
    """Set the current time that the tokenizer's chat template sees in all later renderings."""
    setattr(tokenizer, CLOCK, moment)


def clock_of(tokenizer: Any) -> datetime:
    """Current time as a chat template sees it; where the clock was not set, the moment of the first rendering."""
    if not isinstance(moment := getattr(tokenizer, CLOCK, None), datetime):
        set_clock(tokenizer, moment := datetime.now())
    return moment


@dataclass(frozen=True, slots=True)
class Template:
    """Chat template of a tokenizer with its further arguments.

    Args:
        tools: the JSON schemas of what the assistant may call.
        variables: values of the template's own variables, as `enable_thinking`.
    """

    tokenizer: Any
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The program; some tokenizers have one of its own for conversations with tools."""
        try:
            return str(self.tokenizer.get_chat_template(tools=self.tools))
        except ValueError as error:  # there is none, or none of several is for this
            raise InputError(f"the tokenizer has no chat template for this: {error}") from None

    def render(self, messages: list[dict[str, Any]], generation: bool = False) -> str:
        """A conversation as the template writes it.

        Args:
            messages: contents are texts, or lists of blocks where they have images.
            generation: with what an assistant's turn begins with.

        Raises:
            InputError: with what the template complains of.
        """
        return self._written(messages, generation)[0]

    def check_new(self, prompt: str, remedy: str) -> None:
        """Raises InputError where a prompt has been rendered before: it begins as the template's texts do, or any text."""
        tokens = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        begun = [token for token in tokens if prompt.lstrip().startswith(token)]
        if not begun:
            return
        text = self.render([{"role": "user", "content": PLACEHOLDER}])
        if known := [token for token in begun if text.startswith(token) or token == self.tokenizer.bos_token]:
            raise InputError(
                f"the prompt begins with {quoted(max(known, key=len))}, as a text that was rendered before, and the chat "
                f"template would render it again; {remedy}"
            )

    def masked(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        """A conversation, and the characters in it that the template's own `{% generation %}` marks."""
        return self._written(messages, False, mask=True)

    def _written(self, messages: list[dict[str, Any]], generation: bool, mask: bool = False) -> tuple[str, Spans]:
        try:
            if self._in_blocks(messages):
                messages = [message | {"content": _blocks(message.get("content"))} for message in messages]
            return self._apply(messages, generation, mask)
        except EndlessError as error:
            name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
            raise EndlessTemplateError(
                f"the chat template of {name} does not come to an end: {error}; use another template"
            ) from None
        except InputError:
            raise
        except Exception as error:  # templates raise their own complaints, e.g. about the order of roles
            raise InputError(f"the chat template refuses the messages: {error}") from None

    def _apply(self, messages: list[dict[str, Any]], generation: bool, mask: bool = False) -> tuple[str, Spans]:
        if not messages:
            raise InputError("the conversation has no messages")
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        from packlora.data.bounded import compiled, limits

        with limits(clock_of(self.tokenizer), len(messages)):
            (text,), spans = render_jinja_template(
                conversations=[said], tools=self.tools, chat_template=compiled(self.source),
                add_generation_prompt=generation, return_assistant_tokens_mask=mask,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )  # fmt: skip
        return str(text), spans[0] if spans else []

    def _in_blocks(self, messages: list[dict[str, Any]]) -> bool:
        """Whether texts are to be lists of blocks: the template shows no others."""
        if any(isinstance(message.get("content"), list) for message in messages) and self._tried(True):
            raise InputError("the chat template writes the list of a content's blocks as it is, and is not for images")
        return self._tried(False)

    def _tried(self, given: bool) -> bool:
        """Try out whether the template takes only blocks; `given`: whether it writes them as Python does."""
        key = self.source, given
        if key not in _BLOCKS_ALONE:
            texts, blocks = (self._tried_with(content) for content in (PLACEHOLDER, _blocks(PLACEHOLDER)))
            written = blocks is not None and any(form(_blocks(PLACEHOLDER)[0]) in blocks for form in (str, json.dumps))
            takes = blocks is not None and PLACEHOLDER in blocks and not (texts is not None and PLACEHOLDER in texts)
            _BLOCKS_ALONE[key] = written if given else takes and not written
        return _BLOCKS_ALONE[key]

    def _tried_with(self, content: Any) -> str | None:
        try:
            return self._apply([{"role": "user", "content": content}], False)[0]
        except EndlessError:
            raise
        except Exception:  # a template that wants other roles, or no such content
            return None


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
