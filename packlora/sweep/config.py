"""Keys of a search for the best values of a job's keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from packlora.changes import SHOWN
from packlora.config import HIGHER_IS_BETTER, JobConfig, Run
from packlora.config.shared import MOST_STEPS, Strict
from packlora.errors import quoted

MOST_CANDIDATES = 100_000
OF_ROLLOUTS = ("eval_reward", "reward")
"""Metrics of jobs with a rollout."""
RESERVED_BY_SWEEPS = {"best", SHOWN}
"""Names that no job of a run with a sweep may have."""
if TYPE_CHECKING:
    Metric: TypeAlias = str
else:
    Metric = Literal["eval_loss", *HIGHER_IS_BETTER]


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


class _Values:
    """Reads values of a swept key: a list as it is, or a range."""

    @staticmethod
    def _read(value: Any) -> Any:
        if isinstance(value, list):
            return value
        if not isinstance(value, dict | RangeConfig):
            raise PydanticCustomError("values", "input should be a list of values, or a range {min, max, log}")
        return RangeConfig.model_validate(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        kinds: dict[str, CoreSchema] = {
            "list": core_schema.list_schema(),
            "range": RangeConfig.__pydantic_core_schema__,
        }
        return handler(core_schema.tagged_union_schema(kinds, lambda value: ""))


Values = Annotated[list[Any] | RangeConfig, _Values()]
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
    metric: Metric = "eval_loss"
    """Metric by which candidates are compared: the held-out loss; for preferences, also the held-out rewards, which may be
    given without eval_, as in transformers. For a job with a rollout eval_reward, or without held-out prompts reward, its mean
    in training. Of rewards the higher are the better."""
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

    def spacing(self, every: int, own: int | None) -> int:
        """Optimizer steps between the evaluations that decide. every: eval_every. own: eval_steps of a candidate."""
        return math.lcm(every, own or every) if self.metric.startswith("eval_") else every

    def check(self, run: Run) -> None:
        """Raises ValueError where a run has not what the sweep needs."""
        for job in run.jobs:
            if job.name.lower() in RESERVED_BY_SWEEPS:
                raise ValueError(
                    f"jobs: a sweep itself uses {job.name!r} in output_dir; choose another name for the job"
                )
        template = next((job for job in run.jobs if job.name == self.job), None)
        if template is None:
            names = ", ".join(job.name for job in run.jobs)
            raise ValueError(f"sweep.job: there is no job {quoted(self.job)}; there are {names}")
        self._check_metric(template)
        moved = [key for key in self.parameters if key == "seed" or key.partition(".")[0] == "data"]
        if template.data.eval_split is not None and moved:
            raise ValueError(
                f"sweep.parameters: with data.eval_split, {moved[0]} decides what is held out, by which candidates are "
                "compared; give an eval_path"
            )
        if self.stopping.method != "none" and not run.eval_every:
            raise ValueError("sweep.stopping: evaluations decide, and eval_every is 0; set how often they are made")
        self._check_compared(template, run.eval_every)

    def _check_metric(self, template: JobConfig) -> None:
        """Whether candidates of the job have the metric, which follows from the job where none is written."""
        if template.rollout is not None and "metric" not in self.model_fields_set:
            self.metric = "eval_reward" if template.data.holds_out else "reward"
        if template.rollout is not None and self.metric not in OF_ROLLOUTS:
            raise ValueError(f"sweep.metric: {self.metric} does not compare rewards; use {' or '.join(OF_ROLLOUTS)}")
        if not template.data.holds_out and self.metric.startswith("eval_"):
            raise ValueError(
                f"sweep: job {template.name!r} has no data.eval_path or data.eval_split, by which candidates are compared"
            )
        if self.metric == "eval_loss" and self.stopping.target is not None and self.stopping.target <= 0:
            raise ValueError(f"sweep.stopping: target is {self.stopping.target:g}; a held-out loss is above 0")

    def _check_compared(self, template: JobConfig, every: int) -> None:
        """Whether candidates of the job are evaluated where its stopping rule compares them, as far as no value is swept."""
        own, method, name = template.train.eval_steps, self.stopping.method, template.name
        if method == "none" or "train.eval_steps" in self.parameters:
            return
        if self.metric.startswith("eval_") and own is not None and (own == 0 or (every % own and own % every)):
            raise ValueError(
                f"sweep.stopping: candidates are compared at multiples of eval_every, {every}, where train.eval_steps {own} "
                f"of job {name!r} makes few evaluations or none; leave it out"
            )
        first, steps = max(every, own or 0), template.train.max_steps
        if method != "target" and 0 < steps <= first and "train.max_steps" not in self.parameters:
            raise ValueError(
                f"sweep.stopping: candidates are compared every {first} optimizer steps and take {steps}, so none would be "
                "stopped; set eval_every lower"
            )
