"""Jobs, lengths and costs of the benchmark `schedule`, and the time and memory of planning. Nothing here imports torch.

    python -m benchmarks.planning SAMPLES      # plan so many samples once, in this process; prints one JSON line

Lengths are drawn from lengths.json beside this file. Those of XSum, CNN/DM and WikiSum are ESTIMATES and every row says so.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packlora.pipeline.estimate import balance
from packlora.pipeline.timeline import Timeline
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch, Placed, ScheduleError
from packlora.schedule.verify import with_noops
from packlora.seeding import stable_hash

LENGTHS: dict[str, Any] = json.loads((Path(__file__).parent / "lengths.json").read_text())
MIX = ("xsum", "cnn_dailymail", "wikisum")
SETS: dict[str, tuple[str, ...]] = {
    "xsum": ("xsum",) * 4,
    "cnn_dailymail": ("cnn_dailymail",) * 4,
    "wikisum": ("wikisum",) * 4,
    "mix": ("mix",) * 4,
    "het": ("xsum", "cnn_dailymail", "wikisum", "mix"),
    "real": ("debian_synopsis", "py_docstrings", "newsgroups20", "manpages"),
}
"""Lengths of four jobs. mix: equal parts of LoRAFusion's three sets, shuffled; het: another set for each job."""
LLAMA_70B = {"layers": 80, "hidden": 8192, "intermediate": 28672, "vocabulary": 128256, "key_value_width": 1024}
FLOPS, BYTES = 0.5 * 989e12, 3.35e12
"""One H100 SXM: half of its dense bfloat16 peak; its memory bandwidth, with which all weights are read per microbatch."""
CAPACITY, BATCH, STAGES = 4096, 16, 4


