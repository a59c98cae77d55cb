"""`python -m benchmarks model`: a whole model with LoRA or DoRA against the same model frozen and under PEFT.

Llama-3.1-8B's shape with random weights, 4 x 2048 tokens, with and without gradient checkpointing, with LoRA (part lora) and
with DoRA of rank 384 (part dora); then single decoder layers of Llama-3.1-8B, Qwen2.5-32B and Llama-3.1-70B (part layers).
With liger-kernel where it is installed. All contenders of a case stand in one process over the same frozen weights, so that
they can run in turn; a contender's memory is counted as if it stood there alone.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen2Config

from benchmarks.layer import accelerated, show
from benchmarks.options import Options, Outcome, choose
from benchmarks.peers.peft import under_autocast
from benchmarks.results import text_table
from packlora.plans.timing import Contender, Timings, Work, paired, stepped

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONTENDERS = ["frozen", "packlora", "packlora_recompute", "packlora_fp32", "peft_bf16"]
OPTIONAL = ["packlora_stepped", "peft_fp32_autocast"]
"""They take part unnamed in the DoRA cases, peft_fp32_autocast in the one with checkpointing, where its memory leaves room for
the others."""
DORA_RANK = 384
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip
QWEN_32B: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LAYER_SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama-3.1-8B": (LlamaConfig, LLAMA_8B),
    "Qwen2.5-32B": (Qwen2Config, QWEN_32B),
    "Llama-3.1-70B": (LlamaConfig, LLAMA_70B),
}
LAYER_SAMPLE = 512
"""Tokens of each sample in the single-layer cases."""
PROTOCOL = (
    "kind model: Llama-3.1-8B's shape ({layers} layers), random bfloat16 weights, 4 x 2048 random tokens, forward with "
    "labels and backward; frozen: no adapter, only the embeddings' output wants a gradient. kind layer: one decoder layer, "
    "samples of 512 tokens. LoRA r 16, alpha 32, dropout 0.1 on all linear layers, or DoRA r 384, alpha 768, no dropout, "
    "magnitudes and B away from their initial values; packlora: packlora.accelerate on the PEFT model with bfloat16 "
    "adapters (_recompute: with recompute=True and keep_outputs=True; _fp32: PEFT's default float32; _stepped: the adapters "
    "are written to before each run, so that norms are made anew in it, an optimizer step for every microbatch); peft_bf16: "
    "the PEFT model as it is; peft_fp32_autocast: PEFT's default float32 adapters under torch.autocast. {liger}. Contenders "
    "run in turn inside one loop over the same frozen weights, random order each round, CUDA events, medians, ratios within "
    "a round. gib: peak of one step, with the frozen weights and what the contender itself keeps, without what the others "
    "keep. ckpt: gradient checkpointing (use_reentrant=False) of every decoder layer."
)


# --- building ----------------------------------------------------------------------------------------------------------


def build(config: PreTrainedConfig, device: torch.device, make: Callable[[PreTrainedConfig], nn.Module]) -> nn.Module:
    """A frozen model with random bfloat16 weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = make(config)
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False).train()


def shared_copy(model: nn.Module) -> Any:
    """A copy with modules of its own over the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def with_lora(model: nn.Module, rank: int, dropout: float, wide: bool, dora: bool = False) -> Any:
    """The model under PEFT, LoRA or DoRA on all linear layers, B not zero and magnitudes not the norms of the weights.

    Args:
        wide: float32 adapter parameters, PEFT's default; else the model's type.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=TARGETS, use_dora=dora)
    with next(model.parameters()).device:  # a billion numbers are drawn in seconds by one core, in none by the GPU
        return away_from_start(get_peft_model(model, config, autocast_adapter_dtype=wide).train())


