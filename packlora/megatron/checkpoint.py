"""Adapters in Megatron-Core's distributed checkpoints: the slice of each parameter on this process, and its place in the whole
tensor.

A layer's `sharded_state_dict` gives its own tensors as before and the adapters' beside them. Slices are those of
adapters/sharded.py: rows of B and magnitude of a column-parallel layer, columns of A of a row-parallel one. Gate and up in one
layer are two slices each, as their weight is. Tensors of experts have the expert as their first dimension, the same for experts
that are layers of their own and for grouped ones. So a checkpoint knows no layout.

Megatron-Core makes one tensor of a parameter of all layers unless it is told that they are `non_homogeneous_layers`. Where not
all layers have an adapter, or not of one rank, its tensors are stored by the number of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from packlora.adapters.sharded import SLICED
from packlora.errors import InputError
from packlora.megatron.attach import Placed, parameter_name
from packlora.megatron.gather import everywhere
from packlora.megatron.layers import Found, config_in, rank_of, size_of
from packlora.megatron.names import OTHERS
from packlora.megatron.owners import Owned
from packlora.megatron.targets import PREDICTION

MARK = "lora_"
"""Parameters of adapters begin with it."""
NUMBER = re.compile(r"\.layers\.\d+\.")


class ShardedState:
    """The `sharded_state_dict` of a layer with adapters; while one of them is merged, only that of the layer.

    parameters: (layer, of grouped ones each; adapter; key; the dimension that is cut). unlike: see _unlike.
    """

    def __init__(
        self, module: Any, parameters: list[tuple[Found, str, str, int | None]], owned: Owned, unlike: set[str]
    ) -> None:
        self.module, self.parameters, self.owned, self.unlike = module, parameters, owned, unlike
        self.original: Callable[..., dict[str, Any]] | None = getattr(module, "sharded_state_dict", None)

    def __call__(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        metadata = {} if metadata is None else metadata
        if "dp_cp_group" not in metadata:
            metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        own = {} if self.original is None else self.original(prefix, sharded_offsets, metadata)
        out = {key: value for key, value in own.items() if not key.rpartition(".")[2].startswith(MARK)}
        for layer, adapter, key, dim in self.parameters if self.owned.merged is None else ():
            name = parameter_name(layer, adapter, key)
            offsets, stored = tuple(sharded_offsets), f"{MARK}{key}_{adapter}"
            of_layers = len(offsets) > (layer.expert is not None and not layer.grouped)  # an expert has one of its own
            if of_layers and _alike(adapter, layer.name) in self.unlike:
                stored = f"{offsets[0][1]}.{stored}"
                offsets = tuple((axis - 1, at, count) for axis, at, count in offsets[1:])
            out[f"{prefix}{name}"] = self._one(layer, name, stored, dim, prefix, offsets, metadata)
        return out

    def _one(
        self, layer: Found, name: str, stored: str, dim: int | None, prefix: str, offsets: tuple[Any, ...], metadata: Any
    ) -> Any:  # fmt: skip
        tensor = getattr(self.module, name)
        single = bool(metadata.get("singleton_local_shards", False))
        if layer.grouped:
            ep = self.module._pg_collection.ep
            number = rank_of(ep) * self.module.num_gemms + int(layer.expert or 0)
            if not single:
                offsets = (*offsets, (len(offsets), number, size_of(ep) * self.module.num_gemms))
            stored = f"{number}.{stored}" if single else stored
        groups = {"tp_group": layer.group, "dp_cp_group": metadata["dp_cp_group"]}
        key = f"{prefix}{stored}"
        if dim is None:
            made = make_sharded_tensor_for_checkpoint(tensor, key, prepend_offsets=offsets, **groups)
        else:
            words = {"allow_shape_mismatch": True} if layer.name in OTHERS else {}  # vocabularies are padded
            made = make_tp_sharded_tensor_for_checkpoint(tensor, key, dim, prepend_offsets=offsets, **groups, **words)
            if layer.gated and dim == 0:
                made = apply_swiglu_sharded_factory(made, offsets, single)
        if layer.grouped:
            made.replica_id = (*made.replica_id[:2], rank_of(self.module._pg_collection.expt_dp))
        return made


def _alike(adapter: str, layer: str) -> str:
    """An adapter and a layer's name without its number."""
    return f"{adapter} {NUMBER.sub('.layers.*.', layer, count=1)}"


