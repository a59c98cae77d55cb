"""Paired timing: every contender runs in turn inside one loop, so that clocks, heat and neighbours fall on all alike.

Before each run the L2 cache is flushed (256 MB written). On a GPU a run lies between two CUDA events and the host never waits
inside the loop; on a CPU the clock is perf_counter and nothing is flushed. A ratio is the median over rounds of the ratio
within a round. The order within a round is drawn anew each time: nobody always follows the same neighbour. A contender that
fails, wherever it does, is kept with its error.

A single layer may take the host longer than the GPU, and then its time says how fast this host is. So rounds can be added
where the GPU is kept waiting before each run until the host has launched all of it, as where many layers are queued: what is
timed then is the GPU alone. And rounds can be added where each run is waited for: the time on the wall of one run by itself,
host and GPU one after the other where they cannot overlap.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""CUDA events before and after a run."""
FLUSH_BYTES = 256 * 2**20
MORE_ROUNDS = 15
"""Rounds of each kind that are added."""
AHEAD_FACTOR, AHEAD_CYCLES_A_US = 1.5, 2000
"""The GPU waits so many times as long as the host usually takes to launch the run, at a clock of 2 GHz or less."""
LONG = 0.05
"""Seconds of a round from which on garbage is collected after it: for a single layer there is little to collect, and a
collection empties the processor's caches, which triples what the host needs for the next launches."""


@dataclass(frozen=True, slots=True)
class Work:
    """step: one forward and backward. clear: drop the gradients it left, outside the clock. note: on how it is computed."""

    step: Callable[[], None]
    clear: Callable[[], None]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Contender:
    """make builds its modules and inputs; it runs once, and what it allocates counts as the contender's own."""

    name: str
    make: Callable[[], Work]


