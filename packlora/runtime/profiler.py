"""The parallelism profiler: what a microbatch costs in time and memory, and which token budget suits a run best.

Two sources of the same Profile. `estimate` counts products and bytes; it needs neither a GPU nor the weights, and one short
matrix product tells it how fast the machine is. `measure` runs the model on microbatches of the run's own samples, up to the
budget that memory does not hold; what it finds is remembered on disk (profiles.py). `choose` then plans the run's beginning at
each budget and takes the best predicted throughput that fits in memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, cycle, pairwise
from typing import Any, Literal

import numpy as np
import torch

from packlora.base.device import choose_device
from packlora.base.model import Base
from packlora.config import PlansConfig, Run
from packlora.engine.memory import free_memory, memory_room, synchronize
from packlora.engine.parts import Part, num_tokens, rows_of
from packlora.engine.passes import Executor, run_microbatch
from packlora.engine.rows import Row
from packlora.ops.cross_entropy.linear_cross_entropy import CHUNK_BYTES
from packlora.runtime.job import Job
from packlora.runtime.machine_speed import machine_bandwidth, machine_flops
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Point, ProfileCache
from packlora.schedule.cost import CostModel, balance
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

BUDGETS = tuple(2**power * part // 2 for power in range(10, 17) for part in (2, 3))
"""Token budgets that are tried: 1024, 1536, 2048, 3072, ... 98304."""
ROOM_SHARE = 0.92
"""Share of a device's memory that is planned with; the allocator's rounding and other buffers take the rest."""
CLOSE = 0.01
"""Share of throughput. Among budgets whose prediction differs by less, the smallest is taken: it needs less memory."""
MEASURED_SECONDS = 60.0
"""After this time no larger budget is measured."""
REPEATS = 2
"""Timed runs of a microbatch after one to warm up."""
PRODUCTS_SHARE = {"cuda": 0.8, "cpu": 0.55}
"""Speed of a model's matrix products over that of large square ones: four jobs on 0.6B's and 8B's shapes on an H200. Of a CPU,
the part of a whole step that they would take at that speed: SmolLM2-135M on two cores."""
PASSES = 3, 7
"""How often forward and backward on a GPU read or write what goes into and comes out of linear layers, beside the products:
norms, activations, rotations, sums, the products with narrow adapters. Four jobs on the same shapes."""
PLANNED_FLOPS = {"cuda": 4e14, "cpu": 1e11}
"""FLOP/s that schedules of a pipeline and layouts are planned for, on any machine. It sets what is fixed for a microbatch
against what its tokens take."""
LAYER_SECONDS = {"cuda": 5e-5, "cpu": 3e-4}
"""Least seconds of the forward of a decoder layer, however few its tokens are."""
OPTIMIZER_BYTES = 16
"""Per trainable parameter, of what training keeps beside parameter and a microbatch's gradient: that of the global batch, two
moments and the last good value."""
TRAINABLE_BYTES = 4 * 6
"""Per trainable parameter in all: with its value and a microbatch's gradient."""
RANK_MULTIPLE = 16
"""Kernels pad ranks to multiples of it."""
BYTES_PER_SECOND = 2e11
"""Assumed of messages between devices: four H200s gather a layer by NVLink at 2.1e11 to 2.5e11."""
ATTENTION_SLOWER = 2.5
"""Attention's products against large plain ones, time per operation."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Knowledge of a model, its jobs and a device.

    stages: of the pipeline that the model lies on, a device each. origin: estimated, measured or remembered. cost: seconds of a
    microbatch. kept_bytes, bytes_per_token: of memory at its peak. room: bytes of the device. failed: fewest tokens that memory
    did not hold.
    """

    stages: int
    origin: Literal["estimated", "measured", "remembered"]
    cost: CostModel
    kept_bytes: float
    bytes_per_token: float
    room: int
    points: tuple[Point, ...] = ()

    @property
    def failed(self) -> int | None:
        return min((point.tokens for point in self.points if point.seconds is None), default=None)

    def bytes(self, tokens: int) -> int:
        """Bytes at the peak of a microbatch."""
        return round(self.kept_bytes + self.bytes_per_token * tokens)

    def fits(self, tokens: int) -> bool:
        return self.has_room(self.bytes(tokens)) and (self.failed is None or tokens < self.failed)

    def has_room(self, size: int) -> bool:
        """Whether a device has so many bytes."""
        return size <= ROOM_SHARE * self.room

    def describe(self) -> dict[str, Any]:
        """For run.json and the report."""
        return {
            "origin": self.origin, "cost": asdict(self.cost), "kept_bytes": round(self.kept_bytes),
            "bytes_per_token": round(self.bytes_per_token), "room_bytes": self.room,
            "points": [asdict(point) for point in self.points],
        }  # fmt: skip

    def seconds(self, microbatch: Microbatch) -> float:
        """Seconds of forward and backward, all stages together."""
        return sum(sum(self.cost.both(microbatch, stage)) for stage in range(self.cost.stages))

    def pace(self, microbatch: Microbatch) -> float:
        """Seconds from one microbatch to the next like it: those of the slowest stage."""
        return max(sum(self.cost.both(microbatch, stage)) for stage in range(self.cost.stages))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run's beginning under a token budget; seconds of its microbatches, bytes of the fullest one."""

    budget: int
    stages: int
    microbatches: int
    tokens: int
    seconds: float
    bytes: int
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


