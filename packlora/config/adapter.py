"""Keys of a job's adapter; names and meanings are PEFT's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from packlora.config.shared import LEAST_ALPHA, MOST_ALPHA, MOST_PATTERNS, MOST_RANK, PathText, Strict, check_regex
from packlora.errors import quoted
from packlora.starts import STARTS, is_doubled

_OF_DATA = "which takes a pass over the data before training, and changes the base weights"
OTHER_STARTS = {
    "corda": _OF_DATA,
    "lora_ga": _OF_DATA,
    "eva": "which takes a pass over the data before training, by which ranks are shared out (an adapter made with PEFT's "
    "initialize_lora_eva_weights and save_pretrained can be continued: init_from)",
}
"""Values of PEFT's init_lora_weights that are not taken, and why."""


class AdapterConfig(Strict):
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
    """Part of a DoRA layer that lora_dropout applies to. peft: also the base product that the magnitude scales, as in PEFT,
    which costs a second base product; low_rank: the low-rank branch only, as in LoRA."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained too: none, all of the model, or those of layers with an adapter."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Ranks that differ from r, by a name or a regular expression of modules."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    """Alphas that differ from lora_alpha, by a name or a regular expression of modules."""
    exclude_modules: str | list[str] | None = None
    """Modules that target_modules leaves alone: a list of names, or a regular expression."""
    layers_to_transform: int | list[int] | None = None
    """Numbers of the layers whose modules target_modules, a list, means."""
    layers_pattern: str | list[str] | None = None
    """Name of the list of layers, such as layers or h, for layers_to_transform."""
    init_lora_weights: bool | str = True
    """Initial values of A and B. true: A random and B zeros; false: both random; gaussian; orthogonal; pissa, pissa_niter_4 and
    olora: from the weights of the base; loftq: from the error of their quantization."""
    modules_to_save: list[str] | None = None
    """Linear layers, embeddings and norms that the job trains a copy of."""
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
            check_regex(value, value)
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
            check_regex(name, rf"(^|.*\.){name}($|\..*)")  # PEFT's form of modules_to_save
        return value

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _plain_start(cls, value: Any) -> Any:
        if isinstance(value, str) and STARTS.fullmatch(value) is None:
            why = next((reason for start, reason in OTHER_STARTS.items() if value.startswith(start)), None)
            raise ValueError(
                f"is {quoted(value)}{'' if why is None else ', ' + why}; give true, false, gaussian, orthogonal, pissa, "
                "pissa_niter_4 (1 to 99), olora or loftq"
            )
        return value

    @property
    def is_doubled(self) -> bool:
        """Whether its adapter has twice the rank; the second half is never trained."""
        return is_doubled(self.init_lora_weights)

    @model_validator(mode="after")
    def _start_is_not_dropped(self) -> AdapterConfig:
        of_folder = self.init_from is not None and "lora_dropout" not in self.model_fields_set
        if self.is_doubled and self.lora_dropout and not of_folder:
            raise ValueError(
                f"init_lora_weights is {self.init_lora_weights}, and lora_dropout {self.lora_dropout:g} would drop the "
                "principal part of the base; set lora_dropout: 0"
            )
        return self

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
            check_regex(pattern, rf"(.*\.)?({pattern})$")  # PEFT's form of the pattern
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
