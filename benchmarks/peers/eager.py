"""The adapters of a packed microbatch in plain PyTorch operations, as PEFT's own forward has them for one adapter: every mask,
product and sum is a tensor of its own that autograd keeps. The same parameters as packlora's, so both may take turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from packlora.adapters.linear import AdaptedLinear


def forward(layer: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
    """y [..., N] of x [..., K], LoRA alone: each segment of tokens with its owner's A and B, in x's type. Where the microbatch
    drops anything, masks come from torch's own generator."""
    owners = layer.attached.owners(math.prod(x.shape[:-1]))
    y: torch.Tensor = layer.base(x)
    if owners is None or owners.adapters.isdisjoint(layer.adapters):
        return y
    parts, at = [], 0
    for number, start, stop in owners.segments:
        own = layer.adapters.get(number)
        if own is None:
            continue
        assert own.A is not None and own.B is not None and own.magnitude is None and own.bias is None, "LoRA alone"
        dropped = F.dropout(x[..., start:stop, :], own.spec.dropout, training=owners.keys_T2 is not None)
        low = F.linear(F.linear(dropped, own.A.to(x.dtype)), own.B.to(x.dtype)) * own.spec.scaling
        parts += [y[..., at:start, :], y[..., start:stop, :] + low]
        at = stop
    parts = [part for part in [*parts, y[..., at:, :]] if part.shape[-2]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Let the model's adapted layers run `forward` meanwhile."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for layer in layers:
        layer.forward = partial(forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
