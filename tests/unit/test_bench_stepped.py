"""Benchmark rows that promise the norm in every pass: their parameters change, and the norms are computed in each timed run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from packlora.adapters import norms
from packlora.bench import dora_layer, model
from packlora.bench.options import Options
from packlora.timing import Contender, write_to

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
    for name, stepped in (("packlora", False), ("packlora_stepped", True)):
        work = made(name).make()
        work.step()
        before: list[torch.Tensor] = []
        for _ in range(2):
            work.clear()
            computed.clear()
            work.step()
            assert bool(computed) == stepped, name
            assert all(not torch.equal(now, old) for now, old in zip(computed, before, strict=bool(before)))
            before = list(computed)


def test_a_write_changes_every_factor_and_returns_to_the_first_values() -> None:
    parameters = [torch.randn(3, 5), torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(4)]
    before = [parameter.clone() for parameter in parameters]
    write_to(parameters)
    assert [torch.equal(now, old) for now, old in zip(parameters, before, strict=True)] == [False, False, True]
    write_to(parameters)
    assert all(torch.equal(now, old) for now, old in zip(parameters, before, strict=True))
