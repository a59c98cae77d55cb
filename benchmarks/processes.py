"""What benchmarks on several processes have in common: they start together, and no fault lets any of them wait for ever.

Three things end a process that waits in vain: the process groups give up after TIMEOUT, so does `alarm`, which needs neither
the process group nor Python's lock, and torchrun ends all of them when one has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.layer import progress_line
from benchmarks.messages import counted
from benchmarks.options import Options
from benchmarks.progress import Case, Row
from benchmarks.results import text_table
from packlora.errors import InputError
from packlora.parallel.mesh import Mesh, started, world_size
from packlora.plans.timing import Work
from packlora.runtime.memory import free_memory

TIMEOUT, ENDING = 120.0, 20.0
"""Seconds until the next sign of life at the latest; and that a process which has failed takes to end."""


def alarm(seconds: float = TIMEOUT) -> None:
    """End this process, saying where it stands, unless this is called again within so many seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True)


@contextlib.contextmanager
def processes(name: str) -> Iterator[Mesh]:
    """The processes that torchrun has started for a benchmark.

    Raises:
        InputError: there is one.
    """
    if world_size() == 1:
        raise InputError(
            f"bench {name} measures several processes: torchrun --nproc-per-node 2 -m benchmarks {name} --out FILE"
        )
    alarm()
    try:
        with started(TIMEOUT) as mesh:
            assert isinstance(mesh, Mesh)
            try:
                yield mesh
            except InputError:
                raise
            except BaseException as error:
                if not isinstance(error, SystemExit):  # which has been told
                    tell(mesh.rank)
                alarm(ENDING)  # an orderly end may wait for what the others wait for
                raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def tell(rank: int) -> None:
    """Print the error that is being handled."""
    print(f"process {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def all_or_none(step: Callable[[], None], rank: int) -> Callable[[], None]:
    """The step of a contender whose error ends the run: the others wait for it in a collective, so a loop must not go on
    without it."""

    def run() -> None:
        try:
            step()
        except Exception as error:
            tell(rank)
            raise SystemExit(1) from error

    return run


# --- contenders on all of them -----------------------------------------------------------------------------------------


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def together(work: Work, mesh: Mesh, device: torch.device) -> Work:
    """A contender's work on all processes: no process begins a run before all are there."""

    def clear() -> None:
        alarm()
        work.clear()
        dist.all_reduce(torch.zeros(1, device=device))

    return Work(all_or_none(work.step, mesh.rank), clear, work.note)


def messages(works: Mapping[str, Work]) -> dict[str, dict[str, Any]]:
    """By contender what a run of it sends: collectives, and bytes of this process."""
    found = {}
    for name, work in works.items():
        work.clear()
        with counted() as sent:
            work.step()
        work.clear()
        found[name] = {"collectives": len(sent.names), "sent": sent.sent}
    return found


def measured_rows(cases: Sequence[Case], measure: Callable[[Case], Row], options: Options, mesh: Mesh) -> list[Row]:
    """The rows that stay in the file and those of the cases; the first process prints a line per case."""
    rows = list(options.kept)
    for case in cases:
        rows.append(measure(case))
        if mesh.is_first:
            print(progress_line(rows[-1]), flush=True)
        free_memory(options.device)
    return rows


def part_of(row: Row) -> str:
    """Of a benchmark without parts: a run with so many processes replaces the rows with as many."""
    return f"all {row['processes']}"


def message_table(rows: list[dict[str, Any]]) -> list[str]:
    """Of rows that have milliseconds and messages by contender."""
    lines = [
        [
            row["case"], name, f"{row['ms'][name]:.2f}", f"{row['over_frozen'].get(name) or 1.0:.3f}",
            str(row["messages"][name]["collectives"]), f"{row['messages'][name]['sent'] / 2**20:.2f}",
        ]
        for row in rows
        for name in row["ms"]
    ]  # fmt: skip
    return text_table(["case", "contender", "ms", "/frozen", "messages", "MiB sent"], lines)
