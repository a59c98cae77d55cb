"""Keys of a search for the best values of a job's keys."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from packlora.config.shared import MOST_STEPS, Strict

MOST_CANDIDATES = 100_000


class RangeConfig(Strict):
    """Values of a swept key from `min` to `max`, whole numbers where both are."""

    min: int | float
    """The least."""
    max: int | float
    """The largest."""
    log: bool = False
    """Draw the logarithm evenly."""

    @model_validator(mode="after")
    def _a_range(self) -> RangeConfig:
        if not self.min < self.max or (self.log and self.min <= 0):
            raise ValueError(f"goes from {self.min} to {self.max}; min is under max, and above 0 with log")
        return self


Values = Annotated[
    Annotated[list[Any], Tag("list")] | Annotated[RangeConfig, Tag("range")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "range"),
]
"""Values of a swept key."""


class StoppingConfig(Strict):
    """Rule by which candidates end before their last step. successive_halving: at steps min_resource, times reduction_factor
    and so on, the best of the candidates that came as far go on. median: a candidate ends if its best so far is worse than the
    median there. patience: it ends after so many evaluations without improvement. target: the sweep ends once a candidate is as
    good."""

    method: Literal["none", "successive_halving", "median", "patience", "target"] = "none"
    """successive_halving: at steps min_resource, times reduction_factor and so on, the best of those that came as far go on.
    median: the best so far is worse than the median there. patience: no better for so many evaluations. target: once a
    candidate is as good, the sweep ends."""
    min_resource: int = Field(16, ge=1, le=MOST_STEPS)
    """successive_halving: optimizer steps before the first look."""
    reduction_factor: int = Field(3, ge=2, le=1000)
    """successive_halving: one in so many goes on."""
    n_startup_trials: int = Field(5, ge=1, le=MOST_STEPS)
    """median: candidates that must have come as far."""
    n_warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """median: optimizer steps before the first look."""
    patience: int = Field(3, ge=1, le=MOST_STEPS)
    """patience: evaluations."""
    min_delta: float = Field(0.0, ge=0)
    """Least difference that counts as an improvement (patience)."""
    target: float | None = Field(None, allow_inf_nan=False)
    """target: the held-out loss, or what else is compared."""

    @model_validator(mode="after")
    def _has_target(self) -> StoppingConfig:
        if (self.target is not None) != (self.method == "target"):
            raise ValueError("method: target goes with a target, the sweep's metric to reach, and no other method does")
        return self


class SweepConfig(Strict):
    """Candidates of one job which differ in some keys. They train together, and share every forward of the base model."""

    job: str
    """The job of the list that they are made from; it is not trained itself."""
    parameters: dict[str, Values]
    """Values, or their range, by dotted key of the job, e.g. train.learning_rate."""
    method: Literal["grid", "random", "optuna"] = "grid"
    """grid: all combinations. random: drawn. optuna: by its TPE sampler, which learns from candidates that have ended."""
    num_trials: int | None = Field(None, ge=1, le=MOST_CANDIDATES)
    """Candidates, with random and optuna."""
    concurrent: int = Field(8, ge=1, le=10_000)
    """Candidates that train at the same time; when one ends, the next one takes its place."""
    metric: Literal["eval_loss", "eval_rewards/margins", "eval_rewards/accuracies"] = "eval_loss"
    """Metric by which candidates are compared: the held-out loss; or, for preferences, the held-out rewards, of which the
    higher are the better. The latter may be given without eval_, as in transformers."""
    stopping: StoppingConfig = Field(default_factory=StoppingConfig)
    """Rule by which candidates end early."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of the draws of random and optuna; null: the run's. All candidates have the seed of the job, and differ in nothing
    else."""

    @field_validator("metric", mode="before")
    @classmethod
    def _of_evaluations(cls, value: Any) -> Any:
        return f"eval_{value}" if isinstance(value, str) and value.startswith("rewards/") else value

    @model_validator(mode="after")
    def _whole(self) -> SweepConfig:
        if not self.parameters:
            raise ValueError(
                "parameters is empty; give values of at least one key, such as train.learning_rate: [1e-4, 2e-4]"
            )
        for key, values in self.parameters.items():
            if key.partition(".")[0] == "name" or key in ("data.eval_path", "data.eval_split"):
                raise ValueError(f"{key} cannot be swept: candidates are named and compared by it")
            if isinstance(values, list) and not values:
                raise ValueError(f"{key} has no values")
            if isinstance(values, RangeConfig) and self.method == "grid":
                raise ValueError(f"{key} is a range, and a grid takes lists; list its values, or use random or optuna")
        if self.method == "grid" and self.combinations > MOST_CANDIDATES:
            raise ValueError(
                f"the grid has {self.combinations:,} combinations, and at most {MOST_CANDIDATES:,} are taken; leave values "
                "out, or use method: random with num_trials"
            )
        if self.metric == "eval_loss" and self.stopping.target is not None and self.stopping.target <= 0:
            raise ValueError(f"stopping.target is {self.stopping.target:g}; a held-out loss is above 0")
        if self.method != "grid" and self.num_trials is None:
            raise ValueError(f"method {self.method} needs num_trials, the number of candidates")
        if self.method == "grid" and self.num_trials is not None:
            raise ValueError(
                f"num_trials is {self.num_trials}, but the method is grid, which has all combinations; leave it out, or use "
                "random or optuna"
            )
        return self

    @property
    def combinations(self) -> int:
        """Number of combinations of all listed values."""
        return math.prod(len(values) for values in self.parameters.values() if isinstance(values, list))