def _unlike(placed: Placed) -> set[str]:
    """Layers without their number of which not all of the model have an adapter, or not of one rank; see _alike."""
    own = {
        f"{_alike(adapter, path)} {path} {layer.spec.rank}"
        for adapter, weights in placed.weights.items() for path, layer in weights.items()
    }  # fmt: skip
    ranks: dict[str, list[str]] = {}
    for adapter, layer, _, rank in (line.split(" ") for line in everywhere(own)):
        ranks.setdefault(f"{adapter} {layer}", []).append(rank)
    model = config_in(placed.layers)

    def count(layer: str) -> int:
        predicts = layer.partition(" ")[2].startswith(PREDICTION)
        return int(model.mtp_num_layers if predicts else model.num_layers)

    return {layer for layer, found in ranks.items() if len(found) != count(layer) or len(set(found)) > 1}


def put(placed: Placed) -> None:
    """Give every layer with adapters its `sharded_state_dict`."""
    unlike = _unlike(placed)
    modules: dict[int, list[tuple[Found, str, str, int | None]]] = {}
    for adapter, weights in placed.weights.items():
        for path, own in weights.items():
            layer = placed.layers[path]
            for key in own.named_parameters():
                modules.setdefault(id(layer.module), []).append((layer, adapter, key, cut_dimension(layer, key)))
    for parameters in modules.values():
        module: Any = parameters[0][0].module
        module.sharded_state_dict = ShardedState(module, parameters, placed.owned, unlike)


def cut_dimension(layer: Found, key: str) -> int | None:
    """Dimension of a parameter that the processes of a layer have slices of, also with one process; None where the parameter is
    not cut."""
    if layer.dim is None:
        return None
    cut = 1 if layer.kind == "embedding" else layer.dim
    return SLICED[cut].get(key)


def adapter_state(placed: Placed, adapters: Iterable[str]) -> dict[str, Any]:
    """The sharded tensors of these adapters alone, by the names of their parameters, for dist_checkpointing.

    With several chunks the names begin with model<number>., as Megatron's own do.
    """
    wanted = {key for name in adapters for key in _keys_of(placed, name)}
    found: dict[str, Any] = {}
    for number, chunk in enumerate(placed.chunks):
        state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})  # type: ignore[operator]
        found |= {_prefix(placed, number) + key: value for key, value in state.items() if key in wanted}
    return found


def _keys_of(placed: Placed, adapter: str) -> set[str]:
    """Names of an adapter's parameters in the chunks."""
    return {
        f"{placed.layers[path].path}.{parameter_name(placed.layers[path], adapter, key)}"
        for path, own in placed.weights[adapter].items() for key in own.named_parameters()
    }  # fmt: skip


def _prefix(placed: Placed, number: int) -> str:
    return f"model{number}." if len(placed.chunks) > 1 else ""


def load_state(placed: Placed, state: dict[str, Any]) -> None:
    """Copy what dist_checkpointing has loaded into `adapter_state` into the parameters.

    Raises:
        InputError: it is not of whole adapters that are here.
    """
    given, names = set(state), list[tuple[str, str]]()
    for number, chunk in enumerate(placed.chunks):  # layers of several chunks may have one path
        names += [(_prefix(placed, number), key) for key, _ in chunk.named_parameters()]
    own = {
        adapter: {prefix + key for prefix, key in names if key in keys}
        for adapter in placed.weights for keys in (_keys_of(placed, adapter),)
    }  # fmt: skip
    if extra := sorted(given - set().union(*own.values())):
        raise InputError(f"the state has {extra[0]!r} (and {len(extra) - 1} more), which is of no adapter on the model")
    for adapter, keys in own.items():
        if given & keys and (lacking := sorted(keys - given)):
            raise InputError(f"the state of adapter {adapter!r} lacks {lacking[0]} (and {len(lacking) - 1} more)")
    if not given and all(own.values()):
        raise InputError("the state holds nothing of the adapters; give what dist_checkpointing.load has returned")
    with torch.no_grad():
        for number, chunk in enumerate(placed.chunks):
            prefix = _prefix(placed, number)
            for key, parameter in chunk.named_parameters():
                if prefix + key in state:
                    parameter.copy_(state[prefix + key])
