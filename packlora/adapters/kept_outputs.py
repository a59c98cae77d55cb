"""`keep_outputs`: DoRA layers whose backward reads their output in the place of a product as large.

The gradient of a DoRA magnitude needs what the layer multiplied with it, z, or the output y = g z. What reads y often keeps it
anyway; then y in z's place saves a tensor of the output's size.

y is saved by autograd: an operation of torch that writes into it makes the backward an error ("modified by an inplace
operation"), never a wrong gradient. Kernels that write behind autograd's back are not noticed. Those of liger are known here;
of others nobody knows, which is why keep_outputs is off unless it is asked for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

LIGER = ("liger_kernel", "packlora.base.liger")
"""Modules that define the forwards and functions that call liger's kernels."""
ROTARY = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb", "apply_rotary_pos_emb_vision", "apply_rotary_emb")
"""Functions of modeling files that liger replaces; its kernels write into q and k. Which modules of a file call them is not
known, so all are taken to do so."""
UNTOUCHED = ("v_proj", "o_proj", "down_proj", "w2")
"""Layers whose outputs liger's kernels are not given."""


def why_product(bias: bool, scales_dropped: bool, magnitudes: Iterable[torch.Tensor], overwritten: bool) -> str | None:
    """Why a DoRA layer keeps its product, as the end of "they have ..."; None where its output will do.

    Args:
        bias: it adds a bias, frozen or trained, whose subtraction would cost digits.
        scales_dropped: it has two base products, one of them of the dropped x.
        magnitudes: [N] each; where one is 0, the output tells nothing of the product.
        overwritten: see `is_overwritten`.
    """
    if bias:
        return "a bias"
    if scales_dropped:
        return "dropout"
    if not all(bool(magnitude.detach().all()) for magnitude in magnitudes):
        return "a magnitude of 0"
    return "an output that may be overwritten unseen" if overwritten else None


def is_overwritten(model: nn.Module, path: str) -> bool:
    """Whether kernels that autograd does not see may write into the output of the layer at this path: those of liger's gated
    activations, rotary embeddings and losses."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    reader = reader_of(model, path)
    return model.get_submodule(path) is head or (reader is not None and is_on_liger(reader))


def reader_of(model: nn.Module, path: str) -> nn.Module | None:
    """The module that reads the output of the layer at this path, if it could give it to a kernel of liger's."""
    parent, _, name = path.rpartition(".")
    return None if name in UNTOUCHED else model.get_submodule(parent)


def is_on_liger(module: nn.Module) -> bool:
    """Whether the module's forward is liger's, or may call liger's rotary embedding."""
    home = getattr(module.forward, "__module__", None) or ""
    if home.startswith(LIGER):
        return True
    names = getattr(sys.modules.get(home), "__dict__", {})
    return any((getattr(names.get(name), "__module__", None) or "").startswith(LIGER) for name in ROTARY)


def described(reasons: Iterable[str | None]) -> str:
    """Description of what why_product gave for the DoRA layers of a model."""
    counts = Counter(reasons)
    kept, total = counts.pop(None, 0), sum(counts.values())
    others = "".join(f"; {count} keep a product: they have {reason}" for reason, count in counts.items())
    return f"DoRA: {kept} of {total + kept} layers keep their output for the gradient of the magnitude{others}"
