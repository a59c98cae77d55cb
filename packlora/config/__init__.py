"""Run file as strict pydantic models: its keys, their defaults and the values that are accepted.

Names follow PEFT's LoraConfig and transformers' TrainingArguments. run_file.py reads the models from YAML, run_file_errors.py
words the messages. Checks that need the model, the tokenizer or the data are left to the code that loads them.
"""

from __future__ import annotations

from packlora.config.adapter import AdapterConfig
from packlora.config.computing import PlansConfig, QuantizationConfig, ScheduleConfig
from packlora.config.data import DataConfig, DataSource
from packlora.config.job import JobConfig
from packlora.config.parallel import ParallelConfig
from packlora.config.run import Run
from packlora.config.shared import MOST_NESTED
from packlora.config.train import BASE, BUILT_IN, CUT_OPTIMS, HIGHER_IS_BETTER, TrainConfig

__all__ = [
    "BASE", "BUILT_IN", "CUT_OPTIMS", "HIGHER_IS_BETTER", "MOST_NESTED", "AdapterConfig", "DataConfig", "DataSource",
    "JobConfig", "ParallelConfig", "PlansConfig", "QuantizationConfig", "Run", "ScheduleConfig", "TrainConfig",
]  # fmt: skip