# --- estimated ---------------------------------------------------------------------------------------------------------


def estimate(run: Run, prepared: PreparedRun, stages: int = 1) -> Profile:
    """Estimate from shapes alone and the speed of the machine at one matrix product and one copy.

    Args:
        stages: of a pipeline of such devices; memory is then that of one of them, with as many microbatches in flight.
    """
    device = choose_device(run.device)
    parts = memory_parts(run, prepared, tokens=1)
    per_token = parts["activations"] + (0 if _by_kernels(run) else parts["logits"])
    kept = sum(parts.values()) - per_token
    cost = analytic_cost(run, prepared, *_speed(run), stages=stages)
    own = kept * largest_stage(run, prepared, stages)
    return Profile(stages, "estimated", cost, own, per_token, memory_room(device))


def staged(known: Profile, run: Run, prepared: PreparedRun, stages: int) -> Profile:
    """Profile of a pipeline of so many devices like the known one."""
    split = estimate(run, prepared, stages)
    cost = replace(known.cost, stage_shares=split.cost.stage_shares)
    kept = known.kept_bytes * largest_stage(run, prepared, stages)
    return replace(known, stages=stages, cost=cost, kept_bytes=kept)


def stage_layers(run: Run, prepared: PreparedRun, stages: int) -> tuple[int, ...]:
    """Layers of each stage of a pipeline, so that the slowest one is as fast as it can be; the last one has the output layer
    and the loss too, by what was measured of them (head_cost.py), else by their operations. A layer costs by the weights that a
    token meets there, of experts those that it goes to."""
    shape = prepared.shape
    mean = sum(active for _, active in shape.layer_numbers) / max(1, len(shape.layer_numbers))
    costs = [active / mean for _, active in shape.layer_numbers] if mean else []
    return balance(stages, shape.layers, head_in_layers(run, prepared), costs)


def head_in_layers(run: Run, prepared: PreparedRun) -> float:
    """How many layers of the run, adapters included, the output layer and the loss take as long as."""
    forward, backward, head = _operations(run, prepared)
    return 2 * head / ((forward + backward) / prepared.shape.layers)


def largest_stage(run: Run, prepared: PreparedRun, stages: int) -> float:
    """Share of the layers' parameters, all experts included, on the stage that has the most."""
    return max(_on_stages(run, prepared, stages, [held for held, _ in prepared.shape.layer_numbers]))


