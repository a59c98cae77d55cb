"""Importance correction: losses are multiplied by how much likelier drawn tokens are for the trainer than for the sampler.

Both have the same weights, so a ratio is 1 up to rounding; it takes out of the gradient what rounding has put in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packlora.data.encode import Sample
from packlora.rl.config import RolloutConfig

CORRECTION = "correction"
"""Column of samples, see engine/objectives/policy.py."""


def corrections(
    trainer: Sequence[float], sampler: Sequence[float] | None, config: RolloutConfig
) -> dict[str, np.ndarray]:
    """The column of a completion: ratios [l] of its tokens, or its own [], as TRL has them for the same mode.

    Args:
        trainer, sampler: log-probabilities [l]; without the sampler's there is no column.
    """
    most = config.importance_sampling_clip_max
    if sampler is None or most is None:
        return {}
    level, bound = config.importance_sampling_mode.split("_")
    away = np.subtract(trainer, sampler)
    with np.errstate(over="ignore"):
        found = np.exp(away.sum() if level == "sequence" else away)
    return {CORRECTION: np.minimum(found, most) if bound == "truncate" else np.where(found > most, 0.0, found)}


def told_of(batch: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the ratios of a global batch; none where there are none."""
    found = [np.ravel(sample.columns[CORRECTION]) for sample in batch if CORRECTION in sample.columns]
    if not found:
        return {}
    every = np.concatenate(found)
    values = {"min": every.min(), "mean": every.mean(), "max": every.max()}
    return {f"sampling/importance_sampling_ratio/{name}": float(value) for name, value in values.items()}
