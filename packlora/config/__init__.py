"""Run file as strict pydantic models: its keys, their defaults and the values that are accepted.

Names follow PEFT's LoraConfig and transformers' TrainingArguments. run_file.py reads the models from YAML and words the
messages. Checks that need the model, the tokenizer or the data are left to the code that loads them.
"""

from __future__ import annotations

from typing import Any

from packlora.changes import plugin
from packlora.config.adapter import OTHER_STARTS, AdapterConfig
from packlora.config.computing import PlansConfig, QuantizationConfig, ScheduleConfig
from packlora.config.data import DataConfig, DataSource
from packlora.config.job import JobConfig
from packlora.config.parallel import ParallelConfig
from packlora.config.run import Run
from packlora.config.shared import (
    JOB_NAME,
    LEAST_ALPHA,
    MOST_ALPHA,
    MOST_CHARACTERS,
    MOST_NESTED,
    MOST_PATTERNS,
    MOST_PROMPTS,
    MOST_RANK,
    MOST_STEPS,
    MOST_TOKENS,
    RESERVED_NAMES,
    PathText,
    Prompt,
)
from packlora.config.train import (
    BASE,
    CUT_OPTIMS,
    HIGHER_IS_BETTER,
    LOSS_TYPES,
    OF_A_BATCH,
    SCHEDULE_KEYS,
    TRAINER_KEYS,
    Optim,
    Scheduler,
    TrainConfig,
    Trainer,
)

__all__ = [
    "BASE",
    "CUT_OPTIMS",
    "HIGHER_IS_BETTER",
    "JOB_NAME",
    "LEAST_ALPHA",
    "LOSS_TYPES",
    "MOST_ALPHA",
    "MOST_CHARACTERS",
    "MOST_NESTED",
    "MOST_PATTERNS",
    "MOST_PROMPTS",
    "MOST_RANK",
    "MOST_STEPS",
    "MOST_TOKENS",
    "OF_A_BATCH",
    "OTHER_STARTS",
    "RESERVED_NAMES",
    "SCHEDULE_KEYS",
    "TRAINER_KEYS",
    "AdapterConfig",
    "DataConfig",
    "DataSource",
    "JobConfig",
    "Optim",
    "ParallelConfig",
    "PathText",
    "PlansConfig",
    "Prompt",
    "QuantizationConfig",
    "Run",
    "ScheduleConfig",
    "Scheduler",
    "TrainConfig",
    "Trainer",
]

_OF_PLUGINS = ("RESERVED_BY_SWEEPS", "RangeConfig", "StoppingConfig", "SweepConfig", "Values")
"""Names that stand in the plug-in of their section, which is imported where one is used."""


def __getattr__(name: str) -> Any:
    if name not in _OF_PLUGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(plugin("config"), name)
