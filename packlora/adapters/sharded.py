"""A linear layer of which a process holds a slice: what of adapters on it is a slice, and which of their gradients are parts.

A column-parallel layer holds rows of W, so some of the outputs; a row-parallel layer holds columns of W, so some of the inputs,
and its products of all processes are added up. LoRA and DoRA are linear in these sums, so the operator computes on the slice as
on any layer, and the sum that the frozen layer needs anyway adds up the adapter's part too:

                     A [r, K]            B [N, r]            magnitude [N]       bias [N]
    column-parallel  whole, grad a part  slice of rows       slice               slice
    row-parallel     slice of columns    whole, grad a part  whole, grad a part  whole, added after the sum

(Where each process has tokens of its own after the sum, the gradient of the bias is a part too.) A gradient that is a part is
added up over the processes once a step. Who adds up is not this file's business: packlora.parallel makes the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch

from packlora.adapters.linear import AdaptedCall, AdaptedLinear
from packlora.adapters.owners import TokenOwners
from packlora.adapters.weights import AdapterWeights
from packlora.ops.lora_linear.types import LowRank

SLICED: dict[int, dict[str, int]] = {0: {"B": 0, "magnitude": 0, "bias": 0}, 1: {"A": 1}}
"""Sliced tensors of an adapter, each with its dimension, by `Shard.dim`."""
PARTS: dict[int, tuple[str, ...]] = {0: ("A",), 1: ("B", "magnitude")}
"""Tensors of an adapter that every process holds whole and of whose gradient it computes a part, by `Shard.dim`."""

Through = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Slice `index` of `count` equal slices of W [N, K] in dimension `dim`: 0 rows (column-parallel), 1 columns (row-parallel).

    copies: processes that hold the same slice, as those do that share a key-value head; their gradients are parts.
    enter: what the layer's input goes through, None where it comes as it is needed.
    leave: what its output goes through, without bias in a row-parallel layer.
    by_tokens: a row-parallel layer's output may then be of this process's tokens alone, as many for each process.
    add_up: adds up a tensor over all processes that hold slices, in place.
    """

    dim: Literal[0, 1]
    index: int
    count: int
    copies: int
    enter: Through | None
    leave: Through | None
    add_up: Callable[[torch.Tensor], None]
    by_tokens: bool = False
    of_experts: ClassVar[bool] = False
    """Whether processes with the same slice of the layers may have other slices of this kind: experts."""

    def is_slice(self, name: str) -> bool:
        """Whether a process has a slice of an adapter's tensor."""
        return name in SLICED[self.dim]

    def is_part(self, name: str) -> bool:
        """Whether a process computes a part of the gradient of what it has of an adapter's tensor."""
        if self.is_slice(name):
            return self.copies > 1
        return name in PARTS[self.dim] or (name == "bias" and self.by_tokens)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a whole tensor of an adapter, or of "weight", from the shape of its slice."""
        dim = self._dim(name)
        return tuple(size * self.count if at == dim else size for at, size in enumerate(shape))

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The view of a whole tensor of an adapter, or of "weight", that is this process's."""
        dim = self._dim(name)
        if dim is None:
            return whole
        size = whole.shape[dim] // self.count
        return whole.narrow(dim, self.index * size, size)

    def joined(self, name: str, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from those of all processes in their order; there may be more of them, who have the same again."""
        dim = self._dim(name)
        return slices[0] if dim is None else torch.cat(list(slices[: self.count * self.copies : self.copies]), dim)

    def place(self, leaf: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Rows and columns of the layer's weight or bias that a tensor of this shape is; nothing for a whole one."""
        if leaf == "bias" and self.dim:
            return ()
        own = slice(self.index * shape[self.dim], (self.index + 1) * shape[self.dim])
        return (own,) if self.dim == 0 else (slice(None), own)

    @property
    def adapted(self) -> type[AdaptedLinear]:
        return AdaptedSlice

    @property
    def add_inputs(self) -> Callable[[torch.Tensor], None] | None:
        """Adds up sums over W's inputs over the processes, in place; None where all inputs are here."""
        return self.add_up if self.dim else None

    def _dim(self, name: str) -> int | None:
        return self.dim if name == "weight" else SLICED[self.dim].get(name)


class ShardedLinear(torch.nn.Linear):
    """The slice of a frozen linear layer, y = x W' + bias of what it is a slice of.

    weight: the slice. bias: of the outputs that it gives, all of them in a row-parallel layer. in_features and out_features are
    the weight's.
    """

    def __init__(self, whole: torch.nn.Linear, shard: Shard) -> None:
        weight = shard.own("weight", whole.weight.detach())
        super().__init__(weight.shape[1], weight.shape[0], whole.bias is not None, "meta", weight.dtype)
        self.shard = shard
        self.weight = _frozen(weight)
        if whole.bias is not None:
            self.bias = _frozen(shard.own("bias", whole.bias.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shard = self.shard
        x = x if shard.enter is None else shard.enter(x)
        y = torch.nn.functional.linear(x, self.weight, None if shard.dim else self.bias)
        y = y if shard.leave is None else shard.leave(y)
        return y + self.bias if shard.dim and self.bias is not None else y


class AdaptedSlice(AdaptedLinear):
    """AdaptedLinear on this process's slice of a layer: inputs and outputs pass through the slice's functions, and biases of a
    row-parallel layer come after the sum over all processes."""

    def __init__(self, base: torch.nn.Linear, *more: Any) -> None:
        super().__init__(base, *more)
        self.shard = cast(ShardedLinear, base).shard
        self.row_parallel = self.shard.dim == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLinear."""
        shard, owners = self.shard, self.attached.owners(math.prod(x.shape[:-1]), self.of_rows, self.of_images)
        if owners is None or owners.adapters.isdisjoint(self.adapters):
            return self.base.forward(x)
        x = x if shard.enter is None else shard.enter(x)
        if owners.adapters.isdisjoint(self.computed()):
            y = torch.nn.functional.linear(x, self.base.weight)
        else:
            y = self.group.serve(self.index, x, AdaptedCall(self, owners))
        y = y if shard.leave is None else shard.leave(y)
        return self._with_biases(y, owners) if self.row_parallel and self.base.bias is not None else y

    @property
    def first_feature(self) -> int:
        """See AdaptedLinear."""
        return self.shard.index * self.base.in_features if self.row_parallel else 0

    def computed(self) -> Mapping[int, AdapterWeights]:
        """See AdaptedLinear. Adapters that train but the bias of a row-parallel layer are none of them."""
        if not self.row_parallel:
            return self.adapters
        return {number: own for number, own in self.adapters.items() if own.spec.rank}

    def low_rank(self) -> dict[int, LowRank]:
        """See AdaptedLinear."""
        own = super().low_rank()
        return {number: replace(low, bias=None) for number, low in own.items()} if self.row_parallel else own

    @property
    def added(self) -> torch.Tensor | None:
        """See AdaptedLinear."""
        return None if self.row_parallel else self.base.bias

    @property
    def why_product(self) -> str | None:
        """See AdaptedLinear."""
        return super().why_product or ("an output that is added up over processes" if self.row_parallel else None)

    def _with_biases(self, y: torch.Tensor, owners: TokenOwners) -> torch.Tensor:
        """y of a row-parallel layer, each token with its owner's bias; y may be of this process's tokens."""
        assert self.base.bias is not None
        if not owners.boundaries.known:
            raise RuntimeError("biases of row-parallel layers cannot follow segments that move; switch cuda_graphs off")
        count = math.prod(y.shape[:-1])
        first = 0 if count == owners.total else self.shard.index * count
        trained = {number: own.bias for number, own in self.adapters.items() if own.bias is not None}
        runs, y_TN = owners.runs(trained), y.reshape(count, -1)
        of_jobs = any(number is not None for number, _, _ in runs)
        if self.shard.by_tokens and count == owners.total and of_jobs and torch.is_grad_enabled():
            raise RuntimeError(f"each process trains biases on tokens of its own, but {count} tokens do not divide")
        parts = []
        for number, start, stop in runs:  # also those of other processes' tokens: their gradient here is 0
            own = y_TN[max(start - first, 0) : max(min(stop - first, count), 0)]
            parts.append((own + (self.base.bias if number is None else trained[number])).to(y.dtype))
        return torch.cat(parts).view(y.shape)


def gathered_inputs(block: torch.nn.Module) -> list[torch.Tensor]:
    """Trained A's on the column-parallel layers of a block, of the adapters that own tokens of the microbatch that is
    running."""
    found = list[torch.Tensor]()
    for layer in block.children():
        if isinstance(layer, AdaptedSlice) and not layer.row_parallel and (owners := layer.attached.microbatch):
            own = (weights.A for number, weights in layer.adapters.items() if number in owners.adapters)
            found += [A for A in own if A is not None and A.requires_grad]
    return found


def _frozen(part: torch.Tensor) -> torch.nn.Parameter:
    """Copy in memory of its own, so that the whole can be freed."""
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
