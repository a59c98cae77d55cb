"""Training by CUDA graphs on a GPU: as exact as without, the same bits every time, nothing waits.

make gpu
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import graph_runs
import pytest
import torch
from conftest import tiny_model
from expert_models import tiny_experts
from graph_runs import BESIDE, Run
from waits import no_waiting

import packlora
from packlora.engine.graphs import GraphedDevice
from packlora.engine.recorded import Recorder
from packlora.ops import launcher
from packlora.runtime.run import deterministic

JOBS = ("lora", "dora", "some modules")


def run(
    graphs: bool, dtype: torch.dtype, jobs: tuple[str, ...] = JOBS, **kwargs: Any
) -> tuple[Run, list[torch.Tensor]]:
    with deterministic():
        own = Run(Recorder if graphs else None, device="cuda", dtype=dtype, layers=2, jobs=jobs)
        return own, own.train(**kwargs)


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("jobs", [JOBS, ("lora",)], ids=["three jobs", "one job"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_graphs_are_as_exact_as_none_with_the_same_bits_every_time(dtype: torch.dtype, jobs: tuple[str, ...]) -> None:
    _, exact = run(False, torch.float64, jobs, times=3)
    _, plain = run(False, dtype, jobs, times=3)
    own, got = run(True, dtype, jobs, times=3)
    assert own.told == [] and isinstance(own.executor, GraphedDevice)
    shapes = 2 if jobs == JOBS else 1  # the last microbatch of a round is larger where all have tokens in it
    assert sum(body.recorded for body in own.executor._bodies.values()) == len(own.executor._bodies) == shapes
    assert error(got, exact) <= 1.5 * error(plain, exact), (error(got, exact), error(plain, exact))
    _, again = run(True, dtype, jobs, times=3)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


def learnt(
    graphs: bool, dtype: torch.dtype, jobs: tuple[str, ...], balance: float = 0.0, times: int = 2
) -> tuple[Run, list[torch.Tensor]]:
    """A run, and what its jobs have learnt: changes of parameters, and losses.

    By small steps of SGD: Adam makes much of gradients that are next to nothing, so errors of one rounding are twice another's.
    """
    with deterministic():
        own = Run(Recorder if graphs else None, device="cuda", dtype=dtype, layers=2, jobs=jobs, balance=balance)
        own.optimizers = [torch.optim.SGD(a.named_parameters().values(), lr=5e-4) for a in own.adapters]
        before = [parameter.detach().double().clone() for parameter in own.parameters()]
        got = own.train(times=times)
    return own, [now.double() - then for now, then in zip(got, before, strict=False)] + got[len(before) :]


def as_exact(jobs: tuple[str, ...], most: float, balance: float = 0.0, times: int = 2) -> Run:
    """Assert that graphs are recorded, are as exact as none, by a factor, and have the same bits again.

    A gradient that is missing is an error of 1.
    """
    _, exact = learnt(False, torch.float64, jobs, balance, times)
    _, plain = learnt(False, torch.bfloat16, jobs, balance, times)
    own, got = learnt(True, torch.bfloat16, jobs, balance, times)
    assert own.told == [] and all(body.recorded for body in own.executor._bodies.values())
    assert error(got, exact) <= most * error(plain, exact) < 0.9, (error(got, exact), error(plain, exact))
    _, again = learnt(True, torch.bfloat16, jobs, balance, times)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    return own


def rounded(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of tiny models whose weights bfloat16 holds, so that copies of these begin with the same in any dtype."""

    def model(_: str, **more: Any) -> Any:
        made = make(**more)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        return made

    return model


TIED = ("tokens of both", "tied tokens", "decoder, head")
SETS = [
    TIED, ("head", "copies", "dora embedding, head"), ("decoder, head", "dora head, dropped", "tokens"),
    ("copied head", "copied linear", "lora"), ("tokens of both", "lora", "dora"), ("decoder, head",), ("copies",),
    ("dora embedding, head",),
]  # fmt: skip
"""Jobs with and without adapters, copies and rows on the output layer and the embedding."""


