"""Proof that a schedule is valid, and the no-ops that make it so: for one job, slot of batch b + 1 - slot of batch b >= lag.

The engine hands out the results of slot q - lag before slot q enters; the lag is 1 on one device, and the number of stages of a
pipeline. So a job's batch b + 1 sees the weights that its batch b left behind if and only if its first slot is at least `lag`
after the last slot of batch b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from packlora.schedule.types import NOOP, Carry, Microbatch, ScheduleError

Batches = Mapping[str, Mapping[int, Sequence[tuple[int, int]]]]
"""Samples (sample number, length) by job and global batch."""


def with_noops(microbatches: Sequence[Microbatch], lag: int, carry: Carry | None = None) -> list[Microbatch]:
    """The microbatches in the same order, with no-ops right before each one that would come too early; the fewest possible."""
    last = {job: -1 - since for job, since in (carry.slots_since if carry else {}).items()}
    current: dict[str, int] = {}
    before: dict[str, int] = {}
    out: list[Microbatch] = []
    for microbatch in microbatches:
        if microbatch.is_noop:
            continue
        enters = {placed.job: placed.batch for placed in microbatch.samples}
        for job, batch in enters.items():
            if current.get(job) != batch:
                current[job] = batch
                if job in last:
                    before[job] = last[job]
        earliest = max((before[job] + lag for job in enters if job in before), default=0)
        out += [NOOP] * (earliest - len(out))
        for job in enters:
            last[job] = len(out)
        out.append(microbatch)
    return out


def carry_after(microbatches: Sequence[Microbatch], lag: int, carry: Carry | None = None) -> Carry:
    """State for the next window: jobs whose last slot is less than lag - 1 slots before the end."""
    since = {job: slots + len(microbatches) for job, slots in (carry.slots_since if carry else {}).items()}
    for slot, microbatch in enumerate(microbatches):
        for placed in microbatch.samples:
            since[placed.job] = len(microbatches) - 1 - slot
    return Carry({job: slots for job, slots in since.items() if slots < lag - 1})


def check(
    microbatches: Sequence[Microbatch],
    lag: int,
    batches: Batches | None = None,
    capacity: int | None = None,
    carry: Carry | None = None,
) -> None:
    """Prove the schedule valid. O(samples).

    Args:
        microbatches: in the order of slots.
        lag: least number of slots from one batch of a job to the next.
        batches: what must be scheduled, each sample once; None: not checked.
        capacity: most tokens of a microbatch; None: not checked.
        carry: the slots before.

    Raises:
        ScheduleError: naming job, batch and slots.
    """
    last: dict[str, int] = {job: -1 - since for job, since in (carry.slots_since if carry else {}).items()}
    current: dict[str, int] = {}
    ended: dict[str, int] = {}  # last slot of the batch before the current one
    done: dict[tuple[str, int], int] = {}
    for slot, microbatch in enumerate(microbatches):
        here: dict[str, int] = {}
        load = 0
        for placed in microbatch.samples:
            if here.setdefault(placed.job, placed.batch) != placed.batch:
                raise ScheduleError(
                    f"job {placed.job!r}: batches {here[placed.job]} and {placed.batch} share the microbatch of slot {slot}"
                )
            load += placed.length
        for job, batch in here.items():
            if job not in current or current[job] != batch:
                if job in current and batch != current[job] + 1:
                    raise ScheduleError(f"job {job!r}: batch {batch} in slot {slot} follows batch {current[job]}")
                if job in current and (job, current[job]) not in done:
                    raise ScheduleError(
                        f"job {job!r}: batch {batch} begins in slot {slot}, batch {current[job]} never ends"
                    )
                if job in last:
                    ended[job] = last[job]
                current[job] = batch
            if job in ended and slot - ended[job] < lag:
                raise ScheduleError(
                    f"job {job!r}: batch {batch} enters in slot {slot}, only {slot - ended[job]} after slot {ended[job]} of "
                    f"the batch before it; with {lag} stages it takes {lag} or more"
                )
            if (job, batch) in done:
                raise ScheduleError(
                    f"job {job!r}: batch {batch} has samples in slot {slot}, but it ended in slot {done[job, batch]}"
                )
            last[job] = slot
        for job, batch in microbatch.completes:
            if here.get(job) != batch:
                raise ScheduleError(f"job {job!r}: batch {batch} ends in slot {slot} without samples there")
            done[job, batch] = slot
        if capacity is not None and load > capacity:
            raise ScheduleError(
                f"slot {slot}, jobs {', '.join(here)}: {load} tokens in a microbatch of at most {capacity}"
            )
    for job, batch in current.items():
        if (job, batch) not in done:
            raise ScheduleError(f"job {job!r}: batch {batch} never ends")
    if batches is not None:
        _same_samples(microbatches, batches)


def _same_samples(microbatches: Sequence[Microbatch], batches: Batches) -> None:
    placed = Counter(
        (item.job, item.batch, item.sample, item.length) for microbatch in microbatches for item in microbatch.samples
    )
    wanted = Counter(
        (job, number, sample, length)
        for job, numbered in batches.items()
        for number, batch in numbered.items()
        for sample, length in batch
    )
    if placed == wanted:
        return
    (job, batch, sample, _), _ = min(((wanted - placed) or (placed - wanted)).items())
    words = "is missing" if wanted - placed else "is there once too often"
    raise ScheduleError(f"job {job!r}: sample {sample} of batch {batch} {words} in the schedule")
