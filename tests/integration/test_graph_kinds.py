"""Jobs of every kind whose microbatches share a graph: as without graphs, and none reaches another."""

from __future__ import annotations

from typing import Any

import graph_runs
import pytest
import torch
from conftest import tiny_model
from graph_runs import Fixed, Pretended, Run, attention_by_starts
from seeds import some

from packlora.engine import recorded
from packlora.ops.attention import attention
from packlora.ops.lora_linear.plan import ROUTED
from packlora.runtime.keep_outputs import keep_outputs

KINDS: dict[str, dict[str, Any]] = {
    "biases": {"r": 4, "bias": "all"},
    "biases, dropout": {"r": 4, "bias": "lora_only", "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "r": 2,
        "rank_pattern": {"q_proj": 19, "up_proj": 1},
        "alpha_pattern": {"v_proj": 3},
        "use_rslora": True,
    },
    "dora, biases": {"r": 3, "use_dora": True, "bias": "all"},
}
NARROW = {"lora": {"r": 4, "lora_dropout": 0.2, "target_modules": ["v_proj"]}}
NARROW["dora"] = {"r": 3, "use_dora": True, "target_modules": ["v_proj", "o_proj"]}
CASES = [(("biases", "patterns"), False), (("biases, dropout", "dora, biases"), False), (("dora", "biases"), True)]
SHORT = [[(0, 11), (1, 3), (1, 2)], [(0, 16)], [(0, 2), (0, 9), (1, 4)]]
"""All of one shape, one of them of one job, after which that steps; the last one is a replay."""
BOTH = [[(0, 11), (1, 5)], [(0, 3), (1, 13)], [(0, 8), (1, 8)]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with biases and microbatches of few tokens."""
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 16)
    monkeypatch.setattr(graph_runs, "MICROBATCHES", SHORT)
    monkeypatch.setattr(graph_runs, "JOBS", graph_runs.JOBS | KINDS)
    changes = {"hidden_size": 32, "intermediate_size": 48}
    monkeypatch.setattr(graph_runs, "tiny_model", lambda _, **more: tiny_model("qwen2", **more, **changes))
    monkeypatch.setitem(graph_runs.TINY, "hidden_size", 32)


def graphed(monkeypatch: pytest.MonkeyPatch, jobs: tuple[str, ...], kept: bool = False) -> Run:
    attention_by_starts(monkeypatch)
    run = Run(Pretended, Fixed(ROUTED), jobs=jobs)
    if kept:
        keep_outputs(run.executor.single.base.model)
    return run


def collected(run: Run, numbers: tuple[int, ...] = (0, 1)) -> list[torch.Tensor]:
    """The gradients of jobs that no step has taken yet."""
    return [buffer for number in numbers for _, buffer in run.buffers[number].values()]


@pytest.mark.parametrize(("jobs", "kept"), some(CASES, 3), ids=str)
def test_jobs_of_all_kinds_train_as_without_graphs(
    jobs: tuple[str, ...], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Run(None, jobs=jobs)
    run = graphed(monkeypatch, jobs, kept)
    for one in (plain, run):  # Adam makes much of gradients that are next to nothing
        one.optimizers = [torch.optim.SGD(a.named_parameters().values(), lr=0.1) for a in one.adapters]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "uses_kernels", lambda *_: False)
        want = [*plain.train(), *collected(plain)]
    got = [*run.train(), *collected(run)]
    assert any(bool(gradient.any()) for gradient in collected(run, (0,)))
    assert not run.told
    assert run.executor._recorder.recorded == 3
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("where", "value"), some([("magnitude", torch.nan), ("A", torch.nan), ("B", torch.inf)], 3))
def test_a_job_that_is_not_finite_changes_no_bit_of_another_in_a_replay(
    where: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runs, "JOBS", NARROW)
    monkeypatch.setattr(graph_runs, "MICROBATCHES", BOTH)

    def trained(spoilt: bool) -> list[torch.Tensor]:
        run = graphed(monkeypatch, ("lora", "dora"))
        with torch.no_grad():
            for name, parameter in run.adapters[1].named_parameters().items():
                if spoilt and name.endswith(where):
                    parameter.view(-1)[::3] = value
        tensors = run.train()
        assert not run.told
        assert run.executor._recorder.recorded == 3
        mine, all_of_them = len(run.adapters[0].named_parameters()), len(run.parameters())
        assert spoilt != all(bool(t.isfinite().all()) for t in tensors)
        own = collected(run, (0,))
        assert any(bool(gradient.any()) for gradient in own)
        return [*tensors[:mine], *own, *(sums[0] for sums in tensors[all_of_them:])]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)
