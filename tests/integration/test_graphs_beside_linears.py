"""Jobs that train output layers, embeddings, copies and rows of tokens, whose microbatches share a graph: as without graphs.

Jobs have nothing on linear layers of the decoder where several run, so no kernel is interpreted, and numbers are float64.
"""

from __future__ import annotations

from typing import Any

import graph_runs
import pytest
import torch
from conftest import tiny_model
from expert_models import in_float64, tiny_experts
from graph_runs import BESIDE, Pretended, Run, attention_by_starts
from seeds import some

from packlora.engine import recorded
from packlora.engine.recorded import Body
from packlora.ops.attention import attention

SEVERAL = [
    ("head", "copies", "dora embedding, head"), ("embedding", "dora head, dropped", "tokens"),
    ("copied head", "copied linear", "head"),
]  # fmt: skip
ALONE = ["decoder, head", "dora head, dropped", "copies", "dora embedding, head"]
TIED = [("tokens of both",), ("tied tokens", "head", "embedding")]
MICROBATCHES = [
    [(0, 30), (0, 9), (1, 10), (2, 15)], [(0, 12), (1, 30), (2, 18)], [(2, 27), (2, 30)], [(0, 25), (1, 9), (2, 30)],
    [(1, 50), (2, 10)], [(0, 61)],
]  # fmt: skip
"""All of one shape; the third one and those after it are replays."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES)
    monkeypatch.setattr(graph_runs, "JOBS", BESIDE)


def tied(_: str, **more: Any) -> Any:
    return tiny_model("gemma3", tie_word_embeddings=True, **more)


def trained(
    graphs: bool, jobs: tuple[str, ...], balance: float = 0.0, **spoilt: float
) -> tuple[Run, list[torch.Tensor]]:
    """A run, what its jobs have become, gradients that no step has taken, and the losses."""
    with pytest.MonkeyPatch.context() as patch:
        if graphs:
            attention_by_starts(patch)
        else:
            patch.setattr(attention, "uses_kernels", lambda *_: False)
        run = Run(Pretended if graphs else None, jobs=jobs, dtype=torch.float64, balance=balance)
        with torch.no_grad():
            for name, parameter in run.adapters[-1].named_parameters().items():
                if (value := spoilt.get(name.rpartition("/")[2])) is not None:
                    parameter.view(-1)[::3] = value
        run.optimizers = [torch.optim.SGD(a.named_parameters().values(), lr=0.1) for a in run.adapters]
        got = run.train()
    if graphs and not run.told:
        assert all(body.recorded for body in run.executor._bodies.values())
    return run, [*got, *(buffer for own in run.buffers.values() for _, buffer in own.values())]


def agree(jobs: tuple[str, ...], told: int = 0, balance: float = 0.0) -> Run:
    (plain, want), (run, got) = trained(False, jobs, balance), trained(True, jobs, balance)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert len(run.told) == told
    before = Run(None, jobs=jobs, dtype=torch.float64).parameters()
    assert all(not torch.equal(now, then) for now, then in zip(plain.parameters(), before, strict=True))
    return run


@pytest.mark.parametrize("jobs", SEVERAL, ids=str)
def test_several_jobs_train_as_without_graphs(jobs: tuple[str, ...]) -> None:
    agree(jobs)


@pytest.mark.parametrize("job", ALONE)
def test_a_job_by_itself_trains_as_without_graphs(job: str) -> None:
    agree((job,))


@pytest.mark.parametrize("jobs", TIED, ids=str)
def test_jobs_on_tied_embeddings_train_as_without_graphs(
    jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's embeddings are scaled, and norms of heads have tokens in another dimension."""
    monkeypatch.setattr(graph_runs, "tiny_model", tied)
    agree(jobs)


@pytest.mark.parametrize("family", some(["mixtral", "qwen3_moe", "olmoe"], 2))
@pytest.mark.parametrize("jobs", [("decoder, head",), ("head", "embedding", "copies"), ("dora head", "head")], ids=str)
def test_load_balancing_losses_train_as_without_graphs(
    family: str, jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers give nothing that is trained where all jobs are on the output layer: their metric is there all the same."""
    monkeypatch.setattr(graph_runs, "tiny_model", lambda _, **more: tiny_experts(family, **more))
    monkeypatch.setitem(
        BESIDE, "decoder, head", BESIDE["decoder, head"] | {"target_modules": ["q_proj", "o_proj", "lm_head"]}
    )
    monkeypatch.setitem(BESIDE, "copies", BESIDE["copies"] | {"modules_to_save": ["norm", "input_layernorm"]})
    with in_float64():
        run, got = agree(jobs, balance=3.0), trained(True, jobs)[1]
    before = got[: len(run.parameters())]
    reached = any(not torch.equal(now, then) for now, then in zip(run.parameters(), before, strict=True))
    assert reached == (jobs != ("dora head", "head"))


@pytest.mark.parametrize(
    ("jobs", "family"),
    [
        (("experts", "dora experts, head", "head"), "qwen3_moe"), (("dora experts, head",), "mixtral"),
        (("router",), "qwen3_moe"), (("experts", "embedding", "dora experts, head"), "gpt_oss"),
    ],
    ids=str,
)  # fmt: skip
def test_adapters_of_experts_and_routers_train_as_without_graphs(
    jobs: tuple[str, ...], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runs, "tiny_model", lambda _, **more: tiny_experts(family, **more))
    with in_float64():
        agree(jobs, balance=3.0 * (family != "gpt_oss"))


def test_a_decoder_that_nothing_is_trained_in_has_no_backward() -> None:
    run = agree(("head", "dora head"))
    assert run.executor._recorder.recorded == 1


def test_a_backward_that_fails_adds_no_gradient_of_the_output_layer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Body._run_backward, []

    def failing(self: Body) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return original(self)

    monkeypatch.setattr(Body, "_run_backward", failing)
    monkeypatch.setattr(graph_runs, "tiny_model", tied)
    agree(("tokens of both",), told=1)


MODULES = ("copied linear", "dora embedding, head", "copies")
ON_EXPERTS = ("experts", "head", "dora experts, head")


@pytest.mark.parametrize(
    ("jobs", "where", "value"),
    [
        (MODULES, "norm", torch.nan), (MODULES, "weight", torch.inf), (MODULES, "B", torch.nan),
        (ON_EXPERTS, "A", torch.nan), (ON_EXPERTS, "magnitude", torch.inf),
    ],
)  # fmt: skip
def test_a_job_that_is_not_finite_changes_no_bit_of_another(
    jobs: tuple[str, ...], where: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jobs == ON_EXPERTS:
        monkeypatch.setattr(graph_runs, "tiny_model", lambda _, **more: tiny_experts("qwen3_moe", **more))
    (run, spoilt), (_, whole) = trained(True, jobs, **{where: value}), trained(True, jobs)
    number, mine = len(run.parameters()), sum(len(own.named_parameters()) for own in run.adapters[:2])
    sums = slice(number, number + len(MICROBATCHES))
    assert not all(bool(tensor.isfinite().all()) for tensor in spoilt[mine:])
    buffers = slice(sums.stop, sums.stop + mine)
    for own in (slice(0, mine), buffers):
        assert all(map(torch.equal, spoilt[own], whole[own]))
    for packed, one, other in zip(MICROBATCHES, spoilt[sums], whole[sums], strict=True):
        kept = len({owner for owner, _ in packed} - {2})
        assert torch.equal(one[:kept], other[:kept])
