"""How a run spreads over devices: what each layout is predicted to take, and which one training takes.

Work is predicted from shapes alone (work.py): so every process of a run finds the same layout, and a resumed run too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.parallel import layout as layouts
from packlora.parallel.layout import Layout, Prediction, Wave
from packlora.runtime import profiler
from packlora.runtime.prepare import PreparedRun
from packlora.runtime.profiler import Profile
from packlora.runtime.work import Work
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

SAMPLES = 20_000
"""Samples of a group that are planned; of a longer run the first windows, scaled up."""


@dataclass(slots=True)
class Spread:
    """A layout and what its groups run at the beginning.

    waves, parts: by group, see layout.predict.
    """

    layout: Layout
    waves: list[list[Wave]]
    parts: list[float]

    @property
    def fullest(self) -> list[int]:
        """By group, tokens of its fullest microbatch; 0 where it has no jobs."""
        return [max((one.num_tokens for wave in own for one in wave), default=0) for own in self.waves]

    def predict(self, cost: Callable[[Microbatch], float]) -> Prediction:
        """See layout.predict."""
        return layouts.predict(self.layout, self.waves, self.parts, cost)


@dataclass(frozen=True, slots=True)
class Choice:
    """The layout that training takes, and why."""

    layout: Layout
    reason: str


def choose(prepared: PreparedRun, devices: int, known: Profile) -> Choice:
    """How the run is trained on so many devices. To be asked before the budget is chosen.

    Args:
        known: of a device; the same on every process.

    Raises:
        InputError: devices_per_job does not divide so many devices.
    """
    work, parallel = Work(prepared), prepared.run.parallel
    found, sharded = candidates(prepared, devices, work.jobs()), sharded_layout(prepared, devices)
    if not found:
        raise InputError(
            f"parallel.devices_per_job is {parallel.devices_per_job}, which does not divide {devices} devices"
        )
    if parallel.pipeline > 1:
        return Choice(found[0], f"parallel.pipeline is {parallel.pipeline}")
    if devices == 1:
        return Choice(one_device(prepared), "there is one device")
    if parallel.shard_base is True and sharded is not None:
        return Choice(sharded, "parallel.shard_base is true")
    if len(found) == 1 and sharded is None:
        return Choice(found[0], f"parallel.devices_per_job is {parallel.devices_per_job}")
    planned = [spread(prepared, own) for own in found]
    if parallel.tensor == 1:  # of a model that is cut nothing is predicted
        needed = [needed_bytes(prepared, known, own, first=True) for own in planned]
        fitting = [own for own, size in zip(planned, needed, strict=True) if fits(known, size)]
        if sharded is not None and not fitting:
            least = needed_bytes(prepared, known, spread(prepared, sharded), first=True)
            if least < min(needed):
                return Choice(sharded, _does_not_fit(known, min(needed), least))
        planned = fitting or planned
    return _choose_whole([own.predict(work.of) for own in planned], parallel.devices_per_job)


def _does_not_fit(known: Profile, whole: int, sharded: int) -> str:
    gib = 2**30
    return (
        f"training on the whole base model is estimated to take {whole / gib:.2f} GiB of a device, which has "
        f"{known.room / gib:.2f} free, of which {profiler.ROOM_SHARE:.0%} are planned with; on a part of it {sharded / gib:.2f}"
    )


def _choose_whole(predictions: list[Prediction], asked: int | str) -> Choice:
    """Of layouts whose devices hold the whole base model."""
    if asked != "auto":
        return Choice(predictions[0].layout, f"parallel.devices_per_job is {asked}")
    taken = layouts.choose(predictions)
    if taken.idle > layouts.MOST_IDLE:
        return Choice(
            taken.layout,
            f"no layout leaves less than {layouts.MOST_IDLE:.0%} of the devices' time idle, and this one is done first",
        )
    why = f"{taken.idle:.0%} of the devices' time is idle"
    fewer = [f"{one.layout.split}: {one.idle:.0%}" for one in predictions if one.layout.split < taken.layout.split]
    if fewer:
        why += f"; with fewer devices per job it is more than {layouts.MOST_IDLE:.0%} ({', '.join(fewer)})"
    return Choice(taken.layout, why)


def one_device(prepared: PreparedRun) -> Layout:
    return Layout((tuple(job.data.name for job in prepared.jobs),))


def candidates(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """The layouts that the run file allows on so many devices that hold the whole base model, or those of a replica together;
    those whose jobs share the fewest first.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel = prepared.run.parallel
    if parallel.pipeline > 1:
        return [Layout((tuple(job.data.name for job in prepared.jobs),), pipeline=parallel.pipeline)]
    asked = devices if parallel.shard_base is True else parallel.devices_per_job
    found = layouts.layouts(work, devices, parallel.tensor)
    return [own for own in found if asked in ("auto", own.devices_per_job)]


