"""Backwards whose gradients cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Backward of an autograd function that raises RuntimeError if its graph is requested (create_graph), or if several
    gradients are batched. Under autocast its products have the dtypes that they have outside, those of the forward.

    torch's once_differentiable raises later, and not always: where the gradient that comes in has no history, as of y.sum(), or
    where the second derivative is asked for with torch.autograd.grad, what goes through A, B and W is missing without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *d: torch.Tensor | None) -> Gradients:
        if torch.is_grad_enabled():  # in a backward: with create_graph=True
            raise RuntimeError(
                "gradients of packlora's operators cannot be differentiated again: create_graph=True is not accepted; "
                "packlora.restore(model) gives PEFT's layers back, whose gradients can"
            )
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return refusing(ctx, *d)
        try:
            return backward(ctx, *d)
        except RuntimeError as error:
            if not any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in d):
                raise
            raise RuntimeError(
                "packlora's operators take one gradient at a time: is_grads_batched=True and vectorize=True are not accepted; "
                "packlora.restore(model) gives PEFT's layers back, which take several"
            ) from error

    return refusing