@pytest.mark.parametrize("jobs", SETS, ids=str)
def test_output_layers_embeddings_and_copies_are_as_exact_as_without_graphs(
    jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runs, "JOBS", graph_runs.JOBS | BESIDE)
    tied = partial(tiny_model, "qwen3", tie_word_embeddings=True)
    monkeypatch.setattr(graph_runs, "tiny_model", rounded(tied if jobs == TIED else partial(tiny_model, "llama")))
    as_exact(jobs, 1.5)


ROUTED = [
    ("decoder, head",), ("lora", "decoder, head", "dora"), ("experts",), ("experts", "dora experts, head", "lora"), ("router",),
    ("router", "lora"),
]  # fmt: skip


@pytest.mark.parametrize("jobs", ROUTED, ids=str)
def test_models_with_experts_are_recorded_with_their_adapters_and_the_load_balancing_loss(
    jobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are computed by grouped products. Rounding may send a token to another expert, so the bound is wide."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    own = graph_runs.JOBS | BESIDE
    kinds = {name: own[name] | {"target_modules": attention + ["lm_head"] * ("head" in name)} for name in jobs}
    monkeypatch.setattr(graph_runs, "JOBS", kinds)
    prepared = graph_runs.prepare_model

    def prepare(model: Any, *rest: Any) -> Any:
        if model.dtype == torch.bfloat16 and not any("experts" in job for job in jobs):
            model.set_experts_implementation("grouped_mm")
        return prepared(model, *rest)

    monkeypatch.setattr(graph_runs, "prepare_model", prepare)
    monkeypatch.setattr(graph_runs, "tiny_model", rounded(partial(tiny_experts, "qwen3_moe")))
    as_exact(jobs, 3.0, balance=3.0)


def test_embeddings_of_many_tokens_are_recorded_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of an embedding is computed by sorting where there are more than 3,072 tokens."""
    monkeypatch.setattr(graph_runs, "JOBS", graph_runs.JOBS | BESIDE)
    monkeypatch.setattr(graph_runs, "tiny_model", rounded(partial(tiny_model, "llama")))
    rows = [(number, 200) for number in range(3) for _ in range(7)]
    monkeypatch.setattr(graph_runs, "MICROBATCHES", [rows] * 4)
    own = as_exact(("copies", "dora embedding, head", "tokens of both"), 1.5, times=1)
    with deterministic(), no_waiting():
        own.train()


def test_pinned_memory_is_kept_where_a_graph_is_recorded() -> None:
    values = torch.zeros(8, device="cuda")
    assert torch.equal(values, torch.zeros_like(values))  # which pins what torch reads numbers into
    torch.empty(1 << 20, pin_memory=True)  # nobody's at once, so the next one gets it
    before = torch.cuda.host_memory_stats()
    replay = Recorder(torch.device("cuda", 0)).record(lambda: values.add_(1))
    assert torch.equal(values, torch.zeros_like(values))
    replay()
    assert torch.equal(values, torch.ones_like(values))
    torch.empty(1 << 20, pin_memory=True)
    after = torch.cuda.host_memory_stats()
    assert after["allocations.allocated"] == before["allocations.allocated"] > 0, (before, after)


def test_a_graph_that_waits_for_the_collector_ends_no_recording() -> None:
    """A graph of an earlier run, say: where it is destroyed while another one is recorded, CUDA refuses the rest."""
    values, recorder = torch.zeros(8, device="cuda"), Recorder(torch.device("cuda", 0))
    cycle: list[Any] = [recorder.record(lambda: values.add_(1))]
    cycle.append(cycle)
    thresholds, made = gc.get_threshold(), list[list[int]]()
    del cycle

    def work() -> None:
        gc.set_threshold(1)  # the next objects let the collector run
        made.extend([] for _ in range(99))
        values.add_(1)

    try:
        replay = recorder.record(work)
    finally:
        gc.set_threshold(*thresholds)
    replay()
    assert torch.equal(values, torch.ones_like(values)) and gc.isenabled()


def test_evaluations_between_replays_change_nothing() -> None:
    own, got = run(True, torch.bfloat16, times=2, evaluate=True)
    _, want = run(True, torch.bfloat16, times=2)
    number = len(own.parameters())
    assert all(torch.equal(one, other) for one, other in zip(got[:number], want[:number], strict=True))


def test_a_replayed_microbatch_waits_for_nothing() -> None:
    own, _ = run(True, torch.bfloat16, times=3)
    assert all(body.recorded for body in own.executor._bodies.values())
    own.optimizers = [torch.optim.SGD(a.named_parameters().values(), lr=1e-3) for a in own.adapters]
    with deterministic(), no_waiting():
        own.train()


def test_memory_that_runs_out_frees_the_graphs_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = run(True, torch.bfloat16, times=2)
    original, failed = own.executor.single.evaluate, []

    def once(*args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("once")
        return original(*args)

    monkeypatch.setattr(type(own.executor.single), "evaluate", lambda self, *args: once(*args))
    with deterministic():
        own.train(evaluate=True)
    assert failed and own.told == []


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"gradient_checkpointing": True}, {"quantization": {"method": "nf4", "double_quant": True}},
        {"quantization": {"method": "int8"}, "gradient_checkpointing": True},
        {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
        {"trainable_token_indices": [4, 5, 30], "gradient_checkpointing": True},
    ],
    ids=["plain", "checkpointed", "nf4", "int8 checkpointed", "output layer", "copies", "tokens, checkpointed"],
)  # fmt: skip
def test_a_run_by_graphs_trains_as_one_without(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path, keys: dict[str, Any]
) -> None:
    """By the user's door; two runs have the same bits."""
    if "quantization" in keys:
        pytest.importorskip("bitsandbytes")
    data = write_rows("rows", 64, longest=40)
    adapter = {
        key: keys[key] for key in keys if key in ("target_modules", "modules_to_save", "trainable_token_indices")
    }
    keys = {key: value for key, value in keys.items() if key not in adapter}

    def train(name: str, graphs: Any) -> list[float]:
        jobs = [
            {
                "name": f"j{n}", "data": {"path": data}, "seed": n,
                "adapter": {"r": 4 * n, "lora_alpha": 8, "use_dora": n == 2, "lora_dropout": 0.1 * (n == 1)}
                | (adapter if n < 3 else {}),
                "train": {"max_steps": 8, "global_batch_size": 8, "learning_rate": 1e-3},
            } for n in (1, 2, 3)
        ]  # fmt: skip
        config = {
            "base_model": tiny_base("llama"), "output_dir": str(tmp_path / name), "dtype": "bfloat16", "device": "cuda",
            "max_tokens_per_microbatch": 1024, "cuda_graphs": graphs, "save_every": 2, "jobs": jobs,
        }  # fmt: skip
        assert packlora.train(config | keys).status == "done"
        assert "no CUDA graphs" not in (tmp_path / name / "run.json").read_text()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in sorted(lines, key=lambda line: (line["job"], line["step"]))]

    plain, graphed, again = train("plain", False), train("graphed", True), train("again", True)
    assert graphed == again
    assert max(abs(a - b) for a, b in zip(plain, graphed, strict=True)) < 0.02


