"""Files of adapters on a Megatron model, in PEFT's form."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from packlora.adapters.files import MAGNITUDE, WEIGHTS
from packlora.adapters.kinds import LOW_RANK, PREFIX, suffixes
from packlora.adapters.reading import stored_tensors
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.config.adapter_file import read_config
from packlora.config.peft import whole_number
from packlora.errors import InputError
from packlora.lora_config import LoraConfig
from packlora.megatron.attach import Placed
from packlora.megatron.gather import Tensors, everywhere
from packlora.megatron.layers import Found, config_in
from packlora.megatron.names import OTHERS, Part, fuse, fused_spec, parts_of, same_A
from packlora.megatron.stacked import (
    OWNER,
    own_of,
    parameter_names,
    place_of,
    source_of,
    stacked_shapes,
)
from packlora.megatron.targets import check_layers, check_ranks, config_of, module_spec

COPIES = {f"{PREFIX}{part}.base_layer.weight" for part in OTHERS.values()}
"""Keys of weights of the base model, which PEFT writes beside an adapted embedding or output layer."""
ENDS = {end: own for kind in (suffixes("embedding"), LOW_RANK) for own, end in kind.items() if own != "bias"}
"""Tensors of an adapter by the ends of their keys in its file; that of a magnitude may have .weight after it."""


def _size(layer: Found) -> int:
    """Outputs of a layer over all processes."""
    rows = layer.tensor().shape[0]
    return rows * layer.degree if layer.dim == 0 else rows


def _parts(layer: Found) -> list[Part]:
    """Parts of a layer in transformers' model; none where it has none, or no weight of its own, as a tied output layer."""
    if layer.tensor() is None:
        return []
    try:
        return parts_of(layer.name, _size(layer), getattr(layer.module, "config", None))
    except InputError:
        return []


def keyed_part(part: str, tensors: Tensors, vocab_size: int | None) -> Tensors:
    """Tensors by PEFT's keys, cut to the vocabulary of the model of transformers."""
    at = f"{PREFIX}{part}"
    keys = LOW_RANK | {"magnitude": f"{LOW_RANK['magnitude']}.weight"}
    if part == "model.embed_tokens":
        keys, tensors = dict(suffixes("embedding")), tensors | {"A": tensors["A"][:, :vocab_size]}
    if part == "lm_head":
        tensors = {key: value if key == "A" else value[:vocab_size] for key, value in tensors.items()}
    return {f"{at}.{keys[key]}": value.contiguous() for key, value in tensors.items()}


def config_of_parts(peft: LoraConfig, specs: Mapping[str, tuple[int, float]], known: set[str]) -> LoraConfig:
    """LoraConfig of an adapter with these ranks and scalings by layer. A layer whose rank or scaling differs from the first
    one's has both in the patterns: a rank by itself would change the scaling.

    known: all layers of the model that can have adapters.
    """
    out = copy.copy(peft)
    first_rank, first_scaling = next(iter(specs.values()))
    out.r, out.rank_pattern, out.alpha_pattern = first_rank, {}, {}
    out.lora_alpha = _alpha(first_rank, first_scaling, peft.use_rslora)
    for name, (rank, scaling) in specs.items():
        if (rank, scaling) != (first_rank, first_scaling):
            out.rank_pattern[name] = rank
            out.alpha_pattern[name] = _alpha(rank, scaling, peft.use_rslora)
    modules = {name for name in specs if not _is_parameter(name)}
    leaves = {name.rpartition(".")[2] for name in modules}
    whole = {name for name in known if not _is_parameter(name) and name.rpartition(".")[2] in leaves}
    out.target_modules = leaves if whole <= specs.keys() else modules
    out.target_parameters = sorted(parameter_names(specs.keys() - modules, filter(_is_parameter, known))) or None
    out.layers_to_transform = out.layers_pattern = out.exclude_modules = None
    out.task_type = "CAUSAL_LM"
    return out


def _is_parameter(name: str) -> bool:
    """Whether a configuration names it as a parameter."""
    return f".{OWNER}." in name or name.endswith(".weight")