def _on_stages(run: Run, prepared: PreparedRun, stages: int, numbers: Sequence[int]) -> tuple[float, ...]:
    """The part that each stage has of numbers that belong to the layers; where these are not known, all layers are alike."""
    until = [0, *accumulate(numbers if any(numbers) else [1] * prepared.shape.layers)]
    ends = [0, *accumulate(stage_layers(run, prepared, stages))]
    return tuple((until[end] - until[start]) / until[-1] for start, end in pairwise(ends))


def planning_cost(run: Run, prepared: PreparedRun, stages: int = 1, experts_on: int = 1) -> CostModel:
    """Cost of a microbatch on each stage, for the planner and for the choice of a layout: the same on every machine, so that
    all processes of a run find the same, and a resumed run too."""
    flops = PLANNED_FLOPS[choose_device(run.device).type]
    return analytic_cost(run, prepared, flops, stages=stages, experts_on=experts_on)


def sharing_experts(
    known: Profile, run: Run, prepared: PreparedRun, devices: int, exchange: bool = False
) -> Profile:  # fmt: skip
    """Profile of one of so many devices like the known one that hold the experts together and run the same microbatches; or
    with `exchange` their own, of which each device computes as much as it has, messages not counted."""
    if devices == 1:
        return known
    whole, shared = (
        analytic_cost(run, prepared, *_speed(run), experts_on=count) for count in (1, 1 if exchange else devices)
    )
    cost = replace(
        known.cost,
        per_token=known.cost.per_token * shared.per_token / whole.per_token,
        backward_ratio=known.cost.backward_ratio * shared.backward_ratio / whole.backward_ratio,
    )
    shape, width, less = prepared.shape, getattr(torch, run.dtype).itemsize, 1 - 1 / devices
    layers = 1 if run.gradient_checkpointing else shape.layers
    return replace(
        known,
        cost=cost,
        kept_bytes=known.kept_bytes
        - less * (width * shape.expert_parameters + TRAINABLE_BYTES * sum(job.on_experts for job in prepared.jobs)),
        bytes_per_token=known.bytes_per_token - (0 if exchange else less * width * shape.routed_width * layers),
    )


def _speed(run: Run) -> tuple[float, float]:
    """Speed of the machine at a model's matrix products and in memory: FLOP/s, and bytes that are read or written a second."""
    device = choose_device(run.device)
    return machine_flops(device, run.dtype) * PRODUCTS_SHARE[device.type], machine_bandwidth(device)


def analytic_cost(
    run: Run, prepared: PreparedRun, flops: float, bandwidth: float = math.inf, *, stages: int = 1, experts_on: int = 1
) -> CostModel:
    """Seconds of a microbatch on machines of so many FLOP/s.

    Forward: two operations per weight of the linear layers and of a token's own adapter, causal attention, and the output layer
    at the label tokens. Backward: frozen weights take no gradient, adapters do; checkpointing runs the layers again. Where
    experts are shared out to devices, each computes its share of what goes to them, and what they give is added up.

    Args:
        bandwidth: bytes a second that memory reads or writes; without it only products take time.
        experts_on: devices that hold the experts together.
    """
    shape, device = prepared.shape, choose_device(run.device)
    forward, backward, head = _operations(run, prepared, experts_on)
    width, routed = getattr(torch, run.dtype).itemsize, shape.routed_width / experts_on
    moved = shape.outputs + shape.layers * (2 * shape.hidden + shape.attention + shape.inner + routed)
    there, back = (passes * width * moved / bandwidth for passes in PASSES)
    if experts_on > 1:
        message = 2 * (1 - 1 / experts_on) * shape.layers * shape.hidden * width / BYTES_PER_SECOND
        there, back = there + message, back + message
    back += there * run.gradient_checkpointing
    forward, backward = forward + there * flops, backward + back * flops  # as operations
    return CostModel(
        per_token=forward / flops,
        per_token_squared=shape.layers * 2 * shape.attention * ATTENTION_SLOWER / flops,
        fixed=shape.layers * LAYER_SECONDS[device.type],
        head_per_token=head / flops,
        backward_ratio=backward / forward,
        stage_shares=_on_stages(run, prepared, stages, [active for _, active in shape.layer_numbers]),
        head_backward_ratio=1.0,
    )


