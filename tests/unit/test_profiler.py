"""The profiler without a model: fits, choices and what it remembers. Measuring is in tests/integration/test_schedule.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from seeds import SEED

from benchmarks.training import JOBS, Lengths, make_samples, prepared_on, trainer_of
from packlora.base.model import Base
from packlora.base.packing import prepare_model
from packlora.config import Run
from packlora.engine.parts import num_tokens
from packlora.engine.passes import run_microbatch
from packlora.runtime import estimate, measure
from packlora.runtime.measure import fitted
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.profiler import CLOSE, Prediction, choose
from packlora.runtime.profiles import Point, Profile, ProfileCache
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch, Placed

COST = CostModel(
    per_token=2e-5, per_token_squared=3e-9, fixed=1e-3, head_per_token=4e-6, backward_ratio=1.3, head_backward_ratio=1.0
)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


LLAMA_8B = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336, "down": 4096}
"""Outputs of a layer's projections."""


@pytest.mark.parametrize(
    ("checkpointing", "rank", "keys"),
    [
        (False, 16, ("lora_r16_recompute_gib",)),
        (True, 16, ("lora_r16_recompute_ckpt_gib",)),
        # training recomputes and does not keep outputs: measured were neither, both, and recomputation of LoRA
        (False, 384, ("dora_r384_gib", "lora_r16_recompute_gib", "-lora_r16_gib")),
    ],
)
def test_memory_of_a_gpu_is_estimated_as_it_was_measured(
    checkpointing: bool, rank: int, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 %: 8192 tokens on Llama-3.1-8B's shape, LoRA r 16 or DoRA r 384 in bfloat16 without an optimizer."""
    monkeypatch.setattr(estimate, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(estimate, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(estimate, "runs_triton", lambda device: True)
    shape = ModelShape("llama", 8_030_261_248, 6_979_321_856, 32, 4096, 4096, 1024, 14336, 128256)
    run = SimpleNamespace(
        dtype="bfloat16",
        device="auto",
        gradient_checkpointing=checkpointing,
        offload_embedding=False,
        activation_offloading=False,
        cuda_graphs=False,
    )
    outputs = {f"{layer}.{name}": width for layer in range(32) for name, width in LLAMA_8B.items()}
    modules = {path: SimpleNamespace(kind="linear", rank=rank) for path in outputs}
    job = SimpleNamespace(
        data=SimpleNamespace(label_share=1.0),
        spec=SimpleNamespace(modules=modules),
        products=outputs if rank > 16 else {},
    )
    prepared: Any = SimpleNamespace(shape=shape, trainable=0, jobs=[job], in_codes=(0, 0), recompute=True)
    parts = estimate.memory_parts(run, prepared, 8192)  # type: ignore[arg-type]
    monkeypatch.setattr(estimate, "why_no_kernels", lambda device: "a T4")
    torch_s = estimate.memory_parts(run, prepared, 8192)  # type: ignore[arg-type]
    layers = 1 if checkpointing else 32
    assert torch_s["activations"] - parts["activations"] == 8192 * 2 * layers * (3 * 4096 - 2 * 1024)
    adapters = 41_943_040 * rank // 16 * 2 * 2  # values and gradients
    recorded = json.loads((RESULTS / "model-h200.json").read_text())["summary"]
    measured = sum(recorded[key.removeprefix("-")] * (-1 if key.startswith("-") else 1) for key in keys) * 2**30
    assert sum(parts.values()) + adapters == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "graphs", "ways", "more"),
    [
        (4096, True, "auto", [], 3 * 4096 * 4096 * 2 + 2**26), (4096, True, True, ["tensor"], 3 * 4096 * 4096 * 2 + 2**26),
        (4096, True, "auto", ["tensor"], 3 * 4096 * 4096 * 2 + 2**26), (4096, True, "auto", ["shard_base"], 0),
        (4096, True, "auto", ["tensor", "shard_base"], 0), (4096, True, False, [], 0),
        # the loss takes 2**28 + 3 * T * 4096 * 2 bytes, a layer's backward T * 2 * (4096 + 2 * 14336): the latter is less
        (256, False, "auto", [], 0), (4096, False, "auto", [], 3 * 4096 * 4096 * 2 + 2**26 - (2**28 - 4096 * 2 * 20480)),
    ],
)  # fmt: skip
def test_graphs_add_what_the_loss_leaves_to_a_layer_s_backward(
    tokens: int, checkpointing: bool, graphs: Any, ways: list[str], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states [T, 4096], their gradient and its copy, and workspaces: where the loss is not the more of the two."""
    monkeypatch.setattr(estimate, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(estimate, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(estimate, "runs_triton", lambda device: True)
    shape = ModelShape("llama", 8_030_261_248, 6_979_321_856, 32, 4096, 4096, 1024, 14336, 128256)
    job = SimpleNamespace(data=SimpleNamespace(label_share=1.0), spec=SimpleNamespace(modules={}), products={})
    prepared: Any = SimpleNamespace(shape=shape, trainable=0, jobs=[job], in_codes=(0, 0), recompute=True)

    def total(cuda_graphs: Any) -> int:
        run: Any = SimpleNamespace(
            dtype="bfloat16", device="auto", gradient_checkpointing=checkpointing, offload_embedding=False,
            activation_offloading=False, cuda_graphs=cuda_graphs, parallel=SimpleNamespace(ways=ways),
        )  # fmt: skip
        return sum(estimate.memory_parts(run, prepared, tokens).values())

    assert total(graphs) - total(False) == more


@pytest.mark.parametrize(
    ("layers", "hidden", "attention", "inner", "vocabulary", "measured"),
    # tokens_per_s of packlora in benchmarks/results/small-h200.json, train 0.6B and train 8x8B
    [(28, 1024, 2048, 3072, 151936, 114_783), (8, 4096, 4096, 14336, 128256, 55_500)],
    ids=["0.6B", "8x8B"],
)
def test_speed_of_a_gpu_is_estimated_as_it_was_measured(
    layers: int, hidden: int, attention: int, inner: int, vocabulary: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Within 10 %: the benchmark's four jobs of short samples, at a product's and a copy's speeds of that H200."""
    for name, given in (
        ("choose_device", torch.device("cuda")), ("memory_room", 1), ("why_no_kernels", None), ("runs_triton", True),
        ("machine_flops", 7.5e14), ("machine_bandwidth", 3.98e12),
    ):  # fmt: skip
        monkeypatch.setattr(estimate, name, lambda *asked, given=given: given)
    wide = [(attention, hidden), (1024, hidden), (1024, hidden), (hidden, attention)]
    wide += [(inner, hidden), (inner, hidden), (hidden, inner)]
    linear, outputs = layers * sum(N * K for N, K in wide), layers * sum(N for N, _ in wide)
    shape = ModelShape(
        "qwen3", linear, linear, layers, hidden, attention, 1024, inner, vocabulary, largest=inner * hidden, outputs=outputs
    )  # fmt: skip
    run: Any = SimpleNamespace(
        dtype="bfloat16",
        device="auto",
        gradient_checkpointing=False,
        offload_embedding=False,
        activation_offloading=False,
        cuda_graphs=False,
    )
    jobs, samples = [], []
    for name, (lengths, rank) in JOBS.items():
        drawn = lengths.draw(320, 2048, 0)
        samples += [Placed(name, number // 32, number, int(length)) for number, length in enumerate(drawn)]
        data = SimpleNamespace(planned=SimpleNamespace(lengths=drawn), label_share=1 - 1 / drawn.mean())
        active, spec = layers * rank * sum(N + K for N, K in wide), SimpleNamespace(modules={})
        jobs.append(SimpleNamespace(data=data, active=active, active_on_experts=0, spec=spec, products={}))
    prepared: Any = SimpleNamespace(
        shape=shape, trainable=0, jobs=jobs, in_codes=(0, 0), recompute=True, head_in_layers=None
    )
    filled: list[list[Placed]] = [[]]
    for one in sorted(samples, key=lambda one: one.batch):
        if sum(placed.length for placed in filled[-1]) + one.length > 8192:
            filled.append([])
        filled[-1].append(one)
    known = estimate.estimate(run, prepared)
    seconds = sum(known.seconds(Microbatch(tuple(own))) for own in filled)
    assert sum(one.length for one in samples) / seconds == pytest.approx(measured, rel=0.1)
    run.gradient_checkpointing = True
    again = estimate.estimate(run, prepared).cost
    assert again.backward_ratio == pytest.approx(known.cost.backward_ratio + 1), "layers run again"


def peak_of(work: Callable[[], Any]) -> int:
    """Most bytes of the CPU that torch holds at once, beyond what it holds before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(
    ("family", "checkpointing", "words"), [("qwen3", False, 320), ("llama", True, 320), ("llama", True, 12_000)]
)
def test_memory_of_a_microbatch_is_estimated_as_torch_counts_it(
    family: str, checkpointing: bool, words: int, tmp_path: Path
) -> None:
    """Within 5 %: what a job with DoRA keeps for its magnitudes, S, and of many words a chunk of logits are in it."""
    model = tiny_model(
        family, num_hidden_layers=3, hidden_size=128, intermediate_size=352, head_dim=32, vocab_size=words
    ).to(torch.bfloat16)
    jobs = [
        {
            "name": f"job{r}", "data": {"path": "random"}, "train": {"global_batch_size": 4, "max_steps": 2},
            "adapter": {"r": r, "target_modules": "all-linear", "use_dora": r == 8},
        }
        for r in (4, 8)
    ]  # fmt: skip
    values = {"base_model": "random", "output_dir": str(tmp_path), "dtype": "bfloat16", "device": "cpu", "jobs": jobs}
    run = Run.model_validate(values | {"gradient_checkpointing": checkpointing})
    prepare_model(model, gradient_checkpointing=checkpointing)
    base = Base(model, None, torch.device("cpu"), "random", [], fused_loss=True)
    samples = [make_samples(Lengths(5.5, 0.2, ""), 8, 400, 320, seed) for seed in (0, 1)]
    prepared = prepared_on(run, base, 1500, ModelShape.of(model), samples)
    trainer = trainer_of(prepared, base, tmp_path)
    mix = measure.sample_mix(trainer.jobs, 1500)
    run_microbatch(trainer.executor, mix)
    for job in trainer.jobs:
        job.discard()
    peak = peak_of(lambda: run_microbatch(trainer.executor, mix))
    parts = estimate.memory_parts(run, prepared, num_tokens(mix))
    assert parts["activations"] + parts["logits"] + parts["buffers"] == pytest.approx(peak, rel=0.05)


def guess() -> Profile:
    return Profile("estimated", COST, 1e9, 1e5, 10**11)


def test_a_fit_finds_the_times_and_the_memory_that_the_points_were_made_from() -> None:
    """Points of a machine twice as fast as estimated, with three times the fixed cost, 2 GB and 0.3 MB a token."""
    draw = random.Random(SEED)
    points = []
    for tokens in (1024, 2048, 4096, 8192):
        squared = tokens * draw.randrange(50, 900)
        body = 1e-5 * tokens + 1.5e-9 * squared + 3e-3
        points.append(Point(tokens, squared, body * 2.3 + 2e-6 * tokens * 2, int(2e9 + 3e5 * tokens)))
    known = fitted(guess(), points, "measured", more_bytes=7)
    assert known.cost.per_token == pytest.approx(1e-5)
    assert known.cost.per_token_squared == pytest.approx(1.5e-9)
    assert known.cost.head_per_token == pytest.approx(2e-6)
    assert known.cost.fixed == pytest.approx(3e-3)
    assert known.bytes(3000) == pytest.approx(2e9 + 3e5 * 3000 + 7)


def test_a_fit_of_points_of_the_same_tokens_keeps_the_estimated_slope() -> None:
    """Budgets between the lengths of few long samples hold the same ones."""
    points = [Point(900, 900**2, 0.1, 10**10)] * 2 + [Point(1800, 2 * 900**2, None, None)]
    known = fitted(guess(), points, "measured")
    assert known.bytes_per_token == guess().bytes_per_token
    assert known.bytes(900) == 10**10 and known.failed == 1800


def prediction(budget: int, rate: float, fits: bool = True) -> Prediction:
    return Prediction(budget, 1, 10, 1000, 1000 / rate, budget, fits)


def test_the_best_throughput_that_fits_is_chosen_and_of_close_ones_the_smallest_budget() -> None:
    one = [prediction(1024, 50), prediction(2048, 90), prediction(4096, 100 * (1 - CLOSE / 2)), prediction(8192, 100)]
    assert choose(one).budget == 4096
    assert choose([*one[:2], prediction(4096, 98), one[3]]).budget == 8192
    assert choose([*one[:2], prediction(4096, 98), prediction(8192, 100, fits=False)]).budget == 4096
    assert choose([prediction(4096, 98, fits=False), prediction(2048, 90, fits=False)]).budget == 2048


def test_points_are_kept_by_key_as_readable_json_and_anything_broken_is_as_good_as_nothing(tmp_path: Path) -> None:
    cache = ProfileCache(torch.device("cpu"), tmp_path / "new" / "cpu.json")
    one, other = [Point(10, 40, 0.5, None)], [Point(10, 50, 0.25, 99), Point(20, 90, None, None)]
    assert cache.get("one") == []
    cache.put("one", [Point(1, 1, 1.0, 1)])
    cache.put("other", other)
    cache.put("one", one)
    assert cache.get("one") == one
    assert cache.get("other") == other
    tree = json.loads(cache.path.read_text())
    assert tree["profiles"]["one"] == [{"tokens": 10, "squared": 40, "seconds": 0.5, "bytes": None}]
    for change in ({"device": "another"}, {"schema": 0}, {"versions": {}}, {"profiles": {"one": [{"tokens": 1}]}}):
        cache.path.write_text(json.dumps({**tree, **change}))
        assert cache.get("one") == [], change
    cache.path.write_text('{"schema":' + "[" * 200_000)
    assert cache.get("one") == []
    wrong = {"tokens": 10, "squared": 40, "seconds": -1.0, "bytes": None}
    cache.path.write_text(json.dumps({**tree, "profiles": {"one": [wrong]}}))
    assert cache.get("one") == []


def test_profiles_lie_beside_the_measured_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packlora.plans.identity import cache_path

    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path))
    device = torch.device("cpu")
    assert ProfileCache(device).path.parent == tmp_path / "profiles"
    assert ProfileCache(device).path.name == cache_path(device).name
