"""What a sweep decides at the border of two windows, whatever is known of later steps by then: a run that is broken off there
decides the same when it is continued, before its slower jobs have come as far as the others."""

from __future__ import annotations

import random
from typing import Any

import pytest
from seeds import SEED

from packlora.config import Run
from packlora.sweep.candidates import Sweep

STEPS, COUNT = 7, 6
RULES = [
    {"method": "median", "n_startup_trials": 2}, {"method": "successive_halving", "min_resource": 1, "reduction_factor": 2},
    {"method": "patience", "patience": 2}, {"method": "target", "target": 0.2},
]  # fmt: skip


def decided(rule: dict[str, Any], costs: list[list[float]], given: int, ahead: int) -> dict[str, str]:
    """Decisions of round `given`, where so many candidates have taken one step more."""
    template = {"name": "a", "data": {"path": "x", "eval_path": "y"}, "train": {"max_steps": STEPS}}
    sweep_keys = {"job": "a", "parameters": {"seed": list(range(COUNT))}, "stopping": rule, "concurrent": COUNT}
    run = {"base_model": "-", "output_dir": "-", "eval_every": 1, "jobs": [template], "sweep": sweep_keys}
    sweep = Sweep(Run.model_validate(run))
    sweep.follow(sweep.begin())
    for trial, own in zip(sweep.trials.values(), costs, strict=True):
        step = given + (trial.number < ahead)
        lines = [{"step": at, "loss": 0.0, "eval_loss": own[at - 1]} for at in range(1, step + 1)]
        trial.see(step, "running", STEPS, lines)
    return sweep.decide(given)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["method"]))
def test_a_round_is_decided_alike_where_some_candidates_are_a_step_further(rule: dict[str, Any]) -> None:
    draw, found = random.Random(SEED), 0
    for _ in range(2):
        costs = [[draw.random() for _ in range(STEPS)] for _ in range(COUNT)]
        for given in range(1, STEPS - 1):
            first = decided(rule, costs, given, 0)
            found += bool(first)
            assert all(decided(rule, costs, given, ahead) == first for ahead in (1, 4))
    assert found


@pytest.mark.parametrize(("every", "own", "looks"), [(20, None, 32), (4, 12, 12), (12, 4, 12), (16, None, 16)], ids=str)
def test_a_rung_is_decided_by_the_first_evaluation_that_is_made_there_or_later(
    every: int, own: int | None, looks: int
) -> None:
    steps, rule = 60, {"method": "successive_halving", "min_resource": 4, "reduction_factor": 100}
    template = {"name": "a", "data": {"path": "x", "eval_path": "y"}, "train": {"max_steps": steps, "eval_steps": own}}
    sweep_keys = {"job": "a", "parameters": {"seed": [0, 1, 2]}, "stopping": rule}
    run = {"base_model": "-", "output_dir": "-", "eval_every": every, "jobs": [template], "sweep": sweep_keys}
    sweep = Sweep(Run.model_validate(run))
    sweep.follow(sweep.begin())
    for number, trial in enumerate(sweep.trials.values()):
        made = range(own or every, looks + 1, own or every)
        trial.see(looks, "running", steps, [{"step": at, "eval_loss": 1.0 + number} for at in made])
    for given in range(sweep.window, looks, sweep.window):
        assert sweep.decide(given) == {}
    assert set(sweep.decide(looks)) == {"a-001", "a-002"}
