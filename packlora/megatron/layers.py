"""Layers of a Megatron-Core model that can have adapters: the weight of each, its slice on a process, and the communication
around the product.

Layers are known by their attributes and the names of their classes, not by their types: Megatron-Core's own parallel linear
layers, those around Transformer Engine, with a norm before them or grouped for experts, and what others derive from these.

    column-parallel   rows of W: copied or gathered tokens in, some of the outputs out
    row-parallel      columns of W: some of the inputs in, products that are added up (and scattered) out
    whole             all of W on every process, on its own tokens

Weights are read as tensors, and the messages are Megatron-Core's mappings: what Transformer Engine computes in the same dtype.
A weight that is not a plain tensor (FP8) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from packlora.adapters.sharded import Shard, ShardedLinear, Through
from packlora.errors import InputError

PLAIN = (torch.nn.Parameter, torch.Tensor)
"""Types of weights that are read."""
OTHER_COLUMNS = ("in_proj", "conv1d")
"""Column-parallel layers of state-space models, whose rows have an order of their own."""


class GatedShard(Shard):
    """A slice of gate and up in one layer, [gate; up]: of each a process has as many rows, its gates before its ups."""

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The slice of a whole tensor, a copy where rows are cut."""
        if self._dim(name) != 0:
            return whole
        return torch.cat([half.chunk(self.count)[self.index] for half in whole.chunk(2)])

    def joined(self, name: str, slices: Any) -> torch.Tensor:
        if self._dim(name) != 0:
            return slices[0]  # type: ignore[no-any-return]
        halves = [part.chunk(2) for part in slices]
        return torch.cat([half[at] for at in (0, 1) for half in halves])


class View(ShardedLinear):
    """The very weight of a layer of Megatron-Core as adapters/ takes linear layers; not a part of the model.

    bias: what the product is given, None where it is added elsewhere.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, shard: Shard | None) -> None:
        torch.nn.Linear.__init__(self, weight.shape[1], weight.shape[0], False, "meta", weight.dtype)
        self.shard = shard  # type: ignore[assignment]
        self.bias = bias  # type: ignore[assignment]
        self.hold(weight)

    def hold(self, weight: torch.Tensor) -> None:
        """Set the layer's weight."""
        if weight is not self.weight:
            made = isinstance(weight, torch.nn.Parameter)
            self.weight = weight if made else torch.nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True, slots=True)
class Found:
    """A layer that can have adapters.

    path: in the model. name: the same with the layer's and the expert's number in the whole model, so equal for any layout.
    kind: "linear" also of grouped ones. weight: the attribute that holds W. expert: its index among those of this process.
    group: over which W is cut, or tokens are where it is whole. degree, rank: of it.
    sequence: processes have tokens of their own. talks: the layer sends messages. gated: its outputs are gates, then ups.
    config: the model's, of an embedding, which has none.
    """

    path: str
    name: str
    module: torch.nn.Module
    kind: Literal["linear", "router", "embedding"]
    weight: str = "weight"
    expert: int | None = None
    grouped: bool = False
    dim: Literal[0, 1] | None = None
    group: dist.ProcessGroup | None = None
    degree: int = 1
    rank: int = 0
    sequence: bool = False
    talks: bool = False
    gated: bool = False
    config: Any = None

    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.module, self.weight)
        return found

    @property
    def shard(self) -> Shard | None:
        """Slice for adapters/sharded.py; None for a layer that is not cut."""
        if self.degree == 1 or self.dim is None:
            return None
        make = GatedShard if self.gated else Shard
        return make(self.dim, self.rank, self.degree, 1, None, None, partial(_add_up, group=self.group))