def _operations(run: Run, prepared: PreparedRun, experts_on: int = 1) -> tuple[float, float, float]:
    """Operations of a token in all layers, forward and backward, and in the output layer."""
    shape = prepared.shape
    lengths = [job.data.planned.lengths.astype(np.int64) for job in prepared.jobs]
    tokens = [int(own.sum()) for own in lengths]
    less = 1 - 1 / experts_on
    active = [job.active - less * job.active_on_experts for job in prepared.jobs]
    adapter = sum(t * own for t, own in zip(tokens, active, strict=True)) / sum(tokens)
    labels = sum(t * job.data.label_share for t, job in zip(tokens, prepared.jobs, strict=True)) / sum(tokens)
    frozen = shape.linear_parameters + shape.routed_parameters / experts_on
    forward = 2 * (frozen + adapter)
    backward = 2 * frozen + 4 * adapter + (forward if run.gradient_checkpointing else 0)
    head = 2.0 * shape.hidden * shape.vocabulary
    if prepared.head_in_layers is not None:  # of frozen layers, forward and backward
        whole = shape.linear_parameters + shape.routed_parameters
        head = prepared.head_in_layers * whole / shape.layers * (3 if run.gradient_checkpointing else 2)
    return forward, backward, head * labels


def model_flops(shape: ModelShape, jobs: Mapping[str, Job], microbatches: Sequence[Microbatch]) -> float:
    """Floating-point operations of forward and backward: frozen linear layers and the output layer twice, without gradients of
    their weights, a token's own adapter three times; of experts those that a token goes to; attention scores are not
    counted."""
    head, frozen = 4 * shape.hidden * shape.vocabulary, shape.linear_parameters + shape.routed_parameters
    idle = 1 - shape.routed_parameters / shape.expert_parameters if shape.expert_parameters else 0.0
    each = {
        name: 4 * frozen
        + 6 * (job.adapter.num_parameters - idle * job.adapter.on_experts)
        + head * job.data.label_share
        for name, job in jobs.items()
    }
    return sum(placed.length * each[placed.job] for one in microbatches for placed in one.samples)


def memory_parts(run: Run, prepared: PreparedRun, tokens: int) -> dict[str, int]:
    """Bytes by what holds them, in a microbatch of so many tokens.

    Counted: frozen weights, of quantised ones the codes and the two largest as they are multiplied; per trainable parameter its
    value, the gradients of microbatch and global batch, two AdamW moments and the last good value (4 bytes each); per token and
    layer the tensors that backward needs, those of adapters too (or with checkpointing one per layer and one layer's worth);
    logits of the label tokens, their softmax and gradient, or, where kernels make the loss, of one chunk. Not counted: what
    keep_outputs saves, temporary buffers, the allocator's rounding, the interpreter and its libraries (about 0.6 GiB of a CPU
    process).
    """
    shape, width = prepared.shape, getattr(torch, run.dtype).itemsize
    if _by_kernels(run):
        # inputs of two norms, whose outputs are made again; queries, keys, values, attention output; gate and up
        per_layer = 2 * width * (shape.hidden + shape.attention + shape.key_value + shape.inner)
        per_layer += width * (shape.attention + shape.key_value) * shape.head_norms
    else:
        # two norms keep their input in float32, and their outputs feed the projections; queries, keys and values of all
        # heads as attention reads them, its output twice; gate, up, activation and their product
        per_layer = width * (2 * shape.hidden + 5 * shape.attention + 4 * shape.inner) + 2 * 4 * shape.hidden
        per_layer += 4 * (shape.attention + shape.key_value) * shape.head_norms
    per_layer += width * shape.routed_width + width * _numbers_of_adapters(prepared) // shape.layers
    kept = shape.layers * per_layer
    if run.gradient_checkpointing:
        kept = shape.layers * shape.hidden * width + per_layer
    labels = max(job.data.label_share for job in prepared.jobs)
    logits = CHUNK_BYTES["cuda"] if _by_kernels(run) else round(tokens * labels * shape.vocabulary * (4 * 2 + width))
    return {
        "frozen weights": _frozen_bytes(prepared, width),
        "adapters and optimizer": prepared.trainable * TRAINABLE_BYTES,
        "activations": tokens * kept,
        "logits": logits,
    }