def named_part(part: str, model: Any) -> str:
    """Name in PEFT's configuration of a layer of transformers' model. A router is no linear layer there: its weight is named.
    In models with experts, PEFT takes former names of the experts' linear layers for the experts; so other layers with these
    names (shared experts, dense layers) are named by their weights too."""
    once = model.num_moe_experts and part.endswith((".gate_proj", ".up_proj", ".down_proj"))
    return f"{part}.weight" if once or part.endswith(".mlp.gate") else part


def file_names(layer: Found, model: Any) -> list[str]:
    """Names of a layer in PEFT's configurations: names of modules, and of parameters."""
    if place := place_of(layer.name, model):
        return [f"{place[0]}.{place[1]}"]
    return [named_part(part.name, model) for part in _parts(layer)]


def _alpha(rank: int, scaling: float, rslora: bool) -> Any:
    alpha = scaling * (math.sqrt(rank) if rslora else rank)
    return whole_number(round(alpha, 9) if math.isclose(alpha, round(alpha, 9), rel_tol=1e-12) else alpha)


def read_layer(
    folder: str | Path, layers: Mapping[str, Found], name: str
) -> tuple[AdapterSpec, dict[str, Tensors]]:  # fmt: skip
    """Adapter of a folder: its modules on the layers of this process, and their whole tensors.

    Raises:
        InputError: see apply_lora.
    """
    config = read_config(str(folder), name)
    config.init_lora_weights = True  # the tensors are there
    by_part: dict[str, Tensors] = {}
    for key, tensor in stored_tensors(Path(folder) / WEIGHTS, name).items():
        if key in COPIES:
            warnings.warn(
                f"adapter {name!r}: {folder}: {key!r} is a copy of a base weight; the model's own is used", stacklevel=3
            )
            continue
        part, own = _split_key(key, name, folder)
        by_part.setdefault(part, {})[own] = tensor
    given = copy.copy(config)
    given.target_parameters = None  # they say the same as the tensors do
    spec, values, used, model = AdapterSpec(config_of(given, name)), {}, set(), config_in(layers)
    for path, layer in layers.items():
        if (source := source_of(by_part, config.target_parameters, path, model)) is not None:
            spec.modules[path], values[path] = _expert_of(config, layer, by_part.get(source[0], {}), source[1], name)
            used.add(source[0])
            continue
        parts = _parts(layer)
        there = [by_part.get(part.name) for part in parts]
        if not any(there):
            continue
        parted = [
            None if one is None else _spec_of(config, layer, part, one, name)
            for one, part in zip(there, parts, strict=True)
        ]
        shared = same_A(there, parted)
        spec.modules[path] = fused_spec(parted, shared)
        if layer.kind == "embedding":
            values[path] = dict(there[0] or {})
        else:
            rows = [len(one["B"]) for one in there if one] if layer.name == "output_layer" else [_size(layer)]
            values[path] = fuse(there, parted, parts, shared, rows[0])
        used |= {part.name for part in parts}
    left = sorted(by_part.keys() - everywhere(used))
    if left:
        raise InputError(
            f"adapter {name!r}: {folder} has {left[0]} (and {len(left) - 1} more), which the model does not have"
        )
    ranks = everywhere({f"{path} {module.rank}" for path, module in spec.modules.items()})
    check_ranks({path: int(rank) for path, rank in (line.split(" ") for line in ranks)}, model, name)
    check_layers(spec, layers, name)
    return spec, values


def _split_key(key: str, name: str, folder: str | Path) -> tuple[str, str]:
    there = key.removesuffix(".weight") if key.endswith(f"{MAGNITUDE}.weight") else key
    for end, own in ENDS.items():
        if there.startswith(PREFIX) and there.endswith(f".{end}"):
            return there.removeprefix(PREFIX).removesuffix(f".{end}"), own
    raise InputError(f"adapter {name!r}: {folder} has {key!r}, which adapters on Megatron-Core models do not have")


def _expert_of(
    config: LoraConfig, layer: Found, tensors: Tensors, parameter: str, name: str
) -> tuple[ModuleSpec, Tensors]:
    """An expert's adapter out of the tensors of all experts of its layer."""
    model: Any = layer.module.config
    place, experts = place_of(layer.name, model), int(model.num_moe_experts)
    spec = module_spec(config, parameter, f"{parameter}.weight")
    assert place is not None
    wanted = stacked_shapes(_shapes(layer, Part(layer.name), spec.rank, config.use_dora), experts)
    _check_tensors(tensors, {key: [shape] for key, shape in wanted.items()}, layer, parameter, spec.rank, name)
    return spec, own_of(tensors, experts, place[2], spec.rank)


