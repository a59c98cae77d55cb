"""Sequence parallelism: between the layers that are cut, each process has some of the tokens, so norms and residuals are
computed once and kept once, not on every process.

A block gets all tokens (`enter`), and its last layer's sum gives each process its own ones (`leave`): the messages of tensor
parallelism, each in two halves. What of a decoder layer is no block and no norm (experts with their router, attentions that are
not cut) is given all tokens too, computed by each process alike, and gives each its own ones. The tokens part before the first
decoder layer and are joined after the last. Norms are frozen: nothing of theirs is to be added up. Of what a block is
given a process keeps its own tokens, and makes its part of the gradients of the A's of these (ops/lora_linear/own_tokens.py).

Forwards over tokens that the number of processes does not divide are computed whole, with tensor parallelism's messages. All
microbatches that are trained must divide: SingleDevice.multiple.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.sharded import Through, gathered_inputs
from packlora.parallel.collectives import copied, summed
from packlora.parallel.tokens import all_tokens, joined_tokens, own_tokens, summed_tokens


class TokenSlices:
    """State that layers and blocks of one model share: whether the tokens of the forward that is running are apart."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._apart = False

    def attach(self, model: torch.nn.Module, blocks: Iterable[str], apart: Set[str]) -> None:
        """Put hooks on the first and the last of the decoder layers that have blocks, and on what of these and those between
        them is no norm and none of the blocks that are `apart`."""
        numbers = {int(_layer(block).rpartition(".")[2]): _layer(block) for block in blocks}
        path = numbers[min(numbers)].rpartition(".")[0]
        layers = [f"{path}.{number}" for number in range(min(numbers), max(numbers) + 1)]
        for layer in layers:
            for name, part in model.get_submodule(layer).named_children():
                is_norm = all(parameter.ndim < 2 for parameter in part.parameters())
                if not is_norm and apart.isdisjoint((layer, f"{layer}.{name}")):
                    part.register_forward_pre_hook(self._join, with_kwargs=True)
                    part.register_forward_hook(self._part)
        model.get_submodule(layers[0]).register_forward_pre_hook(self._begin, with_kwargs=True)
        model.get_submodule(layers[-1]).register_forward_hook(self._end)

    def enter(self, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """All tokens for a block."""
        return all_tokens(x, self.group, gathered_inputs(block)) if self._apart else copied(x, self.group)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of a row-parallel layer's products, of the tokens that are here."""
        return summed_tokens(y, self.group) if self._apart else summed(y, self.group)

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def part(x: torch.Tensor) -> torch.Tensor:
            self._apart = x.shape[0] == 1 and x.shape[1] % dist.get_world_size(self.group) == 0
            return own_tokens(x, self.group) if self._apart else x

        return with_input(args, kwargs, part)

    def _end(self, _: torch.nn.Module, args: Any, output: Any) -> Any:
        return _first(output, partial(joined_tokens, group=self.group)) if self._apart else output

    def _join(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_input(args, kwargs, partial(joined_tokens, group=self.group)) if self._apart else (args, kwargs)

    def _part(self, _: torch.nn.Module, args: Any, output: Any) -> Any:
        def own(y: torch.Tensor) -> torch.Tensor:
            return own_tokens(y if y.ndim == 3 else y[None], self.group)  # Llama 4's gives them without the batch

        return _first(output, own) if self._apart else output


def stands_in_layer(block: str) -> bool:
    """Whether a block is a part of its decoder layer, and not of a part, which has all tokens on every process."""
    layer = _layer(block)
    return block == layer or block.rpartition(".")[0] == layer


def _first(output: Any, change: Through) -> Any:
    """Output of a module with its hidden states changed: the output, or the first one."""
    return change(output) if isinstance(output, torch.Tensor) else (change(output[0]), *output[1:])


def with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Through
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module with its hidden states changed: the first argument, or the keyword hidden_states."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _layer(block: str) -> str:
    """The decoder layer of a block: model.layers.3 of model.layers.3.self_attn."""
    parts = block.split(".")
    at = next(at for at, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: at + 1])
