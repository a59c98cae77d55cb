"""Does `packlora plan` predict the memory that training takes? Its estimate beside the peak of the training loop.

    python -m benchmarks plan-memory --out benchmarks/results/plan-memory-h200.json   # one GPU, about two minutes
    python -m benchmarks plan-memory --tiny --out plan-memory.json                    # a CPU; has no peak

Estimates are of shapes alone, as `plan` has them without a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import experts
from benchmarks.model import LLAMA_8B, TINY, build
from benchmarks.modes import forget
from benchmarks.results import check_writable, device_slug, text_table, write_results
from benchmarks.studies.short_jobs import (
    QWEN3,
    Lengths,
    ShortJob,
    make_samples,
    prepared_run,
    timed_window,
    trainer_of,
)
from packlora.runtime import profiler
from packlora.schedule.planner import Planner

BUDGET, ROUNDS, BATCH = 8192, 2, 8
PROTOCOL = (
    "Random bfloat16 weights, samples of random tokens with loss on all, {batch} an optimizer step of a job, microbatches "
    "of at most {budget} tokens, adapters on all linear layers, of models with experts on the attention and all experts; "
    "dropout 0.1, for DoRA 0. The training loop over two windows of {rounds} optimizer steps of every job, as CUDA graphs "
    "where that is said. peak_gib: most that torch had allocated, weights included; reserved_gib: most that it held. "
    "predicted_gib: the profiler's estimate from shapes for the fullest microbatch, measured by nothing."
)
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "8x8B": (LlamaConfig, LlamaForCausalLM, LLAMA_8B | {"num_hidden_layers": 8, "tie_word_embeddings": False}),
    "0.6B": (Qwen3Config, Qwen3ForCausalLM, QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}),
    "4x30B-A3B": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        experts.QWEN_30B_A3B | {"num_hidden_layers": 4, "experts_implementation": "grouped_mm"},
    ),
}  # fmt: skip
"""Shapes of Llama-3.1-8B, Qwen3-0.6B and Qwen3-30B-A3B."""


@dataclass(frozen=True, slots=True)
class Case:
    """ranks: of a job each. keys: of the run file."""

    model: str
    ranks: tuple[int, ...]
    dora: bool = False
    keys: Mapping[str, Any] = field(default_factory=lambda: {"cuda_graphs": False})

    @property
    def label(self) -> str:
        kind = f"{'dora' if self.dora else 'lora'} r {', '.join(map(str, self.ranks))}"
        how = "checkpointing" if "gradient_checkpointing" in self.keys else "graphs" if not self.keys else "eager"
        return f"{self.model} {kind} {how}"


CHECKPOINTING = {"gradient_checkpointing": True}
CASES = (
    Case("8x8B", (16,)), Case("8x8B", (16,), keys={}), Case("8x8B", (64,), dora=True), Case("8x8B", (8, 16, 32, 64)),
    Case("8x8B", (16,), keys=CHECKPOINTING), Case("8x8B", (64,), dora=True, keys=CHECKPOINTING), Case("0.6B", (8, 16, 32, 64)),
    Case("4x30B-A3B", (16,)), Case("4x30B-A3B", (16,), dora=True),
)  # fmt: skip


def measured_row(case: Case, device: torch.device, tiny: bool) -> dict[str, Any]:
    """The estimate for a case, and on a GPU its peak."""
    kind, make, values = MODELS[case.model]
    has_experts = kind is Qwen3MoeConfig
    small = experts.TINY if has_experts else TINY | {"head_dim": 16}
    values = values | (small | {"num_hidden_layers": 2} if tiny else {})
    model = build(kind(**values, attn_implementation="sdpa", use_cache=False), device, make)
    budget, lengths = (256, Lengths(3.0, 0.4, "")) if tiny else (BUDGET, Lengths(6.5, 0.4, ""))
    adapter: dict[str, Any] = {"use_dora": case.dora} | ({"lora_dropout": 0.0} if case.dora or has_experts else {})
    if has_experts:
        adapter |= {key: experts.TARGETS[key] for key in ("target_modules", "target_parameters")}
    jobs = [
        ShortJob(
            f"job{number}", rank, BATCH, make_samples(lengths, BATCH * 6, budget // 4, values["vocab_size"], number),
            adapter=adapter,
        )
        for number, rank in enumerate(case.ranks)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        prepared, base = prepared_run(model, device, budget, 2 * ROUNDS, Path(scratch), jobs, **case.keys)
        trainer = trainer_of(prepared, base, Path(scratch))
        planner = Planner([job.data.planned for job in trainer.jobs], budget, window_rounds=ROUNDS)
        windows = [planner.window(first) for first in (0, ROUNDS)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for window in windows:
            timed_window(trainer, window)
    fullest = max(microbatch.num_tokens for window in windows for microbatch in window.microbatches)
    parts = profiler.memory_parts(prepared.run, prepared, fullest)
    row: dict[str, Any] = {
        "case": case.label, "tokens": fullest, "predicted_gib": sum(parts.values()) / 2**30,
        "parts_gib": {name: size / 2**30 for name, size in parts.items()}, "failed": {},
    }  # fmt: skip
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        row |= {"peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30}
        row["predicted_over_peak"] = row["predicted_gib"] / row["peak_gib"]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest error of a prediction, as a part of the peak; None where nothing was measured."""
    errors = [abs(row["predicted_over_peak"] - 1) for row in rows if "predicted_over_peak" in row]
    return {"largest_error": max(errors, default=None), "cases": len(errors)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan-memory-h200.json"))
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(arguments)
    check_writable(args.out)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("this needs a GPU; --tiny tries it on a CPU")
    device = torch.device("cpu" if args.tiny else "cuda")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if args.only not in case.label:
            continue
        try:
            rows.append(measured_row(case, device, args.tiny))
        except Exception as error:  # the others are measured all the same
            rows.append({"case": case.label, "failed": {"packlora": f"{type(error).__name__}: {error}"[:400]}})
        print(rows[-1], flush=True)
        forget(device)
    figures = summary(rows)
    if args.tiny or args.only:
        figures = {f"part_{key}": value for key, value in figures.items()}
    shown = [
        [
            row["case"],
            *(f"{row[key]:.3f}" if key in row else "-" for key in ("predicted_gib", "peak_gib", "reserved_gib")),
        ]
        for row in rows
    ]
    print("\n".join(text_table(["case", "predicted GiB", "peak", "reserved"], shown)))
    protocol = PROTOCOL.format(batch=BATCH, budget=BUDGET, rounds=ROUNDS)
    write_results(args.out, f"plan-memory-{device_slug(device)}", protocol, rows, figures, str(device))


if __name__ == "__main__":
    main()
