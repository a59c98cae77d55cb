"""Figures of a plan on made-up jobs, without a model: counts, sparklines, the picture, and how long a large run takes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from seeds import SEED

from packlora.commands.plan import figures
from packlora.config import TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.pipeline.picture import draw
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel


def prepared(jobs: dict[str, tuple[Any, int]], budget: int) -> Any:
    """Jobs by name: lengths of their samples, global batch size."""
    made = []
    for name, (lengths, batch) in jobs.items():
        samples = [Sample(np.zeros(n, np.int32), np.ones(n, bool)) for n in lengths]
        data = JobData(name, samples, TrainConfig(global_batch_size=batch), 0)
        made.append(SimpleNamespace(data=data))
    run = SimpleNamespace(schedule=SimpleNamespace(time_limit_s=10.0))
    return SimpleNamespace(jobs=made, budget=budget, run=run)


def known(stages: int = 1, **cost: float) -> Profile:
    shares = tuple([1 / stages] * stages)
    return Profile("estimated", CostModel(stage_shares=shares, **cost), 100.0, 2.0, 10**9)


def test_a_pipeline_has_a_bubble() -> None:
    run = prepared({"a": ([10] * 40, 4), "b": ([12] * 40, 4)}, 48)
    piped, shown = figures(run, known(stages=3), "auto")
    assert 0 < piped.bubble < 1
    assert piped.noops == sum(microbatch.is_noop for microbatch in shown)
    assert piped.tokens == 880


@pytest.mark.soak
def test_64_jobs_of_100_000_samples_are_planned_in_seconds() -> None:
    draw_lengths = np.random.default_rng(SEED)
    run = prepared(
        {
            f"job{n}": (np.clip(draw_lengths.lognormal(5 + n / 64, 0.6, 1563), 8, 4096).astype(int), 4 << n % 3)
            for n in range(64)
        },
        8192,
    )
    start = time.process_time()
    made, _ = figures(run, known(), "auto")
    assert time.process_time() - start < 20
    assert made.tokens == sum(job.data.tokens for job in run.jobs)
    assert made.gap < 0.02


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_shows_every_job_and_stage(kind: str, tmp_path: Path) -> None:
    run = prepared({"left": ([10] * 8, 4), "right": ([20] * 8, 4)}, 50)
    _, shown = figures(run, known(stages=2), "auto")
    draw(shown, known(stages=2).cost, "a title", tmp_path / f"plan.{kind}")
    content = (tmp_path / f"plan.{kind}").read_bytes()
    assert len(content) > 5000
    if kind == "svg":
        assert all(word in content.decode() for word in ("left", "right", "stage 1", "a title"))


def test_tokens_of_a_job_are_those_of_the_batches_that_it_takes() -> None:
    for epochs, limit, drop in ((1.0, None, False), (2.5, None, False), (3.0, 7, False), (1.0, None, True)):
        lengths = np.random.default_rng(SEED).integers(3, 90, 22)
        samples = [Sample(np.zeros(n, np.int32), np.ones(n, bool)) for n in lengths]
        data = JobData(
            "a", samples, TrainConfig(global_batch_size=4, num_train_epochs=epochs, drop_last=drop), 3, limit
        )
        exact = sum(int(lengths[n]) for step in range(data.num_steps) for n in data.global_batch(step))
        assert data.tokens == (pytest.approx(exact, rel=0.2) if drop else exact)
