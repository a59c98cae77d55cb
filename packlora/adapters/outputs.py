"""Which layers' outputs nobody writes into between their forward and their backward, found by watching real ones.

The gradient of a DoRA magnitude needs what the layer multiplied with it, z, or the output y = g z. y is there anyway, but
some kernels work in place in what they are given (liger's rotary embedding in q and k, its SwiGLU in gate and up, in the
backward) and move no version counter, so that nobody notices later. A layer keeps y in z's place only where

    watched     y had the same bits and version after the backward as after the forward, in every run of the watch: train mode,
                2 tokens, and 40 with padding; and no storage that leaves the model was y's, since the caller may write there
    the same    y is on the kind of device and of the dtype that were watched, and the modules and the functions that they call
                are still those (KeptOutputs.still): liger and its like replace them

What is not seen: a kernel that writes in place only in cases that the watch did not run. In-place operations of torch are
never missed: autograd refuses such a backward.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packlora.adapters.siblings import remove_hooks, undisturbed

Kind = tuple[str, torch.dtype]
"""Of an output: kind of device, dtype."""


class KeptOutputs:
    """What was found for a model: by path of a layer, the kind of output that nobody writes into. Copies know nothing."""

    def __init__(self, model: nn.Module, kinds: Mapping[str, Kind], ours: tuple[type, ...]) -> None:
        self.kinds, self.still = dict(kinds), True
        self._program: Program | None = Program(model, ours)

    def __getstate__(self) -> dict[str, Any]:
        return {"kinds": {}, "still": False, "_program": None}

    def keeps(self, path: str, device: torch.device, dtype: torch.dtype) -> bool:
        return self.still and self.kinds.get(path) == (device.type, dtype)

    def attach(self, module: nn.Module) -> None:
        """Look at the program before every forward of a module; `detach` undoes it."""
        module.register_forward_pre_hook(self._before)

    @staticmethod
    def detach(module: nn.Module) -> None:
        remove_hooks(module, KeptOutputs)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._program is None:
            return
        changed = self._program.changed()
        if self.still and changed is not None:
            warnings.warn(
                f"{changed} was replaced after packlora.accelerate(model): DoRA layers keep a product beside their outputs "
                "again, which takes more memory; call packlora.accelerate(model) again",
                stacklevel=2,
            )
        self.still = changed is None


# --- watching ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """An output, the bits that it had right after its layer, and the tensor that is part of the graph."""

    now: torch.Tensor
    then: torch.Tensor
    version: int
    node: torch.Tensor

    def untouched(self) -> bool:
        return self.now._version == self.version and torch.equal(_bits(self.now), self.then)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
CHUNK = 1 << 22
"""Elements at a time: an example may be as large as a batch of training."""


def _bits(y: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits for each row of an output: two rows that differ have the same once in 2^64."""
    rows, N = y.reshape(-1, y.shape[-1]), y.shape[-1]
    weights = torch.arange(1, N + 1, device=y.device).mul_(-7046029254386353131).bitwise_or_(1)
    step = max(1, CHUNK // N)
    ints = INTEGERS[y.element_size()]
    return torch.cat([
        (part.contiguous().view(ints).to(torch.int64) * weights).sum(1) for part in rows.split(step)
    ])  # fmt: skip


def _telling(y: torch.Tensor) -> bool:
    """Whether a write would show: not in what is no number, or 0 everywhere."""
    return bool(y.isfinite().all() & y.any())


def untouched_outputs(model: nn.Module, paths: Iterable[str], examples: Sequence[Mapping[str, Any]]) -> dict[str, Kind]:
    """Layers whose outputs survive a forward and a backward of the model on every example, and the outputs' kinds.

    Modes, buffers, random states and gradients are afterwards what they were; hooks on parameters are not called.

    Args:
        paths: of modules whose output is a tensor.
        examples: keyword arguments of the model.

    Raises:
        ValueError: no output of the model, or of the layers, has a gradient.
        Exception: whatever the forward or the backward raises.
    """
    layers = {path: model.get_submodule(path) for path in paths}
    found: dict[str, Kind] | None = None
    for example in examples:
        with in_training(model):
            own = _watch(model, layers, example)
        found = own if found is None else {path: kind for path, kind in found.items() if own.get(path) == kind}
    return found or {}


def _watch(model: nn.Module, layers: Mapping[str, nn.Module], example: Mapping[str, Any]) -> dict[str, Kind]:
    seen: dict[str, list[_Seen]] = {path: [] for path in layers}
    handles = []
    for path, layer in layers.items():

        def note(_: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:  # without, nobody keeps it
                now = output.detach()
                seen[path].append(_Seen(now, _bits(now), now._version if _telling(now) else -1, output))

        handles.append(layer.register_forward_hook(note, prepend=True))
    try:
        left = list(_tensors(model(**example)))
        ends = [tensor for tensor in left if tensor.requires_grad]
        if not ends:
            raise ValueError("no output of the model has a gradient")
        # up to the outputs, not to the parameters: no gradient is accumulated, and no hook of theirs runs
        nodes = [one.node for own in seen.values() for one in own]
        if not nodes:
            raise ValueError("no adapted layer ran with gradients, as under reentrant checkpointing")
        torch.autograd.grad(ends, nodes, [torch.randn_like(end) for end in ends], allow_unused=True)
        outside = {tensor.untyped_storage().data_ptr() for tensor in left}
        return {
            path: (own[0].now.device.type, own[0].now.dtype)
            for path, own in seen.items()
            if own and all(one.untouched() and one.now.untyped_storage().data_ptr() not in outside for one in own)
            and len({(one.now.device.type, one.now.dtype) for one in own}) == 1
        }  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any, known: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors inside of what a model returns: mappings, sequences, and objects such as caches."""
    known = set() if known is None else known
    if id(value) in known or isinstance(value, str | bytes | int | float | type | nn.Module | types.FunctionType):
        return
    known.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in list(parts):
        yield from _tensors(part, known)


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """As in training, and without a trace: in train mode, some modules count in buffers."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None
    ]  # fmt: skip
    try:
        with torch.inference_mode(False), undisturbed(model, training=True):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keyword arguments for two sequences of the same ids, the first of them padded at its end (at its begin, some attentions
    give NaN for tokens that see none)."""
    mask = torch.ones(2, ids.shape[1], dtype=torch.int64, device=ids.device)
    mask[0, -max(1, ids.shape[1] // 8) :] = 0
    return {"input_ids": ids.expand(2, -1).contiguous(), "attention_mask": mask}


# --- the program that was watched ----------------------------------------------------------------------------------------


class Program:
    """The code of a model, as far as a look in every forward can afford: children and own `forward` of every module, the
    `forward` of their classes, and what functions see under the names that they use, through functions outside of torch."""

    def __init__(self, model: nn.Module, ours: tuple[type, ...]) -> None:
        self.modules: list[tuple[str, nn.Module, list[Any], Any]] = []
        self.classes: dict[Any, Any] = {}
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        inside: set[int] = set()
        functions: list[Any] = []
        for path, module in model.named_modules():
            if id(module) in inside:
                continue
            own = module.__dict__.get("forward")
            self.modules.append((path, module, list(module._modules.values()), own))
            if isinstance(own, ours):  # what is inside of an adapted layer is looked at by the layer
                inside.update(map(id, module.modules()))
                continue
            self.classes[type(module)] = type(module).forward
            functions += [own, type(module).forward]
        known: set[int] = set()
        while functions:
            function = functions.pop()
            function = getattr(function, "__func__", function)
            if not isinstance(function, types.FunctionType) or id(function) in known:
                continue
            known.add(id(function))
            if function.__module__ is not None and function.__module__.partition(".")[0] == "torch":
                continue
            functions.append(getattr(function, "__wrapped__", None))
            functions += [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
            for name in _names(function.__code__):
                value = function.__globals__.get(name)
                if callable(value):
                    self.names.append((function.__globals__, name, value))
                    functions.append(value)

    def changed(self) -> str | None:
        """What is not what it was, in words."""
        for path, module, children, own in self.modules:
            if module.__dict__.get("forward") is not own:
                return f"the forward of {path or 'the model'}"
            if list(module._modules.values()) != children:
                return f"a part of {path or 'the model'}"
        for cls, forward in self.classes.items():
            if cls.forward is not forward:
                return f"{cls.__name__}.forward"
        for names, name, value in self.names:
            if names.get(name) is not value:
                return f"{names.get('__name__')}.{name}"
        return None


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def filled(cell: Any) -> bool:
    """Whether a cell of a closure has a value yet."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
