"""The part of `packlora plan --gpus` about devices: each layout of the run on them, and which one training takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import MOST_IDLE, Layout, choose
from packlora.report.progress import duration
from packlora.runtime import profiler
from packlora.runtime.prepare import PreparedRun
from packlora.runtime.profiler import Profile
from packlora.runtime.spread import Spread, candidates, spread
from packlora.runtime.work import Work
from packlora.schedule.types import Microbatch

GATHER_BYTES_PER_SECOND = 2e11
"""Assumed, of a device that gathers a layer from the others: four H200s by NVLink reach 2.1e11 to 2.5e11."""
HEADINGS = ("devices per job", "groups", "waves", "time", "speedup", "idle", "memory GiB", "")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """A layout of the run, predicted.

    groups: names of their jobs. sharded: the base model is in parts on all devices, and gathered layer by layer. waves: of the
    group with the most. speedup: over one device. idle: share of all devices' time in which they have no microbatch, by
    predicted work (runtime/work.py). bytes: of a device of the group that needs the most.
    """

    devices_per_job: int
    groups: tuple[tuple[str, ...], ...]
    sharded: bool
    waves: int
    seconds: float
    speedup: float
    idle: float
    bytes: int
    fits: bool
    taken: bool

    @property
    def status(self) -> str:
        """For the last column."""
        words = ["taken"] if self.taken else []
        words += ["base sharded"] if self.sharded else []
        words += [] if self.fits else ["does not fit"]
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of the run on so many devices. reason: why training takes the one that it takes."""

    devices: int
    rows: list[LayoutFigures]
    reason: str

    @property
    def taken(self) -> LayoutFigures:
        return next(row for row in self.rows if row.taken)

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices, "layouts": [asdict(row) for row in self.rows], "reason": self.reason,
            "gather_bytes_per_second": GATHER_BYTES_PER_SECOND,
        }  # fmt: skip


def taken_layout(prepared: PreparedRun, devices: int) -> tuple[Layout, str]:
    """The layout that training takes, and why. To be asked before the budget is chosen, as training does.

    Raises:
        InputError: devices_per_job does not divide so many devices.
    """
    work = Work(prepared)
    found = candidates(prepared, devices, work.jobs())
    if not found:
        raise InputError(
            f"parallel.devices_per_job is {prepared.run.parallel.devices_per_job}, which does not divide {devices} devices"
        )
    if devices == 1:
        return found[0], "there is one device"
    if len(found) == 1:
        return found[0], f"parallel.devices_per_job is {found[0].split}"
    predictions = [spread(prepared, own).predict(work.of) for own in found]
    taken = choose(predictions)
    if taken.idle > MOST_IDLE:
        return (
            taken.layout,
            f"no layout leaves less than {MOST_IDLE:.0%} of the devices' time idle, and this one is done first",
        )
    why = f"{taken.idle:.0%} of the devices' time is idle"
    fewer = [f"{one.layout.split}: {one.idle:.0%}" for one in predictions if one.layout.split < taken.layout.split]
    if fewer:
        why += f"; with fewer devices per job it is more than {MOST_IDLE:.0%} ({', '.join(fewer)})"
    return taken.layout, why


def figures_of(prepared: PreparedRun, known: Profile, devices: int, taken: tuple[Layout, str], alone: float) -> Layouts:
    """All layouts on so many devices.

    Args:
        taken: from taken_layout.
        alone: seconds that the run takes on one device.
    """
    work = Work(prepared)
    found = candidates(prepared, devices, work.jobs())
    rows = [_row(prepared, known, spread(prepared, own), work, taken[0], alone) for own in found]
    if devices > 1:
        rows.append(_sharded(prepared, known, devices, work, alone))
    return Layouts(devices, rows, taken[1])


