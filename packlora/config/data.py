"""Keys of a job's data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from packlora.config.shared import MOST_PATTERNS, MOST_TOKENS, PathText, Strict


class DataSource(Strict):
    """Source of a job's samples, one of several."""

    path: PathText
    """Path in one of the forms that data.path accepts as a text."""
    weight: float | None = Field(None, gt=0, le=1e6)
    """Share of the samples, divided by the sum of all weights; null: all samples of the path once."""


class DataConfig(Strict):
    """Samples: a .jsonl, .json, .csv or .parquet file, a pattern of such files (data/*.jsonl), the folder of a saved Hugging
    Face data set, or the id of one on the hub; or a list of these, each with or without a weight."""

    path: PathText | list[DataSource]
    """A .jsonl, .json, .csv or .parquet file, a pattern of such files (data/*.jsonl), the folder of a saved Hugging Face data
    set, or the id of one on the hub; or a list of these, each with a weight or none."""
    eval_path: PathText | list[PathText] | None = None
    """Held-out samples in the same format; their loss is measured before and after training."""
    system: str | None = Field(None, min_length=1, max_length=10**6)
    """A message of the system, for conversations and prompts without one."""
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
    def _streamed(self) -> DataConfig:
        if self.shuffle_buffer_size is not None and not self.streaming:
            raise ValueError("shuffle_buffer_size goes with streaming: true; without it all samples are shuffled")
        if not self.streaming:
            return self
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
    def eval_paths(self) -> list[str]:
        """Paths of the held-out samples."""
        return [self.eval_path] if isinstance(self.eval_path, str) else self.eval_path or []
