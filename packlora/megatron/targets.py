"""Which layers of a Megatron-Core model a configuration adapts, and how: matching is PEFT's, on the names of layers.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from packlora.adapters.files import UNSUPPORTED
from packlora.adapters.spec import AdapterSpec, ModuleSpec, peft_config
from packlora.config import AdapterConfig
from packlora.errors import InputError, quoted
from packlora.megatron.layers import Found, check

STARTS: tuple[object, ...] = (True, "gaussian")
"""Values of init_lora_weights: A as PEFT's linear layers have it, or normal with a deviation of 1 / r. B is zero."""
OF_TRANSFORMERS = {
    "modules_to_save": None, "trainable_token_indices": None, "target_parameters": None, "fan_in_fan_out": False,
}  # fmt: skip
"""Keys, with the value they have when unused, that adapters on models of transformers alone have."""
SPLIT = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
}  # fmt: skip
"""By Megatron-Core's leaf, those of transformers' models that are in it."""
NOT_ALL_LINEAR = ("output_layer",)
"""What all-linear leaves out, beside routers and embeddings."""


def config_of(given: LoraConfig | AdapterConfig, name: str) -> LoraConfig:
    """As PEFT has it.

    Raises:
        InputError: it uses what is not computed here.
    """
    config = peft_config(given, "", None) if isinstance(given, AdapterConfig) else given
    if not isinstance(config, LoraConfig):
        raise InputError(
            f"adapter {name!r}: a peft.LoraConfig or an adapter of a run file is needed, not {type(given).__name__}"
        )
    if isinstance(given, AdapterConfig) and given.expert_rank != "r":
        raise InputError(f"adapter {name!r}: expert_rank is set, which adapters on Megatron-Core models do not support")
    for key, unused in (UNSUPPORTED | OF_TRANSFORMERS).items():
        if getattr(config, key, unused) not in (unused, None, False, []):
            raise InputError(f"adapter {name!r}: {key} is set, which adapters on Megatron-Core models do not support")
    if config.bias != "none":
        raise InputError(f"adapter {name!r}: bias is {config.bias!r}; on Megatron-Core models it must be 'none'")
    if config.init_lora_weights not in STARTS:
        raise InputError(
            f"adapter {name!r}: init_lora_weights is {config.init_lora_weights!r}; accepted are {', '.join(map(repr, STARTS))}"
        )
    return config


def resolve(config: LoraConfig, layers: Mapping[str, Found], name: str) -> AdapterSpec:
    """The adapter of each layer that the configuration means.

    Args:
        layers: of all processes of the pipeline that this one has, by name.

    Raises:
        InputError: a target or a pattern means nothing, half of a fused layer, or a layer that cannot be adapted.
    """
    chosen = _chosen(config, layers, name)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(get_pattern_key([pattern], layer) == pattern for layer in chosen):
                raise InputError(f"adapter {name!r}: {key} has {quoted(pattern, 300)}, which matches no adapted layer")
    spec = AdapterSpec(config)
    for layer in chosen:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), layer), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), layer), config.lora_alpha)
        spec.modules[layer] = ModuleSpec(
            rank, alpha / (math.sqrt(rank) if config.use_rslora else rank), config.lora_dropout, config.use_dora, False
        )
    check_layers(spec, layers, name)
    return spec


def check_layers(spec: AdapterSpec, layers: Mapping[str, Found], name: str) -> None:
    """Raises InputError where an adapter cannot be put on one of its layers."""
    for path, module in spec.modules.items():
        check(layers[path], name, module.dropout)
        if layers[path].kind == "embedding" and module.use_dora:
            raise InputError(f"adapter {name!r}: {path} is an embedding, which DoRA does not support here")


def _chosen(config: LoraConfig, layers: Mapping[str, Found], name: str) -> list[str]:
    linear = [path for path, layer in layers.items() if layer.kind == "linear" and _leaf(path) not in NOT_ALL_LINEAR]
    targets = config.target_modules
    if targets is None:
        raise InputError(f"adapter {name!r}: target_modules is not set; name layers such as linear_qkv, or all-linear")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return linear
    if isinstance(targets, str):
        chosen = [path for path in layers if _matches(config, path)]
        if not chosen:
            raise InputError(
                f"adapter {name!r}: target_modules {quoted(targets, 300)} matches no layer: {_leaves(layers)}"
            )
        return chosen
    wanted = own_names(targets, name)
    named = LoraConfig(
        target_modules=list(wanted), exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform, layers_pattern=config.layers_pattern,
    )  # fmt: skip
    chosen = [path for path in layers if _matches(named, path)]
    for target in wanted:
        if not any(path == target or path.endswith(f".{target}") for path in layers):
            raise InputError(
                f"adapter {name!r}: target_modules has {quoted(target, 300)}, but there is: {_leaves(layers)}"
            )
    return chosen


def own_names(targets: Collection[str], name: str) -> list[str]:
    """Targets with Megatron-Core's names in the place of transformers'.

    Raises:
        InputError: only some of the layers that are one layer here are named.
    """
    wanted = set(targets)
    for own, parts in SPLIT.items():
        named = wanted & set(parts)
        if named and (missing := sorted(set(parts) - named)):
            raise InputError(
                f"adapter {name!r}: target_modules names {', '.join(sorted(named))} without {', '.join(missing)}, but they are "
                f"one layer here, {own}; name all of them, or {own}"
            )
        if named:
            wanted = (wanted - named) | {own}
    return sorted(wanted)


def _matches(config: LoraConfig, path: str) -> bool:
    match = check_target_module_exists(config, path)
    return bool(match) and type(match).__name__ != "_ExcludedModule"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _leaves(layers: Mapping[str, Found]) -> str:
    return ", ".join(sorted({_leaf(path) for path in layers})) or "no layer that can be adapted"
