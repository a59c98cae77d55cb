"""Benchmarks on several processes: they start together, no fault lets one of them wait for ever, messages are counted.

Three things end a process that waits in vain: the process groups give up after TIMEOUT, so does `alarm`, which needs neither
the process group nor Python's lock, and torchrun ends all processes when one has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from packlora.errors import InputError
from packlora.parallel.alone import OneProcess
from packlora.parallel.collectives import GATHER, SCATTER, SCATTER_SEVERAL
from packlora.parallel.mesh import Mesh
from packlora.parallel.start import started
from packlora.tune.timing import Contender, Work

TIMEOUT, ENDING = 120.0, 20.0
"""Seconds until the next sign of life at the latest, and for a process that has failed to end."""


def alarm(seconds: float = TIMEOUT) -> None:
    """End this process, printing where it stands, unless this is called again within so many seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True)


@contextlib.contextmanager
def processes() -> Iterator[OneProcess]:
    """The processes that torchrun has started. A process that fails prints its error and ends soon; one that is sent SIGUSR1
    prints where it stands."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    alarm()
    try:
        with started(TIMEOUT) as mesh:
            try:
                yield mesh
                gc.collect()  # a process group does not end while graphs hold its messages
            except InputError:
                raise
            except BaseException as error:
                if not isinstance(error, SystemExit):  # which was printed
                    show_error(mesh.rank)
                alarm(ENDING)  # an orderly end may wait for what the others wait for
                traceback.clear_frames(error.__traceback__)  # which hold what was measured, graphs among it
                gc.collect()
                raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def show_error(rank: int) -> None:
    print(f"process {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def aligned(
    name: str, make: Callable[[], Work], mesh: OneProcess, device: torch.device, made: dict[str, Work]
) -> Contender:
    """A contender on all processes: no process begins a run before all are there, and an error in a run ends all of them.

    Args:
        made: its work is put there.
    """

    def build() -> Work:
        work = make()
        if not isinstance(mesh, Mesh):
            return made.setdefault(name, work)

        def step() -> None:
            try:
                work.step()
            except Exception as error:  # the others wait for it in a collective: the loop must not go on without it
                show_error(mesh.rank)
                raise SystemExit(1) from error

        def clear() -> None:
            alarm()
            work.clear()
            dist.all_reduce(torch.zeros(1, device=device))

        return made.setdefault(name, Work(step, clear, work.note))

    return Contender(name, build)


# --- messages ----------------------------------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


SENT: dict[str, Callable[[int, tuple[Any, ...]], float]] = {
    "all_reduce": lambda size, args: 2 * (size - 1) / size * _bytes(args[0]),
    "all_gather": lambda size, args: (size - 1) * _bytes(args[1]),
    GATHER: lambda size, args: (size - 1) * _bytes(args[1]),
    SCATTER: lambda size, args: (size - 1) * _bytes(args[0]),
    SCATTER_SEVERAL: lambda size, args: (size - 1) * sum(map(_bytes, args[1])),
    "reduce_scatter": lambda size, args: (size - 1) * _bytes(args[0]),
    "all_to_all": lambda size, args: (size - 1) / size * sum(map(_bytes, args[1])),
    "all_to_all_single": lambda size, args: (size - 1) / size * _bytes(args[1]),
    "broadcast": lambda size, args: _bytes(args[0]),
    "reduce": lambda size, args: _bytes(args[0]),
    "send": lambda size, args: _bytes(args[0]),
}
"""Bytes that a process sends where messages go round in a ring, by function of torch.distributed or method of its groups."""


@dataclass(slots=True)
class Messages:
    """names: of the collectives that were called. sent: bytes that this process sent."""

    names: list[str] = field(default_factory=list)
    sent: float = 0.0


@contextlib.contextmanager
def counted() -> Iterator[Messages]:
    """Count what this process calls of SENT, on the default group or one of the same size."""
    found, size = Messages(), dist.get_world_size()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.names.append(name)
            found.sent += SENT[name](size, args)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patched:
        for name in SENT:
            owner: Any = dist if hasattr(dist, name) else dist.ProcessGroup
            patched.enter_context(mock.patch.object(owner, name, counting(name, getattr(owner, name))))
        yield found


def messages(works: Mapping[str, Work]) -> dict[str, dict[str, Any]]:
    """Collectives and bytes that a run of each contender sends from this process."""
    found = {}
    for name, work in works.items():
        work.clear()
        with counted() as sent:
            work.step()
        work.clear()
        found[name] = {"collectives": len(sent.names), "sent": sent.sent}
    return found