def _add_up(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(tensor, group=group)


# --- finding them -----------------------------------------------------------------------------------------------------


def layers_of(chunks: list[torch.nn.Module]) -> dict[str, Found]:
    """All layers of a model that can have adapters, by name. chunks: those of its virtual pipeline stages here."""
    found = {}
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for layer in _found(chunk, path, module):
                found[layer.name] = layer
    return found


def config_in(layers: Mapping[str, Found]) -> Any:
    """The TransformerConfig of a model."""
    return next(getattr(layer.module, "config", layer.config) for layer in layers.values())


def _found(model: torch.nn.Module, path: str, module: Any) -> Iterator[Found]:
    config = getattr(module, "config", None)
    style = _style(module)
    if style is not None:
        yield from _linears(model, path, module, style)
    elif _inherits(module, "Router") and hasattr(module, "gating"):
        group = getattr(module, "tp_group", None)
        yield Found(
            path, global_name(model, path), module, "router", group=group, degree=size_of(group), rank=rank_of(group),
            sequence=bool(config is not None and config.sequence_parallel and size_of(group) > 1),
        )  # fmt: skip
    elif _inherits(module, "VocabParallelEmbedding"):
        group = module.tp_group
        yield Found(
            path, global_name(model, path), module, "embedding", dim=0, group=group, degree=size_of(group),
            rank=rank_of(group), sequence=bool(module.reduce_scatter_embeddings), talks=True, config=model.config,
        )  # fmt: skip


def _inherits(module: torch.nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _style(module: torch.nn.Module) -> Literal[0, 1, "whole"] | None:
    """Dimension of W that is cut, or "whole"; None for a module that is no linear layer of Megatron-Core."""
    names = [base.__name__ for base in type(module).__mro__]
    if not (hasattr(module, "weight") or hasattr(module, "weight0")) or not any("Linear" in name for name in names):
        return None
    if any("ColumnParallel" in name for name in names):
        return 0
    if any("RowParallel" in name for name in names):
        return 1
    return "whole" if any(name.startswith("TE") for name in names) else None


def _linears(
    model: torch.nn.Module, path: str, module: torch.nn.Module, style: Literal[0, 1, "whole"]
) -> Iterator[Found]:
    group = getattr(module, "tp_group", None)
    group = getattr(module, "_tp_group", None) if group is None else group
    dim = None if style == "whole" else style
    config: Any = getattr(module, "config", None)
    degree = size_of(group)
    sequence = bool(getattr(module, "sequence_parallel", False)) and degree > 1
    gated = path.endswith("linear_fc1") and bool(getattr(config, "gated_linear_unit", False))
    silent = bool(getattr(module, "explicit_expert_comm", False)) or (
        hasattr(module, "parallel_mode") and module.parallel_mode is None
    )
    talks = degree > 1 and not silent and dim is not None
    if dim is None:
        sequence = bool(getattr(config, "sequence_parallel", False)) and degree > 1
    name, first, here = global_name(model, path), _first_expert(model, path), _local_expert(path)
    count = getattr(module, "num_gemms", None)
    for at in range(count or 1):
        expert = at if count is not None else here
        yield Found(
            path, name if count is None else _of_expert(name, first + at), module, "linear",
            "weight" if count is None else f"weight{at}", expert, count is not None, dim, group, degree, rank_of(group),
            sequence, talks, gated,
        )  # fmt: skip


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


# --- names ------------------------------------------------------------------------------------------------------------


def global_name(model: torch.nn.Module, path: str) -> str:
    """The path with numbers of layers and experts in the whole model."""
    parts = path.split(".")
    for at in range(1, len(parts)):
        if parts[at - 1] == "layers" and parts[at].isdigit():
            number = getattr(model.get_submodule(".".join(parts[: at + 1])), "layer_number", None)
            if isinstance(number, int):
                parts[at] = str(number - 1)
        elif parts[at - 1] == "local_experts":
            parts[at] = str(_first_expert(model, path) + int(path.split(".")[at]))
    while parts and parts[0] == "module":  # wrappers
        parts.pop(0)
    return ".".join(parts)


def _experts_path(path: str) -> str | None:
    head, found, _ = path.partition(".experts.")
    return f"{head}.experts" if found else None


def _first_expert(model: torch.nn.Module, path: str) -> int:
    """The number of the first expert of this process."""
    at = _experts_path(path)
    experts: Any = None if at is None else model.get_submodule(at)
    return 0 if experts is None else rank_of(experts.ep_group) * int(experts.num_local_experts)


def _local_expert(path: str) -> int | None:
    _, found, rest = path.partition(".local_experts.")
    return int(rest.split(".")[0]) if found else None


def _of_expert(name: str, number: int) -> str:
    """A grouped layer's expert, by the name it has where experts are layers of their own."""
    head, _, leaf = name.rpartition(".")
    return f"{head}.local_experts.{number}.{leaf}"


# --- what cannot be adapted -------------------------------------------------------------------------------------------


def check(layer: Found, adapter: str, dropout: float) -> None:
    """Raises InputError where adapters cannot be put on a layer."""
    where, module, weight = f"adapter {adapter!r}: {layer.name}", layer.module, layer.tensor()
    config: Any = getattr(module, "config", None)
    if weight is not None and type(weight) not in PLAIN:
        raise InputError(f"{where} has a weight of type {type(weight).__name__}; only plain tensors can be adapted")
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        raise InputError(f"{where} is computed in FP8 or FP4, which adapters do not support; use bf16=True")
    if layer.path.rpartition(".")[2] in OTHER_COLUMNS:
        raise InputError(f"{where} is a layer of a state-space model, which this version cannot adapt")
    if getattr(module, "disable_grad_reduce", False):
        raise InputError(f"{where} has disable_grad_reduce, so its input's gradient would be wrong; leave it out")
    if layer.expert is not None and layer.degree > 1 and layer.degree != _dense_degree():
        raise InputError(
            f"{where}: expert_tensor_parallel_size is {layer.degree}; adapters on experts need 1 or the tensor parallel size, "
            f"{_dense_degree()}"
        )
    if layer.expert is not None and layer.degree == 1 < _dense_degree() and config.expert_model_parallel_size == 1:
        raise InputError(
            f"{where}: processes of a tensor parallel group would have the same experts and other tokens; adapters on experts "
            "need expert_model_parallel_size over 1, or expert_tensor_parallel_size of the tensor parallel size"
        )
    if dropout and layer.dim == 1 and layer.degree > 1 and weight.shape[1] % 2:
        raise InputError(
            f"{where}: each process has {weight.shape[1]} of its inputs, an odd number, but dropout draws two at once"
        )


def _dense_degree() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())


# --- messages ---------------------------------------------------------------------------------------------------------


def enter_of(layer: Found) -> Through | None:
    """Communication that a layer's input goes through before the product; None where there is none."""
    if not layer.talks:
        return None
    if layer.dim == 0:
        if layer.sequence:
            gather = mappings.gather_from_sequence_parallel_region
            return partial(gather, tensor_parallel_output_grad=True, group=layer.group)
        return partial(mappings.copy_to_tensor_model_parallel_region, group=layer.group)
    if getattr(layer.module, "input_is_parallel", True):
        return None
    return partial(mappings.scatter_to_tensor_model_parallel_region, group=layer.group)


def leave_of(layer: Found) -> Through | None:
    """Communication that a row-parallel layer's product goes through; None where there is none."""
    if not layer.talks or layer.dim != 1:
        return None
    if layer.sequence:
        return partial(mappings.reduce_scatter_to_sequence_parallel_region, group=layer.group)
    return partial(mappings.reduce_from_tensor_model_parallel_region, group=layer.group)


def bias_of(layer: Found) -> tuple[torch.Tensor | None, bool]:
    """The frozen bias, and whether the layer's caller adds it."""
    module = layer.module
    name = layer.weight.replace("weight", "bias")
    bias = getattr(module, name, None)
    if bias is not None and not bias.numel():  # Transformer Engine's way of saying none
        bias = None
    skips = getattr(module, "skip_bias_add", getattr(module, "te_return_bias", False))
    return bias, bool(skips) and bias is not None


def norm_before(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm that is a part of some layers."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    if getattr(module, "zero_centered_gamma", False):
        weight = weight + 1
    if getattr(module, "normalization", "LayerNorm") == "RMSNorm":
        return torch.nn.functional.rms_norm(x, weight.shape, weight, module.eps)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, module.layer_norm_bias, module.eps)


def tokens_of(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])
