"""Keys of a job's rollout."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from packlora.config.job import JobConfig
from packlora.config.shared import LEAST_WEIGHT, MOST_TOKENS, MOST_WEIGHT, PathText, Strict
from packlora.errors import quoted
from packlora.functions import names_a_function

MOST_REWARDS = 32
MOST_TOOLS = 128
MOST_ROUNDS = 1000
ROUNDS = 10
"""Most rounds of dynamic sampling where the run file says true."""
TURNS = 8
"""Most turns where the run file does not say."""


class RolloutConfig(Strict):
    """Completions that a job's adapter generates, and their rewards. A global batch counts completions, as TRL's does."""

    CODE: ClassVar = ("reward", "environment_factory", "tools")
    """Keys that name functions in files."""
    reward: PathText | list[PathText] | None = None
    """Functions that judge completions: FILE.py:FUNCTION, or an address that answers with JSON; one or a list."""
    environment_factory: PathText | None = None
    """Environment that each completion talks to, turn by turn: FILE.py:CLASS, or a function that makes one."""
    tools: PathText | list[PathText] | None = None
    """Functions that the model may call, by the format of its chat template: FILE.py:FUNCTION; one or a list."""
    max_turns: int = Field(TURNS, ge=1, le=1024)
    """Most turns of the model in a completion, with an environment or tools."""
    reward_weights: list[float] | None = Field(None, min_length=1, max_length=MOST_REWARDS)
    """Weight of each reward in the sum; null: 1 for each."""
    teacher: PathText | None = None
    """A model that completions are to be likely for, token by token: base (the model without the adapter), the folder or hub id
    of a model with the same tokens, or the folder of an adapter."""
    teacher_weight: float = Field(1.0, gt=0, le=MOST_WEIGHT)
    """Weight of the teacher beside the rewards."""
    num_generations: int = Field(8, ge=2, le=4096)
    """Completions of each prompt, which are compared with each other."""
    max_new_tokens: int = Field(256, ge=1, le=MOST_TOKENS)
    """Most tokens of a completion."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Logits are divided by it where tokens are drawn and where they are learnt, as in TRL."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """Losses are multiplied by the ratio of the trainer's probability to the sampler's, of each token or of the completion.
    Ratios above importance_sampling_clip_max become it (truncate) or 0 (mask), as by vllm_importance_sampling_mode of TRL."""
    importance_sampling_clip_max: float | None = Field(3.0, gt=0, le=MOST_WEIGHT)
    """Largest ratio of importance_sampling_mode; null: losses are not multiplied by ratios."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that differences from a group's mean are divided by: that of the group, of the batch, or none."""
    dynamic_sampling: bool | int = False
    """Replace groups whose rewards are all equal, or failed, by groups of further prompts, as DAPO does. true: in up to 10
    rounds of a step; a number: in so many. Where some are left then, the step learns from what there is."""
    max_staleness: int = Field(0, ge=0, le=64)
    """Optimizer steps that the adapter may take between drawing a completion and learning from it: that of step k, counted
    from 1, is drawn by the adapter after step max(0, k - 1 - max_staleness)."""
    reward_timeout: float = Field(60.0, gt=0, le=86400)
    """Seconds that the rewards of a prompt's completions may take; without them the group teaches nothing."""
    log_completions: bool = False
    """Whether the run's trackers get the best and the worst completions of each logged step, with their prompts."""

    @property
    def rewards(self) -> list[str]:
        """Rewards as a list."""
        return [self.reward] if isinstance(self.reward, str) else list(self.reward or [])

    @property
    def tool_specs(self) -> list[str]:
        """Tools as a list."""
        return [self.tools] if isinstance(self.tools, str) else list(self.tools or [])

    @property
    def reward_sources(self) -> list[str]:
        """Rewards, and the environment, which may give one."""
        return [*self.rewards, self.environment_factory] if self.environment_factory is not None else self.rewards

    @property
    def rounds(self) -> int:
        """Most rounds in which groups of a step are drawn again; 0: none."""
        return ROUNDS if self.dynamic_sampling is True else int(self.dynamic_sampling)

    @property
    def has_environment(self) -> bool:
        """Whether something answers what the model says."""
        return self.environment_factory is not None or self.tools is not None

    @property
    def turns(self) -> int:
        """Most turns of a completion."""
        return self.max_turns if self.has_environment else 1

    @field_validator("reward")
    @classmethod
    def _known(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is None:
            return None
        specs = [value] if isinstance(value, str) else value
        if not 1 <= len(specs) <= MOST_REWARDS:
            raise ValueError(f"is a list of {len(specs)} rewards; from 1 to {MOST_REWARDS} are taken")
        for spec in specs:
            if not (names_a_function(spec) or re.match(r"https?://[^/]", spec)):
                raise ValueError(
                    f"is {quoted(spec)}; it names a function in a file, as FILE.py:FUNCTION, or an address, as http://..."
                )
        return value

    @field_validator("environment_factory", "tools")
    @classmethod
    def _functions(cls, value: str | list[str] | None) -> str | list[str] | None:
        specs = [value] if isinstance(value, str) else value or []
        if not isinstance(value, str | None) and not 1 <= len(specs) <= MOST_TOOLS:
            raise ValueError(f"is a list of {len(specs)} functions; from 1 to {MOST_TOOLS} are taken")
        for spec in specs:
            if not names_a_function(spec):
                raise ValueError(f"is {quoted(spec)}; it names a function in a file, as FILE.py:FUNCTION")
        return value

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _rounds(cls, value: object) -> object:
        if not isinstance(value, bool) and not (isinstance(value, int) and 1 <= value <= MOST_ROUNDS):
            raise ValueError(
                f"is {quoted(str(value))}; give false, true, or a number of rounds from 1 to {MOST_ROUNDS}"
            )
        return value

    @field_validator("reward_weights")
    @classmethod
    def _finite(cls, value: list[float] | None) -> list[float] | None:
        for weight in value or []:
            if not abs(weight) <= MOST_WEIGHT:
                raise ValueError(f"has {weight}; a weight is a number up to {MOST_WEIGHT:g}")
        return value

    def check(self, job: JobConfig) -> None:
        """Raises ValueError where other keys of the job do not go with a rollout."""
        train, data = job.train, job.data
        if self.reward is None and self.teacher is None and self.environment_factory is None:
            raise ValueError("rollout has neither a reward nor a teacher; set rollout.reward to FILE.py:FUNCTION")
        if self.max_turns != TURNS and not self.has_environment:
            raise ValueError(
                "rollout.max_turns is for completions with rollout.environment_factory or rollout.tools; set one"
            )
        if self.importance_sampling_clip_max is None and self.importance_sampling_mode != "token_truncate":
            raise ValueError(
                "rollout.importance_sampling_mode goes with rollout.importance_sampling_clip_max; set it, or leave this out"
            )
        if self.teacher is None and self.teacher_weight != 1:
            raise ValueError(
                "rollout.teacher_weight is for completions with rollout.teacher; set it, or leave this out"
            )
        if self.rounds and not self.reward_sources:
            raise ValueError(
                "rollout.dynamic_sampling goes by rewards, and rollout has a teacher alone; set rollout.reward, or leave it out"
            )
        if train.declared.rows != "rewards":
            raise ValueError(
                f"rollout is for trainer grpo, and this job's trainer is {train.trainer}; set train.loss_type, as dapo"
            )
        _check_bounds(train)
        if train.global_batch_size % self.num_generations:
            raise ValueError(
                f"train.global_batch_size is {train.global_batch_size} completions, which are no whole groups of "
                f"{self.num_generations} (rollout.num_generations)"
            )
        if train.needs_evaluations and "metric_for_best_model" not in train.model_fields_set:
            train.metric_for_best_model = "eval_reward"
        if train.needs_evaluations and train.metric_for_best_model != "eval_reward":
            raise ValueError(
                f"train.metric_for_best_model is {train.metric_for_best_model}, which says nothing of rewards; set eval_reward"
            )
        if train.needs_evaluations and not self.reward_sources:
            raise ValueError(
                "rollout has a teacher alone, and held-out rewards are compared by load_best_model_at_end and "
                "early_stopping_patience; set rollout.reward, or leave these out"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"rollout.reward_weights has {len(self.reward_weights)} numbers for {len(self.rewards)} rewards"
            )
        if self.reward_weights and not any(self.reward_weights) and self.teacher is self.environment_factory is None:
            raise ValueError("rollout.reward_weights are all 0, so nothing would be learnt; set one of them")
        if job.adapter.lora_dropout and job.adapter.init_from is None:  # of a folder it is checked in prepare.py
            raise ValueError(
                f"adapter.lora_dropout is {job.adapter.lora_dropout:g}, so that what is trained would not be what has been "
                "drawn; leave it out, or set 0"
            )
        taken = {
            "data.streaming": data.streaming, "train.objective": train.objective, "train.drop_last": train.drop_last,
        }  # fmt: skip
        for key, value in taken.items():
            if value:
                raise ValueError(f"{key} does not go with rollout in this version; leave one of them out")


def _check_bounds(train: Any) -> None:
    """Raises ValueError for bounds of ratios that the loss does not have."""
    (kind,) = train.loss_types
    has = {"importance_sampling": "", "dro": "", "cispo": "epsilon_high"}.get(kind)
    for key in ("epsilon", "epsilon_high"):
        if has is not None and key != has and getattr(train, key) is not None:
            raise ValueError(f"train.{key} is no bound of loss_type {kind}{has and f', which has {has}'}; leave it out")
    if kind == "cispo" and train.epsilon_high is not None and train.epsilon_high < LEAST_WEIGHT:
        raise ValueError(
            f"train.epsilon_high is {train.epsilon_high:g}, the largest ratio of loss_type cispo, so nothing would be learnt; "
            "raise it"
        )
