"""Keys of a job."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from packlora.config.adapter import AdapterConfig
from packlora.config.data import DataConfig
from packlora.config.section import Section
from packlora.config.shared import JOB_NAME, MOST_PROMPTS, RESERVED_NAMES, Prompt, Strict
from packlora.config.train import BASE, TrainConfig
from packlora.errors import quoted
from packlora.files import TEMPORARY
from packlora.portable import why_no_file


class JobConfig(Strict):
    """One adapter to train: its data, its shape, its optimization."""

    name: str
    """Name in messages and of the folder in output_dir: 1 to 100 of the characters A-Z a-z 0-9 . _ -, unique in the run."""
    data: DataConfig
    """Samples that the job is trained on."""
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    """Adapter that is trained."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Optimization of the adapter."""
    rollout: Annotated[Any, Section(lambda: import_module("packlora.rl.config").RolloutConfig)] = None
    """Completions that the adapter generates while it trains, and their rewards, for trainer grpo."""
    sample_prompts: list[Prompt] | None = Field(None, max_length=MOST_PROMPTS)
    """Prompts that its adapter completes at every evaluation; null: the run's."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of its initial adapter, sample order and dropout; null: the run's. Equal seeds draw equally, whatever the names."""

    @property
    def has_reference(self) -> bool:
        """Whether its model is held to another one."""
        return "reference" in self.train.declared.shared

    @property
    def reference_adapter(self) -> str | None:
        """The folder of the adapter with which that is; None where it is the base model alone, or there is none."""
        asked = self.adapter.init_from if self.train.reference is None else self.train.reference
        return asked if self.has_reference and asked != BASE else None

    @model_validator(mode="before")
    @classmethod
    def _without_dropout(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("rollout") is None:
            return value
        adapter = value.get("adapter") or {}
        if not isinstance(adapter, Mapping) or "lora_dropout" in adapter or adapter.get("init_from") is not None:
            return value
        return {**value, "adapter": {**adapter, "lora_dropout": 0.0}}

    @model_validator(mode="after")
    def _rewarded(self) -> JobConfig:
        if self.rollout is not None:
            self.rollout.check(self)
        elif self.train.declared.rows == "rewards":
            raise ValueError(
                f"train.trainer {self.train.trainer} learns from rewards of what the adapter generates; set rollout"
            )
        return self

    @model_validator(mode="after")
    def _evaluated(self) -> JobConfig:
        if self.train.needs_evaluations and not self.data.holds_out:
            key = "load_best_model_at_end" if self.train.load_best_model_at_end else "early_stopping_patience"
            raise ValueError(f"train.{key} needs held-out samples; set data.eval_path or data.eval_split")
        return self

    @model_validator(mode="after")
    def _of_completions(self) -> JobConfig:
        own = {
            "train.label_smoothing_factor": self.train.label_smoothing_factor, "data.streaming": self.data.streaming,
            "train.neftune_noise_alpha": self.train.neftune_noise_alpha,
        }  # fmt: skip
        for key, value in own.items():
            if value and self.train.declared.rows != "completions":
                raise ValueError(
                    f"{key} is for trainer sft; this job's trainer is {self.train.trainer}"
                    + ("; of preferences it is label_smoothing" if key.endswith("factor") else "")
                )
        return self

    @model_validator(mode="after")
    def _streamed(self) -> JobConfig:
        if self.data.streaming and self.train.reads_fields:
            raise ValueError(
                "train.objective or a loss of fields is tried on all rows before training, which data.streaming reads later"
            )
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
        if (reason := why_no_file(name)) is not None:
            raise ValueError(f"is {name!r}, which {reason}; choose another name")
        return name
