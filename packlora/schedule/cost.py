"""Seconds of a microbatch on each device that it passes: an affine function of its tokens and the squares of its lengths, but
no less than the host takes to launch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from packlora.schedule.types import Microbatch, ScheduleError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds (or any unit) of a forward over all layers, and how they are spread over the stages.

    per_token: all layers, linear in tokens. per_token_squared: attention, times the sum of length^2 of the samples.
    fixed: per microbatch. least: of a microbatch at least, the head apart. head_per_token: output layer and loss, on the
    last stage. backward_ratio: backward of the layers over their forward; head_backward_ratio: the same of the head.
    stage_shares: part of the layers on each stage; sums to 1.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0
    fixed: float = 0.0
    head_per_token: float = 0.0
    backward_ratio: float = 1.0
    stage_shares: tuple[float, ...] = (1.0,)
    head_backward_ratio: float = 1.0
    least: float = 0.0

    def __post_init__(self) -> None:
        if not self.stage_shares or abs(sum(self.stage_shares) - 1) > 1e-6 or min(self.stage_shares) < 0:
            raise ScheduleError(f"cost model: stage_shares {self.stage_shares} must be 0 or more and sum to 1")

    @property
    def devices(self) -> int:
        """Number of devices that a microbatch passes, one behind the other."""
        return len(self.stage_shares)

    def layers(self, microbatch: Microbatch) -> float:
        """Forward of all layers, without the head; 0 for a no-op."""
        if microbatch.is_noop:
            return 0.0
        tokens = squares = 0
        for placed in microbatch.samples:
            tokens += placed.length
            squares += placed.length * placed.length
        return max(self.per_token * tokens + self.per_token_squared * squares + self.fixed, self.least)

    def both(self, microbatch: Microbatch, stage: int = 0) -> tuple[float, float]:
        """Forward and backward of a microbatch on a stage."""
        body = self.layers(microbatch) * self.stage_shares[stage]
        head = self.head_per_token * microbatch.num_tokens if stage == self.devices - 1 else 0.0
        return body + head, body * self.backward_ratio + head * self.head_backward_ratio

    def by_stage(self, microbatch: Microbatch) -> list[float]:
        """Forward and backward together, on each stage."""
        return [sum(self.both(microbatch, stage)) for stage in range(self.devices)]

    def makespan(self, microbatches: Sequence[Microbatch]) -> float:
        """Time from the first start to the last end."""
        if self.devices > 1:
            seconds: float = import_module("packlora.pipeline.timeline").makespan(microbatches, self)
            return seconds
        clock = 0.0
        for microbatch in microbatches:
            forward, backward = self.both(microbatch)
            clock = clock + forward + backward
        return clock
