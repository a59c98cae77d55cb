"""apply_lora and its result: the adapters of a Megatron-Core model, with functions to train, save and export them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import peft as of_peft
import torch
import torch.distributed as dist

from packlora.adapters.files import CONFIG, MAGNITUDE, WEIGHTS, config_dict, stored_tensors
from packlora.adapters.kinds import PREFIX, SUFFIXES
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.adapters.weights import AdapterWeights
from packlora.config import AdapterConfig
from packlora.config.adapter_file import read_config
from packlora.config.peft import whole_number
from packlora.errors import InputError
from packlora.files import write_json, write_tensors
from packlora.lora_config import LoraConfig
from packlora.megatron.attach import Placed, check_model, unwrapped
from packlora.megatron.checkpoint import adapter_state, load_state, put
from packlora.megatron.gather import Tensors, everywhere, whole_tensors
from packlora.megatron.layers import Found, config_in
from packlora.megatron.names import OTHERS, Part, fuse, fused_spec, parts_of, same_A, split
from packlora.megatron.owners import token_owners
from packlora.megatron.stacked import (
    OWNER,
    own_of,
    parameter_names,
    place_of,
    source_of,
    stacked,
    stacked_shapes,
)
from packlora.megatron.targets import check_layers, check_ranks, config_of, module_spec, resolve

Given: TypeAlias = LoraConfig | of_peft.LoraConfig | AdapterConfig | str | Path
"""A configuration, or a folder with an adapter."""
ENDS = {end: own for kind in (SUFFIXES["embedding"], SUFFIXES["linear"]) for own, end in kind.items() if own != "bias"}
"""Tensors of an adapter by the ends of their keys in its file; that of a magnitude may have .weight after it."""


def apply_lora(
    model: torch.nn.Module | Sequence[torch.nn.Module], config: Given | Mapping[str, Given], seed: int = 0
) -> MegatronAdapters:
    """Freeze a Megatron-Core model and put LoRA or DoRA adapters onto it, in place.

    Call it on all processes, after the model has its weights, where it will train, and before it is wrapped by
    DistributedDataParallel; a Float16Module around it may be there or come later. First values depend on the seed and the names
    of layers, not on how the model is cut.

    Args:
        model: a model, or its chunks under a virtual pipeline.
        config: of one adapter, named "default", or of several by name. A folder is an adapter in PEFT's format, for
            transformers' version of the model: it is taken as it is, see names.py.
        seed: of first values.

    Raises:
        InputError: a configuration uses what is not supported, or means no layer or one that cannot be adapted; a folder is
            none of an adapter, or one of layers that the model does not have.
    """
    chunks = [unwrapped(one) for one in ([model] if isinstance(model, torch.nn.Module) else model)]
    given: dict[str, Given] = dict(config) if isinstance(config, Mapping) else {"default": config}
    layers = check_model(chunks, list(given))
    lines = everywhere({f"{path} {layer.kind}" for path, layer in layers.items()})
    kinds = dict(line.split(" ") for line in sorted(lines))
    specs, values = {}, {}
    for name, one in given.items():
        if isinstance(one, str | Path):
            specs[name], values[name] = _read(one, layers, name)
        else:
            divided = isinstance(one, AdapterConfig) and one.expert_rank != "r"
            specs[name] = resolve(config_of(one, name), layers, kinds, name, divided)
    placed = Placed(chunks, specs, seed)
    put(placed)
    for name, tensors in values.items():
        _copy(placed, name, tensors)
    return MegatronAdapters(placed)


class MegatronAdapters:
    """The adapters of a model. With one adapter, all tokens are its own; with several, run forwards inside `active`."""

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._kept: dict[str, torch.Tensor] = {}
        """Frozen weights of layers into which an adapter is merged, on the CPU."""

    @property
    def names(self) -> tuple[str, ...]:
        return self._placed.owned.names

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        """Parameters of one adapter on this process."""
        return [p for own in self._weights(name).values() for p in own.named_parameters().values()]

    def specs(self, name: str) -> Mapping[str, ModuleSpec]:
        """Specification of one adapter by layer."""
        self._weights(name)
        return self._placed.specs[name].modules

    def _weights(self, name: str) -> dict[str, AdapterWeights]:
        if name not in self._placed.weights:
            raise InputError(f"no adapter {name!r}; the model has {', '.join(map(repr, self.names))}")
        return self._placed.weights[name]

    def _check_not_merged(self, before: str) -> None:
        if self._placed.owned.merged:
            raise InputError(f"adapter {self._placed.owned.merged!r} is merged; call unmerge before {before}")

    # --- owners -------------------------------------------------------------------------------------------------------

    def owners(
        self, samples: Sequence[tuple[str | None, int]], keys_T2: torch.Tensor | None = None
    ) -> TokenOwners:  # fmt: skip
        """Owners of packed samples: (adapter or None, tokens) of each in order; of all processes' tokens where these are split.

        keys_T2: dropout keys, from packlora.ops.dropout.keys.packed_token_keys; without them nothing is dropped.
        """
        return token_owners(self.names, samples, keys_T2)

    def changed(self) -> None:
        """Make DoRA's norms anew: call it after writes that neither the host nor a step of a torch.optim.Optimizer shows."""
        self._placed.owned.norms.changed()

    def active(self, owners: TokenOwners) -> AbstractContextManager[None]:
        """Run a forward on tokens of these owners."""
        return self._placed.owned.active(owners)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def sharded_state_dict(self, *names: str) -> dict[str, Any]:
        """Tensors of the adapters for megatron.core.dist_checkpointing; without names those of all adapters.

        Raises:
            InputError: there is no such adapter, or one is merged.
        """
        for name in names:
            self._weights(name)
        self._check_not_merged("sharded_state_dict")
        return adapter_state(self._placed, names or self.names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what dist_checkpointing.load has made of `sharded_state_dict`.

        Raises:
            InputError: it holds no adapter that is here, a part of one, or something else.
        """
        load_state(self._placed, state)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, name: str, base_model: str | None = None, vocab_size: int | None = None) -> None:
        """Write an adapter as PEFT does, for transformers' version of the model. All processes call it; the first one writes.

        Args:
            base_model: what adapter_config.json names.
            vocab_size: words of that model, where Megatron's vocabulary is padded.

        Raises:
            InputError: a layer has no counterpart in transformers' model.
        """
        self._weights(name)
        self._check_not_merged("save")
        tensors, config = self._as_peft(name, base_model, vocab_size)
        try:
            if dist.get_rank() == 0:
                Path(folder).mkdir(parents=True, exist_ok=True)
                write_tensors(Path(folder) / WEIGHTS, tensors)
                write_json(Path(folder) / CONFIG, config_dict(config))
        finally:
            dist.barrier()

    def _as_peft(self, name: str, base_model: str | None, vocab_size: int | None) -> tuple[Tensors, LoraConfig]:
        whole, layers = whole_tensors(self._placed, name), self._placed.layers
        # gathered from other processes: the names of all their layers, and the adapter's specification on them
        model = config_in(layers)
        known = everywhere({part for layer in layers.values() for part in _file_names(layer, model)})
        every = everywhere({f"{path}|{spec.rank}|{spec.scaling!r}" for path, spec in self.specs(name).items()})
        told = {path: (int(rank), float(scaling)) for path, rank, scaling in (line.split("|") for line in every)}
        found, specs = stacked(whole, told, model, name)
        for path in whole:
            if place_of(path, model) is None:
                config = model if path not in layers else getattr(layers[path].module, "config", None)
                for part, own in split(whole[path], parts_of(path, whole[path]["B"].shape[0], config)).items():
                    specs[_named(part, model)] = told[path]
                    found[part] = own
        tensors = {key: value for part, own in found.items() for key, value in _keyed(part, own, vocab_size).items()}
        peft = _config_of(self._placed.specs[name].peft, specs, known)
        peft.base_model_name_or_path = base_model
        return tensors, peft

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge(self, name: str) -> None:
        """Put an adapter into the weights: the model computes it then by itself, and the model's `sharded_state_dict` has the
        merged weights alone. Frozen weights are kept on the CPU.

        Raises:
            InputError: one is merged already, or it is one of an embedding whose weight is the output layer's too.
        """
        owned = self._placed.owned
        weights = self._weights(name)
        if owned.merged:
            raise InputError(f"adapter {owned.merged!r} is merged already; call unmerge first")
        shared = any(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in self._placed.chunks)
        if shared and any(self._placed.layers[path].kind == "embedding" for path in weights):
            raise InputError(
                f"adapter {name!r} is on word_embeddings, whose weight is the output layer's too, which it would change; untie "
                "the model to merge it"
            )
        merged = {path: _merged(self._placed.layers[path], own) for path, own in weights.items()}
        with torch.no_grad():
            for path, value in merged.items():
                weight = self._placed.layers[path].tensor()
                self._kept[path] = weight.detach().cpu().clone()
                weight.copy_(value)
        owned.merged = name

    def unmerge(self) -> None:
        """Put the frozen weights back, to the bit."""
        with torch.no_grad():
            for path, kept in self._kept.items():
                self._placed.layers[path].tensor().copy_(kept)
        self._kept.clear()
        self._placed.owned.merged = None


def _merged(layer: Found, own: AdapterWeights) -> torch.Tensor:
    """W with an adapter in it."""
    assert own.A is not None and own.B is not None
    weight, wide = layer.tensor().detach(), own.A.dtype
    with torch.no_grad():
        delta = (own.B.to(wide) @ own.A) * own.spec.scaling
        if layer.kind == "embedding":
            return (weight.to(wide) + delta.t()).to(weight.dtype)
        value = weight.to(wide) + delta
        if own.magnitude is not None:
            value = value * (own.magnitude / own.norm().to(wide))[:, None]
        return value.to(weight.dtype)


# --- files ------------------------------------------------------------------------------------------------------------


def _size(layer: Found) -> int:
    """Outputs of a layer over all processes."""
    rows = layer.tensor().shape[0]
    return rows * layer.degree if layer.dim == 0 else rows


def _parts(layer: Found) -> list[Part]:
    try:
        return parts_of(layer.name, _size(layer), getattr(layer.module, "config", None))
    except InputError:
        return []


def _keyed(part: str, tensors: Tensors, vocab_size: int | None) -> Tensors:
    """Tensors by PEFT's keys, cut to the vocabulary of the model of transformers."""
    at = f"{PREFIX}{part}"
    keys = SUFFIXES["linear"] | {"magnitude": f"{SUFFIXES['linear']['magnitude']}.weight"}
    if part == "model.embed_tokens":
        keys, tensors = SUFFIXES["embedding"], tensors | {"A": tensors["A"][:, :vocab_size]}
    if part == "lm_head":
        tensors = {key: value if key == "A" else value[:vocab_size] for key, value in tensors.items()}
    return {f"{at}.{keys[key]}": value.contiguous() for key, value in tensors.items()}


def _config_of(peft: LoraConfig, specs: Mapping[str, tuple[int, float]], known: set[str]) -> LoraConfig:
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


def _named(part: str, model: Any) -> str:
    """Name in PEFT's configuration of a layer of transformers' model. A router is no linear layer there: its weight is named.
    In models with experts, PEFT takes former names of the experts' linear layers for the experts; so other layers with these
    names (shared experts, dense layers) are named by their weights too."""
    once = model.num_moe_experts and part.endswith((".gate_proj", ".up_proj", ".down_proj"))
    return f"{part}.weight" if once or part.endswith(".mlp.gate") else part


def _file_names(layer: Found, model: Any) -> list[str]:
    """Names of a layer in PEFT's configurations: names of modules, and of parameters."""
    if place := place_of(layer.name, model):
        return [f"{place[0]}.{place[1]}"]
    return [_named(part.name, model) for part in _parts(layer)]


def _alpha(rank: int, scaling: float, rslora: bool) -> Any:
    alpha = scaling * (math.sqrt(rank) if rslora else rank)
    return whole_number(round(alpha, 9) if math.isclose(alpha, round(alpha, 9), rel_tol=1e-12) else alpha)


def _read(
    folder: str | Path, layers: Mapping[str, Found], name: str
) -> tuple[AdapterSpec, dict[str, Tensors]]:  # fmt: skip
    """Adapter of a folder: its modules on the layers of this process, and their whole tensors.

    Raises:
        InputError: see apply_lora.
    """
    config = read_config(str(folder), name)
    by_part: dict[str, Tensors] = {}
    for key, tensor in stored_tensors(Path(folder) / WEIGHTS, name).items():
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
    check_ranks({path: int(rank) for path, rank in (line.split(" ") for line in ranks)}, name)
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
        end = SUFFIXES["embedding" if layer.kind == "embedding" else "linear"][key]
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


def _copy(placed: Placed, name: str, values: Mapping[str, Tensors]) -> None:
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