@dataclass(slots=True)
class Timing:
    """Timing of one contender.

    ms: time of every counted round. host_us: time until the host had launched the run. own_bytes: memory kept between runs
    since it was built. peak_bytes: memory of one run beyond what was allocated before it (None on a CPU). note: note of its
    Work. error: reason why there are no figures. ahead_ms: times of the rounds in which the host was ahead. wall_ms: times of
    the rounds in which each run was waited for.
    """

    name: str
    ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    own_bytes: int | None = None
    peak_bytes: int | None = None
    note: str = ""
    error: str | None = None
    ahead_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Timings:
    """Timings of all contenders of one case, in the order given."""

    by_name: dict[str, Timing]

    def ratio(self, name: str, to: str, kind: str = "ms") -> float | None:
        """Time of `name` over time of `to`, median over rounds; None where one of them failed or did not take part.

        Args:
            kind: of rounds: ms, ahead_ms or wall_ms.
        """
        above, below = self.by_name.get(name), self.by_name.get(to)
        if above is None or below is None or above.error or below.error:
            return None
        pairs = zip(getattr(above, kind), getattr(below, kind), strict=True)
        return float(statistics.median(a / b for a, b in pairs))


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean; None where a value is missing or there is none: a mean over fewer cases than requested would mislead."""
    values = list(values)
    if not values or any(value is None for value in values):
        return None
    return statistics.geometric_mean(value for value in values if value is not None)


def paired(
    contenders: Sequence[Contender],
    device: torch.device,
    seconds: float = 1.5,
    rounds: tuple[int, int] = (15, 100),
    warmup: int = 3,
    flush: bool = True,
    ahead: bool = False,
    wall: bool = False,
    seed: int = 0,
) -> Timings:
    """Build, warm up, then time the contenders in turn.

    Args:
        contenders: in the order they are built; names must differ.
        seconds: how long the counted rounds should take together, on the clock on the wall.
        rounds: fewest and most of them.
        warmup: runs of each contender that are not counted (they compile and choose plans), before two whole rounds that
            are not counted either.
        flush: write 256 MB before each run; not done on a CPU.
        ahead: add MORE_ROUNDS rounds in which the host is ahead of the GPU; not done on a CPU.
        wall: add MORE_ROUNDS rounds in which each run is waited for; not done on a CPU.
        seed: of the orders.
    """
    if len({contender.name for contender in contenders}) != len(contenders):
        raise ValueError(f"names of contenders must differ, got {[contender.name for contender in contenders]}")
    timings = Timings({contender.name: Timing(contender.name) for contender in contenders})
    orders = random.Random(seed)
    with _no_collections():
        works = _built(contenders, timings, device, warmup)
        scratch = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if flush and device.type == "cuda" else None
        )
        each = _rounds(works, timings, device, 2, scratch, orders) / 2
        for timing in timings.by_name.values():
            timing.ms, timing.host_us = [], []
        count = min(max(round(seconds / max(each, 1e-9)), rounds[0]), rounds[1])
        _rounds(works, timings, device, count, scratch, orders)
        if ahead and device.type == "cuda":
            waits = {name: _cycles(timings.by_name[name]) for name in works}
            _rounds(works, timings, device, MORE_ROUNDS, scratch, orders, waits=waits)
        if wall and device.type == "cuda":
            _rounds(works, timings, device, MORE_ROUNDS, scratch, orders, wall=True)
    return timings


def _built(contenders: Sequence[Contender], timings: Timings, device: torch.device, warmup: int) -> dict[str, Work]:
    """Contenders that run, warmed up; the timings of the others get the error."""
    works: dict[str, Work] = {}
    for contender in contenders:
        timing = timings.by_name[contender.name]
        try:
            works[contender.name] = _warmed_up(contender, timing, device, warmup)
        except Exception as error:  # a peer may fail in any way; the row says how
            timing.error = _described(error)
        if timing.error is not None:
            _free(device)
    gc.collect()
    gc.freeze()  # existing objects are not searched again: a collection between rounds then takes microseconds
    return works


def _cycles(timing: Timing) -> int:
    return int(AHEAD_FACTOR * AHEAD_CYCLES_A_US * statistics.median(timing.host_us))


def _warmed_up(contender: Contender, timing: Timing, device: torch.device, warmup: int) -> Work:
    gc.collect()  # cyclic garbage of another contender must not be freed in between and counted as this one's
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    work = contender.make()
    timing.note = work.note
    for _ in range(warmup):
        work.clear()
        work.step()
    work.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        resident = torch.cuda.memory_allocated(device)
        timing.own_bytes = resident - before
        torch.cuda.reset_peak_memory_stats(device)
        work.step()
        torch.cuda.synchronize(device)
        timing.peak_bytes = torch.cuda.max_memory_allocated(device) - resident
        work.clear()
    return work


def _rounds(
    works: dict[str, Work],
    timings: Timings,
    device: torch.device,
    count: int,
    scratch: torch.Tensor | None,
    orders: random.Random,
    waits: dict[str, int] | None = None,
    wall: bool = False,
) -> float:
    """Run `count` rounds and add their times. A contender that fails leaves the loop. Returns the seconds of all rounds.

    Args:
        waits: clock cycles that the GPU waits before each run, by contender: the times are ahead_ms.
        wall: wait for the GPU before and after each run: the times are wall_ms.
    """
    events: dict[str, list[Events]] = {name: [] for name in works}
    first = began = time.perf_counter()
    for number in range(count):
        if number and time.perf_counter() - began > LONG:
            gc.collect()  # a cycle that holds a model's activations must not outlive its round
        began = time.perf_counter()
        for name in orders.sample(list(works), len(works)):
            timing, wait = timings.by_name[name], None if waits is None else waits[name]
            try:
                works[name].clear()
                if scratch is not None:
                    scratch.fill_(number % 251)
                events[name] += _timed_run(works[name], timing, device, wait, wall)
                works[name].clear()
            except Exception as error:
                timing.error = _described(error)
                del works[name]
    if device.type == "cuda" and not wall:
        torch.cuda.synchronize(device)
        for name in works:
            into = timings.by_name[name].ms if waits is None else timings.by_name[name].ahead_ms
            into += [begin.elapsed_time(end) for begin, end in events[name]]
    return time.perf_counter() - first


def _timed_run(work: Work, timing: Timing, device: torch.device, wait: int | None, wall: bool) -> list[Events]:
    """One run. On a GPU its events are returned, to be read after the loop, unless it is waited for; else its time is added.

    Args:
        wait: clock cycles that the GPU waits before the run; None: none, and the host's time is added.
        wall: wait for the GPU before and after the run.
    """
    events: list[Events] = []
    if wait is not None:
        torch.cuda._sleep(wait)
    if device.type == "cuda" and not wall:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events = [(begin, end)]
        begin.record()
    if wall:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work.step()
    if wall:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    for _, end in events:
        end.record()
    if wall:
        timing.wall_ms.append(seconds * 1e3)
    elif device.type != "cuda":
        timing.ms.append(seconds * 1e3)
    if wait is None and not wall:
        timing.host_us.append(seconds * 1e6)
    return events


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disable automatic garbage collection: a collection inside a run would be charged to that run."""
    gc.collect()
    gc.freeze()  # modules of libraries are most of what there is: the collections inside look at what is made since
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
