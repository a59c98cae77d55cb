"""Keys of a job's adapter; names and meanings are PEFT's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from packlora.config.shared import (
    LEAST_ALPHA,
    MOST_ALPHA,
    MOST_PATTERNS,
    MOST_RANK,
    PathText,
    Pattern,
    Strict,
    check_regex,
)
from packlora.errors import quoted
from packlora.lora_config import STARTS, is_doubled

_OF_DATA = "which takes a pass over the data before training, and changes the base weights"
OTHER_STARTS = {
    "corda": _OF_DATA,
    "lora_ga": _OF_DATA,
    "eva": "which takes a pass over the data before training, by which ranks are shared out (an adapter made with PEFT's "
    "initialize_lora_eva_weights and save_pretrained can be continued: init_from)",
}
"""Values of PEFT's init_lora_weights that are not taken, and why."""


def _once(tokens: list[int]) -> list[int]:
    if len(set(tokens)) < len(tokens):
        raise ValueError("names a token twice")
    return tokens


Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]
Alpha = Annotated[float, Field(ge=LEAST_ALPHA, le=MOST_ALPHA)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Name], Field(max_length=MOST_PATTERNS)]
Number = Annotated[int, Field(ge=0)]
Numbers = Annotated[list[Number], Field(min_length=1, max_length=MOST_PATTERNS)]
Tokens = Annotated[list[Number], Field(min_length=1), AfterValidator(_once)]


class AdapterConfig(Strict):
    """The adapter of a job; the meaning of every key is PEFT's."""

    r: Rank = 16
    """Rank of A [r, K] and B [N, r]."""
    lora_alpha: Alpha = 32
    """The low-rank product is scaled by lora_alpha / r."""
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0)
    """Probability that an element of the low-rank branch's input is dropped."""
    target_parameters: Names | None = None
    """Names of parameters that are adapted too: weights of experts, as mlp.experts.down_proj, and of routers."""
    target_modules: str | Names = "all-linear"
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
    rank_pattern: dict[Pattern, Rank] = Field(default_factory=dict, max_length=MOST_PATTERNS)
    """Ranks that differ from r, by a name or a regular expression of modules."""
    alpha_pattern: dict[Pattern, Alpha] = Field(default_factory=dict, max_length=MOST_PATTERNS)
    """Alphas that differ from lora_alpha, by a name or a regular expression of modules."""
    exclude_modules: str | Names | None = None
    """Modules that target_modules leaves alone: a list of names, or a regular expression."""
    layers_to_transform: Number | Numbers | None = None
    """Numbers of the layers whose modules target_modules, a list, means."""
    layers_pattern: str | Names | None = None
    """Name of the list of layers, such as layers or h, for layers_to_transform."""
    init_lora_weights: bool | str = True
    """Initial values of A and B. true: A random and B zeros; false: both random; gaussian; orthogonal; pissa, pissa_niter_4 and
    olora: from the weights of the base; loftq: from the error of their quantization."""
    modules_to_save: Names | None = None
    """Linear layers, embeddings and norms that the job trains a copy of."""
    trainable_token_indices: Tokens | Annotated[dict[Name, Tokens], Field(min_length=1)] | None = None
    """Tokens whose rows of the embedding are trained, also of an output layer that is tied to it; or by module."""
    expert_rank: Literal["r", "r // top_k"] = "r"
    """Rank of adapters of experts: r as everywhere, or r divided by the number of experts that a token goes to, with the
    scaling of r. The adapter's rank_pattern and alpha_pattern then say so."""
    init_from: PathText | None = None
    """A PEFT adapter folder to continue from; its adapter_config.json then gives the keys that are not set here."""

    @field_validator("target_parameters")
    @classmethod
    def _some_parameters(cls, value: list[str] | None) -> list[str] | None:
        return value or None

    @field_validator("target_modules")
    @classmethod
    def _some_target(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        if value == [] and info.data.get("target_parameters"):
            return value
        if not value:
            raise ValueError("is empty; give all-linear, a list of module names or a regular expression")
        if isinstance(value, str):
            check_regex(value, value)
        return value

    @field_validator("exclude_modules", "layers_pattern", "modules_to_save")
    @classmethod
    def _some_names(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and not value:
            raise ValueError("is empty; give names of modules, or leave the key out")
        for name in [value] if isinstance(value, str) else value or []:
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
        # what a folder says of it is checked by runtime/continued.py
        if self.is_doubled and self.lora_dropout and self.init_from is None:
            raise ValueError(
                f"init_lora_weights is {self.init_lora_weights}, and lora_dropout {self.lora_dropout:g} would drop the "
                "principal part of the base; set lora_dropout: 0"
            )
        return self

    @model_validator(mode="after")
    def _layers_of_names(self) -> AdapterConfig:
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError("layers_to_transform goes with a list of names in target_modules")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError("layers_pattern goes with layers_to_transform")
        return self

    @model_validator(mode="after")
    def _ranks_of_the_folder(self) -> AdapterConfig:
        if self.init_from is not None and self.expert_rank != "r":
            raise ValueError(
                "expert_rank is not for an adapter with init_from, whose folder gives all ranks; leave it out"
            )
        return self
