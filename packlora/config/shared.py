"""Types and bounds shared by all parts of a run file: names, paths, numbers, and the strict base class."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from packlora.errors import quoted

JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")
RESERVED_NAMES = {
    ".", "..", ".lock", "run.json", "metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl", "samples.jsonl",
    "pipeline.jsonl", "journal.jsonl", "report.html", "control", "trackers",
}  # fmt: skip
"""Names that no job may have, because a job's folder stands beside these files of the run."""
MOST_TOKENS = 2**31 - 1
MOST_STEPS = 10**9
MOST_RANK = 2**16
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e6
"""Bounds of lora_alpha, far beyond useful values: no scaling may leave float32, which would end the run of the other jobs as
well."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Bounds of the weights of a loss's parts: a smaller weight trains nothing."""
MOST_PATTERNS, MOST_CHARACTERS = 10_000, 10_000
"""Names or patterns of an adapter, and characters of a regular expression."""
MOST_NESTED = 100
"""Brackets in brackets of a run file, and folders in folders of a path."""


def _path_text(path: str) -> str:
    """A path or a hub id, with ~ as the home folder; what no file system can have as a name is refused."""
    if not path.strip():
        raise ValueError("is empty")
    if odd := next((char for char in path if unicodedata.category(char) in {"Cc", "Cs"}), None):
        raise ValueError(f"has the character {odd!r}, which is taken neither in paths nor in names")
    path = os.path.expanduser(path)
    if len(path.encode()) > 4095 or max(len(part.encode()) for part in path.split("/")) > 255:
        raise ValueError(f"is {quoted(path, 40)}, {len(path)} characters long; no file system has such a path")
    if path.count("/") > MOST_NESTED:
        raise ValueError(
            f"is {quoted(path, 40)}, {path.count('/')} folders in one another; at most {MOST_NESTED} are taken"
        )
    return path


PathText = Annotated[str, Field(min_length=1), AfterValidator(_path_text)]
Prompt = Annotated[str, Field(min_length=1, max_length=10**6)]
"""Prompt that an adapter completes."""
MOST_PROMPTS = 100


class Strict(BaseModel):
    """Base class of every part of a run file: it accepts no unknown key, and no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def check_regex(pattern: str, used: str) -> None:
    """used: what the pattern becomes part of."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"has a pattern of {len(pattern)} characters; at most {MOST_CHARACTERS} are taken")
    try:
        re.compile(used)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: x{99999999999}, ten thousand brackets
        raise ValueError(f"has {quoted(pattern)}, which is not a valid regular expression: {error}") from None


def _pattern(pattern: str) -> str:
    check_regex(pattern, rf"(.*\.)?({pattern})$")
    return pattern


Pattern = Annotated[str, AfterValidator(_pattern)]
"""Pattern of module paths, as PEFT's rank_pattern has them."""
