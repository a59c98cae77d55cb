"""Plans of stages against the times of decoder layers that were measured on a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from schedule_cases import Lengths

from packlora.ops import gpu
from packlora.pipeline import estimate
from packlora.pipeline.timeline import end_times
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "model-h200.json"
LAYERS = {"Qwen2.5-32B": (64, 487_600_000), "Llama-3.1-70B": (80, 855_600_000)}
"""Layers of a model, and the weights of one's linear layers."""
TOKENS = 2048, 4096, 8192
BODIES = {"short a": (150, 54), "short b": (200, 41), "long a": (450, 18), "long b": (500, 16)}
"""Tokens of a sample, and samples of an optimizer step: some 8,192 tokens."""


def seconds(microbatches: Sequence[Microbatch], model: str, stages: int) -> float:
    """Time from the first start to the last end, each layer as long as measured with so many tokens, forward and backward
    equally; with none as long as the layer of 8B with 2,048, where the host decides."""
    times = {row["case"]: row["ms"]["packlora"] for row in json.loads(MEASURED.read_text())["rows"]}
    known = [times["layer Llama-3.1-8B T2048"], *(times[f"layer {model} T{tokens}"] for tokens in TOKENS)]
    each = LAYERS[model][0] / stages / 2e3
    taken = [float(np.interp(one.num_tokens, (0, *TOKENS), known)) * each for one in microbatches]
    return max(ends[-1] for ends in end_times([[(one, one) for one in taken]] * stages)[1])


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are planned as for H200s, each with as many layers."""
    monkeypatch.setattr(estimate, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(estimate, "capability", gpu.capability.__wrapped__)  # what it finds is not kept for other tests
    monkeypatch.setattr(estimate, "_shares", lambda run, prepared, stages, numbers: (1 / stages,) * stages)


def planned(model: str, stages: int) -> CostModel:
    """Cost of a microbatch for the planner."""
    layers, weights = LAYERS[model]
    tokens = CostModel(2 * weights * layers / 4e14, fixed=5e-5 * layers)
    prepared: Any = SimpleNamespace(shape=SimpleNamespace(layers=layers, layer_numbers=[(1, 1)] * layers))
    return estimate.on_stages(tokens, cast(Any, SimpleNamespace(device="cuda")), prepared, stages)


def ratio(bodies: Sequence[str], model: str, stages: int, seed: int, **without: float) -> float:
    """Time of a plan over that of one whose cost has other numbers."""
    draw, cost = random.Random(seed), planned(model, stages)
    sizes = [(name, *BODIES[name]) for name in bodies]
    jobs = [
        Lengths(name, [[draw.randint(mean // 2, mean * 3 // 2) for _ in range(count)] for _ in range(8)])
        for name, mean, count in sizes
    ]
    found, other = (
        seconds(Planner(jobs, 8192, lag=stages, cost=own, method="greedy").window(0).microbatches, model, stages)
        for own in (cost, replace(cost, **without))
    )
    return found / other


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("model", LAYERS)
def test_microbatches_of_stages_are_as_large_as_measured_layers_ask_for(model: str) -> None:
    """Plans that count what a microbatch costs the host are a tenth shorter: with few tokens it takes longer than the GPU."""
    layers = LAYERS[model][0]  # four stages: two have as few microbatches as there can be
    ratios = [ratio(list(BODIES), model, 4, seed, fixed=5e-5 * layers, least=0.0) for seed in range(2)]
    assert max(ratios) <= 0.9, ratios


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("least", [0.0, 3.5e-3])
def test_a_job_alone_has_no_microbatches_that_the_host_launches_longer_than_they_run(
    model: str, stages: int, least: float
) -> None:
    """Many small microbatches would fill the stages between two of its steps, if each took as long as its tokens do. 3.5e-3
    seconds are of a slower GPU."""
    ratios = [ratio([name], model, stages, 0, least=least * LAYERS[model][0]) for name in BODIES]
    assert max(ratios) <= 1.001 and np.mean(ratios) <= 0.95, ratios


@pytest.mark.usefixtures("on_gpus")
def test_the_speed_of_hopper_is_not_taken_for_that_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm has a capability of 9, too: gfx942 is 9.4."""
    layers, hopper = LAYERS["Llama-3.1-70B"][0], planned("Llama-3.1-70B", 2).least
    assert hopper == layers * estimate.HOPPER_LAUNCH_SECONDS
    for hip, found in ((None, (8, 0)), (None, (10, 0)), ("7.0", (9, 4))):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=found: found)
        assert planned("Llama-3.1-70B", 2).least == layers * estimate.LAUNCH_SECONDS["cuda"]
