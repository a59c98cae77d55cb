"""apply_lora and its result: the adapters of a Megatron-Core model, with functions to train, save and export them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import peft as of_peft
import torch
import torch.distributed as dist

from packlora.adapters.files import CONFIG, WEIGHTS, config_dict
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.weights import AdapterWeights
from packlora.config import AdapterConfig
from packlora.errors import InputError
from packlora.files import write_json, write_tensors
from packlora.lora_config import LoraConfig
from packlora.megatron.adapter_files import config_of_parts, copy_part, file_names, keyed_part, named_part, read_layer
from packlora.megatron.attach import Placed, check_model, unwrapped
from packlora.megatron.checkpoint import adapter_state, load_state, put
from packlora.megatron.gather import Tensors, everywhere, whole_tensors
from packlora.megatron.layers import Found, config_in
from packlora.megatron.names import OTHERS, parts_of, split
from packlora.megatron.owners import token_owners
from packlora.megatron.stacked import (
    place_of,
    stacked,
)
from packlora.megatron.targets import config_of, resolve

Given: TypeAlias = LoraConfig | of_peft.LoraConfig | AdapterConfig | str | Path
"""A configuration, or a folder with an adapter."""


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
            specs[name], values[name] = read_layer(one, layers, name)
        else:
            divided = isinstance(one, AdapterConfig) and one.expert_rank != "r"
            specs[name] = resolve(config_of(one, name), layers, kinds, name, divided)
    placed = Placed(chunks, specs, seed)
    put(placed)
    for name, tensors in values.items():
        copy_part(placed, name, tensors)
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
        known = everywhere({part for layer in layers.values() for part in file_names(layer, model)})
        every = everywhere({f"{path}|{spec.rank}|{spec.scaling!r}" for path, spec in self.specs(name).items()})
        told = {path: (int(rank), float(scaling)) for path, rank, scaling in (line.split("|") for line in every)}
        found, specs = stacked(whole, told, model, name)
        for path in whole:
            if place_of(path, model) is None:
                config = model if path not in layers else getattr(layers[path].module, "config", None)
                for part, own in split(whole[path], parts_of(path, whole[path]["B"].shape[0], config)).items():
                    specs[named_part(part, model)] = told[path]
                    found[part] = own
        tensors = {
            key: value for part, own in found.items() for key, value in keyed_part(part, own, vocab_size).items()
        }
        peft = config_of_parts(self._placed.specs[name].peft, specs, known)
        peft.base_model_name_or_path = base_model
        return tensors, peft

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge(self, name: str) -> None:
        """Put an adapter into the weights: the model computes it then by itself, and the model's `sharded_state_dict` has the
        merged weights alone. Frozen weights are kept on the CPU. All processes call it.

        Raises:
            InputError: one is merged already, or it is on an embedding or output layer whose weight is the other's too.
        """
        owned = self._placed.owned
        weights = self._weights(name)
        if owned.merged:
            raise InputError(f"adapter {owned.merged!r} is merged already; call unmerge first")
        shared = any(getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in self._placed.chunks)
        if shared and (tied := sorted(everywhere(weights.keys() & OTHERS.keys()))):
            raise InputError(
                f"adapter {name!r} is on {tied[0]}, and the embedding's weight is the output layer's too, so that both would "
                "change; untie the model to merge it"
            )
        merged = {path: _merged(self._placed.layers[path], own) for path, own in weights.items()}
        # all of them before the first is written: where memory runs out, nothing is merged
        self._kept = {path: self._placed.layers[path].tensor().detach().cpu().clone() for path in merged}
        with torch.no_grad():
            for path, value in merged.items():
                self._placed.layers[path].tensor().copy_(value)
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
