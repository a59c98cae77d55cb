"""Choice of the layers of a Megatron-Core model that a configuration adapts, with rank and scaling: matching is PEFT's, on the
names of layers.py.

A stage of a pipeline has some layers, an expert parallel process some experts. Targets and patterns are matched against the
names of the whole model, so that all processes take the same and refuse the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import peft

from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.adapters.targets import check_layer_numbers
from packlora.config import AdapterConfig
from packlora.config.adapter_file import UNSUPPORTED
from packlora.config.peft import peft_config
from packlora.errors import InputError, quoted
from packlora.lora_config import LoraConfig, is_target, rank_and_alpha, scaling_of
from packlora.megatron.layers import Found, check, config_in
from packlora.patterns import is_named, pattern_key

STARTS: tuple[object, ...] = (True, "gaussian")
"""Values of init_lora_weights: A as PEFT's linear layers have it, or normal with a deviation of 1 / r. B is zero."""
OF_TRANSFORMERS = {
    "modules_to_save": None, "trainable_token_indices": None, "target_parameters": None, "fan_in_fan_out": False,
}  # fmt: skip
"""Keys, with the value they have when unused, that adapters on models of transformers alone have."""
OURS_ALONE = {"init_from": None, "dora_dropout": "peft"}
"""Keys of a run file's adapter that a LoraConfig does not have, with the value they have when unused."""
SPLIT = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Projections of transformers' models that each Megatron-Core layer joins, by its leaf name."""
NOT_ALL_LINEAR = ("output_layer",)
"""Layers that all-linear leaves out, beside routers and embeddings."""
PREDICTION = "mtp."
"""Names of layers that predict tokens further ahead, which all-linear leaves out: transformers' models have none."""


def config_of(given: LoraConfig | peft.LoraConfig | AdapterConfig, name: str) -> LoraConfig:
    """PEFT configuration of an adapter.

    Raises:
        InputError: it uses what is not computed here.
    """
    for own, value in OURS_ALONE.items():
        if isinstance(given, AdapterConfig) and getattr(given, own) != value:
            raise InputError(f"adapter {name!r}: {own} is set, which adapters on Megatron-Core models do not support")
    config = peft_config(given, "", None) if isinstance(given, AdapterConfig) else given
    if not isinstance(config, LoraConfig | peft.LoraConfig):
        raise InputError(
            f"adapter {name!r}: a peft.LoraConfig or an adapter of a run file is needed, not {type(given).__name__}"
        )
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


def resolve(
    config: LoraConfig, layers: Mapping[str, Found], kinds: Mapping[str, str], name: str, divided: bool = False
) -> AdapterSpec:
    """The adapter of each layer of this process that the configuration means.

    Args:
        layers: those of this process, by name.
        kinds: of all layers of the model, on whichever process they are, by name: "linear", "router" or "embedding".
        divided: the rank of experts is divided by the number of experts that a token goes to; the scaling stays.

    Raises:
        InputError: a target or a pattern means nothing, half of a fused layer, or a layer that cannot be adapted; on all
            processes alike where it is one of names.
    """
    chosen = _chosen(config, kinds, name)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(pattern_key([pattern], layer) == pattern for layer in chosen):
                raise InputError(f"adapter {name!r}: {key} has {quoted(pattern, 300)}, which matches no adapted layer")
    specs, ranks = dict[str, ModuleSpec](), dict[str, int]()
    if divided and not any(map(is_expert, chosen)):
        raise InputError(f"adapter {name!r}: expert_rank is r // top_k, but the adapter takes no experts; leave it out")
    for layer in chosen:
        spec = module_spec(config, layer)
        if divided and is_expert(layer):
            spec = replace(spec, rank=_divided(spec.rank, layers, layer, name))
        ranks[layer] = spec.rank
        specs[layer] = replace(spec, kind="embedding") if kinds[layer] == "embedding" else spec
    check_ranks(ranks, config_in(layers), name)
    found = AdapterSpec(config, {path: specs[path] for path in layers if path in specs})
    check_layers(found, layers, name)
    return found


