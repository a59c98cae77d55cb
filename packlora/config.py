"""What a run is: its keys, their defaults and which values are accepted, as strict pydantic models.

Names follow PEFT's LoraConfig and transformers' TrainingArguments. run_file.py reads them from YAML and words the messages.
What needs the model, the tokenizer or the data to be checked is checked by whoever loads them.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from packlora.errors import InputError, quoted, shown
from packlora.files import TEMPORARY

JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")
RESERVED_NAMES = {
    ".", "..", ".lock", "run.json", "metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl", "samples.jsonl",
    "report.html", "control", "trackers",
}  # fmt: skip
"""Not for jobs: a job's folder stands beside these files of the run."""
RESERVED_BY_SWEEPS = {"best", "sweep.json"}

MOST_TOKENS = 2**31 - 1
MOST_STEPS = 10**9
MOST_RANK = 2**16
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e6
"""Far beyond what is of use; so no scaling leaves float32, where it would end the run of the other jobs as well."""
MOST_PATTERNS, MOST_CHARACTERS = 10_000, 10_000
"""Names or patterns of an adapter, and characters of a regular expression."""
MOST_NESTED = 100
"""Brackets in brackets of a run file, and folders in folders of a path."""


def _path_text(path: str) -> str:
    """A path or a hub id, with ~ as the home folder; what no file system can have as a name is refused."""
    if not path.strip():
        raise ValueError("is empty")
    if odd := next((char for char in path if unicodedata.category(char) in {"Cc", "Cs"}), None):
        raise ValueError(f"has the character {odd!r}, which is taken neither in paths nor in names")
    path = os.path.expanduser(path)
    if len(path.encode()) > 4095 or max(len(part.encode()) for part in path.split("/")) > 255:
        raise ValueError(f"is {quoted(path, 40)}, {len(path)} characters long; no file system has such a path")
    if path.count("/") > MOST_NESTED:
        raise ValueError(
            f"is {quoted(path, 40)}, {path.count('/')} folders in one another; at most {MOST_NESTED} are taken"
        )
    return path


PathText = Annotated[str, Field(min_length=1), AfterValidator(_path_text)]


Prompt = Annotated[str, Field(min_length=1, max_length=10**6)]
"""That an adapter is asked."""
MOST_PROMPTS = 100


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSource(_Strict):
    """One of several places that a job's samples come from."""

    path: PathText
    """As data.path where that is a text."""
    weight: float | None = Field(None, gt=0, le=1e6)
    """Its share of the samples, divided by the sum of all weights; null: all of its samples once."""


