"""Tensors that know how to be made again, so that who needs them in a backward need not keep them.

A LoRA layer keeps its input for the gradient of A. Where that input was made by a cheap function of tensors that are alive
anyway (a norm of the residual stream, the product of gate and up), keeping those and making the input again saves its memory:
11 GiB of an 8B model at 8192 tokens, for 2 % of its time.

The recipe is an attribute of the tensor object and is lost by any operation on it; who does not know of recipes sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Recipe:
    """x = function(*operands), a pure function that gives the same bits every time; operands are kept by version."""

    function: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]


def attach(x: torch.Tensor, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """x, which was made by function(*operands)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        x._packlora_recipe = Recipe(function, operands)  # type: ignore[attr-defined]
    return x


def made_again(function: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """x, without gradient, from the operands as autograd gave them back."""
    with torch.no_grad():
        return function(*operands)


def recipe_of(x: torch.Tensor) -> Recipe | None:
    """Of a tensor whose values are still those that it was made with."""
    recipe: Recipe | None = getattr(x, "_packlora_recipe", None)
    return recipe if recipe is not None and x._version == 0 else None
