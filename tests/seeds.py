"""Random cases: the same in every run, or fresh ones, and all of them, under `make soak`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

SOAK = bool(os.environ.get("PACKLORA_SOAK"))
"""Set by `make soak`: fresh seeds, every case, as many draws as it takes."""
SEED = random.SystemRandom().randrange(2**31) if SOAK else 1729
"""Where random cases begin; a failing test names it."""

T = TypeVar("T")


def some(cases: Sequence[T], one_in: int) -> list[T]:
    """Every one_in-th of the cases, or all of them under `make soak`."""
    return list(cases if SOAK else cases[::one_in])