def test_what_is_rehearsed_is_compiled_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that knows of no kernel yet, as far as launches tell."""
    jobs = ("lora", "some modules")
    with monkeypatch.context() as patch:
        patch.setattr(GraphedDevice, "_can_rehearse", lambda self: False)
        _, want = run(True, torch.bfloat16, jobs)
    known, rehearsals = dict[Any, Any](), list[set[str]]()
    monkeypatch.setattr(launcher, "_COMPILED", known)
    original = launcher._Rehearsal.take

    def take(self: Any, *args: Any) -> None:
        original(self, *args)
        rehearsals.append({str(key) for key in self._seen})

    monkeypatch.setattr(launcher._Rehearsal, "take", take)
    own, got = run(True, torch.bfloat16, jobs)
    assert own.told == []
    launched = {
        str(key) for key in known if "lora_linear" in key[0].fn.__module__ or "attention" in key[0].fn.__module__
    }
    first = {key for key in launched if key in rehearsals[-1]}
    assert len(first) >= 5 and len(first) >= len(launched) / 2, launched - first  # the others are of another shape
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_jobs_with_magnitudes_rehearse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "rehearsal", None)
    own, _ = run(True, torch.bfloat16, times=3)
    assert own.told == [] and all(body.recorded for body in own.executor._bodies.values())
