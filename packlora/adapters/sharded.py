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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from packlora.ops.lora_linear.frozen import FrozenLinear

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


def is_known_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear layer, a slice of one, or one with another frozen weight; others' classes are not."""
    return type(module) in (torch.nn.Linear, ShardedLinear) or isinstance(module, FrozenLinear)


def shard_of(linear: torch.nn.Module) -> Shard | None:
    return linear.shard if isinstance(linear, ShardedLinear) else None


def _frozen(part: torch.Tensor) -> torch.nn.Parameter:
    """Copy in memory of its own, so that the whole can be freed."""
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
