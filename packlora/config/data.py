"""Keys of a job's data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from packlora.config.shared import MOST_PATTERNS, MOST_TOKENS, PathText, Strict
from packlora.errors import quoted

NAMED = (
    "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "text", "chosen", "rejected",
    "label", "system", "tools", "images",
)  # fmt: skip
"""Fields of a row that `columns` may name a column for."""
OF_RENDERING = frozenset({
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "conversation", "conversations",
    "tokenize", "return_assistant_tokens_mask", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "tokenizer_kwargs",
})  # fmt: skip
"""Arguments of the function that renders a chat template; the template itself has no such variables."""
TEMPLATES = ("chatml", "llama3", "gemma", "zephyr", "alpaca", "vicuna")
"""Names of chat templates that packlora has, see data/chat_templates.py."""
MOST_LETTERS = 1000
"""Letters of the name of a column, a subset or a split."""


class _Read(Strict):
    """Keys that say which rows of a path are read, and under which names."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns that hold a row's fields, where they have other names: {prompt: question, completion: answer}."""
    max_samples: int | None = Field(None, ge=1, le=10**12)
    """Most rows that are read, the first ones; null: all."""
    subset: str | None = Field(None, min_length=1, max_length=MOST_LETTERS)
    """Subset (configuration) of a data set of the hub; null: its only or usual one."""
    split: str | None = Field(None, min_length=1, max_length=MOST_LETTERS)
    """Split of a data set of the hub, or of a saved one; null: train."""

    @field_validator("columns")
    @classmethod
    def _named(cls, value: dict[str, str]) -> dict[str, str]:
        if odd := next((key for key in value if key not in NAMED), None):
            raise ValueError(f"names a column for {quoted(odd)}; a row has {', '.join(NAMED)}")
        if odd := next((key for key, name in value.items() if not name or len(name) > MOST_LETTERS), None):
            raise ValueError(f"has no name of a column for {odd}")
        if len(set(value.values())) < len(value):
            raise ValueError(f"gives one column to two fields: {', '.join(f'{k}: {v}' for k, v in value.items())}")
        return value


class DataSource(_Read):
    """Source of a job's samples, one of several."""

    path: PathText
    """Path in one of the forms that data.path accepts as a text."""
    weight: float | None = Field(None, gt=0, le=1e6)
    """Share of the samples, divided by the sum of all weights; null: all samples of the path once."""


class DataConfig(_Read):
    """Samples, and how they are read."""

    path: PathText | list[DataSource]
    """A data file (.jsonl, .csv and others), a pattern of such files (data/*.jsonl), the folder of a saved Hugging Face data
    set, or the id of one on the hub; or a list of these, each with a weight or none."""
    eval_path: PathText | list[PathText] | None = None
    """Held-out samples in the same format; their loss is measured before and after training."""
    eval_split: float | None = Field(None, gt=0, lt=1)
    """Share of the samples that is held out instead of an eval_path, drawn by the job's seed."""
    system: str | None = Field(None, min_length=1, max_length=10**6)
    """A message of the system, for conversations and prompts without one."""
    chat_template: PathText | None = None
    """Chat template in the place of the base model's: a file, the folder of a tokenizer, or the name of a known one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values of the chat template's own variables, as enable_thinking; those of a row go before them."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of a row that is no sample: refuse the run, or leave the row out; run.json lists what was left out."""
    max_length: int = Field(2048, ge=2, le=MOST_TOKENS)
    """Longest sample in tokens."""
    truncate: Literal["error", "drop", "right"] = "error"
    """Treatment of a sample longer than max_length or a microbatch: refuse the run, leave it out, or cut off its end."""

    streaming: bool = False
    """Read the samples while training, for data larger than memory; the job's max_steps say how many."""
    shuffle_buffer_size: int | None = Field(None, ge=1, le=10**8)
    """Rows that a stream is shuffled through; null: 1000."""

    @field_validator("path", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        return [{"path": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value

    @field_validator("path", "eval_path")
    @classmethod
    def _enough(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not 1 <= len(value) <= MOST_PATTERNS:
            raise ValueError(f"is a list of {len(value)} paths; from 1 to {MOST_PATTERNS} are taken")
        weighted = [isinstance(one, DataSource) and one.weight is not None for one in value]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"has a weight at number {weighted.index(True)} and none at number {weighted.index(False)}; give every path of "
                "the list a weight, or none of them"
            )
        return value

    @model_validator(mode="after")
    def _told_apart(self) -> DataConfig:
        """Refuse keys that could mean two things."""
        if self.eval_split is not None and self.eval_path is not None:
            raise ValueError("has eval_path and eval_split, which both say what is held out; leave one of them")
        for key in ("max_samples", "subset", "split") if isinstance(self.path, list) else ():
            if getattr(self, key) is not None:
                raise ValueError(
                    f"path is a list, so that {key} could be of each source or of all; give it to the sources: "
                    f"{{path: ..., {key}: ...}}"
                )
        if odd := next((key for key in self.chat_template_kwargs if key in OF_RENDERING), None):
            raise ValueError(f"chat_template_kwargs has {odd!r}, which is no variable of a chat template; leave it out")
        return self

    @model_validator(mode="after")
    def _streamed(self) -> DataConfig:
        if self.shuffle_buffer_size is not None and not self.streaming:
            raise ValueError("shuffle_buffer_size goes with streaming: true; without it all samples are shuffled")
        if not self.streaming:
            return self
        if self.eval_split is not None:
            raise ValueError(
                "eval_split does not go with streaming, which does not know how many samples there are; give an eval_path"
            )
        if any(weight is not None for _, weight in self.sources):
            raise ValueError("streaming takes no weights: they are shares of numbers of samples that nobody knows")
        if self.truncate == "error" or self.on_bad_row == "error":
            raise ValueError(
                "streaming reads rows when training has begun, where an error would end the run; set truncate to drop or "
                "right, and on_bad_row: skip"
            )
        return self

    @property
    def sources(self) -> list[tuple[str, float | None]]:
        """Paths of the training samples with their weights."""
        return [(self.path, None)] if isinstance(self.path, str) else [(one.path, one.weight) for one in self.path]

    @property
    def train_sources(self) -> list[DataSource]:
        """Sources of the training samples, with the keys that hold for all of them."""
        if isinstance(self.path, list):
            own = {"columns": self.columns}
            return [one if one.columns else one.model_copy(update=own) for one in self.path]
        how = {key: getattr(self, key) for key in _Read.model_fields}
        return [DataSource(path=self.path, **how)]

    @property
    def eval_sources(self) -> list[DataSource]:
        """Sources of eval_path. They have the columns of the training samples."""
        return [DataSource(path=path, columns=self.columns) for path in self.eval_paths]

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out samples."""
        return self.eval_path is not None or self.eval_split is not None

    @property
    def eval_paths(self) -> list[str]:
        """Paths of the held-out samples."""
        return [self.eval_path] if isinstance(self.eval_path, str) else self.eval_path or []
