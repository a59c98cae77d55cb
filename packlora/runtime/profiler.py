"""The profiler: what is known of a run on its device, estimated (estimate.py), measured (measure.py) or remembered
(profiles.py), and which token budget suits it best. `choose` plans the run's beginning at each budget and takes the best
predicted throughput that fits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from packlora.base.device import choose_device
from packlora.base.model import Base
from packlora.config import PlansConfig, Run
from packlora.engine.passes import Executor
from packlora.runtime.estimate import OPTIMIZER_BYTES, estimate
from packlora.runtime.job import Job
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile, ProfileCache
from packlora.schedule.planner import Planner

BUDGETS = tuple(2**power * part // 2 for power in range(10, 17) for part in (2, 3))
"""Token budgets that are tried: 1024, 1536, 2048, 3072, ... 98304."""
CLOSE = 0.01
"""Share of throughput. Among budgets whose prediction differs by less, the smallest is taken: it needs less memory."""


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
        from packlora.runtime.measure import measure

        points, origin = measure(base, executor, jobs, tried), "measured"
        try:
            cache.put(key, points)
        except OSError as error:
            base.warnings.append(f"what was measured cannot be remembered in {cache.path}: {error}")
    if not any(point.seconds is not None for point in points):
        return replace(guess, points=tuple(points))
    from packlora.runtime.measure import fitted

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
        "checkpointing" if run.gradient_checkpointing else "", "offloading" if run.activation_offloading else "",
        "host-embedding" if run.offload_embedding else "", "kept-outputs" if run.keep_outputs else "",
        "" if prepared.recompute else "no-recompute", f"liger-{liger}".lower(), asked, "+".join(adapters),
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


def predict(prepared: PreparedRun, known: Profile, budget: int, method: str = "greedy") -> Prediction:
    """The run's first window at a budget."""
    window = Planner([job.data.planned for job in prepared.jobs], budget, method=method).window(0)
    fullest = max(microbatch.num_tokens for microbatch in window.microbatches)
    return Prediction(
        budget, known.cost.devices, len(window.microbatches), sum(mb.num_tokens for mb in window.microbatches),
        sum(known.seconds(microbatch) for microbatch in window.microbatches), known.bytes(fullest), known.fits(fullest),
    )  # fmt: skip


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The smallest budget within CLOSE of the best throughput that fits in memory; if none fits, the smallest of all."""
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        return min(predictions, key=lambda prediction: prediction.budget)
    best = max(prediction.tokens_per_second for prediction in fitting)
    close = [prediction for prediction in fitting if prediction.tokens_per_second >= (1 - CLOSE) * best]
    return min(close, key=lambda prediction: prediction.budget)


def predictions(prepared: PreparedRun, known: Profile) -> list[Prediction]:
    """Predictions for every budget worth trying."""
    return [predict(prepared, known, budget) for budget in budgets(prepared)]
