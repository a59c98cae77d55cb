"""How a run spreads over devices: what each layout is predicted to take, and which one training takes.

Work is predicted from shapes alone, at a speed that is the same for every process and every session (planning_cost): all of
them find the same layout. It is good for comparing jobs and microbatches, and for nothing else; seconds are profiler.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np
import torch

from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.parallel import layouts
from packlora.parallel.layout import Layout, Wave, planned, waves
from packlora.parallel.layouts import Prediction
from packlora.runtime import estimate, profiler, profiles
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.runtime.wholeness import needs_whole_base
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

OFFLOAD_BYTES_PER_SECOND = 2.5e10
"""Assumed, of a device that copies from pinned memory of its host: sixteen lanes of PCIe 4 have 3.2e10."""
SAMPLES = 20_000
"""Samples of a group that are planned; of a longer run the first windows, scaled up."""


class Work:
    """Predicted times of a run's samples: layers and a job's own adapter by tokens, attention by the squares of lengths, the
    output layer by label tokens.

    samples: by job, of each of its samples. fixed: of a microbatch, however little is in it. cost: of tokens.

    Args:
        experts_on: devices that hold the experts together.
    """

    def __init__(self, prepared: PreparedRun, experts_on: int = 1) -> None:
        self.cost = cost = estimate.planning_cost(prepared.run, prepared, experts_on)
        self.fixed = cost.fixed * (1 + cost.backward_ratio)
        self.samples = {job.data.name: _seconds(prepared, job, experts_on) for job in prepared.jobs}
        self._prepared = prepared

    def jobs(self) -> dict[str, float]:
        """Seconds by job of all its samples on one device, with its share of what is fixed for a microbatch."""
        each = self.fixed / self._prepared.budget
        return {
            job.data.name: job.data.total(self.samples[job.data.name] + each * job.data.planned.lengths)
            for job in self._prepared.jobs
        }

    def of(self, microbatch: Microbatch) -> float:
        """Seconds of a microbatch; 0 of a no-op."""
        if microbatch.is_noop:
            return 0.0
        return self.fixed + sum(self._sample(placed.job, placed.sample) for placed in microbatch.samples)

    def _sample(self, job: str, number: int) -> float:
        """Sample of a job; of a stream the first samples stand for all."""
        known = self.samples[job]
        return float(known[number % len(known)])


def _seconds(prepared: PreparedRun, job: PreparedJob, experts_on: int) -> np.ndarray:
    """Seconds of each sample of a job."""
    cost = estimate.planning_cost(prepared.run, replace(prepared, jobs=[job]), experts_on)
    lengths = job.data.planned.lengths.astype(np.float64)
    layers = cost.per_token * lengths + cost.per_token_squared * lengths**2
    head = cost.head_per_token / job.data.label_share * job.data.num_labels
    seconds: np.ndarray = layers * (1 + cost.backward_ratio) + head * (1 + cost.head_backward_ratio)
    return seconds


class Replica:
    """A replica of the model in a layout, as its time and memory are predicted: its devices run one microbatch at a time, all
    layers of it. A placement may have another one (several.OverProcesses.replica).

    lag, cost: its microbatches are planned with, see Planner. largest: share of the layers on the device that has the most.
    """

    lag = 1
    cost: CostModel | None = None
    largest = 1.0

    def times(
        self, waves: Sequence[Wave], seconds: Callable[[Microbatch], float], cost: CostModel
    ) -> tuple[float, float]:
        """Seconds until replicas side by side have run waves, and the sum of what all of them do. A wave takes what its
        costliest microbatch does.

        Args:
            seconds: of a microbatch.
            cost: the same of a device by itself, of which stages are made.
        """
        return sum(max(map(seconds, wave)) for wave in waves), sum(seconds(one) for wave in waves for one in wave)

    def at_ends(self, names: Collection[str]) -> int:
        """Parameters of jobs that one device may have all of, where layers are shared."""
        return 0


def replica_of(prepared: PreparedRun, layout: Layout) -> Replica:
    """A replica of a layout."""
    if layout.package is None:
        return Replica()
    found: Replica = import_module(f"{layout.package}.placement").PLACEMENT.replica(prepared, layout)
    return found


@dataclass(slots=True)
class Spread:
    """A layout and what its groups run at the beginning.

    waves, parts: by group, see layouts.predict.
    """

    layout: Layout
    replica: Replica
    waves: list[list[Wave]]
    parts: list[float]

    @property
    def fullest(self) -> list[int]:
        """Tokens of the fullest microbatch by group; 0 where it has no jobs."""
        return [max((one.num_tokens for wave in own for one in wave), default=0) for own in self.waves]

    def predict(self, seconds: Callable[[Microbatch], float], cost: CostModel) -> Prediction:
        """See layouts.predict and Replica.times."""
        return layouts.predict(self.layout, self.waves, self.parts, lambda own: self.replica.times(own, seconds, cost))


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
    parallel = prepared.run.parallel
    work = Work(prepared, parallel.experts_on)
    found, sharded = candidates(prepared, devices, work.jobs()), sharded_layouts(prepared, devices, work.jobs())
    if not found:
        raise InputError(
            f"parallel.devices_per_job is {parallel.devices_per_job}, which does not divide {devices} devices"
        )
    if devices == 1:
        return Choice(Layout.of_one_device(job.data.name for job in prepared.jobs), "there is one device")
    if len(found) == 1 and not sharded:
        return Choice(found[0], _as_asked(prepared))
    planned = [spread(prepared, own) for own in found]
    needed = [needed_bytes(prepared, known, own, first=True) for own in planned]
    fitting = [own for own, size in zip(planned, needed, strict=True) if known.has_room(size)]
    if not fitting:
        parts = sharded + piped(prepared, devices, work.jobs())
        taken = _choose_in_parts(prepared, known, work, parts, min(needed))
        if taken is not None:
            return taken
    planned = fitting or planned
    return _choose_as_asked([own.predict(work.of, work.cost) for own in planned], parallel.devices_per_job)


def _as_asked(prepared: PreparedRun) -> str:
    """Key of the run file that leaves one layout."""
    parallel = prepared.run.parallel
    if parallel.shard_base is True:
        return "parallel.shard_base is true"
    own, _ = parallel.own
    key = own or ("shard_base" if parallel.is_sharded else "expert" if parallel.expert > 1 else "devices_per_job")
    key = key if parallel.devices_per_job == "auto" else "devices_per_job"
    return f"parallel.{key} is {getattr(parallel, key)}"


def _choose_in_parts(
    prepared: PreparedRun, known: Profile, work: Work, parts: list[Layout], whole: int
) -> Choice | None:  # fmt: skip
    """Choose, among layouts whose devices hold a part of the base model each, the one that is done first; None where none needs
    less.

    Args:
        whole: bytes that a whole one takes, which no device has.
    """
    gib, spreads = 2**30, [spread(prepared, own) for own in parts]
    needed = {own.layout: needed_bytes(prepared, known, own, first=True) for own in spreads}
    less = [own for own in spreads if needed[own.layout] < whole]
    if not less:
        return None
    times = {
        own.layout: own.predict(seconds_of(prepared, own.layout, work.of), work.cost).time
        for own in [own for own in less if known.has_room(needed[own.layout])] or less
    }
    taken, tensor = min(times, key=times.__getitem__), prepared.run.parallel.tensor
    held = "the whole base model" if tensor == 1 else f"what {tensor} devices together hold whole (parallel.tensor)"
    why = (
        f"training on {held} is estimated to take {whole / gib:.2f} GiB of a device, which has {known.room / gib:.2f} free, of "
        f"which {profiles.ROOM_SHARE:.0%} are planned with; on a part of it {needed[taken] / gib:.2f}"
    )
    others = [
        f"{_words(own)} takes {time / times[taken]:.2f} of its time" for own, time in times.items() if own != taken
    ]
    return Choice(taken, f"{why}; {', '.join(others)}" if others else why)


def _words(layout: Layout) -> str:
    if not layout.sharded:
        return f"a {layout.words[0]}"
    return "a sharded base" if layout.shard == layout.replicas else f"a base sharded over {layout.shard}"


def seconds_of(
    prepared: PreparedRun, layout: Layout, cost: Callable[[Microbatch], float]
) -> Callable[[Microbatch], float]:
    """Seconds of a microbatch in a layout without stages, where one device takes `cost` of it in seconds: an equal part on each
    of the devices that hold a layer together, and messages, which are taken to overlap with nothing."""
    tensor, waits = layout.tensor, gather_seconds(prepared, layout)
    adding = 0.0 if tensor == 1 else _adding_up(prepared, tensor)
    return lambda one: cost(one) / tensor + adding * one.num_tokens + waits


def gather_seconds(prepared: PreparedRun, layout: Layout) -> float:
    """Seconds of a wave for gathering layers in the forward and again in the backward, of devices that hold a slice each if the
    layers are cut, and for copying their parts from the host where they are kept there."""
    if not layout.sharded:
        return 0.0
    held = base_bytes(prepared)[0] - elsewhere_bytes(prepared, layout)
    sent = held // layout.tensor * (layout.shard - 1) / layout.shard
    return 2 * (sent / estimate.BYTES_PER_SECOND + host_bytes(prepared, layout) / OFFLOAD_BYTES_PER_SECOND)


def host_bytes(prepared: PreparedRun, layout: Layout) -> int:
    """Bytes of the base model that each device keeps on its host."""
    if not (layout.sharded and prepared.run.parallel.offload_base):
        return 0
    return (_layer_bytes(prepared)[0] - elsewhere_bytes(prepared, layout)) // (layout.tensor * layout.shard)


def elsewhere_bytes(prepared: PreparedRun, layout: Layout) -> int:
    """Bytes of the experts of other devices that hold them together with one."""
    return _expert_bytes(prepared) * (layout.expert - 1) // layout.expert


def _adding_up(prepared: PreparedRun, tensor: int) -> float:
    """Seconds of a token for adding up what devices that hold a layer together have of its hidden states: after attention and
    after the feed-forward, forward and backward, and once more where the forward is computed again."""
    shape, times = prepared.shape, 3 if prepared.run.gradient_checkpointing else 2
    width: int = getattr(torch, prepared.run.dtype).itemsize
    token = shape.hidden * width * 2 * (tensor - 1) / tensor
    return 2 * times * shape.layers * token / estimate.BYTES_PER_SECOND


def _choose_as_asked(predictions: list[Prediction], asked: int | str) -> Choice:
    """Choose among layouts with as much of the base model on a device as the run file asks for."""
    if asked != "auto":
        return Choice(predictions[0].layout, f"parallel.devices_per_job is {asked}")
    taken = layouts.choose(predictions)
    if taken.idle > layouts.MOST_IDLE:
        return Choice(
            taken.layout,
            f"no layout leaves less than {layouts.MOST_IDLE:.0%} of the devices' time idle, and this one is done first",
        )
    why = f"{taken.idle:.0%} of the devices' time is idle"
    fewer = [
        f"{one.layout.devices_per_job}: {one.idle:.0%}" for one in predictions if one.layout.split < taken.layout.split
    ]
    if fewer:
        why += f"; with fewer devices per job it is more than {layouts.MOST_IDLE:.0%} ({', '.join(fewer)})"
    return Choice(taken.layout, why)


def candidates(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """The layouts that the run file allows on so many devices that hold the whole base model, or as much of it as it says;
    those whose jobs share the fewest first.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel = prepared.run.parallel
    asked = devices if parallel.shard_base is True else parallel.devices_per_job
    found = layouts.layouts(work, devices, **parallel.degrees(devices))
    return [own for own in found if asked in ("auto", own.devices_per_job)]


