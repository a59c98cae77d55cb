"""Comparison of log-probabilities of the same tokens by the sampler and by the trainer.

Both run one adapter on one model, by other kernels and in another order of sums. Where they differ by more than rounding, the
sampler has other weights than the trainer, and what it draws belongs to neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

DRIFT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference of log-probabilities, by dtype of the model, that is still rounding."""


def drift_of(trainer: np.ndarray, sampler: np.ndarray | Sequence[float]) -> float:
    """Mean absolute difference of log-probabilities [l]; NaN where one is."""
    return float(np.abs(trainer - np.asarray(sampler, np.float64)).mean())


def why_apart(drift: float, dtype: torch.dtype, tokens: str) -> str | None:
    """Say that sampler and trainer differ; None where a mean difference is rounding. tokens: which ones were compared."""
    if math.isfinite(drift) and drift <= DRIFT.get(dtype, 1e-3):
        return None
    return f"log-probabilities of the sampler and the trainer differ by {drift:.3g} on {tokens}, which is more than rounding"
