"""Names and patterns of module paths, as those of PEFT's target_modules and rank_pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable


def pattern_key(patterns: Iterable[str], path: str) -> str:
    """The first pattern that stands for the path of a module, as rank_pattern means it: a name, or a regular expression, for
    the whole path or for its end from a dot on. The path itself where none does."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", path)), path)


def is_named(path: str, name: str) -> bool:
    """Whether a name is a path, or its end from a dot on."""
    return path == name or path.endswith(f".{name}")
