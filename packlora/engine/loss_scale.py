"""Dynamic loss scale of one adapter in float16, by the schedule of torch.amp.GradScaler.

Gradients of activations are float16 there: small ones would become 0, large ones infinite. Losses are multiplied by the scale
before a backward, and the float32 gradient of the global batch is divided by it before the step. The scale is a power of two,
so both are exact. A step whose gradient is not finite is skipped and the scale halved; after many good steps in a row it is
doubled. Each adapter has its own, since rows of an adapter meet no rows of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST = 65536.0
GROWTH, GROWS_AFTER = 2.0, 2000
"""Factor of the scale after so many good steps in a row."""
BACKOFF = 0.5
"""Factor of the scale after a step that was skipped."""
LEAST = 1.0
"""Least scale. A gradient that is not finite at this scale is not for want of a smaller one."""


@dataclass(slots=True)
class LossScale:
    """value: the present scale. good: steps in a row that were not skipped, since the scale has changed."""

    value: float = FIRST
    good: int = 0

    @property
    def can_fall(self) -> bool:
        """Whether a gradient that is not finite may be finite at a smaller scale."""
        return self.value > LEAST

    def took(self) -> None:
        """Count a step that was taken."""
        self.good += 1
        if self.good == GROWS_AFTER:
            self.value, self.good = self.value * GROWTH, 0

    def skipped(self) -> None:
        """Count a step that was skipped."""
        self.value, self.good = max(self.value * BACKOFF, LEAST), 0

    def state(self) -> dict[str, float]:
        """Values for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def load(self, state: Mapping[str, float]) -> None:
        """Take what `state` gave."""
        self.value, self.good = float(state["value"]), int(state["good"])
