"""A job's adapter given as PEFT's LoraConfig: its fields as the keys of the run file."""

from __future__ import annotations

import dataclasses
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL_TARGETS

from packlora.config import AdapterConfig
from packlora.config.adapter import OTHER_STARTS
from packlora.errors import InputError, quoted

WITHOUT_EFFECT = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "fan_in_fan_out", "megatron_core", "qalora_group_size",
}  # fmt: skip
"""Fields that say nothing of what is trained here: who wrote it, names that the run gives, the layout of a weight, which PEFT
corrects by the kind of its layer, and details of features that are refused. task_type and inference_mode are looked at."""


def adapter_keys(config: Any, job: str) -> dict[str, Any]:
    """Keys of a job's adapter that mean what a LoraConfig means, PEFT's defaults included; without target_modules where PEFT
    chooses these by the model, see usual_targets.

    Raises:
        InputError: a field is set to what packlora does not support.
    """
    if not isinstance(config, LoraConfig):
        kind = type(config).__name__
        what = "which is not LoRA" if isinstance(config, PeftConfig) else "which is none"
        raise InputError(f"job {job!r}: adapter is a {kind}, {what}; give a dict of keys or a peft.LoraConfig")

    def refused(name: str, value: Any) -> InputError:
        return InputError(
            f"job {job!r}: adapter: LoraConfig has {name} {quoted(value)}, which packlora does not support"
        )

    if config.task_type not in (None, "CAUSAL_LM"):
        raise refused("task_type", getattr(config.task_type, "value", config.task_type))
    if config.inference_mode:
        raise InputError(f"job {job!r}: adapter: LoraConfig has inference_mode True, with which nothing is trained")
    keys, start = dict[str, Any](), config.init_lora_weights
    of_start = {f"{start}_config"} if start in OTHER_STARTS else set()
    # PEFT fills it in; the run file refuses such a start by the name of the start
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in AdapterConfig.model_fields:
            if value is not None:
                keys[field.name] = _as_key(value)
        elif field.name not in WITHOUT_EFFECT | of_start and value != _default(field):
            raise refused(field.name, value)
    if config.target_modules is None and config.target_parameters:
        keys["target_modules"] = []
    return keys


def _as_key(value: Any) -> Any:
    """PEFT keeps lists as sets."""
    if isinstance(value, set | tuple):
        return sorted(value)
    return dict(value) if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def usual_targets(job: str, model_type: str) -> str | list[str]:
    """Modules that PEFT adapts in models of a type where target_modules is None. Raises InputError where it knows none."""
    found = USUAL_TARGETS.get(model_type)
    if found is None:
        raise InputError(
            f"job {job!r}: adapter: LoraConfig has no target_modules, and PEFT knows none for a {model_type} model; set "
            "target_modules, for example to 'all-linear'"
        )
    return found if isinstance(found, str) else list(found)
