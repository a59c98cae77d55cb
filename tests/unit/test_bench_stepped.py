"""Benchmark rows that promise the norm in every pass: their parameters change, and the norms are computed in each timed run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import dora_layer, model
from benchmarks.options import Options
from packlora.adapters import norms
from packlora.plans.timing import Contender, Work, paired, stepped

CPU = torch.device("cpu")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A of every norm that is computed."""
    factors: list[torch.Tensor] = []
    right = norms.row_norms

    def watched(problems: Any, *args: Any, **more: Any) -> Any:
        factors.extend(problem.A.detach().clone() for problem in problems)
        return right(problems, *args, **more)

    monkeypatch.setattr(norms, "row_norms", watched)
    return factors


def model_contender(name: str) -> Contender:
    case = next(case for case in model.cases(Options(CPU)) if case.dora and not case.checkpointing)
    base = model.build(case.config, CPU, LlamaForCausalLM).float()
    ids = torch.randint(0, case.config.vocab_size, (case.samples, case.length))
    return model.causal_lm(name, name, base, ids, 8, 0.0, dora=True)


def layer_contender(name: str) -> Contender:
    return dora_layer.contender(name, dora_layer.Inputs.random(dora_layer.Case(64, 96, 32, 8), CPU))


@pytest.mark.parametrize("made", [model_contender, layer_contender])
def test_the_norms_of_a_stepped_contender_are_those_of_other_values_in_every_run(
    made: Any, computed: list[torch.Tensor]
) -> None:
    """Of values that are as they were a GPU computes none, however often they were written."""
    for name, steps in (("packlora", False), ("packlora_stepped", True)):
        work = made(name).make()
        seen: list[list[torch.Tensor]] = []

        def run(work: Work = work, seen: list[list[torch.Tensor]] = seen) -> None:
            computed.clear()
            work.step()
            seen.append(list(computed))

        timings = paired([Contender(name, lambda: Work(run, work.clear))], CPU, seconds=0, rounds=(3, 3), warmup=2)  # noqa: B023
        assert timings.by_name[name].error is None
        for before, now in itertools.pairwise(seen[1:]):
            assert bool(now) == steps, name
            assert not any(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_values_change_once_between_two_runs_however_often_gradients_are_dropped() -> None:
    parameters = [torch.randn(3, 5), torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4)]
    before = [parameter.clone() for parameter in parameters]
    work = stepped(Work(lambda: None, lambda: None), parameters)
    for changed in (True, False):
        work.step()
        work.clear()
        work.clear()
        same = [torch.equal(now, old) for now, old in zip(parameters, before, strict=True)]
        assert same == ([False, False, True] if changed else [True, True, True])
