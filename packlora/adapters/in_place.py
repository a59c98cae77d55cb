"""liger's gated activations without their habit of overwriting what they were given.

In the backward they write the gradients of gate and up over gate and up, which are outputs of linear layers: a DoRA layer may
then not keep its output (outputs.py). Here they get copies instead. What the model computes stays the same to the bit; two
copies of a layer's gate and up are alive for the time of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sized
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from packlora.adapters.outputs import filled

WRITERS = ("LigerSiLUMulFunction", "LigerGELUMulFunction")
"""Names of autograd functions in liger_kernel that write into what they saved."""
REPLACED = "_packlora_forward_replaced"
"""Attribute of a module whose forward was replaced: the forward that it had of its own, or None, and the one it got."""


def spare_outputs(model: nn.Module, paths: Iterable[str]) -> int:
    """Let gated activations work on copies in the modules that have one of these layers inside; `undo` takes it back.

    Returns:
        How many modules that concerns.
    """
    above = {path[:end] for path in paths for end in range(len(path)) if path[end] == "."}
    known: dict[FunctionType, FunctionType] = {}
    chosen: dict[FunctionType, Any] = {}
    count = 0
    for path in sorted(above):
        module = model.get_submodule(path)
        own = module.__dict__.get("forward")
        if own is None:
            function = type(module).forward
        elif isinstance(own, MethodType) and own.__self__ is module:
            function = own.__func__
        else:
            continue
        if not isinstance(function, FunctionType) or REPLACED in module.__dict__:
            continue
        if function not in chosen:
            spared = _with_copies(function, known)
            chosen[function] = function if spared is function else _unless_compiled(function, spared)
        if chosen[function] is not function:
            module.forward = MethodType(chosen[function], module)
            module.__dict__[REPLACED] = (own, module.forward)
            count += 1
    return count


Found = TypeVar("Found", bound=Sized)


def watched(model: nn.Module, paths: Collection[str], watch: Callable[[], Found]) -> tuple[Found, int]:
    """What `watch` finds of these layers, with copies where more is found that way, which stay then; and in how many
    modules."""
    found = watch()
    if len(found) == len(paths):
        return found, 0
    count = spare_outputs(model, paths)
    try:
        more = watch() if count else found
    except Exception:
        undo(model)
        raise
    if len(more) > len(found):
        return more, count
    undo(model)
    return found, 0


def undo(model: nn.Module) -> None:
    """Give the modules back the forwards that spare_outputs replaced. What others put there since stays."""
    for module in model.modules():
        if REPLACED not in module.__dict__:
            continue
        own, installed = module.__dict__.pop(REPLACED)
        if module.__dict__.get("forward") is installed:
            del module.__dict__["forward"]
            if own is not None:
                module.forward = own


def _unless_compiled(plain: FunctionType, spared: FunctionType) -> Callable[..., Any]:
    """A method that is `spared`; under torch.compile, where no outputs are kept and names must be those of modules, `plain`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # by this name copies that are pickled find it
        return (plain if torch.compiler.is_compiling() else spared)(self, *args, **kwargs)

    return forward


def _with_copies(function: FunctionType, known: dict[FunctionType, FunctionType]) -> FunctionType:
    """The same code where one of WRITERS, that it or a function of liger's that it calls names, is one that takes copies.

    Args:
        known: what was made of functions so far; one that is being made stands for itself, should it call itself.
    """
    if function in known:
        return known[function]
    known[function] = function
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    changed = {name: spared for name, value in named.items() if (spared := _spared(value, known)) is not value}
    closure = function.__closure__ or ()
    values = [cell.cell_contents if filled(cell) else None for cell in closure]
    inside = [_spared(value, known) for value in values]
    if not changed and all(spared is value for spared, value in zip(inside, values, strict=True)):
        return function
    cells = tuple(
        cell if spared is value else CellType(spared)
        for cell, spared, value in zip(closure, inside, values, strict=True)
    )
    made = FunctionType(
        function.__code__, function.__globals__ | changed, function.__name__, function.__defaults__, cells or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    known[function] = made
    return made


def _spared(value: Any, known: dict[FunctionType, FunctionType]) -> Any:
    """What stands in for a value that a function names: the value itself, unless it is one of WRITERS or calls one."""
    if isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__name__ in WRITERS:
        return on_copies(value)
    if isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] == "liger_kernel":
        return _with_copies(value, known)
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