def _numbers_of_adapters(prepared: PreparedRun) -> int:
    """Numbers that a token keeps for its adapter, all layers together: of linear layers S, and the product that the gradient of
    a magnitude is made of. They are kept for all tokens of a microbatch as for the job with most of them."""
    ranks, products = dict[str, int](), dict[str, int]()
    for job in prepared.jobs:
        products |= job.products
        for path, module in job.spec.modules.items():
            if module.kind == "linear":
                ranks[path] = max(ranks.get(path, 0), -(-module.rank // RANK_MULTIPLE) * RANK_MULTIPLE)
    return sum(ranks.values()) + sum(products.values())


def _frozen_bytes(prepared: PreparedRun, width: int) -> int:
    """Bytes of all frozen weights: floats, codes of quantised layers, and their two largest weights as they are multiplied."""
    shape, (numbers, codes) = prepared.shape, prepared.in_codes
    return (shape.parameters - numbers + 2 * shape.largest * (numbers > 0)) * width + codes


def _by_kernels(run: Run) -> bool:
    """Whether kernels compute attention, norms and the loss."""
    return choose_device(run.device).type == "cuda" and run.dtype in ("bfloat16", "float16")


# --- measured ----------------------------------------------------------------------------------------------------------


def profile(
    run: Run,
    prepared: PreparedRun,
    base: Base | None = None,
    executor: Executor | None = None,
    jobs: Sequence[Job] = (),
) -> Profile:
    """Profile of the run on its device: measured now where that decides the budget, else measured before, else estimated.

    Args:
        base, executor, jobs: the loaded model; without it nothing is measured.
    """
    guess = estimate(run, prepared)
    device = choose_device(run.device)
    cache, key = ProfileCache(device), profile_key(run, prepared, base)
    origin: Literal["measured", "remembered"] = "remembered"
    points, tried = cache.get(key), budgets(prepared)
    far_enough = any(point.seconds is None or 3 * point.tokens > 2 * tried[-1] for point in points)
    decides = run.max_tokens_per_microbatch == "auto" and device.type == "cuda"
    if decides and not far_enough and base is not None and executor is not None:
        points, origin = measure(base, executor, jobs, tried), "measured"
        try:
            cache.put(key, points)
        except OSError as error:
            base.warnings.append(f"what was measured cannot be remembered in {cache.path}: {error}")
    if not any(point.seconds is not None for point in points):
        return replace(guess, points=tuple(points))
    return fitted(guess, points, origin, OPTIMIZER_BYTES * prepared.trainable)


def profile_key(run: Run, prepared: PreparedRun, base: Base | None) -> str:
    """Words for what a measurement depends on beside the device and versions."""
    shape = prepared.shape
    adapters = sorted(
        f"{'dora' if job.spec.peft.use_dora else 'lora'}{job.spec.peft.r}{'d' if job.spec.peft.lora_dropout else ''}"
        for job in prepared.jobs
    )
    mean = np.mean([length for job in prepared.jobs for length in job.data.planned.lengths])
    asked = "" if run.plans == PlansConfig() else f"plans-{run.plans.model_dump_json()}"
    liger = run.liger if base is None or run.liger == "auto" else bool(base.liger)
    words = (
        shape.model_type, f"{shape.parameters / 1e9:.3g}B", f"{shape.layers}x{shape.hidden}", run.dtype,
        "checkpointing" if run.gradient_checkpointing else "", "kept-outputs" if run.keep_outputs else "",
        f"liger-{liger}".lower(), asked, "+".join(adapters),
        f"{prepared.trainable / 1e6:.1f}M", "" if prepared.form is None else prepared.form.described,
        f"samples~{2 ** round(np.log2(mean))}",
    )  # fmt: skip
    return " ".join(word for word in words if word)


def budgets(prepared: PreparedRun) -> tuple[int, ...]:
    """Token budgets worth trying: those that hold the longest sample, up to the first that holds the global batches of two
    rounds, more than any microbatch has use for.
    """
    orders = [job.data.planned for job in prepared.jobs]
    per_round = sum(float(order.lengths.mean()) * min(order.global_batch_size, len(order.lengths)) for order in orders)
    longest = prepared.longest
    out = [budget for budget in BUDGETS if budget >= longest] or [longest]
    enough = next((index for index, budget in enumerate(out) if budget >= 2 * per_round), len(out) - 1)
    return tuple(out[: enough + 1])


def measure(base: Base, executor: Executor, jobs: Sequence[Job], tried: Sequence[int]) -> list[Point]:
    """Run forward and backward of the jobs' own samples at the budgets, the smallest first, until memory does not hold one.

    Leaves the jobs as they were: no step is taken, gradients are dropped.
    """
    points: list[Point] = []
    start = time.perf_counter()
    for budget in sorted(tried):
        parts = sample_mix(jobs, budget)
        tokens = num_tokens(parts)
        squared = sum(row.sample.num_tokens**2 for row in rows_of(parts))
        figures = None
        with contextlib.suppress(torch.OutOfMemoryError):  # and of what it holds in memory, before that is freed
            figures = _measure_one(base, executor, jobs, parts)
        for job in jobs:
            job.discard()
        free_memory(base.device)
        points.append(Point(tokens, squared, *(figures or (None, None))))
        if figures is None or time.perf_counter() - start > MEASURED_SECONDS:
            break
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)
    return points


def sample_mix(jobs: Sequence[Job], budget: int) -> list[Part]:
    """Parts of samples of all jobs in turn, up to the budget; at least one. They learn the cross entropy of their labels."""
    sources = cycle([(job, cycle(range(len(job.data.samples)))) for job in jobs])
    picked: dict[int, tuple[Job, list[Row]]] = {}
    total = 0
    for job, numbers in sources:
        number = next(numbers)
        sample = job.data.samples[number]
        if picked and total + sample.num_tokens > budget:
            break
        picked.setdefault(job.adapter.number, (job, []))[1].append(Row(sample, (job.dropout_key, 0, number)))
        total += sample.num_tokens
    facts = {"units": 1, "samples": 1}
    return [
        Part(adapter, rows, weight=job.grad_scale / 1000, terms=job.learning.terms, facts=facts)
        for adapter, (job, rows) in sorted(picked.items(), key=lambda found: found[0])
    ]


def _measure_one(
    base: Base, executor: Executor, jobs: Sequence[Job], parts: Sequence[Part]
) -> tuple[float, int | None]:
    """Seconds of the fastest of the timed runs, and the peak of memory on a GPU."""
    gpu = base.device.type == "cuda"
    seconds = []
    for number in range(1 + REPEATS):
        if gpu:
            torch.cuda.reset_peak_memory_stats(base.device)
        synchronize(base.device)
        start = time.perf_counter()
        run_microbatch(executor, parts)
        synchronize(base.device)
        if number:
            seconds.append(time.perf_counter() - start)
    return min(seconds), torch.cuda.max_memory_allocated(base.device) if gpu else None


def fitted(
    guess: Profile, points: Sequence[Point], origin: Literal["measured", "remembered"], more_bytes: int = 0
) -> Profile:
    """The estimate, corrected to what was measured: a time per microbatch and a factor on everything else.

    Args:
        more_bytes: kept by training, but not there while it was measured: the optimizer's state.
    """
    timed = [point for point in points if point.seconds is not None]
    linear = [_seconds(replace(guess.cost, fixed=0.0), point) for point in timed]
    fixed = [
        _seconds(replace(guess.cost, per_token=0.0, per_token_squared=0.0, head_per_token=0.0), point)
        for point in timed
    ]
    goal = np.array([point.seconds for point in timed], np.float64)
    a, b = _non_negative(np.array([fixed, linear]).T / goal[:, None])
    cost = replace(
        guess.cost,
        per_token=guess.cost.per_token * b,
        per_token_squared=guess.cost.per_token_squared * b,
        head_per_token=guess.cost.head_per_token * b,
        fixed=guess.cost.fixed * a,
    )
    kept, each = guess.kept_bytes, guess.bytes_per_token
    peaks = [(point.tokens, point.bytes) for point in timed if point.bytes is not None]
    if peaks:
        tokens, peak = np.array(peaks, np.float64).T
        if len(peaks) > 1:
            each = float(
                ((tokens - tokens.mean()) * (peak - peak.mean())).sum() / ((tokens - tokens.mean()) ** 2).sum()
            )
        kept = float((peak - each * tokens).max())  # no measured peak lies above what is predicted
    return Profile(guess.stages, origin, cost, kept + more_bytes, each, guess.room, tuple(points))


def _non_negative(matrix: np.ndarray) -> tuple[float, float]:
    """Non-negative (a, b) with a least-squares error of a * column 0 + b * column 1 against 1; b is above 0."""
    ones = np.ones(len(matrix))
    if len(matrix) > 1:
        a, b = np.linalg.lstsq(matrix, ones, rcond=None)[0]
        if a >= 0 and b > 0:
            return float(a), float(b)
    only = matrix[:, 1]
    return 0.0, float(only @ ones / (only @ only))


def _seconds(cost: CostModel, point: Point) -> float:
    body = cost.per_token * point.tokens + cost.per_token_squared * point.squared + cost.fixed
    head = cost.head_per_token * point.tokens
    return body * (1 + cost.backward_ratio) + head * (1 + cost.head_backward_ratio)


def remember_failure(run: Run, prepared: PreparedRun, base: Base, tokens: int) -> None:
    """A microbatch ran out of memory while training: the next run of this kind will not try as many tokens."""
    cache, key = ProfileCache(base.device), profile_key(run, prepared, base)
    points = [point for point in cache.get(key) if point.tokens < tokens]
    if points:
        with contextlib.suppress(OSError):
            cache.put(key, [*points, Point(tokens, tokens, None, None)])


# --- chosen ------------------------------------------------------------------------------------------------------------


def predict(prepared: PreparedRun, known: Profile, budget: int, method: str = "greedy") -> Prediction:
    """The run's first window at a budget."""
    window = Planner([job.data.planned for job in prepared.jobs], budget, method=method).window(0)
    fullest = max(microbatch.num_tokens for microbatch in window.microbatches)
    return Prediction(
        budget, known.stages, len(window.microbatches), sum(mb.num_tokens for mb in window.microbatches),
        sum(known.seconds(microbatch) for microbatch in window.microbatches), known.bytes(fullest), known.fits(fullest),
    )  # fmt: skip


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The smallest budget within CLOSE of the best throughput that fits in memory; if none fits, the smallest of all."""
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        return min(predictions, key=lambda prediction: prediction.budget)
    best = max(prediction.tokens_per_second for prediction in fitting)
    close = [prediction for prediction in fitting if prediction.tokens_per_second >= (1 - CLOSE) * best]
    return min(close, key=lambda prediction: (prediction.budget, prediction.stages))


def predictions(prepared: PreparedRun, profiles: Sequence[Profile]) -> list[Prediction]:
    """Predictions for every budget worth trying, with every number of stages that there is a profile of."""
    return [predict(prepared, known, budget) for known in profiles for budget in budgets(prepared)]