def piped(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """Pipelines; see packlora/pipeline/layouts.py."""
    found: list[Layout] = import_module("packlora.pipeline.layouts").candidates(prepared, devices, work)
    return found


def sharded_layouts(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """Layouts in which devices hold a part of the rows of every weight each, where that is left to us: over all of them, and
    over every smaller number. Each job is on as few devices as leave none without a job.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel = prepared.run.parallel
    asked = parallel.shard_base == "auto" and parallel.package is None and parallel.expert == 1
    if not asked or prepared.form is not None or needs_whole_base(prepared):
        return []
    out, replicas = [], devices // parallel.tensor
    for shard in (size for size in range(replicas, 1, -1) if replicas % size == 0):
        every = layouts.layouts(work, devices, parallel.tensor, shard=shard)
        out += layouts.fewest(every, parallel.devices_per_job)
    return out


# --- memory ------------------------------------------------------------------------------------------------------------


def needed_bytes(prepared: PreparedRun, known: Profile, own: Spread, first: bool = False) -> int:
    """Bytes of the device of a layout that needs the most. A device holds its own jobs alone; a stage of a pipeline its part of
    them and of the base model, and parts of as many microbatches as there are stages; a device of several that hold layers
    together its slice of the base model, and all of the microbatch unless these share its tokens, which is more than it is.

    Args:
        first: with the fewest tokens to a microbatch that the profiler would choose, where that is left to it.
    """
    trainable = {job.data.name: job.trainable for job in prepared.jobs}
    smallest = None
    if first and prepared.run.max_tokens_per_microbatch == "auto" and choose_device(prepared.run.device).type == "cuda":
        smallest = profiler.budgets(prepared)[0]
    layout, experts = own.layout, own.layout.expert
    if experts > 1:
        known = import_module("packlora.experts.layouts").profile(known, prepared, layout)
    needed, (base, gathered), elsewhere = 0, base_bytes(prepared), elsewhere_bytes(prepared, layout)
    base, gathered = base - elsewhere, gathered - 2 * elsewhere // prepared.shape.layers
    here = base // (layout.tensor * layout.shard) - host_bytes(prepared, layout)  # stages have a part of that
    each = known.bytes_per_token / (layout.tensor if prepared.run.parallel.sequence_parallel else 1)
    for names, fullest in zip(layout.groups, own.fullest, strict=True):
        others = prepared.trainable - sum(trainable[name] for name in names)
        tokens = fullest if smallest is None else min(fullest, smallest)
        others -= round((1 - 1 / experts) * sum(job.on_experts for job in prepared.jobs if job.data.name not in names))
        kept = known.kept_bytes - estimate.TRAINABLE_BYTES * others
        ends = estimate.TRAINABLE_BYTES * own.replica.at_ends(names)
        needed = max(needed, round((kept - base + here - ends) * own.replica.largest + ends + each * tokens))
    return needed + gathered // layout.tensor if layout.sharded else needed


def base_bytes(prepared: PreparedRun) -> tuple[int, int]:
    """Bytes of the base model; and, where it is sharded, of what is whole on a device at a time: two layers, the embedding, the
    norms and the output layer."""
    layers, others = _layer_bytes(prepared)
    return layers + others, others + 2 * layers // prepared.shape.layers


def _layer_bytes(prepared: PreparedRun) -> tuple[int, int]:
    """Bytes of the linear layers of the base model, some of which may be codes, with the experts; and of all else."""
    shape, width, (numbers, codes) = prepared.shape, getattr(torch, prepared.run.dtype).itemsize, prepared.in_codes
    experts = _expert_bytes(prepared)
    linear = (shape.linear_parameters - numbers) * width + codes
    return linear + experts, (shape.parameters - shape.linear_parameters) * width - experts


def _expert_bytes(prepared: PreparedRun) -> int:
    return prepared.shape.expert_parameters * int(getattr(torch, prepared.run.dtype).itemsize)


# --- plans -------------------------------------------------------------------------------------------------------------


def spread(prepared: PreparedRun, layout: Layout) -> Spread:
    """Plan what the groups of a layout run."""
    replica = replica_of(prepared, layout)
    planned = [_waves(prepared, names, layout.split, replica) for names in layout.groups]
    return Spread(layout, replica, [waves for waves, _ in planned], [part for _, part in planned])


def _waves(prepared: PreparedRun, names: tuple[str, ...], split: int, replica: Replica) -> tuple[list[Wave], float]:
    """Waves of the jobs of a group, and the part of their tokens that they are."""
    jobs = [job.data for job in prepared.jobs if job.data.name in names]
    if not jobs:
        return [], 1.0
    method = "solo" if prepared.run.schedule.method == "solo" else "greedy"
    out: list[Wave] = []
    samples = tokens = 0
    budget, orders = planned(prepared.budget, split), [job.planned for job in jobs]
    for window in Planner(orders, budget, lag=replica.lag, method=method, cost=replica.cost).windows():
        out += waves(window.microbatches, split, prepared.budget)
        samples += sum(len(microbatch.samples) for microbatch in window.microbatches)
        tokens += sum(microbatch.num_tokens for microbatch in window.microbatches)
        if samples >= SAMPLES:
            break
    return out, min(1.0, tokens / sum(job.tokens for job in jobs))