def _row(
    prepared: PreparedRun, known: Profile, own: Spread, work: Work, taken: Layout, alone: float
) -> LayoutFigures:  # fmt: skip
    needed, fits = _memory(prepared, known, own)
    seconds, balance = own.predict(known.seconds).time, own.predict(work.of)
    return LayoutFigures(
        own.layout.split, own.layout.groups, False, balance.waves, seconds, alone / seconds, balance.idle,
        needed, fits and all(map(known.fits, own.fullest)), own.layout == taken,
    )  # fmt: skip


def _memory(prepared: PreparedRun, known: Profile, own: Spread) -> tuple[int, bool]:
    """Bytes of a device of the group that needs the most, and whether it has them. A device holds its own jobs alone."""
    trainable = {job.data.name: job.trainable for job in prepared.jobs}
    needed = 0
    for names, fullest in zip(own.layout.groups, own.fullest, strict=True):
        others = prepared.trainable - sum(trainable[name] for name in names)
        needed = max(needed, known.bytes(fullest) - profiler.TRAINABLE_BYTES * others)
    return needed, needed <= profiler.ROOM_SHARE * known.room


def _sharded(prepared: PreparedRun, known: Profile, devices: int, work: Work, alone: float) -> LayoutFigures:
    """All devices share every job, and hold a part of the base model each. Two layers are whole at a time. Each is gathered in
    the forward and again in the backward, which is taken to overlap with nothing."""
    names = tuple(job.data.name for job in prepared.jobs)
    own = spread(prepared, Layout((names,), devices))
    base, layer = _base_bytes(prepared.run, prepared)
    gathering = 2 * base * (devices - 1) / devices / GATHER_BYTES_PER_SECOND

    def cost(microbatch: Microbatch) -> float:
        return known.seconds(microbatch) + gathering

    seconds, balance = own.predict(cost).time, own.predict(work.of)
    needed = known.bytes(max(own.fullest)) - base + base // devices + 2 * layer
    return LayoutFigures(
        devices, (names,), True, balance.waves, seconds, alone / seconds, balance.idle, needed,
        needed <= profiler.ROOM_SHARE * known.room, False,
    )  # fmt: skip


def _base_bytes(run: Run, prepared: PreparedRun) -> tuple[int, int]:
    """Of the base model, and of its largest layer, which may be that of the embeddings."""
    shape, width = prepared.shape, getattr(torch, run.dtype).itemsize
    return shape.parameters * width, width * max(
        shape.linear_parameters // shape.layers, shape.vocabulary * shape.hidden
    )


def table(found: Layouts) -> Sequence[Sequence[str]]:
    """Rows below HEADINGS."""
    return [
        (
            str(row.devices_per_job), str(len(row.groups)), str(row.waves),
            duration(row.seconds) if row.seconds >= 60 else f"{row.seconds:.1f} s", f"{row.speedup:.2f}", f"{row.idle:.0%}",
            f"{row.bytes / 2**30:.2f}", row.status,
        )
        for row in found.rows
    ]  # fmt: skip


def sentences(found: Layouts, limit: int) -> list[str]:
    """What is said below the table.

    limit: groups that are listed at all.
    """
    taken, out = found.taken, []
    each = "is whole on one device" if taken.devices_per_job == 1 else f"is shared by {taken.devices_per_job} devices"
    out.append(f"training takes {taken.devices_per_job}, so each job {each}: {found.reason}")
    if len(taken.groups) > 1:
        listed = [" + ".join(group) or "nothing" for group in taken.groups[:limit]]
        more = len(taken.groups) - limit
        out.append("groups: " + ", ".join(listed) + (f" and {more} more" if more > 0 else ""))
    if not taken.fits:
        out.append("note: this does not fit; lower max_tokens_per_microbatch or set gradient_checkpointing: true")
    if any(row.sharded for row in found.rows):
        out.append(
            "base sharded: with parallel.shard_base, for a base model that fits no device. Layers are assumed to be "
            f"gathered at {GATHER_BYTES_PER_SECOND / 1e9:.0f} GB/s"
        )
    return out
