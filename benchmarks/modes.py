"""The three ways in which a user may run a module: as it is, under torch.compile, and with CUDA graphs that it records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from packlora.plans.timing import Contender, Work
from packlora.runtime.memory import free_memory, synchronize

MODES = ("eager", "compiled", "reduce-overhead")
RUNS = 3
"""Until nothing is compiled or recorded any more: the first compiles, reduce-overhead warms up and then records."""


def modes(device: torch.device) -> tuple[str, ...]:
    """Those that the device has."""
    return MODES if device.type == "cuda" else MODES[:2]


def in_mode(call: Callable[..., Any], mode: str, device: torch.device) -> Callable[..., Any]:
    """The call in one of MODES. On a CPU `compiled` stops once the graph is traced."""
    return call if mode == "eager" else torch.compile(call, **_settings(mode, device))


def compile_each(modules: Iterable[nn.Module], mode: str, device: torch.device) -> None:
    """As in_mode, of every module by itself, in place; those of one shape share a graph."""
    for module in modules if mode != "eager" else ():
        module.compile(**_settings(mode, device))


def _settings(mode: str, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"backend": "eager", "dynamic": False}
    return {"mode": "reduce-overhead" if mode == "reduce-overhead" else None, "dynamic": False}


def begin_step(mode: str) -> None:
    """Before each forward: what graphs gave before is not needed any more."""
    if mode == "reduce-overhead":
        torch.compiler.cudagraph_mark_step_begin()


def started(
    name: str,
    make: Callable[[], tuple[Work, Callable[[], None]]],
    mode: str,
    device: torch.device,
    seconds: dict[str, float],
) -> Contender:
    """A contender whose work is run until it is compiled.

    Args:
        make: the work, and a check of its results that is made once it is compiled.
        seconds: how long compiling took is put there under the name.
    """

    def build() -> Work:
        work, check = make()

        def step() -> None:
            begin_step(mode)
            work.step()

        if mode != "eager":
            start = time.perf_counter()
            for _ in range(RUNS):
                work.clear()
                step()
            work.clear()
            synchronize(device)
            seconds[name] = time.perf_counter() - start
        check()
        return Work(step, work.clear, work.note)

    return Contender(name, build)


def forget(device: torch.device) -> None:
    """Drop everything compiled, so that limits of recompilation do not leave later cases uncompiled, and its memory."""
    torch._dynamo.reset()
    free_memory(device)