@dataclass(slots=True)
class Job:
    """Samples of the given lengths, `size` to a global batch."""

    name: str
    lengths: np.ndarray
    size: int

    @property
    def num_batches(self) -> int:
        return -(-len(self.lengths) // self.size)

    def batch(self, n: int) -> list[tuple[int, int]]:
        start = n * self.size
        return list(enumerate(self.lengths[start : start + self.size].tolist(), start))


def draw_lengths(kind: str, count: int, seed: object) -> np.ndarray:
    """So many lengths of a set of lengths.json, or of `mix`; cut at LoRAFusion's 4096 tokens."""
    generator = np.random.Generator(np.random.Philox(stable_hash("schedule bench", kind, seed)))
    if kind == "mix":
        parts = [draw_lengths(part, -(-count // len(MIX)), seed) for part in MIX]
        return generator.permutation(np.concatenate(parts))[:count]
    if kind in LENGTHS["estimates"]:
        fit = LENGTHS["estimates"][kind]
        values = generator.lognormal(fit["mu"], fit["sigma"], count)
    else:
        known = LENGTHS["measured"][kind]
        at = [0.0, *(float(name[1:]) / 100 for name in known["percentiles"]), 1.0]
        logs = np.log([known["min"], *known["percentiles"].values(), known["max"]])
        values = np.exp(np.interp(generator.random(count), at, logs))
    return np.clip(np.rint(values), 1, LENGTHS["cap_tokens"]).astype(np.int64)


def make_jobs(kinds: Sequence[str], samples: int) -> list[Job]:
    """A job of so many samples for each kind of lengths."""
    return [Job(f"{n}-{kind}", draw_lengths(kind, samples, n), BATCH) for n, kind in enumerate(kinds)]


def are_estimates(kinds: Sequence[str]) -> bool:
    return any(kind not in LENGTHS["measured"] for kind in kinds)


def cost_of_model(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    key_value_width: int | None = None,
    stages: int = 1,
    flops_per_second: float = 1.0,
    checkpointing: bool = False,
    fixed: float = 0.0,
    balanced: bool = True,
) -> CostModel:
    """From the shapes of a decoder with a gated MLP and frozen weights; attention is causal.

    The backward of frozen products is one product (no weight gradient), that of attention two and a half forwards; with
    checkpointing each layer's forward is run once more.

    Args:
        key_value_width: width of keys, also of values; None: hidden.
        flops_per_second: of one stage.
        fixed: seconds per microbatch over all layers, such as reading the weights and launching kernels.
        balanced: layers per stage from `balance`, the last stage holding fewer; False: as even as can be.
    """
    key_value_width = hidden if key_value_width is None else key_value_width
    products = 2 * (2 * hidden * hidden + 2 * hidden * key_value_width + 3 * hidden * intermediate)
    per_token = layers * products / flops_per_second
    per_square = layers * 2 * hidden / flops_per_second  # two products, half of them masked
    head = 2 * hidden * vocabulary / flops_per_second
    ratio = 1.0 + (1.0 if checkpointing else 0.0)
    in_layers = 2 * head / (per_token / layers * (1 + ratio))
    counts = balance(stages, layers, in_layers if balanced else 0.0)
    shares = tuple(count / layers for count in counts)
    return CostModel(per_token, per_square, fixed, head, ratio, shares, 1.0)


def make_cost(stages: int) -> CostModel:
    """Seconds per stage of Llama-3.1-70B's shape with activation checkpointing, layers cut so that stages are balanced."""
    hidden, layers = LLAMA_70B["hidden"], LLAMA_70B["layers"]
    weights = layers * (
        2 * hidden**2 + 2 * hidden * LLAMA_70B["key_value_width"] + 3 * hidden * LLAMA_70B["intermediate"]
    )
    return cost_of_model(
        **LLAMA_70B, stages=stages, flops_per_second=FLOPS, checkpointing=True, fixed=2 * weights / BYTES, balanced=True
    )


def check_causality(timeline: Timeline, microbatches: Sequence[Microbatch], stages: int) -> None:
    """On every stage, no job's forward begins before the job's step for the batch before it is done.

    Raises:
        ScheduleError: naming job, batch and stage.
    """
    ends: dict[tuple[int, int], float] = {}
    starts: dict[tuple[int, int], float] = {}
    for span in timeline.spans:
        if span.kind == "forward":
            starts[span.stage, span.microbatch] = span.start
        else:
            ends[span.stage, span.microbatch] = span.end
    for stage in range(stages):
        stepped: dict[tuple[str, int], float] = {}
        first: dict[tuple[str, int], float] = {}
        for number, microbatch in enumerate(microbatches):
            for placed in microbatch.samples:
                key = placed.job, placed.batch
                stepped[key] = max(stepped.get(key, 0.0), ends[stage, number])
                first[key] = min(first.get(key, float("inf")), starts[stage, number])
        for (job, batch), begun in first.items():
            before = stepped.get((job, batch - 1))
            if before is not None and begun < before - 1e-9 * max(1.0, before):
                raise ScheduleError(
                    f"job {job!r}: on stage {stage} the forward of batch {batch} begins at {begun:g}, before the step of "
                    f"batch {batch - 1} at {before:g}"
                )


def random_order(jobs: Sequence[Job], capacity: int, stages: int) -> list[Microbatch]:
    """No scheduler: each round's samples shuffled, cut where the next one no longer fits, and no-ops where the rule asks."""
    generator = np.random.Generator(np.random.Philox(stable_hash("random order")))
    microbatches: list[Microbatch] = []
    for number in range(max(job.num_batches for job in jobs)):
        placed = [
            Placed(job.name, number, *item) for job in jobs if number < job.num_batches for item in job.batch(number)
        ]
        contents, load = list[list[Placed]]([[]]), 0
        for at in generator.permutation(len(placed)):
            if load + placed[at].length > capacity:
                contents.append([])
                load = 0
            contents[-1].append(placed[at])
            load += placed[at].length
        microbatches += [Microbatch(tuple(content)) for content in contents]
    return with_noops(microbatches, stages)


# --- time and memory ---------------------------------------------------------------------------------------------------


def planning_time(samples: int) -> dict[str, Any]:
    """Seconds, MiB and numbers of planning, in a fresh process. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "benchmarks.planning", str(samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def plan_once(samples: int) -> dict[str, Any]:
    """Windows are handed out one by one as in training; the time is that of making, proving and counting them."""
    before = _resident_mib("VmRSS")
    planner = Planner(make_jobs(SETS["mix"], samples // 4), CAPACITY, lag=STAGES, method="auto", cost=make_cost(STAGES))
    begun, cpu, first = time.perf_counter(), time.process_time(), 0.0
    counts = {"microbatches": 0, "noops": 0, "bound": 0}
    for window in planner.windows():
        first = first or time.perf_counter() - begun
        for key in counts:
            counts[key] += getattr(window.report, key)
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds, "first_window_s": first, **counts,
        "rss_mib": _resident_mib("VmHWM") - before, "cpu_s": time.process_time() - cpu,
    }  # fmt: skip


def _resident_mib(field: str) -> float:
    """VmRSS: resident now; VmHWM: at most so far. Unlike getrusage it knows nothing of the process that started this one."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) / 2**10


if __name__ == "__main__":
    print(json.dumps(plan_once(int(sys.argv[1]))))
