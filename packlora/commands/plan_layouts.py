"""The part of `packlora plan --gpus` about devices: each layout of the run on them, and which one training takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packlora.experts import layouts
from packlora.parallel.layout import Layout
from packlora.report.progress import duration
from packlora.runtime import estimate
from packlora.runtime.choose import (
    Choice,
    Spread,
    Work,
    candidates,
    host_bytes,
    needed_bytes,
    piped,
    seconds_of,
    sharded_layouts,
    spread,
)
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile

HEADINGS = ("devices per job", "groups", "waves", "time", "speedup", "idle", "memory GiB", "")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """A layout of the run, predicted.

    waves: of the group with the most. speedup: over one device. host_bytes: of the base model, on the host of each device.
    idle: share of all devices' time in which they have no microbatch, by predicted work (choose.Work). bytes: of a device
    of the group that needs the most.
    """

    layout: Layout
    waves: int
    seconds: float
    speedup: float
    idle: float
    bytes: int
    host_bytes: int
    fits: bool
    taken: bool

    @property
    def status(self) -> str:
        """For the last column."""
        words = ["taken"] if self.taken else []
        return ", ".join(words + self.layout.words + ([] if self.fits else ["does not fit"]))

    def to_json(self) -> dict[str, Any]:
        """Numbers of the layout, and what is predicted."""
        own = {name: getattr(self, name) for name in self.__slots__ if name != "layout"}
        before, after = ("devices_per_job", "groups", "shard", "tensor", "pipeline"), ("expert", "exchange")
        layout = {name: getattr(self.layout, name) for name in before + after}
        return {name: layout[name] for name in before} | own | {name: layout[name] for name in after}


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of the run on so many devices. reason: why training takes the layout that it takes."""

    devices: int
    rows: list[LayoutFigures]
    reason: str

    @property
    def taken(self) -> LayoutFigures:
        return next(row for row in self.rows if row.taken)

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices, "layouts": [row.to_json() for row in self.rows], "reason": self.reason,
            "gather_bytes_per_second": estimate.BYTES_PER_SECOND,
        }  # fmt: skip


def figures_of(prepared: PreparedRun, known: Profile, devices: int, taken: Choice, alone: float) -> Layouts:
    """All layouts on so many devices.

    Args:
        taken: from choose.choose.
        alone: seconds that the run takes on one device.
    """
    work = Work(prepared, prepared.run.parallel.experts_on).jobs()
    found = candidates(prepared, devices, work) + sharded_layouts(prepared, devices, work)
    found += piped(prepared, devices, work) + layouts.candidates(prepared, devices, work)
    rows = [_row(prepared, known, spread(prepared, own), taken.layout, alone) for own in found]
    return Layouts(devices, rows, taken.reason)


def _row(
    prepared: PreparedRun, known: Profile, own: Spread, taken: Layout, alone: float
) -> LayoutFigures:  # fmt: skip
    layout = own.layout
    work = Work(prepared, layout.experts_on)
    shared = layouts.profile(known, prepared, layout)
    seconds = own.predict(seconds_of(prepared, layout, shared.seconds), shared.cost).time
    balance, needed = own.predict(work.of, work.cost), needed_bytes(prepared, known, own)
    has_failed = known.failed is not None and max(own.fullest) >= known.failed and not layout.is_in_parts
    fits = known.has_room(needed) and not has_failed
    return LayoutFigures(
        layout, balance.waves, seconds, alone / seconds, balance.idle, needed, host_bytes(prepared, layout), fits,
        layout == taken,
    )  # fmt: skip


def table(found: Layouts) -> Sequence[Sequence[str]]:
    """Rows below HEADINGS."""
    return [
        (
            str(row.layout.devices_per_job), str(len(row.layout.groups)), str(row.waves),
            duration(row.seconds) if row.seconds >= 60 else f"{row.seconds:.1f} s", f"{row.speedup:.2f}", f"{row.idle:.0%}",
            f"{row.bytes / 2**30:.2f}", row.status,
        )
        for row in found.rows
    ]  # fmt: skip


def sentences(found: Layouts, limit: int) -> list[str]:
    """Sentences below the table of layouts.

    limit: most groups that are listed by name.
    """
    taken, out = found.taken.layout, [f"training takes {_what(found)}: {found.reason}"]
    if len(taken.groups) > 1:
        listed = [" + ".join(group) or "nothing" for group in taken.groups[:limit]]
        more = len(taken.groups) - limit
        out.append("groups: " + ", ".join(listed) + (f" and {more} more" if more > 0 else ""))
    if not found.taken.fits:
        out.append("note: this does not fit; lower max_tokens_per_microbatch or set gradient_checkpointing: true")
    if most := max(row.host_bytes for row in found.rows):
        out.append(f"parallel.offload_base: the host keeps {most / 2**30:.2f} GiB for each device")
    if any(row.layout.is_in_parts for row in found.rows):
        out.append("what is assumed of messages between devices: docs/several-gpus.md")
    return out


def _what(found: Layouts) -> str:
    """Layout that training takes, and what it is for a job."""
    taken = found.taken.layout
    each = "is whole on one device" if taken.devices_per_job == 1 else f"is shared by {taken.devices_per_job} devices"
    what = str(taken.devices_per_job)
    if taken.shard > 1:
        what = (
            "the sharded base" if taken.shard * taken.tensor == found.devices else f"a base sharded over {taken.shard}"
        )
    if taken.pipeline > 1:
        what, each = import_module("packlora.pipeline.plan").words(taken)
    if taken.expert > 1:
        what += f" with experts on {taken.expert}"
    return f"{what}, so each job {each}"