class DataConfig(_Strict):
    """Where a job's samples come from and how long they may be."""

    path: PathText | list[DataSource]
    """A .jsonl, .json, .csv or .parquet file, a pattern of such files (data/*.jsonl), the folder of a saved Hugging Face data
    set, or the id of one on the hub; or a list of these, each with a weight or none."""
    eval_path: PathText | list[PathText] | None = None
    """Held-out samples in the same format; their loss is measured before and after training."""
    system: str | None = Field(None, min_length=1, max_length=10**6)
    """A message of the system, for conversations and prompts without one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that is no sample: refuse the run, or leave it out; run.json lists what was left out."""
    max_length: int = Field(2048, ge=2, le=MOST_TOKENS)
    """Longest sample in tokens."""
    truncate: Literal["error", "drop", "right"] = "error"
    """What to do with a sample longer than max_length or a microbatch: refuse the run, leave it out, or cut off its end."""

    streaming: bool = False
    """Read the samples while training, for data larger than memory; the job's max_steps say how many."""
    shuffle_buffer_size: int | None = Field(None, ge=1, le=10**8)
    """Rows that a stream is shuffled through; null: 1000."""

    @field_validator("path", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        return [{"path": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value

    @field_validator("path", "eval_path")
    @classmethod
    def _enough(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not 1 <= len(value) <= MOST_PATTERNS:
            raise ValueError(f"is a list of {len(value)} paths; from 1 to {MOST_PATTERNS} are taken")
        weighted = [isinstance(one, DataSource) and one.weight is not None for one in value]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"has a weight at number {weighted.index(True)} and none at number {weighted.index(False)}; give every path of "
                "the list a weight, or none of them"
            )
        return value

    @model_validator(mode="after")
    def _streamed(self) -> DataConfig:
        if self.shuffle_buffer_size is not None and not self.streaming:
            raise ValueError("shuffle_buffer_size goes with streaming: true; without it all samples are shuffled")
        if not self.streaming:
            return self
        if any(weight is not None for _, weight in self.sources):
            raise ValueError("streaming takes no weights: they are shares of numbers of samples that nobody knows")
        if self.truncate == "error" or self.on_bad_row == "error":
            raise ValueError(
                "streaming reads rows when training has begun, where an error would end the run; set truncate to drop or "
                "right, and on_bad_row: skip"
            )
        return self

    @property
    def sources(self) -> list[tuple[str, float | None]]:
        """Paths of the training samples with their weights."""
        return [(self.path, None)] if isinstance(self.path, str) else [(one.path, one.weight) for one in self.path]

    @property
    def eval_paths(self) -> list[str]:
        """Paths of the held-out samples."""
        return [self.eval_path] if isinstance(self.eval_path, str) else self.eval_path or []


_CHANGED = "which changes the base weights, and these are shared by all jobs"
OTHER_STARTS = {
    "pissa": _CHANGED, "olora": _CHANGED, "corda": _CHANGED, "loftq": _CHANGED, "lora_ga": _CHANGED,
    "eva": "which takes a pass over the data before training",
}  # fmt: skip
"""Values of PEFT's init_lora_weights that are not taken, and why."""


class AdapterConfig(_Strict):
    """The adapter of a job; the meaning of every key is PEFT's."""

    r: int = Field(16, ge=1, le=MOST_RANK)
    """Rank of A [r, K] and B [N, r]."""
    lora_alpha: float = Field(32, ge=LEAST_ALPHA, le=MOST_ALPHA)
    """The low-rank product is scaled by lora_alpha / r."""
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0)
    """Probability that an element of the low-rank branch's input is dropped."""
    target_parameters: list[str] | None = None
    """Names of parameters that are adapted too: weights of experts, as mlp.experts.down_proj, and of routers."""
    target_modules: str | list[str] = "all-linear"
    """all-linear (all but the output layer; of a model with experts what PEFT takes), a list of module names, or a regular
    expression. It may be empty where target_parameters is not."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead."""
    use_dora: bool = False
    """Weight-decomposed LoRA: a trained magnitude for every output of a layer."""
    dora_dropout: Literal["peft", "low_rank"] = "peft"
    """What lora_dropout drops in a DoRA adapter: as PEFT has it the base product that the magnitude scales as well, which costs
    a second base product; low_rank: the low-rank branch alone, as in LoRA."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained too: none, all of the model, or those of layers with an adapter."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Other ranks, by a name or a regular expression of modules."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Other values of lora_alpha, likewise."""
    exclude_modules: str | list[str] | None = None
    """Modules that target_modules leaves alone: a list of names, or a regular expression."""
    layers_to_transform: int | list[int] | None = None
    """Numbers of the layers whose modules target_modules, a list, means."""
    layers_pattern: str | list[str] | None = None
    """With layers_to_transform: the name of the list of layers, such as layers or h."""
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    """What A and B begin with: true, A random and B zeros; false, both random; gaussian; orthogonal."""
    modules_to_save: list[str] | None = None
    """Linear layers, embeddings and norms of which the job trains a copy of its own."""
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    """Tokens whose rows of the embedding are trained, also of an output layer that is tied to it; or by module."""
    expert_rank: Literal["r", "r // top_k"] = "r"
    """Rank of adapters of experts: r as everywhere, or r divided by the number of experts that a token goes to, with the
    scaling of r. The adapter's rank_pattern and alpha_pattern then say so."""
    init_from: PathText | None = None
    """A PEFT adapter folder to continue from; its adapter_config.json then gives the keys that are not set here."""

    @field_validator("target_parameters")
    @classmethod
    def _some_parameters(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(value):
            raise ValueError("has an empty name; give names of parameters, such as mlp.experts.down_proj")
        if value is not None and len(value) > MOST_PATTERNS:
            raise ValueError(f"has {len(value)} names; at most {MOST_PATTERNS} are taken")
        return value or None

    @field_validator("target_modules")
    @classmethod
    def _some_target(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        if value == [] and info.data.get("target_parameters"):
            return value
        if not value or (isinstance(value, list) and not all(value)):
            raise ValueError("is empty; give all-linear, a list of module names or a regular expression")
        if isinstance(value, str):
            _check_regex(value, value)
        elif len(value) > MOST_PATTERNS:
            raise ValueError(f"has {len(value)} names; at most {MOST_PATTERNS} are taken")
        return value

    @field_validator("exclude_modules", "layers_pattern", "modules_to_save")
    @classmethod
    def _some_names(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        names = [value] if isinstance(value, str) else value or []
        if value is not None and not all(names or [""]):
            raise ValueError("is empty; give names of modules, or leave the key out")
        if len(names) > MOST_PATTERNS:
            raise ValueError(f"has {len(names)} names; at most {MOST_PATTERNS} are taken")
        for name in names:
            _check_regex(name, rf"(^|.*\.){name}($|\..*)")  # as PEFT puts those of modules_to_save together
        return value

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _plain_start(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("gaussian", "orthogonal"):
            why = next((reason for start, reason in OTHER_STARTS.items() if value.startswith(start)), None)
            raise ValueError(
                f"is {quoted(value)}{'' if why is None else ', ' + why}; give true, false, gaussian or orthogonal"
            )
        return value

    @field_validator("layers_to_transform")
    @classmethod
    def _layer_numbers(cls, value: int | list[int] | None) -> int | list[int] | None:
        numbers = [value] if isinstance(value, int) else value or []
        if value is not None and (not numbers or min(numbers) < 0 or len(numbers) > MOST_PATTERNS):
            raise ValueError("is no list of numbers of layers, which count from 0")
        return value

    @field_validator("trainable_token_indices")
    @classmethod
    def _tokens(cls, value: list[int] | dict[str, list[int]] | None) -> list[int] | dict[str, list[int]] | None:
        for name, tokens in (value if isinstance(value, dict) else {} if value is None else {"": value}).items():
            where = f" for {quoted(name)}" if name else ""
            if not tokens or min(tokens) < 0:
                raise ValueError(f"has no tokens{where}, or negative ones; give numbers of tokens")
            if len(set(tokens)) < len(tokens):
                raise ValueError(f"names a token twice{where}")
        if value == {} or (isinstance(value, dict) and not all(value)):
            raise ValueError("names no module; give numbers of tokens, or these by name of a module")
        return value

    @model_validator(mode="after")
    def _layers_of_names(self) -> AdapterConfig:
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError("layers_to_transform goes with a list of names in target_modules")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError("layers_pattern goes with layers_to_transform")
        return self

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _values_in_range(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        least, most = (1, MOST_RANK) if info.field_name == "rank_pattern" else (LEAST_ALPHA, MOST_ALPHA)
        if len(value) > MOST_PATTERNS:
            raise ValueError(f"has {len(value)} patterns; at most {MOST_PATTERNS} are taken")
        for pattern, number in value.items():
            _check_regex(pattern, rf"(.*\.)?({pattern})$")  # as PEFT puts it together
            if not least <= number <= most:
                raise ValueError(f"has {number} for {quoted(pattern)}; it must be from {least:g} to {most:g}")
        return value

    @model_validator(mode="after")
    def _ranks_of_the_folder(self) -> AdapterConfig:
        if self.init_from is not None and self.expert_rank != "r":
            raise ValueError(
                "expert_rank is not for an adapter with init_from, whose folder gives all ranks; leave it out"
            )
        return self


def _check_regex(pattern: str, used: str) -> None:
    """used: what the pattern becomes part of."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"has a pattern of {len(pattern)} characters; at most {MOST_CHARACTERS} are taken")
    try:
        re.compile(used)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: x{99999999999}, ten thousand brackets
        raise ValueError(f"has {quoted(pattern)}, which is not a valid regular expression: {error}") from None


Scheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
    "cosine_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
Optim = Literal[
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit",
    "paged_adamw_32bit", "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit",
]  # fmt: skip
CUT_OPTIMS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Those that step slices of a job as they do the whole one."""
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


Trainer = Literal["sft", "dpo", "kto", "orpo"]
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "discopop", "sft", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
}  # fmt: skip
"""By trainer; the first one is the default."""
OF_A_BATCH = {
    "aot": "sorts the whole global batch", "aot_unpaired": "sorts the whole global batch",
}  # fmt: skip
"""Those of TRL that this version does not take, and why."""
TRAINER_KEYS: dict[str, tuple[str, ...]] = {
    "beta": ("dpo", "kto", "orpo"), "loss_type": ("dpo", "kto"), "loss_weights": ("dpo",), "label_smoothing": ("dpo",),
    "discopop_tau": ("dpo",), "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
}  # fmt: skip
"""Keys of `train` that some trainers alone have."""
HIGHER_IS_BETTER = ("eval_rewards/accuracies", "eval_rewards/margins")
"""Held-out metrics of preferences that may choose the best adapter; of eval_loss the lower is the better."""


class TrainConfig(_Strict):
    """Optimization of one job; the meaning of every key is that of transformers' TrainingArguments."""

    global_batch_size: int = Field(8, ge=1, le=MOST_STEPS)
    """Samples per optimizer step."""
    num_train_epochs: float = Field(1.0, gt=0, le=MOST_STEPS)
    """Passes over the samples; may be a fraction."""
    max_steps: int = Field(-1, ge=-1, le=MOST_STEPS)
    """Optimizer steps; -1 lets num_train_epochs decide, a positive number overrides it."""
    optim: Optim = "adamw_torch"
    """The optimizer. Those with 8bit, paged or lion in their names are bitsandbytes'."""
    learning_rate: float = Field(2e-4, gt=0, le=1e30)
    """The largest one of the schedule."""
    lr_scheduler_type: Scheduler = "constant"
    """How the learning rate goes over the steps, as transformers' schedule of that name."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What else that schedule takes, by transformers' names."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Optimizer steps in which the learning rate rises from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """The same as a share of all steps, rounded up."""
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    """The optimizer's own, which is decoupled but for sgd; not applied to biases."""
    loraplus_lr_ratio: float | None = Field(None, gt=0, le=1e6)
    """LoRA+: B, magnitudes and trained biases have the learning rate times this; null: that of A."""
    label_smoothing_factor: float = Field(0.0, ge=0, lt=1)
    """Share of every label that all words have in equal parts, in training; held-out losses are without."""
    neftune_noise_alpha: float | None = Field(None, gt=0, le=1e6)
    """NEFTune: uniform noise of alpha / sqrt(tokens * width) on the embeddings of training samples; null: none."""
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
    load_best_model_at_end: bool = False
    """The adapter of the evaluation with the best metric_for_best_model is the job's result, not that of its last step."""
    metric_for_best_model: Literal["eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"] = "eval_loss"
    """What decides which adapter is the best, and whether training ends early: the held-out loss, the lower the better; or, of
    pairs, how often and by how much the chosen completion has the higher reward."""
    early_stopping_patience: int | None = Field(None, ge=1, le=MOST_STEPS)
    """End the job after so many evaluations in a row that were no better than the best one before; null never does."""
    early_stopping_threshold: float = Field(0.0, ge=0, le=1e6)
    """By how much one must be better to count."""
    trainer: Trainer = "sft"
    """What is learnt, as TRL's trainers of these names do: sft completions; dpo and orpo which of two completions is preferred;
    kto which completions are desirable."""
    beta: float | None = Field(None, gt=0, le=1e6)
    """dpo, kto: how closely the model is held to the reference, the base model without the adapter; orpo: weight of the odds
    ratio. null: 0.1."""
    loss_type: str | list[str] | None = None
    """dpo: sigmoid, or another of TRL's losses, or a list of these, which are added; kto: kto, or apo_zero_unpaired."""
    loss_weights: list[float] | None = None
    """dpo: of each of loss_type; null: 1 for each."""
    label_smoothing: float | None = Field(None, ge=0, lt=1)
    """dpo, with robust or exo_pair: share of preferences that are taken to be the other way round."""
    discopop_tau: float | None = Field(None, gt=0, le=1e6)
    """dpo, with discopop: its temperature. null: 0.05."""
    desirable_weight: float | None = Field(None, gt=0, le=1e6)
    """kto: of the losses of desirable completions. null: 1."""
    undesirable_weight: float | None = Field(None, gt=0, le=1e6)
    """kto: of the others. null: 1."""

    @property
    def loss_types(self) -> tuple[str, ...]:
        """loss_type as a list."""
        if self.loss_type is None:
            return LOSS_TYPES.get(self.trainer, ())[:1]
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @model_validator(mode="after")
    def _of_the_trainer(self) -> TrainConfig:
        for key, trainers in TRAINER_KEYS.items():
            if getattr(self, key) is not None and self.trainer not in trainers:
                other = "; of completions it is label_smoothing_factor" if key == "label_smoothing" else ""
                raise ValueError(
                    f"{key} is for trainer {' and '.join(trainers)}; this job's trainer is {self.trainer}{other}"
                )
        known, types = LOSS_TYPES.get(self.trainer, ()), self.loss_types
        for name in types if self.loss_type is not None else ():
            why = f", which {OF_A_BATCH[name]} and is not taken" if name in OF_A_BATCH else ""
            if name not in known:
                raise ValueError(f"loss_type has {quoted(name)}{why}; {self.trainer} takes {', '.join(known)}")
        if self.loss_type is not None and (not types or len(set(types)) < len(types)):
            raise ValueError(
                f"loss_type is {quoted(self.loss_type)}; {self.trainer} takes at least one loss, each once"
            )
        if self.trainer == "kto" and len(types) > 1:
            raise ValueError(f"loss_type has {len(types)} losses; kto takes one")
        if types == ("kto",) and self.global_batch_size < 2:
            raise ValueError(
                "global_batch_size is 1; loss_type kto compares with the completions of other samples of the global batch and "
                "takes at least 2; apo_zero_unpaired takes 1"
            )
        if self.loss_weights is not None and len(self.loss_weights) != len(types):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} numbers for {len(types)} losses")
        smoothed = {"robust", "exo_pair"} & set(types)
        if self.label_smoothing and not smoothed:
            raise ValueError("label_smoothing goes with loss_type robust or exo_pair")
        if "exo_pair" in types and not self.label_smoothing:
            raise ValueError("loss_type exo_pair needs label_smoothing above 0, such as 1e-3")
        if "robust" in types and (self.label_smoothing or 0) >= 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; robust takes less than 0.5")
        if "discopop" not in types and self.discopop_tau is not None:
            raise ValueError("discopop_tau goes with loss_type discopop")
        if self.metric_for_best_model != "eval_loss" and self.trainer not in ("dpo", "orpo"):
            raise ValueError(
                f"metric_for_best_model {self.metric_for_best_model} is of pairs, for trainer dpo and orpo"
            )
        return self

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _plain_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        if len(value) > 100:
            raise ValueError(f"has {len(value)} keys; no schedule takes so many")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
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
        self._check_schedule()
        if self.needs_evaluations and not self.eval_steps:
            key = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            raise ValueError(f"{key} needs evaluations between steps; set eval_steps")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold goes with early_stopping_patience; set both")
        return self

    def _check_schedule(self) -> None:
        known = SCHEDULE_KEYS.get(self.lr_scheduler_type, {})
        for key, value in self.lr_scheduler_kwargs.items():
            where = f"lr_scheduler_kwargs has {shown(key, 40)}: {quoted(value, 40)}"
            if key not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(
                    f"{where}, which the schedule {self.lr_scheduler_type!r} does not take; its keys: {listed}"
                )
            rule = known[key]
            if isinstance(rule[0], str):
                if value not in rule:
                    raise ValueError(f"{where}; it is one of {', '.join(map(str, rule))}")
                continue
            kind, least, most = rule
            number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
            if not number or not least <= value <= most:
                raise ValueError(
                    f"{where}; it is {'a whole' if kind is int else 'a'} number from {least:g} to {most:g}"
                )
        given = self.lr_scheduler_kwargs
        if self.lr_scheduler_type == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & given.keys()) != 1:
            raise ValueError(
                "the schedule 'cosine_with_min_lr' needs one of min_lr and min_lr_rate in lr_scheduler_kwargs"
            )
        if self.lr_scheduler_type == "warmup_stable_decay" and "num_decay_steps" not in given:
            raise ValueError("the schedule 'warmup_stable_decay' needs num_decay_steps in lr_scheduler_kwargs")
        for key in ("min_lr", "lr_end"):
            if given.get(key, 0) > self.learning_rate:
                raise ValueError(
                    f"lr_scheduler_kwargs has {key}: {given[key]:g}, which is over the learning rate, {self.learning_rate:g}"
                )

    @property
    def needs_evaluations(self) -> bool:
        """Whether held-out losses decide how the job ends."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    def warmup_of(self, steps: int) -> int:
        """Steps of the warm-up of so many optimizer steps."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * steps)


class JobConfig(_Strict):
    """One adapter to train: its data, its shape, its optimization."""

    name: str
    """Of its folder in output_dir and in messages: 1 to 100 of the characters A-Z a-z 0-9 . _ -, unique in the run."""
    data: DataConfig
    """What it is trained on."""
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    """What is trained."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """How it is trained."""
    sample_prompts: list[Prompt] | None = Field(None, max_length=MOST_PROMPTS)
    """What its adapter is asked whenever it is evaluated; null: the run's."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Of its initial adapter, sample order and dropout; null: the run's. Equal seeds draw equally, whatever the names."""

    @model_validator(mode="after")
    def _evaluated(self) -> JobConfig:
        if self.train.needs_evaluations and not self.data.eval_path:
            key = "load_best_model_at_end" if self.train.load_best_model_at_end else "early_stopping_patience"
            raise ValueError(f"train.{key} needs held-out samples; set data.eval_path")
        return self

    @model_validator(mode="after")
    def _of_completions(self) -> JobConfig:
        own = {
            "train.label_smoothing_factor": self.train.label_smoothing_factor, "data.streaming": self.data.streaming,
            "train.neftune_noise_alpha": self.train.neftune_noise_alpha,
        }  # fmt: skip
        for key, value in own.items():
            if value and self.train.trainer != "sft":
                raise ValueError(
                    f"{key} is for trainer sft; this job's trainer is {self.train.trainer}"
                    + ("; of preferences it is label_smoothing" if key.endswith("factor") else "")
                )
        return self

    @model_validator(mode="after")
    def _streamed(self) -> JobConfig:
        if self.data.streaming and self.train.max_steps < 1:
            raise ValueError(
                "data.streaming does not know how many samples there are, so num_train_epochs says nothing; set "
                "train.max_steps"
            )
        if self.data.streaming and self.train.drop_last:
            raise ValueError(
                "train.drop_last says nothing of a stream, whose global batches are all full; leave it out"
            )
        return self

    @field_validator("name")
    @classmethod
    def _safe_name(cls, name: str) -> str:
        if not JOB_NAME.fullmatch(name) or name in {".", ".."} or len(name) > 100:
            raise ValueError(
                f"is {quoted(name)}, which cannot be a folder name; use 1 to 100 of the characters A-Z a-z 0-9 . _ -"
            )
        if name.lower() in RESERVED_NAMES or name.lower().startswith(TEMPORARY):
            raise ValueError(f"is {name!r}, which packlora itself uses in output_dir; choose another name")
        return name


class ParallelConfig(_Strict):
    """How a run is spread over the processes that torchrun starts, one for each device. auto: the defaults."""

    devices_per_job: int | Literal["auto"] = Field("auto")
    """Devices that share each job's microbatches and add up its gradient. 1: every job is whole on one device. It divides the
    number of processes, and `tensor` divides it. auto: as few as leave no device without work for long."""
    timeout_s: float = Field(600, gt=0, le=1e6)
    """Seconds after which a process that does not answer is given up, and the run ends."""
    pipeline: int | Literal["auto"] = Field("auto")
    """Stages, one behind the other, that hold some of the layers each; microbatches of all jobs pass through them. A stage is a
    device, or as many as tensor says. It divides the number of processes. auto: one, and several where a device is estimated
    to hold no whole base model with what training needs, and they are predicted to be faster than shard_base."""
    tensor: int = Field(1, ge=1)
    """Devices that hold the base model together, a part of each layer's weights each. It divides the number of processes."""
    expert: int = Field(1, ge=1)
    """Devices that hold some of the experts of each layer each, and all else of the base model; they run the same microbatches.
    It divides the number of processes and that of the experts."""
    ep_implementation: Literal["all_reduce", "all_to_all"] = "all_reduce"
    """With expert: all_reduce: its devices run the same microbatches, and what their experts give is added up; all_to_all: each
    has microbatches of its own, whose tokens go to the experts and back."""
    sequence_parallel: bool = False
    """With tensor: share the tokens of what lies between the layers that are cut, too: norms and residuals."""
    shard_base: bool | int | Literal["auto"] = "auto"
    """Hold a part of the rows of every weight on each device, and gather a layer when it is computed. true: all devices share
    the base model so, and every job; with tensor, its slices. A number: so many do, times tensor, and there are several such
    sets. auto: where a device is estimated to hold no whole one with what training needs."""
    offload_base: bool = False
    """With shard_base: keep each device's part of the layers in the memory of its host, and copy it over whenever a layer is
    gathered. It changes no number, takes time, and nothing is gained by it on a CPU."""

    @model_validator(mode="after")
    def _known(self) -> ParallelConfig:
        if self.devices_per_job != "auto" and self.devices_per_job < 1:
            raise ValueError(f"devices_per_job is {self.devices_per_job}; give auto or a number of devices, at least 1")
        if self.pipeline != "auto" and self.pipeline < 1:
            raise ValueError(f"pipeline is {self.pipeline}; give auto or a number of stages, at least 1")
        if self.has_degree and int(self.shard_base) < 2:
            raise ValueError(
                f"shard_base is {self.shard_base}; give true, false, auto or a number of devices, at least 2"
            )
        if self.stages > 1 and self.is_sharded:
            raise ValueError(
                f"pipeline is {self.pipeline} and shard_base is {str(self.shard_base).lower()}, two ways to share the weights: "
                "a stage would gather each of its layers again for every microbatch, and has them in memory as it is; give one"
            )
        for name, other in (("tensor", self.tensor), ("pipeline", self.stages)):
            if self.expert > 1 and other > 1:
                raise ValueError(f"expert is {self.expert} and {name} is {other}, which do not go together; give one")
        if self.expert > 1 and self.is_sharded:
            raise ValueError(
                f"expert is {self.expert} and shard_base is {str(self.shard_base).lower()}, two ways to share the weights; "
                "give one"
            )
        if self.ep_implementation == "all_to_all" and self.expert == 1:
            raise ValueError(
                "ep_implementation is all_to_all, which goes with expert, the devices that share them; set both"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel goes with tensor, the devices that share the tokens; set both")
        if self.offload_base and not self.is_sharded:
            raise ValueError(
                f"offload_base is true and shard_base is {str(self.shard_base).lower()}, but what is kept on the host are the "
                "parts of layers that devices gather from each other; set shard_base to true or a number too"
            )
        parts = {"pipeline": self.stages, "tensor": self.tensor, "expert": self.expert, "shard_base": self.degree or 1}
        together, named = math.prod(parts.values()), " times ".join(key for key, size in parts.items() if size > 1)
        if self.devices_per_job != "auto" and self.devices_per_job % together:
            raise ValueError(
                f"devices_per_job is {self.devices_per_job}, but {together} devices hold the base model together ({named}); "
                f"give a multiple of {together}"
            )
        return self

    @property
    def stages(self) -> int:
        """Of the pipeline that is asked for; 1 where that is left to us."""
        return 1 if self.pipeline == "auto" else self.pipeline

    @property
    def exchanges(self) -> bool:
        """Whether tokens go to experts on other devices and back."""
        return self.ep_implementation == "all_to_all"

    @property
    def in_parts(self) -> str | None:
        """The key by which several devices hold the base model together and run the same microbatches or stages of them; None
        where none is asked for."""
        asked = {"tensor": self.tensor > 1, "pipeline": self.stages > 1, "expert": self.expert > 1}
        return next((key for key, is_asked in asked.items() if is_asked), None)

    @property
    def is_sharded(self) -> bool:
        """Whether devices are asked to share weights by rows."""
        return self.shard_base is True or self.has_degree

    @property
    def has_degree(self) -> bool:
        """Whether shard_base is a number."""
        return isinstance(self.shard_base, int) and not isinstance(self.shard_base, bool)

    @property
    def degree(self) -> int | None:
        """The number of shard_base; None where it has none."""
        return int(self.shard_base) if self.has_degree else None

    def shards(self, processes: int) -> int:
        """Of so many processes, those that share a weight by rows as it is asked for; 1: none."""
        return self.degree or (processes // self.tensor if self.shard_base is True else 1)

    def check(self, processes: int) -> None:
        """Raises InputError where so many processes cannot be divided as asked."""
        each = self.devices_per_job
        started = f"{processes} {'process was' if processes == 1 else 'processes were'} started, one for each device"
        asked = {
            "tensor": self.tensor, "pipeline": self.stages, "expert": self.expert, "shard_base": self.degree or 1
        }  # fmt: skip
        for name, together in asked.items():
            if processes % together:
                raise InputError(
                    f"parallel.{name} is {together}, but {started}; start a multiple of {together}, or give a number that "
                    f"divides {processes}"
                )
        if processes % (self.tensor * self.stages):
            raise InputError(
                f"parallel.pipeline is {self.stages} and parallel.tensor {self.tensor}, but {started}; start a multiple of "
                f"{self.tensor * self.stages}"
            )
        if processes % (self.tensor * (self.degree or 1)):
            raise InputError(
                f"parallel.shard_base is {self.degree} and parallel.tensor {self.tensor}, but {started}; start a multiple of "
                f"{self.tensor * (self.degree or 1)}"
            )
        if self.shard_base is True and processes == 1:
            raise InputError("parallel.shard_base shares the base model over processes, but one process was started")
        if self.shard_base is True and processes == self.tensor:
            raise InputError(
                f"parallel.shard_base shares what each of {self.tensor} devices (parallel.tensor) holds with further ones, but "
                f"{started}; start a multiple of {self.tensor}, at least {2 * self.tensor}, or leave one of them out"
            )
        if self.shard_base is True and each not in ("auto", processes):
            raise InputError(
                f"parallel.devices_per_job is {each}, but with shard_base all {processes} processes share every job; leave it "
                "out"
            )
        if each != "auto" and processes % each:
            raise InputError(
                f"parallel.devices_per_job is {each}, but {started}; give a number that divides {processes}"
            )


class QuantizationConfig(_Strict):
    """How the frozen linear layers are stored; a text in its place is its `method`."""

    method: Literal["nf4", "fp4", "int8", "torchao", "gptq", "awq", "compressed-tensors", "fp8"]
    """By bitsandbytes: nf4, fp4, 4 bits a number, with a scale for each 64 of them; int8, 8 bits, with a scale for each output.
    By torchao: quant_type says how. The others are only for a base_model that is saved so, and may be left out."""
    double_quant: bool = False
    """Of nf4 and fp4: the scales are quantised too, to 8 bits."""
    quant_type: Literal["int4_weight_only", "int8_weight_only", "float8_weight_only"] | None = None
    """Of torchao: 4 bits a number, with a scale and a zero for each group, on CUDA; 8 bits with a scale for each output."""
    group_size: Literal[32, 64, 128, 256] | None = None
    """Of torchao's int4_weight_only: numbers that share a scale; null: 128."""

    @model_validator(mode="after")
    def _consistent(self) -> QuantizationConfig:
        if self.double_quant and self.method not in ("nf4", "fp4"):
            raise ValueError(f"double_quant is true, but the scales of {self.method} are not quantised; leave it out")
        if (self.method == "torchao") != (self.quant_type is not None):
            if self.quant_type is not None:
                raise ValueError(f"quant_type is torchao's, but method is {self.method}; leave it out")
            kinds = "int4_weight_only, int8_weight_only or float8_weight_only"
            raise ValueError(f"method is torchao, so quant_type is needed: {kinds}")
        if self.group_size is not None and self.quant_type != "int4_weight_only":
            raise ValueError("group_size is for torchao's int4_weight_only; leave it out")
        return self

    @property
    def described(self) -> str:
        """In words, for messages."""
        grouped = "" if self.quant_type != "int4_weight_only" else f", group_size {self.group_size or 128}"
        kind = "" if self.quant_type is None else f" {self.quant_type}{grouped}"
        return self.method + kind + " with double_quant" * self.double_quant


class PlansConfig(_Strict):
    """How layers with adapters are computed; a text in its place is its `plan`."""

    plan: str | dict[str, str] = "measured"
    """measured: what `packlora tune` measured on this device, else a cost model on a GPU, the plain chain on a CPU. flops: the
    fewest floating-point operations. Or a plan's name, or a mapping of patterns of module paths to these."""
    lossy: bool = False
    """measured and flops may choose plans that merge weights, and these may be named: they round more than the plain chain."""
    prefer: Literal["time", "memory"] = "time"
    """memory: measured and flops do not keep S, tokens x rank, for the backward where making it again costs little."""

    @field_validator("plan")
    @classmethod
    def _patterns(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        if isinstance(value, dict):
            if len(value) > MOST_PATTERNS:
                raise ValueError(f"has {len(value)} patterns; at most {MOST_PATTERNS} are taken")
            for pattern in value:
                _check_regex(pattern, rf"(.*\.)?({pattern})$")  # as PEFT puts it together
        return value


class ScheduleConfig(_Strict):
    """How samples are shared out to microbatches; decides speed, not results."""

    method: Literal["auto", "greedy", "milp", "solo"] = "auto"
    """solo: jobs never share a microbatch. greedy: best fit. milp: integer programs. auto: these where greedy may be beaten."""
    padding_multiple: int = Field(1, ge=1, le=MOST_TOKENS)
    """Of a job's tokens in a microbatch, as some kernels need it; only `packlora plan` takes another than 1, to compare."""
    time_limit_s: float = Field(10, gt=0, le=1e6)
    """Emergency stop of an integer program; it normally ends earlier, at a number of nodes."""


class RangeConfig(_Strict):
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
"""Of a swept key."""


class StoppingConfig(_Strict):
    """Which candidates of a sweep end before their last step; looked at between windows, by held-out losses."""

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
    """patience: what is better by less is no better."""
    target: float | None = Field(None, gt=0)
    """target: the held-out loss."""

    @model_validator(mode="after")
    def _has_target(self) -> StoppingConfig:
        if (self.target is not None) != (self.method == "target"):
            raise ValueError("method: target goes with a target, the held-out loss to reach, and no other method does")
        return self


class SweepConfig(_Strict):
    """Candidates of one job which differ in some keys. They train together, and share every forward of the base model."""

    job: str
    """The job of the list that they are made from; it is not trained itself."""
    parameters: dict[str, Values]
    """By dotted key of the job, e.g. train.learning_rate, its values, or their range."""
    method: Literal["grid", "random", "optuna"] = "grid"
    """grid: all combinations. random: drawn. optuna: by its TPE sampler, which learns from candidates that have ended."""
    num_trials: int | None = Field(None, ge=1, le=100_000)
    """Candidates, with random and optuna."""
    concurrent: int = Field(8, ge=1, le=10_000)
    """Candidates that train at the same time; when one ends, the next one takes its place."""
    metric: Literal["eval_loss"] = "eval_loss"
    """What is compared: the held-out loss."""
    stopping: StoppingConfig = Field(default_factory=StoppingConfig)
    """Which of them end early."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Of what random and optuna draw; null: the run's. All candidates have the seed of the job, and differ in nothing else."""

    @model_validator(mode="after")
    def _whole(self) -> SweepConfig:
        if not self.parameters:
            raise ValueError(
                "parameters is empty; give values of at least one key, such as train.learning_rate: [1e-4, 2e-4]"
            )
        for key, values in self.parameters.items():
            if key.partition(".")[0] == "name" or key == "data.eval_path":
                raise ValueError(f"{key} cannot be swept: candidates are named and compared by it")
            if isinstance(values, list) and not values:
                raise ValueError(f"{key} has no values")
            if isinstance(values, RangeConfig) and self.method == "grid":
                raise ValueError(f"{key} is a range, and a grid takes lists; list its values, or use random or optuna")
        if self.method != "grid" and self.num_trials is None:
            raise ValueError(f"method {self.method} needs num_trials, the number of candidates")
        if self.method == "grid" and self.num_trials is not None:
            raise ValueError(
                f"num_trials is {self.num_trials}, but the method is grid, which has all combinations; leave it out, or use "
                "random or optuna"
            )
        return self


class Run(_Strict):
    """A whole run: one frozen base model and the jobs that share it. Its fields are the keys of a run file.

    Raises:
        pydantic.ValidationError: a value is of the wrong type or out of range. packlora.train makes InputError of it for a run
            file or a dict, with the job's name and the nearest known key.
    """

    base_model: PathText
    """A local folder, a Hugging Face model id, or smollm2-135m for the packaged demo model."""
    revision: PathText | None = None
    """Branch, tag or commit of a base model on the hub; null: its main branch."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of the base model and the activations; adapters and optimizer state are float32 (float64 is for verification)."""
    quantization: QuantizationConfig | None = None
    """Quantise the frozen linear layers while they are loaded, as QLoRA does: nf4, fp4 or int8, or a mapping: double_quant, or
    method torchao with its quant_type. They are multiplied in dtype. null: as they are saved."""
    device: str = Field("auto", max_length=100)
    """auto takes the GPU if there is one; cpu, cuda or cuda:1 insist."""
    output_dir: PathText
    """Folder for adapters, checkpoints, logs and the report: new, empty, or one that holds this run, to resume it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of jobs that have none of their own."""
    max_tokens_per_microbatch: int | Literal["auto"] = 4096
    """Most tokens, of all jobs together, in one forward and backward: decides memory and speed, not results. auto: by
    measurements on a GPU, 2048 on a CPU, at least the longest sample."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them: less memory, more time."""
    save_every: int = Field(50, ge=0)
    """Optimizer steps of a job between its checkpoints; 0 only at the end."""
    save_total_limit: int | None = Field(2, ge=1)
    """Checkpoints of a job to keep, the newest ones; null keeps all."""
    eval_every: int = Field(0, ge=0)
    """Optimizer steps of a job between evaluations of its eval_path; 0 only before and after training."""
    trust_remote_code: bool = False
    """Let the base model's repository run code of its own."""
    liger: bool | Literal["auto"] = "auto"
    """Fused norms, liger-kernel's rotary embedding and gated activations; auto takes what is installed and fits, on a GPU."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Microbatches run as CUDA graphs, so that the host does not set the pace; auto where the model and the jobs allow it."""
    keep_outputs: bool = False
    """DoRA layers keep their outputs in the place of a product as large. Not for models with kernels, other than liger's, that
    write into the outputs of linear layers behind autograd's back."""
    plans: PlansConfig = Field(default_factory=PlansConfig)
    """How layers with adapters are computed: decides speed and memory, and with lossy how they are rounded."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How a run is spread over devices."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """How samples are shared out to microbatches."""
    sample_prompts: list[Prompt] = Field(default_factory=list, max_length=MOST_PROMPTS)
    """What each job's adapter is asked whenever it is evaluated; samples.jsonl and the page show what it writes."""
    sample_max_new_tokens: int = Field(64, ge=1, le=MOST_TOKENS)
    """Most tokens of what it writes."""
    trackers: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(default_factory=list)
    """Who else is told of steps and held-out losses; on this machine, unless their own settings say otherwise."""
    sweep: SweepConfig | None = None
    """Search for the best values of a job's keys."""
    jobs: list[JobConfig] = Field(min_length=1)
    """The adapters to train, at least one, all at the same time."""

    def prompts_of(self, job: JobConfig) -> list[str]:
        """What a job's adapter is asked whenever it is evaluated: its own prompts or the run's."""
        return self.sample_prompts if job.sample_prompts is None else job.sample_prompts

    def seed_of(self, job: JobConfig) -> int:
        """The seed, 0 to 2**63 - 1, that a job draws from: its own or the run's."""
        return self.seed if job.seed is None else job.seed

    @field_validator("parallel", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" else value

    @field_validator("quantization", mode="before")
    @classmethod
    def _one_method(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @field_validator("plans", mode="before")
    @classmethod
    def _one_plan(cls, value: Any) -> Any:
        return {"plan": value} if isinstance(value, str) else value

    @field_validator("max_tokens_per_microbatch")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 2 <= value <= MOST_TOKENS:
            raise ValueError(f"is {value}; give auto or a number of tokens, at least 2 and at most {MOST_TOKENS}")
        return value

    @model_validator(mode="after")
    def _whole_codes(self) -> Run:
        if self.quantization is not None:
            self.check_quantized("quantization", self.quantization.method in ("nf4", "fp4", "int8"))
        return self

    def check_quantized(self, what: str, made: bool = False) -> None:
        """Raises ValueError where a setting does not go with a quantised base model.

        Args:
            what: makes it one, for the message.
            made: by bitsandbytes while the model is loaded, so that each process makes the codes of its own rows.
        """
        key = "shard_base" if self.parallel.is_sharded and not made else self.parallel.in_parts
        if key is not None:
            better = (
                "; shard_base takes those of quantization: nf4, fp4 and int8, of a base_model that is saved as floats"
            )
            raise ValueError(
                f"parallel.{key} does not take quantised layers apart ({what}){better}; leave one of them out"
            )
        if self.cuda_graphs is True:
            raise ValueError(
                f"cuda_graphs: true is not for quantised layers ({what}); leave it at auto, which is off there"
            )

    @model_validator(mode="after")
    def _cut_as_it_can_be(self) -> Run:
        key = self.parallel.in_parts
        for job in self.jobs if key is not None else ():
            if job.train.optim not in CUT_OPTIMS:
                raise ValueError(
                    f"jobs: job {job.name!r} has train.optim: {job.train.optim}, which parallel.{key} does not take; use "
                    f"one of {', '.join(CUT_OPTIMS)}"
                )
        return self

    @model_validator(mode="after")
    def _no_stages_for_prompts(self) -> Run:
        asked = [job.name for job in self.jobs if self.prompts_of(job)]
        if asked and self.parallel.stages > 1:
            raise ValueError(
                f"job {asked[0]!r} has sample_prompts, whose answers this version generates on devices that have all layers, "
                f"but with parallel.pipeline {self.parallel.stages} each has some; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> Run:
        seen: dict[str, str] = {}
        for job in self.jobs:  # case-insensitive file systems would mix two such folders
            if job.name.lower() in seen:
                raise ValueError(
                    f"jobs: the name {job.name!r} is used twice (also as {seen[job.name.lower()]!r}); "
                    "job names become folders and must be unique, ignoring case"
                )
            seen[job.name.lower()] = job.name
        return self

    @model_validator(mode="after")
    def _sweep_has_what_it_needs(self) -> Run:
        if self.sweep is None:
            return self
        for job in self.jobs:
            if job.name.lower() in RESERVED_BY_SWEEPS:
                raise ValueError(
                    f"jobs: a sweep itself uses {job.name!r} in output_dir; choose another name for the job"
                )
        template = next((job for job in self.jobs if job.name == self.sweep.job), None)
        if template is None:
            names = ", ".join(job.name for job in self.jobs)
            raise ValueError(f"sweep.job: there is no job {quoted(self.sweep.job)}; there are {names}")
        if template.data.eval_path is None:
            raise ValueError(
                f"sweep: job {template.name!r} has no data.eval_path, by whose loss candidates are compared"
            )
        if self.sweep.stopping.method != "none" and not self.eval_every:
            raise ValueError(
                "sweep.stopping: held-out losses decide, and eval_every is 0; set how often they are measured"
            )
        return self
