"""Plans of stages against the times of decoder layers that were measured on a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from schedule_cases import Lengths

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


@pytest.mark.parametrize("model", LAYERS)
def test_microbatches_of_stages_are_as_large_as_measured_layers_ask_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that count what a microbatch costs the host are a tenth shorter: with few tokens it takes longer than the GPU."""
    (layers, weights), stages = LAYERS[model], 4  # two stages have as few microbatches as there can be
    tokens = CostModel(2 * weights * layers / 4e14, fixed=5e-5 * layers, stage_shares=(1 / stages,) * stages)
    monkeypatch.setattr(estimate, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(estimate.estimate, "planning_cost", lambda run, prepared: tokens)
    monkeypatch.setattr(estimate, "on_stages", lambda cost, *given: cost)
    prepared = SimpleNamespace(shape=SimpleNamespace(layers=layers))
    cost = estimate.planning_cost(SimpleNamespace(device="cuda"), prepared, stages)  # type: ignore[arg-type]
    ratios = []
    for seed in range(2):
        draw = random.Random(seed)
        jobs = [
            Lengths(name, [[draw.randint(mean // 2, mean * 3 // 2) for _ in range(count)] for _ in range(8)])
            for name, (mean, count) in BODIES.items()
        ]
        found, without = (
            seconds(Planner(jobs, 8192, lag=stages, cost=own, method="greedy").window(0).microbatches, model, stages)
            for own in (cost, replace(cost, fixed=tokens.fixed))
        )
        ratios.append(found / without)
    assert max(ratios) <= 0.9, ratios
