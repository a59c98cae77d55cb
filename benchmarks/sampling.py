"""`sampling`: tokens a second of samples of many adapters in one batch, beside transformers on the base model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import GenerationConfig

from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.shapes import build, config_of, shared_copy
from packlora.adapters.attach import attach
from packlora.adapters.linear import Attached
from packlora.adapters.spec import resolve
from packlora.base.liger import use_liger
from packlora.base.packing import prepare_model
from packlora.engine.generate import Sampler, sample
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import SampleRequest
from packlora.tune.timing import Contender, Work

OWN, BASE = "packlora", "packlora_base"
THEIRS = ("generate", "generate_static", "generate_batch")


def sampling_cases(options: Options) -> list[Case]:
    if options.device.type == "cuda":
        rows = 8 if options.quick else 64
        return [case("Qwen3-0.6B", shape="Qwen3-0.6B", rows=rows, adapters=min(rows, 16), prompt=64, new=128)]
    if options.quick:
        return [case("tiny", shape="Qwen3-0.6B", rows=4, adapters=2, prompt=8, new=4)]
    return [case("llama60m", shape="llama60m", rows=32, adapters=8, prompt=64, new=32)]


def prompts_of(one: Case, vocabulary: int) -> np.ndarray:
    """Token ids [rows, prompt]."""
    return np.random.default_rng(0).integers(3, vocabulary, (one.rows, one.prompt))


def mixed(model: Any, one: Case, adapters: int) -> Callable[[], None]:
    """Samples of all rows, of as many adapters in turn; without any, of the base model."""
    prepare_model(model, False)
    use_liger(model, "auto")
    attached, owners = Attached([]), [NO_ADAPTER]
    if adapters:
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        spec = resolve(config, model, "adapter")
        attached, made = attach(model, {f"adapter {number}": spec for number in range(adapters)}, 0)
        owners = [adapter.number for adapter in made]
        with torch.no_grad():
            for adapter in made:
                adapter.flat.add_(torch.randn_like(adapter.flat), alpha=1e-3)
    sampler = Sampler(model, attached, rows=one.rows, cache_tokens=one.rows * 2 * (one.prompt + one.new))
    requests = [
        SampleRequest(tuple(ids), owners[at * len(owners) // one.rows], one.new, temperature=0.0)
        for at, ids in enumerate(prompts_of(one, model.config.vocab_size).tolist())
    ]

    def step() -> None:
        found = sample(sampler, requests)
        assert all(len(tokens) == one.new for samples in found for tokens in samples)

    return step


def by_transformers(model: Any, one: Case, way: str) -> Callable[[], None]:
    """The same rows of the base model, greedily, without an end."""
    ids = torch.from_numpy(prompts_of(one, model.config.vocab_size)).to(model.device)
    how: dict[str, Any] = {"max_new_tokens": one.new, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    how["eos_token_id"] = model.config.vocab_size  # never drawn
    if way == "generate_batch":
        settings = GenerationConfig(**how)

        def batch() -> None:
            found = model.generate_batch(inputs=ids.tolist(), generation_config=settings, progress_bar=False)
            assert len(found) == one.rows

        return batch
    if way == "generate_static":
        how["cache_implementation"] = "static"

    def step() -> None:
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
        assert out.shape == (one.rows, one.prompt + one.new)

    return step


def measure_sampling(one: Case, names: list[str], options: Options) -> Row:
    """All rows from the first prompt to the last token, the ways in turn."""
    tiny = options.tiny and options.quick
    model = build(config_of(one.shape, tiny, options.layers), options.device).eval()
    if options.device.type == "cpu":
        model.float()

    def contender(name: str) -> Contender:
        def make() -> Work:
            own = shared_copy(model)
            if name in (OWN, BASE):
                return Work(mixed(own, one, one.adapters if name == OWN else 0), lambda: None)
            return Work(by_transformers(own, one, name), lambda: None)

        return Contender(name, make)

    chosen = names if options.named else [OWN, BASE, THEIRS[options.device.type == "cuda"]]
    how: dict[str, Any] = {} if options.quick else {"rounds": (5, 5), "warmup": 1}
    with torch.no_grad():
        row = timed([contender(name) for name in chosen], options, **how)
    row["tokens_per_s"] = {name: one.rows * one.new * 1000 / ms for name, ms in row["ms"].items()}
    return row


def sampling_summary(rows: list[Row]) -> Row:
    """Tokens a second, and over the fastest of transformers' ways and over the base model alone."""
    out: Row = {}
    for row in rows:
        rates = row["tokens_per_s"]
        theirs = [rates[name] for name in THEIRS if name in rates]
        out |= {f"{name}_tokens_per_s": rate for name, rate in rates.items()}
        if OWN in rates and theirs:
            out["sampling_vs_transformers"] = rates[OWN] / max(theirs)
        if OWN in rates and BASE in rates:
            out["sampling_over_base"] = rates[BASE] / rates[OWN]
    return out


SAMPLING = Benchmark(
    sampling_cases, measure_sampling, sampling_summary,
    "Random weights, in bfloat16 on a GPU and float32 on a CPU. Rows of equal prompts' length are sampled greedily to equal "
    "length, from prefill to the last token on the host, the ways in turn. packlora: LoRA r 16 on all linear layers, as many "
    "adapters as the case says in one batch; packlora_base: the same loop without adapters; generate: transformers' own with "
    "its dynamic cache, generate_static: with its static cache, compiled; generate_batch: its continuous batching; all three "
    "of the base model alone. tokens_per_s: new tokens. sampling_vs_transformers: packlora's rate over the fastest of these; "
    "sampling_over_base: packlora_base's rate over packlora's. On a CPU generate takes part, on a GPU "
    "generate_static, the fastest; continuous batching fails after either in one process.",
    [OWN, BASE, *THEIRS], where="any",
)  # fmt: skip
