"""`python -m benchmarks graphs`: RunLoRA's three Llama settings, where ranks are large for the width and merged graphs pay.

The lossless plans are the result; the merged one, which rounds W + s B A to bfloat16, is shown beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layer import accelerated, show
from benchmarks.model import TINY, build, causal_lm, peak_gib, table
from benchmarks.options import Options, Outcome, choose
from benchmarks.peers.peft import peft_model
from packlora.ops.lora_linear.plan import Plan
from packlora.plans.timing import Contender, Work, paired

MERGED = Plan(up="merged", dx="merged", keep_s=False)
"""RunLoRA's forward2 with b5, which is where its FLOPs are fewest in these settings."""
CONTENDERS = ["frozen", "packlora", "packlora_merged", "peft_bf16", "peft_fp32_autocast"]
OPTIONAL = ["packlora_fp32"]
PROTOCOL = (
    "Llama models in RunLoRA's sizes, random bfloat16 weights, batches of 1024-token samples, forward with labels and "
    "backward, LoRA on all linear layers without dropout, alpha = 2 r. frozen: no adapter, only the embeddings' output wants "
    "a gradient. packlora: packlora.accelerate on the PEFT model with bfloat16 adapters; _merged: with the plan "
    f"{MERGED.name}, which rounds the merged weight. peft_bf16, peft_fp32_autocast: the PEFT model, the second with PEFT's "
    "default float32 adapters under torch.autocast. Contenders run in turn inside one loop over the same frozen weights, "
    "random order each round, CUDA events, medians, ratios within a round."
)


@dataclass(frozen=True, slots=True)
class Case:
    """label: as in the summary's keys; batch: samples; length: tokens of each."""

    label: str
    config: dict[str, Any]
    batch: int
    length: int
    rank: int


def _llama(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 32000, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip


SETTINGS = [
    Case("llama60m", _llama(512, 1376, 8, 8), 64, 1024, 8),
    Case("llama250m", _llama(768, 2560, 24, 16), 58, 1024, 128),
    Case("llama1_3b", _llama(2048, 5461, 24, 32), 24, 1024, 512),
]


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case("tiny", TINY, 2, 32, 24)]
    return SETTINGS[:1] if options.quick else SETTINGS


def check_merges(device: torch.device) -> None:
    """Make sure that the merged plan merges, so that its name stands for what was timed.

    W is 1 everywhere and s B A is plus or minus 2^-10, less than half an ulp, with the signs of x: the merged weight rounds
    to W and gives 0, every other way gives K 2^-10.

    Raises:
        AssertionError: the result is not that of a merged weight.
    """
    K = 64
    signs = torch.tensor([1.0, -1.0], device=device).repeat(K // 2)
    weight = nn.Parameter(torch.ones(K, K, device=device, dtype=torch.bfloat16), requires_grad=False)
    model, one, _ = peft_model(weight, signs.repeat(16, 1) * 2.0**-5, torch.full((K, 16), 2.0**-10), 0.0, wide=False)
    x = signs.bfloat16().repeat(1, K, 1).requires_grad_()
    accelerated(f"packlora:{MERGED.name}", model, {"x": x.detach()})
    y = one(x)
    if y.abs().max() > 0:
        raise AssertionError(f"plan {MERGED.name} was not computed with a merged weight")


def contender(name: str, base: nn.Module, ids_BS: torch.Tensor, rank: int) -> Contender:
    """By name: one of CONTENDERS, OPTIONAL, or packlora:PLAN."""
    if name != "packlora_merged":
        return causal_lm(name, name, base, ids_BS, rank, 0.0)
    merged = causal_lm(f"packlora:{MERGED.name}", name, base, ids_BS, rank, 0.0)

    def make() -> Work:
        check_merges(ids_BS.device)
        return merged.make()

    return Contender(name, make)


def run(options: Options) -> Outcome:
    """Measure; prints a line per setting."""
    names, chosen = choose(options.only, CONTENDERS, OPTIONAL, cases(options))
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        config = LlamaConfig(**case.config, use_cache=False, attn_implementation="sdpa")
        base = build(config, options.device, LlamaForCausalLM)
        ids = torch.randint(0, config.vocab_size, (case.batch, case.length), device=options.device)
        contenders = [contender(name, base, ids, case.rank) for name in names]
        timings = paired(contenders, options.device, seconds=8.0, rounds=(6, 30), warmup=2, flush=False)
        weights = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
        row = {
            "case": case.label, "T": case.batch * case.length, "r": case.rank, **timings.row(),
            "gib": peak_gib(timings, weights),
        }  # fmt: skip
        rows.append(row)
        del base, contenders, timings
        show(row, options.device)
    return Outcome(PROTOCOL, rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured."""
    out: dict[str, Any] = {}
    for row in rows:
        out[f"{row['case']}_over_frozen"] = row["over_frozen"].get("packlora")
        for name in ("packlora_merged", "peft_bf16", "peft_fp32_autocast"):
            out[f"{row['case']}_{name}_over_frozen"] = row["over_frozen"].get(name)
        out[f"{row['case']}_frozen_ms"] = row["ms"].get("frozen")
    return out
