"""Configuration of an adapter as PEFT's files have it, what it begins with, and the modules that its names and patterns mean.

PEFT itself is not imported: that takes seconds, of which a run would use none. Defaults, the order of keys and the rules of
names are PEFT's, and tests hold them against the installed one.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any, Literal

from packlora.patterns import pattern_key

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter folder."""
Task = Literal["SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]
"""Kinds of models that PEFT names."""

STARTS = re.compile(r"gaussian|orthogonal|pissa(_niter_[1-9]\d?)?|olora|loftq")
"""Values of init_lora_weights that are taken by name: what A and B begin with."""
OF_WEIGHTS = re.compile(r"pissa.*|olora|loftq")
"""Starts that are made of the weights of the base, see adapters/starts.py."""
_DOUBLED = re.compile(r"pissa.*|olora")


def is_doubled(start: bool | str | None) -> bool:
    """Whether an adapter that begins so is saved with twice the rank, of which the first half is trained."""
    return _DOUBLED.fullmatch(str(start)) is not None


@dataclass
class LoraConfig:
    """Keys of an adapter_config.json, in the order of the file."""

    task_type: str | None = None
    peft_type: str = "LORA"
    auto_mapping: dict[str, Any] | None = None
    peft_version: str = field(default_factory=lambda: version("peft"))
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False
    r: int = 8
    target_modules: Any = None
    """A text, a regular expression for whole paths, or a set of names."""
    exclude_modules: Any = None
    """The same."""
    lora_alpha: Any = 8
    lora_dropout: float = 0.0
    fan_in_fan_out: bool = False
    bias: str = "none"
    use_rslora: bool = False
    modules_to_save: Any = None
    init_lora_weights: Any = True
    layers_to_transform: Any = None
    layers_pattern: Any = None
    rank_pattern: dict[str, Any] = field(default_factory=dict)
    alpha_pattern: dict[str, Any] = field(default_factory=dict)
    megatron_config: Any = None
    megatron_core: str | None = "megatron.core"
    trainable_token_indices: Any = None
    loftq_config: Any = field(default_factory=dict)
    eva_config: Any = None
    corda_config: Any = None
    lora_ga_config: Any = None
    use_dora: bool = False
    velora_config: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: bool = False
    qalora_group_size: int = 16
    monteclora_config: Any = None
    layer_replication: Any = None
    lora_bias: bool = False
    target_parameters: Any = None
    use_bdlora: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    ensure_weight_tying: bool = False

    def __post_init__(self) -> None:
        for key in ("target_modules", "exclude_modules"):
            if isinstance(value := getattr(self, key), list):
                setattr(self, key, set(value))

    def to_dict(self) -> dict[str, Any]:
        """Keys and values, in the order of the file."""
        return {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self)}


def is_excluded(config: LoraConfig, path: str) -> bool:
    """Whether exclude_modules or modules_to_save takes a module away from the adapter."""
    excluded = config.exclude_modules
    by_name = _is_meant(excluded, path) if excluded else False
    return by_name or any(re.match(rf"(^|.*\.){own}($|\..*)", path) for own in config.modules_to_save or ())


def is_target(config: LoraConfig, path: str) -> bool:
    """Whether target_modules means a module, and nothing takes it away."""
    targets = config.target_modules
    if is_excluded(config, path) or not targets or not _is_meant(targets, path):
        return False
    wanted = config.layers_to_transform
    if wanted is None or wanted == [] or isinstance(targets, str) or path in targets:
        return True
    number = _layer_number(config.layers_pattern, path)
    return number is not None and number in ([wanted] if isinstance(wanted, int) else wanted)


def _is_meant(names: Any, path: str) -> bool:
    """Whether an expression matches a whole path, or it is one of these names or ends with one."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return path in names or any(path.endswith(f".{name}") for name in names)


def _layer_number(pattern: Any, path: str) -> int | None:
    """Number of the layer that a path lies in; None where it is in no list of layers of that name."""
    names = [pattern] if isinstance(pattern, str) and pattern else pattern or []
    begins = [rf"(?:^|.*?\.){name}" for name in names] or [r".*?\.[^.]*"]
    found = next((match for begin in begins if (match := re.match(rf"{begin}\.(?P<idx>\d+)\.", path))), None)
    return None if found is None else int(found["idx"])


def is_all_linear(target_modules: Any) -> bool:
    return isinstance(target_modules, str) and target_modules.lower() == "all-linear"


def rank_and_alpha(peft: LoraConfig, *names: str) -> tuple[int, float]:
    """Rank and alpha of a module or parameter by the patterns of a configuration, which may mean it by any of these names."""

    def own(patterns: Mapping[str, Any], usual: Any) -> Any:
        keys = [pattern_key(patterns.keys(), name) for name in names]
        return next((patterns[key] for key in keys if key in patterns), usual)

    return own(peft.rank_pattern, peft.r), own(peft.alpha_pattern, peft.lora_alpha)


def scaling_of(peft: LoraConfig, rank: int, alpha: float) -> float:
    return alpha / (math.sqrt(rank) if peft.use_rslora else rank)
