"""Parts model, paper-model and inference of `python -m benchmarks dora`: whole models with DoRA.

model is the DoRA rows of `benchmarks model`. paper-model is the protocol of Scaling-DoRA's own model benchmark on the shape
of its smallest model: one sample of 4096 tokens, gradient checkpointing, the loss on the last 1024 tokens, no optimizer step.
inference is the forward of the same models alone, in eval mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import model
from benchmarks.layer import show
from benchmarks.options import Options, choose
from benchmarks.peers.peft import under_autocast
from packlora.plans.timing import Contender, Work, paired

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
RANKS = (384, 512, 768)
CONTENDERS = {
    "paper-model": ["frozen", "packlora", "packlora_fp32", "packlora_stepped", "peft_bf16", "peft_fp32_autocast"],
    "inference": ["frozen", "packlora", "packlora_fp32", "peft_bf16", "peft_fp32_autocast"],
}  # fmt: skip
"""By part."""
PROTOCOL = (
    "model: the DoRA rows of the model benchmark ({liger}): Llama-3.1-8B's shape, 4 x 2048 tokens, DoRA r 384. paper-model: "
    "Qwen3-8B's shape, random bfloat16 weights, no liger-kernel, one sample of 4096 random tokens, gradient checkpointing "
    "(use_reentrant=False), loss on the last 1024 tokens, DoRA on all linear layers, alpha = 2 r, no dropout, forward and "
    "backward without an optimizer step; packlora: bfloat16 adapters (_fp32: float32); peft_fp32_autocast is the regime of the "
    "paper's benchmark with PEFT as it is. PEFT makes the norms in every forward and every recomputation, packlora once for "
    "the values that there are: once in this loop, or in each run of _stepped, whose adapters are written to before it. "
    "inference: the same models and tokens, the forward to the logits of the last 1024 tokens alone, in eval mode, without "
    "gradients and without checkpointing."
)


@dataclass(frozen=True, slots=True)
class Case:
    part: str
    config: Qwen3Config
    rank: int
    length: int
    loss_tokens: int

    @property
    def label(self) -> str:
        return f"{self.part} Qwen3-8B r{self.rank}"


def cases(options: Options, part: str) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""

    def config(values: dict[str, Any], layers: int) -> Qwen3Config:
        changed = {**values, "num_hidden_layers": layers}
        return Qwen3Config(**changed, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False)

    if options.tiny:
        return [Case(part, config({**model.TINY, "head_dim": 16}, options.layers or 2), 24, 64, 16)]
    layers = options.layers or (4 if options.quick else QWEN3_8B["num_hidden_layers"])
    return [Case(part, config(QWEN3_8B, layers), rank, 4096, 1024) for rank in (RANKS[:1] if options.quick else RANKS)]


def contender(name: str, base: nn.Module, ids_BS: torch.Tensor, case: Case) -> Contender:
    """One of CONTENDERS, by the names of model.adapted_copy."""
    if case.part == "paper-model":
        return model.causal_lm(name, name, base, ids_BS, case.rank, 0.0, True, dora=True, loss_tokens=case.loss_tokens)

    def make() -> Work:
        adapted, note = model.adapted_copy(name, base, case.rank, 0.0, dora=True)
        adapted.eval()

        def forward(ids_BS: torch.Tensor) -> torch.Tensor:
            out = adapted(input_ids=ids_BS, logits_to_keep=case.loss_tokens, use_cache=False)
            return out.logits  # type: ignore[no-any-return]

        call = under_autocast(forward, ids_BS.device) if name == "peft_fp32_autocast" else forward

        def step() -> None:
            with torch.no_grad():
                call(ids_BS)

        return Work(step, lambda: None, note)

    return Contender(name, make)


def run(options: Options, part: str) -> list[dict[str, Any]]:
    """Part paper-model or inference; prints a line per rank."""
    names, chosen = choose(options.only, CONTENDERS[part], [], cases(options, part))
    rows: list[dict[str, Any]] = []
    base = model.build(chosen[0].config, options.device, Qwen3ForCausalLM)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    for case in options.each(chosen, rows):
        ids_BS = torch.randint(0, case.config.vocab_size, (1, case.length), device=options.device)
        contenders = [contender(name, base, ids_BS, case) for name in names]
        timings = paired(contenders, options.device, seconds=4.0, rounds=(4, 20), warmup=1, flush=False)
        row = {
            "part": part, "case": case.label, "layers": case.config.num_hidden_layers, "T": case.length,
            "r": case.rank, **timings.row(), "gib": model.peak_gib(timings, weights),
        }  # fmt: skip
        rows.append(row)
        del contenders, timings
        show(row, options.device)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By rank: ratios to the frozen model, PEFT's time over packlora's in like adapters, and GiB."""
    out: dict[str, Any] = {}
    for row in rows:
        key, over = f"{row['part'].replace('-', '_')}_r{row['r']}", row["over_frozen"]
        for name in CONTENDERS[row["part"]][1:]:
            suffix = "" if name == "packlora" else f"_{name}"
            out[f"{key}{suffix}_over_frozen"], out[f"{key}{suffix}_gib"] = over.get(name), row["gib"].get(name)
        for own, peer in (("packlora", "peft_bf16"), ("packlora_fp32", "peft_fp32_autocast")):
            both = over.get(own) and over.get(peer)
            out[f"{key}_{peer}_over_{own}"] = over[peer] / over[own] if both else None
    return out


def run_model(options: Options) -> list[dict[str, Any]]:
    """The DoRA rows of the model benchmark."""
    wanted = [case for case in model.cases(options) if case.dora]
    names, chosen = choose(options.only, model.CONTENDERS, model.OPTIONAL, wanted)
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        row = model.measured_row(case, model.taking_part(case, names, options), options.device)
        rows.append({"part": "model", **row})
    return rows


table = model.table
"""Case, contender, ms, over frozen, peak GiB."""
