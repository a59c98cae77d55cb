"""liger's gated activations without their habit of overwriting what they were given.

In the backward they write the gradients of gate and up over gate and up, which are outputs of linear layers: a DoRA layer may
then not keep its output (outputs.py). Here they get copies instead. What the model computes stays the same to the bit; two
copies of a layer's gate and up are alive for the time of its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from packlora.adapters.outputs import filled

WRITERS = ("LigerSiLUMulFunction", "LigerGELUMulFunction")
"""Names of autograd functions in liger_kernel that write into what they saved."""
BEFORE = "_packlora_forward_before"
"""Attribute of a module whose forward was replaced: the forward that it had of its own, or None."""


def spare_outputs(model: nn.Module, paths: Iterable[str]) -> int:
    """Let gated activations work on copies in the modules that have one of these layers inside; `undo` takes it back.

    Returns:
        How many modules that concerns.
    """
    above = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."}
    count = 0
    for path in sorted(above):
        module = model.get_submodule(path)
        own = module.__dict__.get("forward")
        function = own.__func__ if isinstance(own, MethodType) else type(module).forward if own is None else None
        if not isinstance(function, FunctionType) or BEFORE in module.__dict__:
            continue
        spared = _with_copies(function)
        if spared is not function:
            module.__dict__[BEFORE] = own
            module.forward = MethodType(spared, module)
            count += 1
    return count


def undo(module: nn.Module) -> None:
    """Give a module back the forward that spare_outputs replaced, if it did."""
    if BEFORE in module.__dict__:
        del module.__dict__["forward"]
        if (own := module.__dict__.pop(BEFORE)) is not None:
            module.forward = own


def _with_copies(function: FunctionType) -> FunctionType:
    """The same code where one of WRITERS, that it or a function of liger's that it calls names, is one that takes copies."""
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    changed = {name: spared for name, value in names.items() if (spared := _spared(value)) is not value}
    cells = tuple(
        cell if spared is value else CellType(spared)
        for cell in function.__closure__ or ()
        for value in (cell.cell_contents if filled(cell) else None,)
        for spared in (_spared(value),)
    )
    if not changed and cells == (function.__closure__ or ()):
        return function
    made = FunctionType(
        function.__code__, function.__globals__ | changed, function.__name__, function.__defaults__, cells or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _spared(value: Any) -> Any:
    """What stands in for a value that a function names: the value itself, unless it is one of WRITERS or calls one."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__name__ in WRITERS:
        return on_copies(value)
    if isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] == "liger_kernel":
        return _with_copies(value)
    return value


def on_copies(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """An autograd function whose backward gets copies of what its forward saved."""

    def backward(ctx: Any, *grads: Any) -> Any:
        return function.backward(_Copies(ctx), *grads)

    return type(f"{function.__name__}OnCopies", (function,), {"backward": staticmethod(backward)})


class _Copies:
    """The context of an autograd function, where saved tensors are copies."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(None if tensor is None else tensor.clone() for tensor in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