def sharded_layout(prepared: PreparedRun, devices: int) -> Layout | None:
    """All devices share every job and hold a part of the base model each; None where the run file does not allow it."""
    parallel = prepared.run.parallel
    if (
        devices == 1
        or parallel.tensor > 1
        or parallel.pipeline > 1
        or prepared.quantization is not None
        or not parallel.shard_base
        or any(job.spec.parameter is not None for job in prepared.jobs)
        or parallel.devices_per_job not in ("auto", devices)
    ):
        return None
    return Layout((tuple(job.data.name for job in prepared.jobs),), devices, sharded=True)


# --- memory ------------------------------------------------------------------------------------------------------------


def needed_bytes(prepared: PreparedRun, known: Profile, own: Spread, first: bool = False) -> int:
    """Of the device of a layout that needs the most. A device holds its own jobs alone.

    Args:
        first: with the fewest tokens to a microbatch that the profiler would choose, where that is left to it.
    """
    trainable = {job.data.name: job.trainable for job in prepared.jobs}
    smallest = None
    if first and prepared.run.max_tokens_per_microbatch == "auto" and choose_device(prepared.run.device).type == "cuda":
        smallest = profiler.budgets(prepared)[0]
    needed = 0
    for names, fullest in zip(own.layout.groups, own.fullest, strict=True):
        others = prepared.trainable - sum(trainable[name] for name in names)
        tokens = fullest if smallest is None else min(fullest, smallest)
        needed = max(needed, known.bytes(tokens) - profiler.TRAINABLE_BYTES * others)
    if not own.layout.sharded:
        return needed
    base, gathered = base_bytes(prepared)
    return needed - base + base // own.layout.processes + gathered


def fits(known: Profile, needed: int) -> bool:
    """Whether a device has so many bytes."""
    return needed <= profiler.ROOM_SHARE * known.room


def base_bytes(prepared: PreparedRun) -> tuple[int, int]:
    """Of the base model; and, where it is sharded, of what is whole on a device at a time: two layers, the embedding, the norms
    and the output layer."""
    shape, width = prepared.shape, getattr(torch, prepared.run.dtype).itemsize
    layers = 2 * shape.linear_parameters // shape.layers
    return shape.parameters * width, (shape.parameters - shape.linear_parameters + layers) * width


# --- plans -------------------------------------------------------------------------------------------------------------


def spread(prepared: PreparedRun, layout: Layout) -> Spread:
    """Plan what the groups of a layout run."""
    planned = [_waves(prepared, names, layout.split) for names in layout.groups]
    return Spread(layout, [waves for waves, _ in planned], [part for _, part in planned])


def _waves(prepared: PreparedRun, names: tuple[str, ...], split: int) -> tuple[list[Wave], float]:
    """Of the jobs of a group, and the part of their tokens that they are."""
    jobs = [job.data for job in prepared.jobs if job.data.name in names]
    if not jobs:
        return [], 1.0
    method = "solo" if prepared.run.schedule.method == "solo" else "greedy"
    out: list[Wave] = []
    samples = tokens = 0
    for window in Planner(
        [job.planned for job in jobs], layouts.planned(prepared.budget, split), method=method
    ).windows():
        out += layouts.waves(window.microbatches, split, prepared.budget)
        samples += sum(len(microbatch.samples) for microbatch in window.microbatches)
        tokens += sum(microbatch.num_tokens for microbatch in window.microbatches)
        if samples >= SAMPLES:
            break
    return out, min(1.0, tokens / sum(job.tokens for job in jobs))
