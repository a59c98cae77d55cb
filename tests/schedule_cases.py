"""Random jobs for the scheduler's tests, and the rules of a schedule, written down again in another way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch


@dataclass
class Lengths:
    """A job given by the lengths of its samples, batch by batch; samples are numbered through."""

    name: str
    batches: list[list[int]]

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def batch(self, n: int) -> list[tuple[int, int]]:
        start = sum(map(len, self.batches[:n]))
        return [(start + at, length) for at, length in enumerate(self.batches[n])]


def some_lengths(draw: random.Random, count: int, capacity: int) -> list[int]:
    """Lengths of one of several kinds: anything, small ones, big ones, few different ones."""
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randint(1, capacity) for _ in range(count)]
    if kind == 1:
        return [draw.randint(1, max(capacity // 4, 1)) for _ in range(count)]
    if kind == 2:
        return [draw.randint(max(capacity // 3, 1), capacity) for _ in range(count)]
    few = [draw.randint(1, capacity) for _ in range(2)]
    return [draw.choice(few) for _ in range(count)]


def some_jobs(
    draw: random.Random, capacity: int, most: int = 5, batches: int = 5, size: int = 7, prefix: str = "j"
) -> list[Lengths]:
    jobs = []
    for number in range(draw.randint(1, most)):
        count = draw.randint(0, batches)
        jobs.append(
            Lengths(f"{prefix}{number}", [some_lengths(draw, draw.randint(1, size), capacity) for _ in range(count)])
        )
    draw.shuffle(jobs)
    return jobs


def some_cost(draw: random.Random, stages: int) -> CostModel:
    shares = [draw.randint(1, 4) for _ in range(stages)]
    return CostModel(
        1.0, draw.choice([0.0, 0.01]), draw.choice([0.0, 5.0]), draw.choice([0.0, 0.3]), draw.choice([1.0, 2.0]),
        tuple(share / sum(shares) for share in shares),
    )  # fmt: skip


def broken_rule(microbatches: Sequence[Microbatch], stages: int) -> str | None:
    """The first pair of slots fewer than `stages` apart with different batches of one job, or a job's batches out of order.

    The rule as it is stated, pair by pair: O(slots * stages).
    """
    holds = [{(item.job, item.batch) for item in microbatch.samples} for microbatch in microbatches]
    reached: dict[str, int] = {}
    for q in range(len(holds)):
        for p in range(max(0, q - stages + 1), q + 1):
            for job, batch in holds[q]:
                if any(other == job and another != batch for other, another in holds[p]):
                    return f"{job} in slots {p} and {q}"
        for job, batch in holds[q]:
            if batch < reached.get(job, batch):
                return f"{job} goes back to batch {batch} in slot {q}"
            reached[job] = batch
    return None


def wrong_contents(microbatches: Sequence[Microbatch], jobs: Sequence[Lengths], capacity: int) -> str | None:
    """What is wrong with the samples, the loads or the completed batches, if anything."""
    wanted = Counter(
        (job.name, number, sample, length)
        for job in jobs
        for number in range(job.num_batches)
        for sample, length in job.batch(number)
    )
    have = Counter((item.job, item.batch, item.sample, item.length) for mb in microbatches for item in mb.samples)
    if have != wanted:
        return f"missing {wanted - have}, too many {have - wanted}"
    for slot, microbatch in enumerate(microbatches):
        load = sum(item.length for item in microbatch.samples)
        if load > capacity:
            return f"slot {slot} holds {load} of {capacity}"
    ends: dict[tuple[str, int], int] = {}
    for slot, microbatch in enumerate(microbatches):
        for item in microbatch.samples:
            ends[item.job, item.batch] = slot
    said = [(key, slot) for slot, microbatch in enumerate(microbatches) for key in microbatch.completes]
    if sorted(said) != sorted(ends.items()):
        return f"completes {said}, but batches end {ends}"
    return None


def fewest_bins(lengths: Sequence[int], capacity: int) -> int:
    """The optimum, by trying every assignment."""
    best = len(lengths)
    ordered = sorted(lengths, reverse=True)

    def place(at: int, bins: tuple[int, ...]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(ordered):
            best = len(bins)
            return
        for number in range(len(bins)):
            if bins[number] + ordered[at] <= capacity and bins[number] not in bins[:number]:
                place(at + 1, (*bins[:number], bins[number] + ordered[at], *bins[number + 1 :]))
        place(at + 1, (*bins, ordered[at]))

    place(0, ())
    return best