@torch.no_grad()
def away_from_start(adapted: Any) -> Any:
    """The PEFT model with B not zero and magnitudes not the norms of the weights."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.002)
        elif "lora_magnitude" in name:
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return adapted


class OneLayer(nn.Module):
    """One decoder layer as it stands in its model, with causal attention inside each sample."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        if isinstance(config, Qwen2Config):
            from transformers.models.qwen2 import modeling_qwen2

            self.layer: nn.Module = modeling_qwen2.Qwen2DecoderLayer(config, 0)
            rotary: nn.Module = modeling_qwen2.Qwen2RotaryEmbedding(config)
        else:
            from transformers.models.llama import modeling_llama

            self.layer = modeling_llama.LlamaDecoderLayer(config, 0)
            rotary = modeling_llama.LlamaRotaryEmbedding(config)
        weight = next(self.layer.parameters())
        positions = torch.arange(config.max_position_embeddings, device=weight.device)[None]
        self.cos, self.sin = (table.detach() for table in rotary(weight, positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        out = self.layer(x, attention_mask=None, position_embeddings=(self.cos[:, :length], self.sin[:, :length]))
        return out  # type: ignore[no-any-return]


def adapted_copy(
    name: str,
    base: nn.Module,
    rank: int,
    dropout: float,
    prepare: Callable[[Any], None] | None = None,
    example: dict[str, Any] | None = None,
    dora: bool = False,
) -> tuple[Any, str]:
    """The module of a contender over the weights of `base`, and packlora's note on it.

    Args:
        name: frozen, packlora, packlora_recompute, packlora_fp32, packlora_stepped, packlora:PLAN, peft_bf16 or
            peft_fp32_autocast.
        prepare: done to the model before packlora sees it.
        example: see layer.accelerated.
    """
    model = shared_copy(base)
    wide = name in ("packlora_fp32", "peft_fp32_autocast")
    if name != "frozen":
        model = with_lora(model, rank, dropout, wide, dora)
    if prepare is not None:
        prepare(model)
    return model, accelerated(name, model, example) if name.startswith("packlora") else ""


def causal_lm(
    name: str,
    label: str,
    base: nn.Module,
    ids_BS: torch.Tensor,
    rank: int,
    dropout: float,
    checkpointing: bool = False,
    dora: bool = False,
    loss_tokens: int = 0,
) -> Contender:
    """A contender that runs a causal language model with labels.

    Args:
        label: what the row calls it.
        ids_BS: tokens, which are the labels as well.
        loss_tokens: the loss is on so many tokens at the end of each sample; 0 is all of them.
    """

    def prepare(model: Any) -> None:
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()

    def make() -> Work:
        model, note = adapted_copy(name, base, rank, dropout, prepare, dora=dora)
        labels_BL = ids_BS[:, -loss_tokens:]

        def forward(ids_BS: torch.Tensor) -> torch.Tensor:
            out = model(input_ids=ids_BS, labels=labels_BL, logits_to_keep=loss_tokens, use_cache=False)
            return out.loss  # type: ignore[no-any-return]

        call = under_autocast(forward, ids_BS.device) if name == "peft_fp32_autocast" else forward

        def step() -> None:
            call(ids_BS).backward()

        def clear() -> None:
            model.zero_grad(set_to_none=True)

        work = Work(step, clear, note)
        return stepped(work, [p for p in model.parameters() if p.requires_grad]) if name == "packlora_stepped" else work

    return Contender(label, make)


def use_liger(device: torch.device) -> str:
    """Let liger-kernel replace its parts of transformers, on a GPU; says in words what was done."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return "Without liger-kernel"
    liger = importlib.import_module("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama()
    liger.apply_liger_kernel_to_qwen2()
    liger.apply_liger_kernel_to_qwen3()
    return f"With liger-kernel {version('liger-kernel')} (RMSNorm, RoPE, SwiGLU, fused linear cross entropy)"


# --- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """kind: model or layer. shape: its name; tokens: of a batch. dora: DoRA of DORA_RANK instead of LoRA."""

    kind: str
    shape: str
    config: PreTrainedConfig
    samples: int
    length: int
    checkpointing: bool = False
    dora: bool = False

    @property
    def label(self) -> str:
        tail = ("ckpt" if self.checkpointing else "plain") if self.kind == "model" else f"T{self.samples * self.length}"
        return f"{self.kind} {self.shape} {tail}" + (f" dora_r{DORA_RANK}" if self.dora else "")

    @property
    def part(self) -> str:
        return "layers" if self.kind == "layer" else "dora" if self.dora else "lora"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""

    def config(kind: type[PreTrainedConfig], values: dict[str, Any], **changes: Any) -> PreTrainedConfig:
        made: PreTrainedConfig = kind(
            **{**values, **changes}, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False
        )
        return made

    if options.tiny:
        small = config(LlamaConfig, TINY, num_hidden_layers=options.layers or 2)
        models = [Case("model", "tiny", small, 2, 32, on, dora) for dora in (False, True) for on in (False, True)]
        return [
            *models,
            Case("layer", "tiny", small, 2, 32),
            Case("layer", "tiny-qwen2", config(Qwen2Config, TINY), 2, 32),
        ]
    layers = options.layers or (4 if options.quick else LLAMA_8B["num_hidden_layers"])
    whole = config(LlamaConfig, LLAMA_8B, num_hidden_layers=layers)
    out = [Case("model", "Llama-3.1-8B", whole, 4, 2048, on, dora) for dora in (False, True) for on in (False, True)]
    for shape, (kind, values) in LAYER_SHAPES.items():
        for T in (8192,) if options.quick else (2048, 4096, 8192):
            out.append(Case("layer", shape, config(kind, values, num_hidden_layers=1), T // LAYER_SAMPLE, LAYER_SAMPLE))
    return out


def layer_contender(name: str, base: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Contender:
    """One decoder layer by the names of adapted_copy, LoRA r 16; x and dy [samples, tokens, K]."""

    def make() -> Work:
        model, note = adapted_copy(name, base, 16, 0.1, example={"x": x.detach()[:1, :2]})
        inner = model if name == "frozen" else model.base_model.model
        call = under_autocast(inner, x.device) if name == "peft_fp32_autocast" else inner

        def step() -> None:
            call(x).backward(dy)

        def clear() -> None:
            x.grad = None
            model.zero_grad(set_to_none=True)

        return Work(step, clear, note)

    return Contender(name, make)


def measure(case: Case, names: list[str], device: torch.device) -> tuple[Timings, int]:
    """Timings of a case, and the bytes of the frozen weights."""
    if case.kind == "model":
        base = build(case.config, device, LlamaForCausalLM)
        ids = torch.randint(0, case.config.vocab_size, (case.samples, case.length), device=device)
        rank, dropout = (DORA_RANK, 0.0) if case.dora else (16, 0.1)
        contenders = [causal_lm(name, name, base, ids, rank, dropout, case.checkpointing, case.dora) for name in names]
    else:
        base = build(case.config, device, OneLayer)
        shape = (case.samples, case.length, case.config.hidden_size)
        x = torch.randn(shape, device=device).bfloat16().requires_grad_()
        dy = torch.randn(shape, device=device).bfloat16()
        contenders = [layer_contender(name, base, x, dy) for name in names]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    timings = paired(contenders, device, seconds=6.0 if case.kind == "model" else 1.5, rounds=(6, 40), warmup=2)
    return timings, weights


def peak_gib(timings: Timings, weights: int) -> dict[str, float]:
    """Peak of each contender as if it were alone: frozen weights, what it keeps, and what one step takes on top."""
    return {
        name: (weights + timing.own_bytes + timing.peak_bytes) / 2**30
        for name, timing in timings.by_name.items()
        if timing.error is None and timing.own_bytes is not None and timing.peak_bytes is not None
    }


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    wanted = [case for case in cases(options) if options.wants(case.part)]
    names, chosen = choose(options.only, CONTENDERS, OPTIONAL, wanted)
    liger = use_liger(options.device)
    print(liger, flush=True)
    rows = list(options.kept)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, taking_part(case, names, options), options.device))
    layers = next((row["layers"] for row in rows if row["kind"] == "model"), "no")
    protocol = PROTOCOL.format(layers=layers, liger=liger)
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


def taking_part(case: Case, names: list[str], options: Options) -> list[str]:
    """The contenders chosen, and those that belong to the case alone."""
    whole = case.dora and not options.quick and not options.only
    return [*names, *(OPTIONAL if case.checkpointing else OPTIONAL[:1])] if whole else names


def measured_row(case: Case, names: list[str], device: torch.device) -> dict[str, Any]:
    """A case's row of the results; prints it."""
    timings, weights = measure(case, names, device)
    row = {
        "case": case.label, "kind": case.kind, "shape": case.shape, "layers": case.config.num_hidden_layers,
        "T": case.samples * case.length, "checkpointing": case.checkpointing, "dora": case.dora, **timings.row(),
        "gib": peak_gib(timings, weights),
    }  # fmt: skip
    show(row, device)
    return row


def part_of(row: dict[str, Any]) -> str:
    """Files from before there was DoRA do not say so."""
    return "layers" if row["kind"] == "layer" else "dora" if row.get("dora") else "lora"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured."""
    out: dict[str, Any] = {}
    for row in rows:
        if row["kind"] != "model":
            T, shape = row["T"], row["shape"]
            out[f"layer_{shape}_T{T}_over_frozen"] = row["over_frozen"].get("packlora")
            continue
        ckpt = "_ckpt" if row["checkpointing"] else ""
        adapter = f"dora_r{DORA_RANK}" if part_of(row) == "dora" else "lora_r16"
        prefixes = {
            "packlora": adapter, "packlora_recompute": f"{adapter}_recompute", "packlora_fp32": f"{adapter}_fp32",
            "peft_bf16": f"peft_{adapter}",
            "peft_fp32_autocast": f"peft_{adapter}_fp32", "packlora_stepped": f"{adapter}_stepped",
        }  # fmt: skip
        out.setdefault(f"frozen{ckpt}_ms", row["ms"].get("frozen"))
        out.setdefault(f"frozen{ckpt}_gib", row["gib"].get("frozen"))
        for name in (*CONTENDERS[1:], *(name for name in OPTIONAL if name in row["ms"])):
            out[f"{prefixes[name]}{ckpt}_over_frozen"] = row["over_frozen"].get(name)
            out[f"{prefixes[name]}{ckpt}_gib"] = row["gib"].get(name)
            out[f"{prefixes[name]}{ckpt}_ms"] = row["ms"].get(name)
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        [
            row["case"], name, f"{row['ms'][name]:.1f}", f"{row['over_frozen'].get(name, 1.0):.3f}",
            f"{row['gib'][name]:.1f}" if name in row["gib"] else "-",
        ]
        for row in rows
        for name in row["ms"]
        if row["over_frozen"].get(name, 1.0) is not None
    ]  # fmt: skip
    return text_table(["case", "contender", "ms", "/frozen", "peak GiB"], lines)