def _spec_of(config: LoraConfig, layer: Found, part: Part, tensors: Tensors, name: str) -> ModuleSpec:
    spec = module_spec(config, part.name, f"{part.name}.weight")
    words: int | None = None
    if layer.name in OTHERS and tensors.keys() >= {"A", "B"}:
        words = tensors["A"].shape[-1] if layer.kind == "embedding" else tensors["B"].shape[0]
    shapes = _shapes(layer, part, spec.rank, config.use_dora)
    fewer = shapes if words is None else _shapes(layer, part, spec.rank, config.use_dora, words)
    _check_tensors(
        tensors, {key: [shapes[key], fewer[key]] for key in shapes}, layer, part.name, spec.rank, name
    )  # fmt: skip
    return spec


def _check_tensors(
    tensors: Tensors, wanted: Mapping[str, Sequence[tuple[int, ...]]], layer: Found, at: str, rank: int, name: str
) -> None:
    """Raise InputError if a file's tensors at one place are not floats of one of the shapes, or not finite."""
    if tensors.keys() != wanted.keys():
        found = {key: list(value.shape) for key, value in tensors.items()}
        raise InputError(f"adapter {name!r}: {at} has {found}; its configuration says rank {rank} and {sorted(wanted)}")
    for key, tensor in tensors.items():
        end = suffixes("embedding" if layer.kind == "embedding" else "linear")[key]
        if tuple(tensor.shape) not in wanted[key]:
            raise InputError(
                f"adapter {name!r}: {at}.{end} is {tuple(tensor.shape)}, the model and rank {rank} need {wanted[key][0]}"
            )
        if not tensor.is_floating_point():
            raise InputError(f"adapter {name!r}: {at}.{end} is {str(tensor.dtype).removeprefix('torch.')}, not floats")
        if not tensor.float().isfinite().all():
            raise InputError(f"adapter {name!r}: {at}.{end} holds numbers that are not finite in float32")


def _shapes(
    layer: Found, part: Part, rank: int, use_dora: bool, words: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole tensors of an adapter on a part of a layer. words: size of the vocabulary, where it is smaller than
    Megatron's."""
    size = _size(layer)
    size = size if words is None else min(words, size)
    if layer.kind == "embedding":
        return {"A": (rank, size), "B": (layer.tensor().shape[1], rank)}
    rows = size if part.rows is None else len(part.rows)
    shapes: dict[str, tuple[int, ...]] = {
        "A": (rank, layer.tensor().shape[1] * (layer.degree if layer.dim == 1 else 1)),
        "B": (rows, rank),
    }
    return shapes | {"magnitude": (rows,)} if use_dora else shapes


def copy_part(placed: Placed, name: str, values: Mapping[str, Tensors]) -> None:
    """Copy this process's slices of whole tensors into an adapter."""
    with torch.no_grad():
        for path, tensors in values.items():
            own, layer = placed.weights[name][path], placed.layers[path]
            for key, parameter in own.named_parameters().items():
                whole = _padded(tensors[key], layer, key, parameter)
                part = own.own(key, whole).to(parameter)
                if part.shape != parameter.shape:
                    raise InputError(
                        f"adapter {name!r}: {key} of {path} is {list(whole.shape)}, the model needs {list(parameter.shape)}"
                    )
                parameter.copy_(torch.where(part.isnan(), parameter, part))


def _padded(whole: torch.Tensor, layer: Found, key: str, parameter: torch.Tensor) -> torch.Tensor:
    """Pad a tensor to Megatron's larger vocabulary: with zeros, and a magnitude with its present values."""
    if layer.kind == "embedding":
        dim = 1 if key == "A" else None
    else:
        dim = 0 if key != "A" and layer.name == "output_layer" else None
    if dim is None:
        return whole
    shape = list(whole.shape)
    shape[dim] = max(parameter.shape[dim] * layer.degree - whole.shape[dim], 0)
    return torch.cat([whole, whole.new_full(shape, torch.nan if key == "magnitude" else 0.0)], dim)
