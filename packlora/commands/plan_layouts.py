"""The part of `packlora plan --gpus` about devices: each layout of the run on them, and which one training takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    sharing_experts,
    spread,
)
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile

HEADINGS = ("devices per job", "groups", "waves", "time", "speedup", "idle", "memory GiB", "")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """A layout of the run, predicted.

    groups: names of their jobs. shard: devices that have a part of the rows of every weight each, gathered layer by layer.
    tensor: devices that have a slice of every layer each. pipeline: stages, a device each, that have a part of its layers each.
    waves: of the group with the most. speedup: over one device. host_bytes: of the base model, on the host of each device.
    idle: share of all devices' time in which they have no microbatch, by predicted work (choose.Work). bytes: of a device
    of the group that needs the most. expert: devices that hold the experts together. exchange: of which each has microbatches
    of its own.
    """

    devices_per_job: int
    groups: tuple[tuple[str, ...], ...]
    shard: int
    tensor: int
    pipeline: int
    waves: int
    seconds: float
    speedup: float
    idle: float
    bytes: int
    host_bytes: int
    fits: bool
    taken: bool
    expert: int = 1
    exchange: bool = False

    @property
    def is_in_parts(self) -> bool:
        return max(self.shard, self.tensor, self.expert, self.pipeline) > 1

    @property
    def status(self) -> str:
        """For the last column."""
        words = ["taken"] if self.taken else []
        words += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        words += [f"shard {self.shard}"] if self.shard > 1 else []
        words += [f"pipeline of {self.pipeline}"] if self.pipeline > 1 else []
        way = ", all_to_all" if self.exchange else ""
        words += [f"experts on {self.expert}{way}"] if self.expert > 1 else []
        words += [] if self.fits else ["does not fit"]
        return ", ".join(words)


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
            "devices": self.devices, "layouts": [asdict(row) for row in self.rows], "reason": self.reason,
            "gather_bytes_per_second": estimate.BYTES_PER_SECOND,
        }  # fmt: skip


def figures_of(prepared: PreparedRun, known: Profile, devices: int, taken: Choice, alone: float) -> Layouts:
    """All layouts on so many devices.

    Args:
        taken: from choose.choose.
        alone: seconds that the run takes on one device.
    """
    asked = prepared.run.parallel
    work = Work(prepared, 1 if asked.exchanges else asked.expert).jobs()
    found = candidates(prepared, devices, work) + sharded_layouts(prepared, devices, work)
    found += piped(prepared, devices, work) + sharing_experts(prepared, devices, work)
    rows = [_row(prepared, known, spread(prepared, own), taken.layout, alone) for own in found]
    return Layouts(devices, rows, taken.reason)


def _row(
    prepared: PreparedRun, known: Profile, own: Spread, taken: Layout, alone: float
) -> LayoutFigures:  # fmt: skip
    layout = own.layout
    work = Work(prepared, 1 if layout.exchange else layout.expert)
    shared = estimate.sharing_experts(known, prepared.run, prepared, layout.expert, layout.exchange)
    staged = None
    if layout.pipeline > 1:
        staged = estimate.staged(shared, prepared.run, prepared, layout.pipeline).cost
    seconds = own.predict(seconds_of(prepared, layout, shared.seconds), staged).time
    balance, needed = own.predict(work.of, work.staged(layout)), needed_bytes(prepared, known, own)
    has_failed = known.failed is not None and max(own.fullest) >= known.failed and not layout.is_in_parts
    return LayoutFigures(
        layout.devices_per_job, layout.groups, layout.shard, layout.tensor, layout.pipeline, balance.waves, seconds,
        alone / seconds, balance.idle, needed, host_bytes(prepared, layout),
        known.has_room(needed) and not has_failed, layout == taken, layout.expert, layout.exchange,
    )  # fmt: skip


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
    """Sentences below the table of layouts.

    limit: most groups that are listed by name.
    """
    taken, out = found.taken, []
    each = "is whole on one device" if taken.devices_per_job == 1 else f"is shared by {taken.devices_per_job} devices"
    what = str(taken.devices_per_job)
    if taken.shard > 1:
        what = (
            "the sharded base" if taken.shard * taken.tensor == found.devices else f"a base sharded over {taken.shard}"
        )
    if taken.pipeline > 1:
        what = f"a pipeline of {taken.pipeline}"
        each = (
            f"is on {taken.devices_per_job} devices, {taken.devices_per_job // taken.pipeline} for each of its stages"
        )
    if taken.expert > 1:
        what += f" with experts on {taken.expert}"
    out.append(f"training takes {what}, so each job {each}: {found.reason}")
    if len(taken.groups) > 1:
        listed = [" + ".join(group) or "nothing" for group in taken.groups[:limit]]
        more = len(taken.groups) - limit
        out.append("groups: " + ", ".join(listed) + (f" and {more} more" if more > 0 else ""))
    if not taken.fits:
        out.append("note: this does not fit; lower max_tokens_per_microbatch or set gradient_checkpointing: true")
    if most := max(row.host_bytes for row in found.rows):
        out.append(f"parallel.offload_base: the host keeps {most / 2**30:.2f} GiB for each device")
    if any(row.is_in_parts for row in found.rows):
        out.append("what is assumed of messages between devices: docs/several-gpus.md")
    return out
