"""Tensors with a recipe for their recomputation, so that a backward that needs them need not keep them.

A LoRA layer keeps its input for the gradient of A. Where that input was computed by a cheap function of tensors that are alive
anyway (a norm of the residual stream, the product of gate and up), keeping those and computing the input once more saves its
memory: 11 GiB of an 8B model at 8192 tokens, for 2 % of its time.

How a tensor is recomputed is an attribute of the tensor object, and is lost by any operation on it. The hooks of
recompute_hooks.py set it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Recompute:
    """x = function(*operands), a pure function that gives the same bits every time; operands are kept by version.

    elsewhere: gives the gradients that x is wanted for (ops/lora_linear/own_tokens.py); the function then is not to be called.
    """

    function: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]
    elsewhere: Any = None


def recomputable(x: torch.Tensor, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """x, which was computed by function(*operands). Autograd keeps none that was made in inference mode: then x is kept."""
    if (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not any(operand.is_inference() for operand in operands)
    ):
        x._packlora_recompute = Recompute(function, operands)  # type: ignore[attr-defined]
    return x


def recomputed(function: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """x, without gradient, from the operands as autograd gave them back."""
    with torch.no_grad():
        return function(*operands)


def recompute_of(x: torch.Tensor) -> Recompute | None:
    """Recipe by which x is recomputed; None where there is none, or x was written to since."""
    recompute: Recompute | None = getattr(x, "_packlora_recompute", None)
    return recompute if recompute is not None and x._version == 0 else None


class RecomputeHooks:
    """Owner of hooks on a module that set the recipe of what the module gives or reads; modules.remove_hooks takes them off."""
