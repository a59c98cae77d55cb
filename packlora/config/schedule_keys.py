"""Further arguments of schedules of the learning rate, loaded where a run file gives some or a schedule needs one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packlora.config.shared import MOST_STEPS
from packlora.errors import quoted, shown

_SHAPES = ("linear", "cosine", "1-sqrt")
SCHEDULE_KEYS: dict[str, dict[str, tuple[type, float, float] | tuple[str, ...]]] = {
    "cosine": {"num_cycles": (float, 1e-6, 1e6)},
    "cosine_with_restarts": {"num_cycles": (int, 1, 1e6)},
    "polynomial": {"lr_end": (float, 0, 1e30), "power": (float, 1e-6, 1e3)},
    "inverse_sqrt": {"timescale": (int, 1, MOST_STEPS)},
    "cosine_with_min_lr": {
        "min_lr": (float, 0, 1e30), "min_lr_rate": (float, 0, 1), "num_cycles": (float, 1e-6, 1e6),
    },
    "warmup_stable_decay": {
        "num_decay_steps": (int, 0, MOST_STEPS), "num_stable_steps": (int, 0, MOST_STEPS), "min_lr_ratio": (float, 0, 1),
        "num_cycles": (float, 1e-6, 1e6), "warmup_type": _SHAPES, "decay_type": _SHAPES,
    },
}  # fmt: skip
"""Keys of lr_scheduler_kwargs by schedule: type, least and most, or the texts that are taken."""


def check_schedule(kind: str, given: Mapping[str, Any], learning_rate: float) -> None:
    """Raises ValueError where a schedule does not take its arguments, or lacks one.

    Args:
        kind: lr_scheduler_type. given: lr_scheduler_kwargs.
    """
    known = SCHEDULE_KEYS.get(kind, {})
    for key, value in given.items():
        where = f"lr_scheduler_kwargs has {shown(key, 40)}: {quoted(value, 40)}"
        if key not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"{where}, which the schedule {kind!r} does not take; its keys: {listed}")
        rule = known[key]
        if isinstance(rule[0], str):
            if value not in rule:
                raise ValueError(f"{where}; it is one of {', '.join(map(str, rule))}")
            continue
        type_, least, most = rule
        number = isinstance(value, int if type_ is int else int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise ValueError(f"{where}; it is {'a whole' if type_ is int else 'a'} number from {least:g} to {most:g}")
    if kind == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & given.keys()) != 1:
        raise ValueError("the schedule 'cosine_with_min_lr' needs one of min_lr and min_lr_rate in lr_scheduler_kwargs")
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        raise ValueError("the schedule 'warmup_stable_decay' needs num_decay_steps in lr_scheduler_kwargs")
    for key in ("min_lr", "lr_end"):
        if given.get(key, 0) > learning_rate:
            raise ValueError(
                f"lr_scheduler_kwargs has {key}: {given[key]:g}, which is over the learning rate, {learning_rate:g}"
            )
