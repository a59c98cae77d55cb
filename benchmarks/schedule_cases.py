"""Jobs, models and baselines of `python -m benchmarks schedule`. Nothing here imports torch.

Lengths are drawn from lengths.json beside this file. Those of XSum, CNN/DM and WikiSum are ESTIMATES and every row says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch, Placed
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
"""What four jobs train on. mix: equal parts of the paper's three sets, shuffled; het: another set for each job."""

MODELS = {
    "70b": {"layers": 80, "hidden": 8192, "intermediate": 28672, "vocabulary": 128256, "key_value_width": 1024},
    "8b": {"layers": 32, "hidden": 4096, "intermediate": 14336, "vocabulary": 128256, "key_value_width": 1024},
}
"""Shapes of Llama 3.1 70B and 8B."""
FLOPS = 0.5 * 989e12
BYTES = 3.35e12
"""Of one H100 SXM: half of its dense bfloat16 peak; its memory bandwidth, with which all weights are read per microbatch."""


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
    """So many lengths of a set of lengths.json, or of `mix`; cut at the paper's 4096 tokens."""
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


def make_jobs(kinds: Sequence[str], samples: int, size: int) -> list[Job]:
    """A job for each kind of lengths."""
    return [Job(f"{n}-{kind}", draw_lengths(kind, samples, n), size) for n, kind in enumerate(kinds)]


def are_estimates(kinds: Sequence[str]) -> bool:
    return any(kind not in LENGTHS["measured"] for kind in kinds)


def make_cost(model: str, stages: int, balanced: bool = True) -> CostModel:
    """Seconds per stage with activation checkpointing, as the paper trains its larger models."""
    shape = MODELS[model]
    hidden, layers = shape["hidden"], shape["layers"]
    weights = layers * (2 * hidden**2 + 2 * hidden * shape["key_value_width"] + 3 * hidden * shape["intermediate"])
    return CostModel.from_model(
        **shape, stages=stages, flops_per_second=FLOPS, checkpointing=True, fixed=2 * weights / BYTES, balanced=balanced
    )


def random_order(jobs: Sequence[Job], capacity: int, stages: int) -> list[Microbatch]:
    """No scheduler: each round's samples shuffled, cut where the next one no longer fits, and no-ops where the rule asks."""
    generator = np.random.Generator(np.random.Philox(stable_hash("random order")))
    microbatches: list[Microbatch] = []
    for number in range(max(job.num_batches for job in jobs)):
        placed = [
            Placed(job.name, number, *item) for job in jobs if number < job.num_batches for item in job.batch(number)
        ]
        contents: list[list[Placed]] = [[]]
        load = 0
        for at in generator.permutation(len(placed)):
            if load + placed[at].length > capacity:
                contents.append([])
                load = 0
            contents[-1].append(placed[at])
            load += placed[at].length
        microbatches += [Microbatch(tuple(content)) for content in contents]
    return with_noops(microbatches, stages)


def efficiency(microbatches: Sequence[Microbatch], cost: CostModel, capacity: int, makespan: float) -> float:
    """The time with full microbatches, equal stages and no bubble, over the time needed: what is left of the machine."""
    tokens = sum(microbatch.num_tokens for microbatch in microbatches)
    real = [microbatch for microbatch in microbatches if not microbatch.is_noop]
    both = 1 + cost.backward_ratio
    body = sum(map(cost.layers, real)) - (len(real) - -(-tokens // capacity)) * cost.fixed
    head = tokens * cost.head_per_token * (1 + cost.head_backward_ratio)
    return (body * both + head) / cost.stages / makespan if makespan else 0.0
