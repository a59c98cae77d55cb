"""`python -m benchmarks experts`: a model with experts and adapters on them, against the same model frozen and under PEFT.

Qwen3-30B-A3B's shape (128 experts, 8 a token) with random weights, LoRA or DoRA of rank 16 on the attention and on all experts,
2048 and 8192 tokens of one job or of four. All contenders of a case stand in one process over the same frozen weights; a
contender's memory is counted as if it stood there alone. PEFT has no DoRA on experts and no several jobs in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.layer import show
from benchmarks.model import build, peak_gib, shared_copy
from benchmarks.model import table as table
from benchmarks.options import Options, Outcome, choose
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.ops.lora_experts import low_rank
from packlora.plans.timing import Contender, Timings, Work, paired

JOBS = 4
SAMPLES = 4
LAYERS = 4
CONTENDERS = ["frozen", "packlora", "peft"]
OPTIONAL = ["packlora_torch"]
"""packlora without kernels of its own."""
TARGETS: dict[str, Any] = {
    "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}  # fmt: skip
QWEN_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 256,
}  # fmt: skip
PROTOCOL = (
    "Qwen3-30B-A3B's shape ({layers} layers, without the output layer), random bfloat16 weights, {samples} samples of random "
    "tokens, forward of the decoder and backward of a random gradient. LoRA or DoRA r 16, alpha 32, no dropout, on q, k, v, o "
    "and on gate_up_proj and down_proj of all experts, B away from zero. frozen: no adapter, only the embeddings' output wants "
    "a gradient; experts by transformers' grouped_mm. peft: PEFT's parameters in bfloat16 over the same, LoRA alone. packlora: "
    "float32 adapters of training; of four jobs each has a sample. Contenders run in turn inside one loop, random order each "
    "round, CUDA events, medians, ratios within a round. gib: peak of one step, with the weights and what the contender itself "
    "keeps, without what the others keep."
)


@dataclass(frozen=True, slots=True)
class Case:
    """length: tokens of each of the SAMPLES samples."""

    jobs: int
    dora: bool
    config: Qwen3MoeConfig
    length: int

    @property
    def label(self) -> str:
        kind = "dora_r16" if self.dora else "lora_r16"
        return f"{self.jobs}job{'s' * (self.jobs > 1)} {kind} T{SAMPLES * self.length}"


def cases(options: Options) -> list[Case]:
    """All cases; sizes of a toy on a CPU."""
    layers = options.layers or (1 if options.tiny else LAYERS)
    config = Qwen3MoeConfig(
        **(TINY if options.tiny else QWEN_30B_A3B), num_hidden_layers=layers, attn_implementation="sdpa", use_cache=False,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    lengths = (8,) if options.tiny else (2048,) if options.quick else (512, 2048)
    return [Case(jobs, dora, config, length) for length in lengths for dora in (False, True) for jobs in (1, JOBS)]


def contender(name: str, base: nn.Module, ids_BS: torch.Tensor, case: Case) -> Contender:
    """One of CONTENDERS, by transformers' own forward of the decoder."""

    def make() -> Work:
        model = shared_copy(base)
        owners: Any = None
        if name == "peft":
            with ids_BS.device:
                model = get_peft_model(model, LoraConfig(**TARGETS), autocast_adapter_dtype=False)
            trained = [p for p in model.parameters() if p.requires_grad]
            decoder: Any = model.base_model.model.model
        else:
            trained = []
            decoder = model.model
        if name.startswith("packlora"):
            config = LoraConfig(**TARGETS, use_dora=case.dora)
            specs = {f"job{at}": resolve(config, model, f"job{at}") for at in range(case.jobs)}
            attached, adapters = attach(model, specs, dict(zip(specs, range(case.jobs), strict=True)))
            trained = [p for adapter in adapters for p in adapter.named_parameters().values()]
            each = ids_BS.numel() // case.jobs
            segments = tuple((job, job * each, (job + 1) * each) for job in range(case.jobs))
            owners = attached, TokenOwners(ids_BS.numel(), segments)
        with torch.no_grad():
            for parameter in trained:
                if not parameter.any():
                    parameter.normal_(std=0.002)
        model.enable_input_require_grads()
        gradient = torch.randn(*ids_BS.shape, case.config.hidden_size, device=ids_BS.device, dtype=torch.bfloat16)

        def step() -> None:
            if owners is None:
                decoder(input_ids=ids_BS).last_hidden_state.backward(gradient)
                return
            with mock.patch.object(low_rank, "KERNELS", name != "packlora_torch"), owners[0].active(owners[1]):
                decoder(input_ids=ids_BS).last_hidden_state.backward(gradient)

        def clear() -> None:
            for parameter in trained:
                parameter.grad = None

        return Work(step, clear)

    return Contender(name, make)


def measured_row(case: Case, names: list[str], device: torch.device) -> dict[str, Any]:
    """A case's row of the results; prints it."""
    base = build(case.config, device, Qwen3MoeForCausalLM)
    base.lm_head = nn.Identity()
    ids = torch.randint(0, case.config.vocab_size, (SAMPLES, case.length), device=device)
    part = [name for name in names if name != "peft" or (case.jobs == 1 and not case.dora)]
    seconds, rounds = (6.0, (6, 40)) if device.type == "cuda" else (0.1, (2, 4))
    timings: Timings = paired(
        [contender(name, base, ids, case) for name in part], device, seconds=seconds, rounds=rounds, warmup=2
    )
    stored = sum(parameter.nbytes for parameter in base.parameters())
    row = {
        "case": case.label, "jobs": case.jobs, "dora": case.dora, "layers": case.config.num_hidden_layers,
        "T": ids.numel(), **timings.row(), "gib": peak_gib(timings, stored), "vs_peft": timings.ratio("peft", "packlora"),
    }  # fmt: skip
    show(row, device)
    return row


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, OPTIONAL, cases(options))
    rows = list(options.kept)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, names, options.device))
    layers = next((row["layers"] for row in rows), "no")
    return Outcome(PROTOCOL.format(layers=layers, samples=SAMPLES), rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted, those of the most tokens without their number; None where one could not be measured."""
    out: dict[str, Any] = {}
    most = max((row["T"] for row in rows), default=0)
    for row in rows:
        kind, end = "dora" if row["dora"] else "lora", "" if row["T"] == most else f"_T{row['T']}"
        over, gib = row["over_frozen"], row["gib"]
        if row["jobs"] > 1:
            start = "four_jobs" if kind == "lora" else "dora_four_jobs"
            out[f"{start}_over_frozen{end}"] = over.get("packlora")
            continue
        out[f"{kind}_over_frozen{end}"], out[f"{kind}_gib{end}"] = over.get("packlora"), gib.get("packlora")
        if kind == "lora":
            out[f"frozen_gib{end}"], out[f"peft_gib{end}"] = gib.get("frozen"), gib.get("peft")
            out[f"peft_over_frozen{end}"], out[f"vs_peft{end}"] = over.get("peft"), row["vs_peft"]
    return out
