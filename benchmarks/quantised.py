"""`python -m benchmarks quantised`: a whole model of 4-bit weights with adapters, against the same model frozen and under PEFT.

Llama-3.1-8B's shape with random weights in bitsandbytes' NF4 with double quantisation, LoRA of rank 16 and DoRA of rank 64, on
8192 tokens of one job, or of four jobs of 2048 each. All contenders of a case stand in one process over the same codes; a
contender's memory is counted as if it stood there alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.layer import accelerated, show
from benchmarks.model import LLAMA_8B, TARGETS, TINY, build, peak_gib, use_liger, with_lora
from benchmarks.model import table as table
from benchmarks.options import Options, Outcome, choose
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.base.packing import hidden_states, prepare_model
from packlora.base.quantized import check_quantization, own_layers
from packlora.config import QuantizationConfig
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.lora_linear.quantized import QuantizedLinear
from packlora.plans.timing import Contender, Timings, Work, paired

JOBS = 4
DORA_RANK = 64
LOSS_STEPS = 10
CONTENDERS = ["frozen", "packlora", "peft_bnb", "sequential"]
PROTOCOL = (
    "Llama-3.1-8B's shape ({layers} layers), random weights in bitsandbytes' NF4 with double quantisation, output layer and "
    "embeddings bfloat16; LoRA r 16, alpha 32, or DoRA r 64, alpha 128, no dropout, bfloat16 adapters, on all linear layers. "
    "one job: 4 x 2048 random tokens, forward with labels and backward; frozen: no adapter, only the embeddings' output wants "
    "a gradient; peft_bnb: PEFT over Linear4bit as it is; packlora: packlora.accelerate on the same PEFT model. {liger}. four "
    "jobs: float32 adapters of training, 2048 tokens each in one sample; packlora: all in one microbatch; sequential: one "
    "microbatch for each, one after the other; frozen: the four samples without an adapter. Contenders run in turn inside one "
    "loop, random order each round, CUDA events, medians, ratios within a round. gib: peak of one step, with the codes and "
    "what the contender itself keeps, without what the others keep. losses: {steps} steps of AdamW (1e-3) on one sample by "
    "packlora and by PEFT from the same adapter, and by PEFT in float32 over what the codes stand for, from the same numbers."
)


@dataclass(frozen=True, slots=True)
class Case:
    """length: tokens of each of the JOBS samples."""

    jobs: int
    dora: bool
    config: LlamaConfig
    length: int

    @property
    def label(self) -> str:
        return f"{self.jobs}job{'s' * (self.jobs > 1)} {f'dora_r{DORA_RANK}' if self.dora else 'lora_r16'}"

    @property
    def rank(self) -> int:
        return DORA_RANK if self.dora else 16


def cases(options: Options) -> list[Case]:
    """All cases; sizes of a toy on a CPU."""
    values = TINY if options.tiny else LLAMA_8B
    layers = options.layers or (2 if options.tiny else 4 if options.quick else LLAMA_8B["num_hidden_layers"])
    config = LlamaConfig(
        **{**values, "num_hidden_layers": layers},
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    return [Case(jobs, dora, config, 32 if options.tiny else 2048) for dora in (False, True) for jobs in (1, JOBS)]


# --- models ------------------------------------------------------------------------------------------------------------


def quantised(model: nn.Module) -> Any:
    """Linear layers but the output layer in NF4, one after the other, in place."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            with torch.device("meta"):
                codes = Linear4bit(module.in_features, module.out_features, False, module.weight.dtype, True, "nf4")
            weight = Params4bit(module.weight.data, quant_type="nf4", compress_statistics=True, module=codes)
            codes.weight = weight.to(module.weight.device)
            model.set_submodule(path, codes)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model


def over_the_same_codes(model: nn.Module) -> Any:
    """A copy with modules of its own."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    states = [module.quant_state for module in model.modules() if hasattr(module, "quant_state")]
    return copy.deepcopy(model, shared | {id(state): state for state in states})


def dense(model: Any) -> Any:
    """The model in float32 with what the codes stand for, of which PEFT's DoRA takes norms."""
    model = own_layers(model, torch.float32)
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, False, "meta")
            plain.weight = nn.Parameter(module.frozen.codes.values(torch.float32), requires_grad=False)
            model.set_submodule(path, plain)
    return model


def stored_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


# --- contenders --------------------------------------------------------------------------------------------------------


def one_job(name: str, base: nn.Module, ids_BS: torch.Tensor, case: Case) -> Contender:
    """frozen, packlora or peft_bnb by transformers' own forward."""

    def make() -> Work:
        model, note = over_the_same_codes(base), ""
        model = own_layers(model, torch.bfloat16) if name == "frozen" else peft_model(model, case)
        model.enable_input_require_grads()
        if name == "packlora":
            note = accelerated(name, model)

        def step() -> None:
            model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss.backward()

        return Work(step, lambda: model.zero_grad(set_to_none=True), note)

    return Contender(name, make)


def peft_model(model: Any, case: Case) -> Any:
    return with_lora(model, case.rank, 0.0, wide=False, dora=case.dora)


