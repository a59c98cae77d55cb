"""Fields of an OpenAI-style request. What would change an answer and is not served is refused; other unknown fields, which
clients send in numbers, are ignored.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from packlora.config.data import OF_RENDERING
from packlora.data.prompts import prompt_ids
from packlora.data.template import set_clock
from packlora.errors import quoted
from packlora.serve.limits import Limits

MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_LIKELIEST = 128, 64, 16, 20
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
"""Lists end at their first wrong member: a body may hold millions, and to describe each holds everybody up."""
MOST_CHARACTERS = Limits().stop_characters
UNSERVED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}), "tools": (None, []),
    "functions": (None, []), "response_format": (None, {"type": "text"}), "suffix": (None, ""), "best_of": (None, 1),
    "audio": (None,), "prediction": (None,), "guided_json": (None,), "repetition_penalty": (None, 1),
    "min_p": (None, 0), "min_tokens": (None, 0), "ignore_eos": (None, False), "stop_token_ids": (None, []),
    "bad_words": (None, []), "length_penalty": (None, 1), "use_beam_search": (None, False), "chat_template": (None,),
    "continue_final_message": (None, False), "add_generation_prompt": (None, True), "modalities": (None, ["text"]),
    "tool_choice": (None, "none", "auto"), "function_call": (None, "none", "auto"), "guided_regex": (None, ""),
    "guided_choice": (None, []), "guided_grammar": (None, ""), "structured_outputs": (None, {}), "grammar": (None, ""),
    "json_schema": (None, {}), "typical_p": (None, 1), "logits_processors": (None, []), "documents": (None, []),
    "prompt_logprobs": (None,), "truncate_prompt_tokens": (None,), "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
}  # fmt: skip
"""Fields that are not served, with the values that change nothing."""


class _StreamOptions(BaseModel):
    include_usage: bool = False


class Fields(BaseModel):
    """Fields of both kinds of completion."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = 0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: int | None = None
    stop: str | Annotated[Texts, Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool | int | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, tree: Any) -> Any:
        if isinstance(tree, dict):
            for name, harmless in UNSERVED.items():
                if name in tree and tree[name] not in harmless:
                    raise ValueError(f"{name}: {quoted(tree[name])} is not served; leave it out")
            return {key: value for key, value in tree.items() if value is not None}
        return tree

    @model_validator(mode="after")
    def _of_short_stops(self) -> Fields:
        if (longest := max(map(len, self.stops), default=0)) > MOST_CHARACTERS:
            raise ValueError(f"stop: a text of {longest} characters; it has at most {MOST_CHARACTERS} characters")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    @property
    def own_seed(self) -> int:
        """The seed, or one that is drawn where none is given."""
        return secrets.randbits(48) if self.seed is None else self.seed

    @property
    def most_tokens(self) -> int | None:
        """New tokens at most; None: as the context has room for."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def likeliest(self) -> int:
        """Likeliest tokens that are wanted at each place."""
        return 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return False


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @model_validator(mode="after")
    def _of_texts(self) -> _Message:
        if self.tool_calls or self.function_call:
            kind = "tool_calls are" if self.tool_calls else "function_call is"
            raise ValueError(f"{kind} not served; leave the message out, or say what was called in its text")
        if isinstance(self.content, list):
            other = [block.get("type") for block in self.content if not isinstance(block.get("text"), str)]
            if other:
                raise ValueError(f"a block of type {quoted(other[0])} is not served; blocks of type 'text' are")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(block["text"] for block in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatFields(Fields):
    """Fields of a chat completion."""

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] = 0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    @model_validator(mode="after")
    def _of_the_template(self) -> ChatFields:
        if odd := next((key for key in self.chat_template_kwargs if key in OF_RENDERING), None):
            raise ValueError(f"chat_template_kwargs: {quoted(odd)} is no variable of a chat template; leave it out")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: it needs logprobs: true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """New tokens at most; None: as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int:
        """Likeliest tokens that are wanted at each place."""
        return self.top_logprobs if self.logprobs else 0

    def ids(self, tokenizer: Any) -> list[int]:
        """Tokens of the conversation, by the chat template, at the present time. Raises InputError."""
        set_clock(tokenizer, datetime.now())
        return prompt_ids([message.plain() for message in self.messages], tokenizer, (), self.chat_template_kwargs)


class CompletionFields(Fields):
    """Fields of a text completion. A prompt is a text or token ids."""

    prompt: (
        str
        | Ids
        | Annotated[Texts, Field(max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    echo: bool = False

    @model_validator(mode="after")
    def _streams_no_echo(self) -> CompletionFields:
        if self.echo and self.stream:
            raise ValueError("echo: a stream has no echo; leave one of both out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is for echo alone")
        if not self.prompts:
            raise ValueError("prompt: it has no tokens; give at least one")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts."""
        own: Any = self.prompt
        is_one = isinstance(own, str) or (len(own) > 0 and isinstance(own[0], int))
        return [own] if is_one else list(own)

    @property
    def likeliest(self) -> int:
        """Likeliest tokens that are wanted at each place."""
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.echo and self.logprobs is not None


def refusal_of(error: ValidationError) -> tuple[str, int, str | None]:
    """Text, HTTP status and field of the first thing that is wrong; of a field that may be of several kinds, what is wrong with
    the kind that comes nearest."""
    errors = error.errors(include_url=False, include_input=True)
    own = _path(errors[0]["loc"])
    first = max((one for one in errors if _path(one["loc"])[: len(own)] == own), key=_nearness)
    path = ".".join(_path(first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{path}: {text}" if path else text, 400, path or text.partition(":")[0]
    found = "" if first["type"] in ("missing", "json_invalid") else f"; found {quoted(first['input'])}"
    return f"{path or 'body'}: {text}{found}", 400, path or None


def _path(place: tuple[int | str, ...]) -> list[str]:
    """Place of an error without the kinds that its field may be of."""
    return [
        str(part) for part in place if not re.fullmatch(r"str|int|bool|(list|function-).*\[.*", str(part), re.DOTALL)
    ]


def _nearness(error: Any) -> tuple[bool, int]:
    """How near a value comes to a kind that its field may be of."""
    return not error["type"].endswith(("_type", "_parsing")), len(_path(error["loc"]))
