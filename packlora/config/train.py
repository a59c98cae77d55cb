"""Keys of a job's training; names follow transformers' TrainingArguments and TRL's trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import Field, create_model, field_validator, model_validator

from packlora.config.shared import LEAST_WEIGHT, MOST_STEPS, MOST_WEIGHT, PathText, Strict
from packlora.config.trainers import Declaration, built_in, trainers
from packlora.errors import quoted
from packlora.given import MEMORY

Scheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
Optim = Literal[
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit",
    "paged_adamw_32bit", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit",
]  # fmt: skip
NEED_ARGUMENTS = ("cosine_with_min_lr", "warmup_stable_decay")
"""Schedules that need one of lr_scheduler_kwargs."""
CUT_OPTIMS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Optimizers that step slices of a job exactly as they step the whole job."""
LACKED = {
    "sgd": ("adam_beta1", "adam_beta2", "adam_epsilon"), "adafactor": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    **dict.fromkeys(("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), ("adam_epsilon",)),
}  # fmt: skip
"""Keys that an optimizer does not have."""
BY_TRAINER: Any = None
BASE = "base"
"""Value of `reference` that means the base model without an adapter."""
BUILT_IN = built_in()
_HELD_OUT = tuple(dict.fromkeys(metric for own in BUILT_IN.values() for metric in own.metrics))
HIGHER_IS_BETTER = (*_HELD_OUT, *(metric for own in BUILT_IN.values() for metric in own.compared))
"""Metrics of preferences and rewards that may choose the best adapter; of eval_loss the lower is the better."""
TRAINERS_OF_KEY: dict[str, list[str]] = {}
"""Trainers that have a key, of the keys that some lack."""
for _name, _own in BUILT_IN.items():
    for _key in (*_own.shared, *_own.keys.model_fields):
        TRAINERS_OF_KEY.setdefault(_key, []).append(_name)
_BY_LOSS = trainers(lambda own: own.names_trainer)
_SET_TRAINER = dict.fromkeys((*BUILT_IN, *(name for one in _BY_LOSS for name in BUILT_IN[one].losses)))
if TYPE_CHECKING:
    Trainer: TypeAlias = str
    Metric: TypeAlias = str

    class _Keys(Strict):
        """Keys that objectives declare."""
else:
    Trainer, Metric = Literal[*BUILT_IN], Literal["eval_loss", *_HELD_OUT]
    _Keys = create_model(
        "_Keys", __base__=tuple(own.keys for own in reversed(BUILT_IN.values()) if own.keys is not Strict)
    )


def with_trainer(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of training with the trainer that a loss is named after, and without a learning rate that is null. Raises ValueError
    where another trainer is written."""
    keys = {key: value for key, value in keys.items() if key != "learning_rate" or value is not None}
    loss = keys.get("loss_type")
    if not isinstance(loss, str):
        return keys
    for named in _BY_LOSS:
        if loss in BUILT_IN[named].losses and keys.get("trainer", named) == named:
            return {**keys, "trainer": named}
    if loss not in BUILT_IN:
        return keys
    trainer = keys.get("trainer", loss)
    if isinstance(trainer, str) and trainer in BUILT_IN and loss in BUILT_IN[trainer].losses and "trainer" in keys:
        return keys  # a loss of TRL's with a trainer's name: kto of kto, sft of dpo
    if trainer != loss:
        raise ValueError(f"loss_type is {loss} and trainer is {quoted(trainer)}; leave one of them out")
    return {**keys, "trainer": loss, "loss_type": None}


def _or_null(schema: dict[str, Any]) -> None:
    """Let a key be null in the JSON schema too."""
    number = {key: schema.pop(key) for key in ("type", "exclusiveMinimum", "maximum")}
    schema["anyOf"] = [number, {"type": "null"}]


class _Common(Strict):
    """Keys of all objectives, and those that several have."""

    global_batch_size: int = Field(8, ge=1, le=MOST_STEPS)
    """Samples per optimizer step."""
    num_train_epochs: float = Field(1.0, gt=0, le=MOST_STEPS)
    """Passes over the samples; may be a fraction."""
    max_steps: int = Field(-1, ge=-1, le=MOST_STEPS)
    """Optimizer steps; -1 lets num_train_epochs decide, a positive number overrides it."""
    optim: Optim = "adamw_torch"
    """The optimizer. Those with 8bit, paged or lion in their names are bitsandbytes'."""
    learning_rate: float = Field(BY_TRAINER, gt=0, le=1e30, json_schema_extra=_or_null)
    """The largest one of the schedule; null: by the trainer, 2e-4 for sft and 5e-6 for dpo, kto and orpo."""
    lr_scheduler_type: Scheduler = "constant"
    """Schedule of the learning rate, by transformers' name."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of that schedule, by transformers' names."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Optimizer steps in which the learning rate rises from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of all steps that is warm-up, rounded up to steps."""
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """The optimizer's own, which is decoupled but for sgd; not applied to biases."""
    loraplus_lr_ratio: float | None = Field(None, gt=0, le=1e6)
    """LoRA+: B, magnitudes and trained biases have the learning rate times this; null: that of A."""
    label_smoothing_factor: float = Field(0.0, ge=0, lt=1)
    """Share of every label that all words have in equal parts, in training; held-out losses are without."""
    neftune_noise_alpha: float | None = Field(None, gt=0, le=1e6)
    """NEFTune: uniform noise of alpha / sqrt(tokens * width) on the embeddings of training samples; null: none."""
    router_aux_loss_coef: float | None = Field(None, ge=0, le=1e6)
    """Weight of the load-balancing loss of a model with experts, beside the loss of the labels; 0: none; null: as the model's
    config.json has it, which is none without output_router_logits."""
    max_grad_norm: float = Field(1.0, ge=0, le=1e30)
    """Gradient norm of the job to clip at; 0 does not clip."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients, of AdamW and Lion."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the mean of their squares; of Lion that of the mean which is kept."""
    adam_epsilon: float = Field(1e-8, ge=1e-30, le=1)
    """Added to the root of that mean, by AdamW."""
    logging_steps: int = Field(1, ge=1, le=MOST_STEPS)
    """Optimizer steps from one that is logged to the next: in metrics.jsonl, on the terminal and by trackers."""
    shuffle: bool = True
    """Take the samples of every epoch in an order of its own; otherwise in file order."""
    drop_last: bool = False
    """Leave out an epoch's last global batch where it is smaller than the others."""
    eval_steps: int | None = Field(None, ge=0, le=MOST_STEPS)
    """Optimizer steps between evaluations; 0 only before and after training; null: the run's eval_every."""
    eval_on_start: bool = True
    """Evaluate before the first step too."""
    load_best_model_at_end: bool = False
    """The adapter of the evaluation with the best metric_for_best_model is the job's result, not that of its last step."""
    metric_for_best_model: Metric = "eval_loss"
    """Metric that decides which adapter is the best, and whether training ends early: the held-out loss, the lower the better;
    or, for pairs, how often and by how much the chosen completion has the higher reward; with a rollout the held-out reward."""
    early_stopping_patience: int | None = Field(None, ge=1, le=MOST_STEPS)
    """End the job after so many evaluations in a row that were no better than the best one before; null never does."""
    early_stopping_threshold: float = Field(0.0, ge=0, le=1e6)
    """Least improvement of an evaluation that counts."""
    trainer: Trainer = "sft"
    """Objective, as TRL's trainers of these names define it: sft learns completions; dpo and orpo which of two completions is
    preferred; kto which completions are desirable; grpo learns from rewards, see rollout; distillation soft targets."""
    objective: PathText | None = None
    """A loss of your own in the place of the trainer's, whose rows the job has: FILE.py:FUNCTION; see docs/run-file.md."""
    beta: float | None = Field(None, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    """dpo, kto: how closely the model is held to the reference; orpo: weight of the odds ratio. null: 0.1. grpo: weight of the
    divergence from the base model; of dro, of the square. null: 0, of dro 0.05."""
    loss_type: str | list[str] | None = None
    """sft, dpo, orpo or kto sets trainer where that is not written, and so does a loss of grpo. With trainer dpo: sigmoid, or
    another of TRL's losses, or a list of these, which are added; with kto: kto, or apo_zero_unpaired; with grpo: dapo, grpo,
    dr_grpo, bnpo, cispo, gspo, dro, ppo or importance_sampling."""
    reference: PathText | None = None
    """Reference model (dpo, kto): base, the base model without an adapter, or the folder of an adapter with the job's modules
    and ranks; null: the adapter of init_from as it was, or without one the base."""

    @property
    def declared(self) -> Declaration:
        """The declaration of the trainer."""
        return BUILT_IN[self.trainer]

    @property
    def reads_fields(self) -> bool:
        """Whether the loss may read further fields of rows."""
        return self.objective is not None or self.declared.reads_fields

    @property
    def loss_types(self) -> tuple[str, ...]:
        """loss_type as a list."""
        if self.loss_type is None:
            return self.declared.losses[:1]
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @model_validator(mode="before")
    @classmethod
    def _trainer_of_the_loss(cls, value: Any) -> Any:
        return with_trainer(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _rate_of_the_trainer(self) -> Self:
        if "learning_rate" not in self.model_fields_set:  # an assignment would count as given by the run file
            self.__dict__["learning_rate"] = self.declared.learning_rate
        return self

    @field_validator("objective")
    @classmethod
    def _function_in_a_file(cls, value: str | None) -> str | None:
        file, _, name = (value or "").rpartition(":")
        in_a_file = file.endswith(".py") and name.isidentifier()
        if value is not None and not (in_a_file or value.startswith(MEMORY)):
            raise ValueError(f"is {quoted(value)}; it names a function in a file, as FILE.py:FUNCTION")
        return value

    @model_validator(mode="after")
    def _own_objective(self) -> Self:
        taken = [key for key in TRAINERS_OF_KEY if key != "reference" and getattr(self, key) is not None]
        taken += ["label_smoothing_factor"] * (self.label_smoothing_factor > 0)
        taken += ["metric_for_best_model"] * (self.metric_for_best_model != "eval_loss")
        if self.objective is not None and taken:
            raise ValueError(f"{taken[0]} is of a loss whose place objective takes; leave one of them out")
        return self

    @model_validator(mode="after")
    def _of_the_trainer(self) -> Self:
        self._check_keys()
        own, types = self.declared, self.loss_types
        for name in types if self.loss_type is not None else ():
            refused = next((one.refused[name] for one in BUILT_IN.values() if name in one.refused), None)
            why = f", which {refused} and is not taken" if refused else ""
            if name not in own.losses:
                raise ValueError(f"loss_type has {quoted(name)}{why}; {self.trainer} takes {', '.join(own.losses)}")
        if self.loss_type is not None and (not types or len(set(types)) < len(types)):
            raise ValueError(
                f"loss_type is {quoted(self.loss_type)}; {self.trainer} takes at least one loss, each once"
            )
        if not own.adds_losses and len(types) > 1:
            raise ValueError(f"loss_type has {len(types)} losses; {self.trainer} takes one")
        own.check(self)
        metric = self.metric_for_best_model
        if metric != "eval_loss" and metric not in own.metrics:
            having = trainers(lambda one: metric in one.metrics)
            raise ValueError(
                f"metric_for_best_model {metric} is of {BUILT_IN[having[0]].rows}, for {' and '.join(having)}"
            )
        return self

    def _check_keys(self) -> None:
        for key, having in TRAINERS_OF_KEY.items():
            if getattr(self, key) is not None and self.trainer not in having:
                other = {
                    "label_smoothing": "; of completions it is label_smoothing_factor",
                    "loss_type": f"; found {quoted(self.loss_type)}; {', '.join(_SET_TRAINER)} set it",
                }.get(key, "")
                raise ValueError(
                    f"{key} is for trainer {' and '.join(having)}; this job's trainer is {self.trainer}{other}"
                )

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _plain_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(value) > 100:
            raise ValueError(f"has {len(value)} keys; no schedule takes so many")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_steps == 0:
            raise ValueError("max_steps is 0, so nothing would be trained; give -1 or a positive number")
        warmup = "warmup_steps" if self.warmup_steps else "warmup_ratio"
        if (self.warmup_steps or self.warmup_ratio) and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"{warmup} is {getattr(self, warmup)}, but the schedule 'constant' has no warm-up; "
                f"use lr_scheduler_type: constant_with_warmup, or {warmup}: 0"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio}; give one of them"
            )
        if self.lr_scheduler_kwargs or self.lr_scheduler_type in NEED_ARGUMENTS:
            from packlora.config.schedule_keys import check_schedule

            check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        for key in LACKED.get(self.optim, ()):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is {value:g}, which the optimizer {self.optim!r} does not have; leave it out")
        if self.needs_evaluations and not self.eval_steps:
            key = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            raise ValueError(f"{key} needs evaluations between steps; set eval_steps")
        if self.metric_for_best_model != "eval_loss" and not self.needs_evaluations:
            raise ValueError(
                f"metric_for_best_model {self.metric_for_best_model} goes with load_best_model_at_end or "
                "early_stopping_patience; set one of them, or leave it out"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold goes with early_stopping_patience; set both")
        return self

    @property
    def needs_evaluations(self) -> bool:
        """Whether held-out losses decide how the job ends."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    def warmup_of(self, steps: int) -> int:
        """Steps of the warm-up of so many optimizer steps."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * steps)


class TrainConfig(_Keys, _Common):
    """Optimization of one job; the meaning of every key is that of transformers' TrainingArguments."""
