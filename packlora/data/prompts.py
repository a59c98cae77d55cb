"""Prompts that a model is to answer: their tokens, rendered as training renders them, and the tokens that end an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.config import DataConfig
from packlora.data.rows import Row, with_system
from packlora.data.samples import encode_rows
from packlora.data.template import Template
from packlora.data.tokens import prompt_tokens
from packlora.errors import InputError

NO_VARIABLES: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a job. ids [T]: its tokens. most: tokens that it may have together with its answer."""

    text: str
    ids: np.ndarray
    most: int


def prompt_ids(
    said: str | list[dict[str, Any]],
    tokenizer: Any,
    names: Sequence[str] = (),
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> list[int]:
    """Tokens of what an answer follows.

    Args:
        said: plain text, which is continued, or the messages of a conversation, by the tokenizer's chat template.
        names: of the messages, for what is said of them.
        variables: of the chat template.

    Raises:
        InputError: the template refuses the messages, or does not show all of them; or there are no tokens.
    """
    if isinstance(said, str):
        text = said
    else:
        from packlora.data.places import prompt_text

        text = prompt_text(Template(tokenizer, None, variables), said, names)
    ids = prompt_tokens(text, tokenizer, is_rendered=not isinstance(said, str))
    if not ids:
        raise InputError("the prompt has no tokens; there is nothing to answer")
    return ids


def encode_prompts(
    texts: Sequence[str], tokenizer: Any, data: DataConfig, new_tokens: int, context: int, job: str
) -> list[Prompt]:
    """The sample_prompts of a job: each is a user's message where the tokenizer has a chat template, else it is continued.

    Args:
        new_tokens: of an answer at most.
        context: most positions that the model knows.

    Raises:
        InputError: a prompt cannot be rendered, or leaves no room for its answer.
    """
    out = []
    for number, text in enumerate(texts):
        where = f"job {job!r}: sample_prompts.{number}"
        messages = with_system([{"role": "user", "content": text}], data.system)
        names = ["data.system"] * (len(messages) - 1) + ["the prompt"]
        try:
            if tokenizer.chat_template:
                Template(tokenizer).check_new(text, "give what a user says alone")
            elif data.system is not None:
                raise InputError("data.system goes by a chat template, and the tokenizer has none")
            ids = prompt_ids(messages if tokenizer.chat_template else text, tokenizer, names, data.chat_template_kwargs)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if len(ids) + new_tokens > context:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens and its answer up to {new_tokens} (sample_max_new_tokens), but the "
                f"model's context is {context}; shorten one of them"
            )
        out.append(Prompt(text, np.asarray(ids), len(ids) + new_tokens))
    return out


def answer_ends(tokenizer: Any, model: Any) -> list[int]:
    """Tokens that end an answer: those of the model's generation settings, and those that follow a turn in training."""
    call = {"type": "function", "function": {"name": "c", "arguments": {}}}
    ends = {*said_ends(model), tokenizer.eos_token_id, taught_end(tokenizer)}
    if tokenizer.chat_template:
        asked = {"role": "user", "content": "a"}
        calls = Row("a call", messages=[asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        ends.add(_end_of(calls, tokenizer))
    return sorted(ends - {None})


def taught_end(tokenizer: Any) -> int | None:
    """Token that follows an answer in training; None where the chat template ends answers without a token of its own."""
    return _end_of(Row("a turn", prompt="a", completion="b"), tokenizer)


def said_ends(model: Any) -> list[int]:
    """The end tokens that the generation settings of a model name: one, several or none."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return said if isinstance(said, list) else [] if said is None else [said]


def _end_of(row: Row, tokenizer: Any) -> int | None:
    """The last token of a row that is learnt, white space aside, if it is one of the tokenizer's own."""
    with contextlib.suppress(InputError):  # a template that takes no such conversation
        (sample,) = encode_rows([row], tokenizer, DataConfig(path="-"), 2**31, "chat").samples
        for token in sample.ids[sample.is_label][::-1].tolist():
            if token in tokenizer.added_tokens_decoder:
                return int(token)
            if tokenizer.decode([token]).strip():
                break
    return None
