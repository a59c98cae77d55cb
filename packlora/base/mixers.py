"""Layers that mix tokens by a convolution and a recurrence (linear attention by a gated delta rule), on packed rows.

transformers computes them by functions of a whole row, in which samples would see each other. Here these are called once for
each sample; the linear layers around them have the whole row. Layers that mix tokens by other functions are left as they are,
and the proof refuses their model.

Shapes: T tokens of the row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from packlora.errors import Unpackable


@dataclass(frozen=True, slots=True)
class Mixing:
    """Signature of a function that mixes tokens. dim: dimension of the tokens; first: number of leading arguments that have
    them; named: keyword arguments that have them."""

    dim: int
    first: int
    named: tuple[str, ...] = ()


DELTA_RULE = "torch_chunk_gated_delta_rule"
MIXING = {"causal_conv1d_fn": Mixing(2, 1), DELTA_RULE: Mixing(1, 3, ("g", "beta"))}
"""transformers' functions that mix tokens, by the names under which its models' files have them."""


def mixing_functions(model: torch.nn.Module) -> set[tuple[str, str]]:
    """Mixing functions that the model's layers call: the Python module of each, and its name there."""
    forwards = [inspect.unwrap(kind.forward) for kind in {type(module) for module in model.modules()}]
    codes = [(one.__module__, one.__code__) for one in forwards if hasattr(one, "__code__")]
    return {(file, name) for file, code in codes for name in MIXING.keys() & {*code.co_names}}


def mix_by_sample(model: torch.nn.Module) -> None:
    """Replace the functions by which the model's layers mix tokens: they run sample by sample where they are given sample
    lengths."""
    for file, name in mixing_functions(model):
        own = getattr(sys.modules[file], name)
        if not hasattr(own, "whole_row"):
            setattr(sys.modules[file], name, _by_sample(own, MIXING[name]))


def _by_sample(own: Callable[..., Any], mixing: Mixing) -> Callable[..., Any]:
    """Wrap a function of a packed row [1, T] so that it is called for each of its samples; without sample_lengths it is
    unchanged."""

    @wraps(own)
    def call(*args: Any, sample_lengths: Sequence[int] | None = None, **kwargs: Any) -> Any:
        if sample_lengths is None:
            return own(*args, **kwargs)
        if not isinstance(sample_lengths, Sequence):
            raise Unpackable(f"{own.__name__}: where samples begin is on the device alone")
        lengths, dim = list(sample_lengths), mixing.dim
        rows = zip(*(one.split(lengths, dim) for one in args[: mixing.first]), strict=True)
        parts = {name: kwargs[name].split(lengths, dim) for name in mixing.named}
        made = [
            own(*row, *args[mixing.first :], **kwargs | {name: part[at] for name, part in parts.items()})
            for at, row in enumerate(rows)
        ]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made, dim)
        return torch.cat([outputs for outputs, _ in made], dim), None  # a row has no state after it

    call.whole_row = own  # type: ignore[attr-defined]
    return call
