"""Settings of an optimizer step, which come with every one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packlora.config import TrainConfig
from packlora.errors import quoted
from packlora.serve.errors import Failed, Refused

DEFAULTS: Mapping[str, float] = {
    "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0,
}  # fmt: skip
BOUNDS: Mapping[str, tuple[float, float]] = {
    "learning_rate": (0.0, 1e30), "beta1": (0.0, math.nextafter(1, 0)), "beta2": (0.0, math.nextafter(1, 0)),
    "eps": (1e-30, 1.0), "weight_decay": (0.0, 1e6), "grad_clip_norm": (0.0, 1e30),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """AdamW's settings of one step. config: those that the optimizer reads."""

    learning_rate: float
    config: TrainConfig


FIRST = TrainConfig(max_grad_norm=0.0)
"""Settings of an optimizer before its first step."""


def settings_of(body: Mapping[str, Any]) -> Settings:
    """Read an optim_step. Raises Refused, which names the field; Failed for other optimizers."""
    other = body.get("optimizer_params")
    if other is not None:
        kind = other.get("type") if isinstance(other, Mapping) else other
        raise Failed(f"optimizer_params: {quoted(kind)} is not served; AdamW is: give AdamParams")
    given = body.get("adam_params")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise Refused(f"adam_params: {quoted(given)} is no object")
    found = dict(DEFAULTS)
    for name, value in given.items():
        if name not in BOUNDS:
            continue
        low, high = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refused(f"adam_params.{name}: {quoted(value)} is no number from {low:g} to {high:g}")
        found[name] = float(value)
    config = FIRST.model_copy(
        update={
            "adam_beta1": found["beta1"], "adam_beta2": found["beta2"], "adam_epsilon": found["eps"],
            "weight_decay": found["weight_decay"], "max_grad_norm": found["grad_clip_norm"],
        }
    )  # fmt: skip
    return Settings(found["learning_rate"], config)
