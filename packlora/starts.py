"""Values of PEFT's init_lora_weights that are taken by name: what an adapter's A and B begin with."""

from __future__ import annotations

import re

STARTS = re.compile(r"gaussian|orthogonal|pissa(_niter_[1-9]\d?)?|olora|loftq")
OF_WEIGHTS = re.compile(r"pissa.*|olora|loftq")
"""Starts that are made of the weights of the base, see adapters/starts.py."""
_DOUBLED = re.compile(r"pissa.*|olora")


def is_doubled(start: bool | str | None) -> bool:
    """Whether an adapter that begins so is saved with twice the rank, of which the first half is trained."""
    return _DOUBLED.fullmatch(str(start)) is not None