def several_jobs(name: str, base: nn.Module, ids_BS: torch.Tensor, case: Case) -> Contender:
    """A sample of each job, as training runs them: packlora in one microbatch, sequential in one for each."""

    def make() -> Work:
        model = own_layers(over_the_same_codes(base), torch.bfloat16)
        prepare_model(model, gradient_checkpointing=False)
        number, length = ids_BS.shape
        config = LoraConfig(
            r=case.rank, lora_alpha=2 * case.rank, lora_dropout=0.0, target_modules=TARGETS, use_dora=case.dora
        )
        specs = {f"job{index}": resolve(config, model, f"job{index}") for index in range(number)}
        attached, adapters = attach(model, specs, dict(zip(specs, range(number), strict=True)))
        if name == "frozen":
            model.enable_input_require_grads()
        positions_S, head = torch.arange(length, device=ids_BS.device), model.get_output_embeddings()

        def run(samples: list[int]) -> None:
            ids_T = ids_BS[samples].flatten()
            segments = [(job, at * length, (at + 1) * length) for at, job in enumerate(samples)]
            owners = TokenOwners(len(ids_T), () if name == "frozen" else tuple(segments))
            with attached.active(owners):
                hidden_TD = hidden_states(model, ids_T, positions_S.repeat(len(samples)), (length,) * len(samples))
                loss = linear_cross_entropy(hidden_TD, head.weight, head.bias, ids_T.roll(-1))[1]
                loss.backward()

        def step() -> None:
            for samples in [[job] for job in range(number)] if name == "sequential" else [list(range(number))]:
                run(samples)

        def clear() -> None:
            for adapter in adapters:
                for parameter in adapter.named_parameters().values():
                    parameter.grad = None

        return Work(step, clear)

    return Contender(name, make)


def losses(base: nn.Module, ids_BS: torch.Tensor, case: Case) -> list[list[float]]:
    """Of packlora, of PEFT, and of PEFT in float32, step by step."""
    found: list[list[float]] = []
    start: dict[str, torch.Tensor] = {}
    for name in ("packlora", "peft_bnb", "float32"):
        torch.manual_seed(1)
        if name == "float32":
            model = peft_model(dense(over_the_same_codes(base)), case)
            for path, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.data = start[path].float()
        else:
            model = peft_model(over_the_same_codes(base), case)
            start = {path: p.detach().clone() for path, p in model.named_parameters() if p.requires_grad}
        if name == "packlora":
            accelerated(name, model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        own: list[float] = []
        for _ in range(LOSS_STEPS):
            loss = model(input_ids=ids_BS[:1], labels=ids_BS[:1], use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        found.append(own)
    return found


# --- running it --------------------------------------------------------------------------------------------------------


def measured_row(case: Case, names: list[str], device: torch.device) -> dict[str, Any]:
    """A case's row of the results; prints it."""
    base = quantised(build(case.config, device, LlamaForCausalLM))
    ids = torch.randint(0, case.config.vocab_size, (JOBS, case.length), device=device)
    own: Callable[..., Contender] = one_job if case.jobs == 1 else several_jobs
    part = [name for name in names if name != ("sequential" if case.jobs == 1 else "peft_bnb")]
    contenders = [own(name, base, ids, case) for name in part]
    seconds, rounds = (6.0, (6, 40)) if device.type == "cuda" else (0.1, (2, 4))
    timings: Timings = paired(contenders, device, seconds=seconds, rounds=rounds, warmup=2)
    row = {
        "case": case.label, "jobs": case.jobs, "dora": case.dora, "layers": case.config.num_hidden_layers,
        "T": ids.numel(), **timings.row(), "gib": peak_gib(timings, stored_bytes(base)),
    }  # fmt: skip
    for name, other in (("packlora", "peft_bnb"), ("packlora", "sequential")):
        row[f"vs_{other}"] = timings.ratio(other, name)
    if {"packlora", "peft_bnb"} <= {*part}:
        row["losses"] = losses(base, ids, case)
    show(row, device)
    return row


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    check_quantization(QuantizationConfig(method="nf4"), options.device, "bench quantised")
    names, chosen = choose(options.only, CONTENDERS, [], cases(options))
    liger = use_liger(options.device)
    rows = list(options.kept)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, names, options.device))
    layers = next((row["layers"] for row in rows), "no")
    protocol = PROTOCOL.format(layers=layers, liger=liger, steps=LOSS_STEPS)
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted, of LoRA without a prefix; None where one could not be measured."""
    out: dict[str, Any] = {}
    for row in rows:
        start = f"dora_r{DORA_RANK}_" if row["dora"] else ""
        if row["jobs"] > 1:
            out[f"{start}four_jobs_vs_sequential"] = row["vs_sequential"]
            out[f"{start}four_jobs_over_frozen"] = row["over_frozen"].get("packlora")
            continue
        out[f"{start}one_job_vs_peft_bnb"] = row["vs_peft_bnb"]
        out[f"{start}one_job_over_frozen"] = row["over_frozen"].get("packlora")
        gib, pairs = row["gib"], row.get("losses")
        both = "packlora" in gib and "peft_bnb" in gib
        out[f"{start}peak_gib_minus_peft"] = gib["packlora"] - gib["peft_bnb"] if both else None
        ours, theirs, *exact = pairs or [None, None]
        out[f"{start}loss_mean_abs_vs_peft"] = _apart(ours, theirs)
        if exact:
            out[f"{start}loss_mean_abs_vs_float32"] = _apart(ours, exact[0])
            out[f"{start}peft_loss_mean_abs_vs_float32"] = _apart(theirs, exact[0])
    return out


def _apart(one: list[float] | None, other: list[float] | None) -> float | None:
    """Mean of the differences."""
    if one is None or other is None:
        return None
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