def module_spec(config: LoraConfig, *names: str) -> ModuleSpec:
    """Specification by a configuration of a layer, or of a part of it in transformers' model, which patterns may mean by any of
    these names."""
    rank, alpha = rank_and_alpha(config, *names)
    start = config.init_lora_weights
    assert start is True or start == "gaussian"  # see config_of
    return ModuleSpec(rank, scaling_of(config, rank, alpha), config.lora_dropout, config.use_dora, False, start=start)


def is_expert(path: str) -> bool:
    """Whether a layer's name is that of one of several experts."""
    return ".local_experts." in path


def _divided(rank: int, layers: Mapping[str, Found], path: str, name: str) -> int:
    """The rank of an expert by the number of experts that a token goes to, which all layers' configuration has."""
    top_k = int(config_in(layers).moe_router_topk)
    if rank % top_k:
        raise InputError(
            f"adapter {name!r}: expert_rank is r // top_k, but the rank {rank} of {path} is no multiple of the {top_k} experts "
            "that a token goes to"
        )
    return rank // top_k


def check_ranks(ranks: Mapping[str, int], model: Any, name: str) -> None:
    """Raises InputError where experts of one layer have unlike ranks, or some have none: a checkpoint holds the tensors of all
    as one.

    ranks: of all layers that are adapted, by name. model: configuration of the model.
    """
    experts: dict[str, list[str]] = {}
    for path in sorted(filter(is_expert, ranks)):
        head, _, rest = path.partition(".local_experts.")
        experts.setdefault(f"{rest.partition('.')[2]} of {head}", []).append(path)
    for where, paths in experts.items():
        if len(paths) != model.num_moe_experts:
            raise InputError(
                f"adapter {name!r} has {len(paths)} of the {model.num_moe_experts} experts of {where}; it needs all experts of "
                "a layer, as checkpoints and files have them, or none"
            )
    for other, path in ((paths[0], path) for paths in experts.values() for path in paths):
        if ranks[other] != ranks[path]:
            raise InputError(
                f"adapter {name!r}: {other} has rank {ranks[other]} and {path} rank {ranks[path]}; experts of one layer need "
                "the same rank"
            )


def check_layers(spec: AdapterSpec, layers: Mapping[str, Found], name: str) -> None:
    """Raises InputError where an adapter cannot be put on one of its layers."""
    for path, module in spec.modules.items():
        check(layers[path], name, module.dropout)
        if layers[path].kind == "embedding" and module.use_dora:
            raise InputError(f"adapter {name!r}: {path} is an embedding, which DoRA does not support here")


def _chosen(config: LoraConfig, kinds: Mapping[str, str], name: str) -> list[str]:
    linear = [
        path
        for path, kind in kinds.items()
        if kind == "linear" and _leaf(path) not in NOT_ALL_LINEAR and not path.startswith(PREDICTION)
    ]
    targets = config.target_modules
    if targets is None:
        raise InputError(f"adapter {name!r}: target_modules is not set; name layers such as linear_qkv, or all-linear")
    for excluded in config.exclude_modules if isinstance(config.exclude_modules, list | set) else ():
        if not any(is_named(path, excluded) for path in kinds):
            raise InputError(
                f"adapter {name!r}: exclude_modules has {quoted(excluded, 300)}, but there is: {_leaves(kinds)}"
            )
    if isinstance(targets, str) and targets.lower() == "all-linear":
        named = LoraConfig(target_modules=linear, exclude_modules=config.exclude_modules)
        return [path for path in linear if is_target(named, path)]
    if isinstance(targets, str):
        chosen = [path for path in kinds if is_target(config, path)]
        if not chosen:
            raise InputError(
                f"adapter {name!r}: target_modules {quoted(targets, 300)} matches no layer: {_leaves(kinds)}"
            )
        return chosen
    wanted = own_names(targets, name)
    named = LoraConfig(
        target_modules=list(wanted), exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform, layers_pattern=config.layers_pattern,
    )  # fmt: skip
    check_layer_numbers(named, kinds, f"adapter {name!r}")
    chosen = [path for path in kinds if is_target(named, path)]
    for target in wanted:
        if not any(is_named(path, target) for path in kinds):
            raise InputError(
                f"adapter {name!r}: target_modules has {quoted(target, 300)}, but there is: {_leaves(kinds)}"
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


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _leaves(kinds: Mapping[str, str]) -> str:
    return ", ".join(sorted({_leaf(path) for path in kinds})) or "no layer that can be adapted"
