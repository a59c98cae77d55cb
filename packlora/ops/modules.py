"""Looking at a model without a trace: runs that change nothing of it, and hooks that are taken off again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Run without gradients and in eval mode, or with `training` with gradients and in train mode. Afterwards each module is in
    its own mode again, the random generators (torch's, Python's, NumPy's) are as before and, with `training`, all buffers."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules() for name, buffer in module._buffers.items() if training and buffer is not None
    ]  # fmt: skip
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    model.train(training)
    try:
        with (
            torch.inference_mode(False) if training else nullcontext(),
            torch.set_grad_enabled(training),
            torch.random.fork_rng(devices=sorted(devices), device_type="cuda"),
        ):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, was_training in modes:
            module.training = was_training
        _like_their_parents(model, {id(module) for module, _ in modes})
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _like_their_parents(module: nn.Module, known: set[int]) -> None:
    """Give modules that a run has put into the model (BigBird does, for short inputs) the mode of the module that has them."""
    for child in module.children():
        if id(child) not in known:
            child.training = module.training
        _like_their_parents(child, known)


def put_hooks(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Have two methods of an object called around a module's forward, `after` also when that ends in an exception.

    A compiler guards the keys of hooks that are always called, and torch's keys are other ones on each module. These are the
    same on all modules that have as many of them, so that layers of one shape share a compiled graph.
    """
    hooks: dict[Any, Any] = module._forward_hooks
    key = next(own for own in map("packlora {}".format, count()) if own not in hooks)
    module._forward_pre_hooks[key] = before  # type: ignore[index]
    hooks[key] = after
    module._forward_hooks_always_called[key] = True  # type: ignore[index]


def remove_hooks(module: nn.Module, owner: type) -> None:
    """Take off the forward hooks that are methods of an `owner`; copies of a module have copies of its hooks."""
    flags = (
        module._forward_hooks_always_called,
        module._forward_hooks_with_kwargs,
        module._forward_pre_hooks_with_kwargs,
    )
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), owner):
                del hooks[number]
                for flag in flags:
                    flag.pop(number, None)


def beside_decoder(model: Any) -> frozenset[str]:
    """Paths of the modules of a vision-language model that are given rows of images, not of tokens: all outside of its language
    model and its output layer. None of other models."""
    if getattr(getattr(model, "config", None), "vision_config", None) is None:
        return frozenset()
    tokens = {id(module) for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    return frozenset(
        path for path, module in model.named_modules() if id(module) not in tokens and not any(
            id(child) in tokens for child in module.modules()
        )
    )  # fmt: skip
