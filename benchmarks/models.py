"""`model`, `graphs`, `quantised`, `experts` and `vlm`: whole models with adapters, against the same frozen and under PEFT.

All contenders of a case stand in one process over the same frozen weights, so that they can run in turn; a contender's memory
is counted as if it stood there alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.contenders import (
    accelerated,
    adapted_copy,
    causal_lm,
    peft_layer,
    under_autocast,
    with_adapter,
    work,
)
from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.layers import least
from benchmarks.processes import aligned, everyone, messages
from benchmarks.shapes import TARGETS, OneLayer, build, config_of, shared_copy, stored_bytes, use_liger
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.base.packing import hidden_states, prepare_model
from packlora.codes.load import check_quantization, own_layers
from packlora.codes.weight import QuantizedLinear
from packlora.config import QuantizationConfig
from packlora.experts.cut import shard_experts
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.lora_experts import low_rank
from packlora.ops.lora_linear.plan import Plan
from packlora.tune.timing import Contender, Work

TIMING = (
    "Contenders run in turn inside one loop over the same frozen weights, random order each round, CUDA events, "
    "medians, ratios within a round. gib: peak of one step, with the frozen weights and what the contender itself "
    "keeps, without what the others keep. frozen: no adapter, only the embeddings' output wants a gradient."
)
ROUNDS: dict[str, Any] = {"seconds": 6.0, "rounds": (6, 40), "warmup": 2}


def depth(options: Options, whole: int) -> int:
    """Decoder layers of a case's model: those asked for, two of a toy, four of --quick, else all."""
    return options.layers or (2 if options.tiny else 4 if options.quick else whole)


# --- Llama-3.1-8B's shape, and single decoder layers -----------------------------------------------------------------------

DORA_RANK = 384


def model_cases(options: Options) -> list[Case]:
    out = []
    for dora in (False, True):
        for checkpointing in (False, True):
            label = f"model Llama-3.1-8B {'ckpt' if checkpointing else 'plain'}" + f" dora_r{DORA_RANK}" * dora
            out.append(case(label, kind="model", shape="Llama-3.1-8B", checkpointing=checkpointing, dora=dora, T=8192))
    shapes = ("Llama-3.1-8B", "Qwen2.5-32B", "Llama-3.1-70B")
    for shape, T in [(shape, T) for shape in shapes for T in ((8192,) if options.quick else (2048, 4096, 8192))]:
        out.append(case(f"layer {shape} T{T}", kind="layer", shape=shape, checkpointing=False, dora=False, T=T))
    return [out[2], out[4], out[5]] if options.tiny else out


def measure_model(one: Case, names: list[str], options: Options) -> Row:
    use_liger(options.device)
    device, tiny = options.device, options.tiny
    if one.kind == "layer":
        config = config_of(one.shape, tiny, 1)
        base = build(config, device, OneLayer)
        length = 32 if tiny else 512
        shape = (2 if tiny else one.T // length, length, config.hidden_size)
        x, dy = (
            torch.randn(shape, device=device).bfloat16().requires_grad_(),
            torch.randn(shape, device=device).bfloat16(),
        )

        def make(name: str) -> Work:
            model, note = adapted_copy(name, base, 16, 0.1, example={"x": x.detach()[:1, :2]})
            inner = model if name == "frozen" else model.base_model.model
            call = under_autocast(inner, device) if name == "peft_fp32_autocast" else inner
            return work(call, x, dy, [p for p in model.parameters() if p.requires_grad], note)

        contenders = [Contender(name, partial(make, name)) for name in names]
        return {"layers": 1, **timed(contenders, options, stored_bytes(base), seconds=1.5, rounds=(6, 40), warmup=2)}
    if one.dora and options.whole:
        names = [*names, "packlora_stepped", *(["peft_fp32_autocast"] if one.checkpointing else [])]
    config = config_of(one.shape, tiny, depth(options, 32))
    base = options.shared(("model", config.num_hidden_layers), lambda: build(config, device))
    ids = torch.randint(0, config.vocab_size, (2, 32) if tiny else (4, one.T // 4), device=device)
    rank, dropout = (24 if tiny else DORA_RANK, 0.0) if one.dora else (16, 0.1)
    contenders = [causal_lm(name, base, ids, rank, dropout, one.checkpointing, one.dora) for name in names]
    return {"layers": config.num_hidden_layers, **timed(contenders, options, stored_bytes(base), **ROUNDS)}


def model_summary(rows: list[Row]) -> Row:
    out: Row = {}
    for row in rows:
        if row["kind"] == "layer":
            out[f"layer_{row['shape']}_T{row['T']}_over_frozen"] = row["over_frozen"].get("packlora")
            continue
        end, kind = "_ckpt" if row["checkpointing"] else "", f"dora_r{DORA_RANK}" if row.get("dora") else "lora_r16"
        names = {"packlora": kind, "peft_bf16": f"peft_{kind}", "peft_fp32_autocast": f"peft_{kind}_fp32"}
        out.setdefault(f"frozen{end}_ms", row["ms"].get("frozen"))
        out.setdefault(f"frozen{end}_gib", row["gib"].get("frozen"))
        for name in (name for name in (*row["ms"], *row["failed"]) if name != "frozen"):
            key = names.get(name, f"{kind}_{name.removeprefix('packlora_')}") + end
            out[f"{key}_over_frozen"] = row["over_frozen"].get(name)
            out[f"{key}_gib"], out[f"{key}_ms"] = row["gib"].get(name), row["ms"].get(name)
    return out


MODEL = Benchmark(
    model_cases, measure_model, model_summary,
    "kind model: Llama-3.1-8B's shape, random bfloat16 weights, 4 x 2048 random tokens, forward with labels and "
    "backward. kind layer: one decoder layer, samples of 512 tokens. LoRA r 16, alpha 32, dropout 0.1 on all linear "
    "layers, or DoRA r 384, alpha 768, no dropout, magnitudes and B away from their initial values; packlora: "
    "packlora.accelerate on the PEFT model with bfloat16 adapters (_recompute: with recompute=True and "
    "keep_outputs=True; _fp32: PEFT's default float32; _stepped: the adapters are written to before each run, an "
    "optimizer step for every microbatch); peft_bf16: the PEFT model as it is; peft_fp32_autocast: PEFT's default "
    "float32 adapters under torch.autocast. liger-kernel where it is installed. ckpt: gradient checkpointing "
    f"(use_reentrant=False) of every decoder layer. {TIMING}",
    ["frozen", "packlora", "packlora_recompute", "packlora_fp32", "peft_bf16"], ["packlora_stepped", "peft_fp32_autocast"],
    by_case=True,
)  # fmt: skip


# --- RunLoRA's settings ----------------------------------------------------------------------------------------------------

MERGED = Plan(up="merged", dx="merged", keep_s=False)
"""RunLoRA's forward2 with b5, whose FLOPs are the fewest in these settings; it rounds W + s B A to bfloat16."""


def graphs_cases(options: Options) -> list[Case]:
    sizes = {"llama60m": (64, 8), "llama250m": (58, 128), "llama1_3b": (24, 512)}
    cases = [case(label, T=1024 * batch, r=r) for label, (batch, r) in sizes.items()]
    return cases[:1] if options.quick else cases


def check_merges(device: torch.device) -> None:
    """Make sure that the merged plan merges.

    W is 1 everywhere and s B A is plus or minus 2^-10, less than half an ulp, with the signs of x: the merged weight rounds
    to W and gives 0, every other way gives K 2^-10. Raises AssertionError where it does not.
    """
    K = 64
    signs = torch.tensor([1.0, -1.0], device=device).repeat(K // 2)
    weight = nn.Parameter(torch.ones(K, K, device=device, dtype=torch.bfloat16), requires_grad=False)
    factors = (signs.repeat(16, 1) * 2.0**-5, torch.full((K, 16), 2.0**-10, device=device))
    model, one, _ = peft_layer(weight, factors, 0.0, wide=False)
    x = signs.bfloat16().repeat(1, K, 1).requires_grad_()
    accelerated(f"packlora:{MERGED.name}", model, {"x": x.detach()})
    assert not one(x).any(), f"plan {MERGED.name} was not computed with a merged weight"


def measure_graphs(one: Case, names: list[str], options: Options) -> Row:
    if "packlora_merged" in names:
        check_merges(options.device)
    config = config_of(one.label, options.tiny)
    base = build(config, options.device)
    shape = (2, 32) if options.tiny else (one.T // 1024, 1024)
    ids = torch.randint(0, config.vocab_size, shape, device=options.device)
    plans = {"packlora_merged": f"packlora:{MERGED.name}"}
    contenders = [causal_lm(plans.get(name, name), base, ids, one.r, 0.0, label=name) for name in names]
    return timed(contenders, options, stored_bytes(base), seconds=8.0, rounds=(6, 30), warmup=2, flush=False)


def graphs_summary(rows: list[Row]) -> Row:
    out: Row = {}
    for row in rows:
        out[f"{row['case']}_frozen_ms"] = row["ms"].get("frozen")
        for name in ("packlora", "packlora_merged", "peft_bf16", "peft_fp32_autocast"):
            out[f"{row['case']}{'' if name == 'packlora' else f'_{name}'}_over_frozen"] = row["over_frozen"].get(name)
    return out


GRAPHS = Benchmark(
    graphs_cases, measure_graphs, graphs_summary,
    "Llama models in RunLoRA's sizes, random bfloat16 weights, batches of 1024-token samples, forward with labels "
    "and backward, LoRA on all linear layers without dropout, alpha = 2 r. packlora: packlora.accelerate on the "
    f"PEFT model with bfloat16 adapters; _merged: with the plan {MERGED.name}, which rounds the merged weight. "
    "peft_bf16, peft_fp32_autocast: the PEFT model, the second with PEFT's default float32 adapters under "
    f"torch.autocast. {TIMING}",
    ["frozen", "packlora", "packlora_merged", "peft_bf16", "peft_fp32_autocast"], ["packlora_fp32"], by_case=True,
)  # fmt: skip


# --- 4-bit weights -----------------------------------------------------------------------------------------------------

JOBS = 4
NF4_DORA_RANK = 64
LOSS_STEPS = 10


def quantised_cases(options: Options) -> list[Case]:
    kinds = {False: "lora_r16", True: f"dora_r{NF4_DORA_RANK}"}
    return [
        case(f"{jobs}job{'s' * (jobs > 1)} {kind}", jobs=jobs, dora=dora)
        for dora, kind in kinds.items()
        for jobs in (1, JOBS)
    ]


def quantised(model: Any) -> Any:
    """Put linear layers but the output layer into NF4, one after the other, in place."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            with torch.device("meta"):
                codes = Linear4bit(module.in_features, module.out_features, False, module.weight.dtype, True, "nf4")
            weight = Params4bit(module.weight.data, quant_type="nf4", compress_statistics=True, module=codes)
            codes.weight = weight.to(module.weight.device)
            model.set_submodule(path, codes)
    model.is_loaded_in_4bit = True
    return model


def over_the_same_codes(model: nn.Module) -> Any:
    """A copy with modules of its own."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    states = [module.quant_state for module in model.modules() if hasattr(module, "quant_state")]
    return copy.deepcopy(model, shared | {id(state): state for state in states})


def dense(model: Any) -> Any:
    """The model in float32 with what the codes stand for."""
    model = own_layers(model, torch.float32)
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, False, "meta")
            plain.weight = nn.Parameter(module.frozen.codes.values(torch.float32), requires_grad=False)
            model.set_submodule(path, plain)
    return model


def one_job(name: str, base: nn.Module, ids_BS: torch.Tensor, rank: int, dora: bool) -> Work:
    """frozen, packlora or peft_bnb by transformers' own forward."""
    model, note = over_the_same_codes(base), ""
    model = own_layers(model, torch.bfloat16) if name == "frozen" else with_adapter(model, rank, 0.0, False, dora)
    model.enable_input_require_grads()
    if name == "packlora":
        note = accelerated(name, model)

    def step() -> None:
        model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss.backward()

    return Work(step, lambda: model.zero_grad(set_to_none=True), note)


def several_jobs(name: str, base: nn.Module, ids_BS: torch.Tensor, rank: int, dora: bool) -> Work:
    """A sample of each job, as training runs them: packlora in one microbatch, sequential in one for each."""
    model = own_layers(over_the_same_codes(base), torch.bfloat16)
    prepare_model(model, gradient_checkpointing=False)
    number, length = ids_BS.shape
    attached, parameters = attached_jobs(model, LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=TARGETS, use_dora=dora
    ), number)  # fmt: skip
    if name == "frozen":
        model.enable_input_require_grads()
    positions_S, head = torch.arange(length, device=ids_BS.device), model.get_output_embeddings()

    def step() -> None:
        for samples in [[job] for job in range(number)] if name == "sequential" else [list(range(number))]:
            ids_T = ids_BS[samples].flatten()
            segments = [(job, at * length, (at + 1) * length) for at, job in enumerate(samples)]
            with attached.active(TokenOwners(len(ids_T), () if name == "frozen" else tuple(segments))):
                hidden_TD = hidden_states(model, ids_T, positions_S.repeat(len(samples)), (length,) * len(samples))
                linear_cross_entropy(hidden_TD, head.weight, head.bias, ids_T.roll(-1))[1].backward()

    return Work(step, lambda: _clear(parameters))


def attached_jobs(model: Any, config: LoraConfig, number: int) -> tuple[Any, list[torch.Tensor]]:
    """So many jobs' adapters on a model, as training attaches them, and all their parameters."""
    specs = {f"job{at}": resolve(config, model, f"job{at}") for at in range(number)}
    attached, adapters = attach(model, specs, dict(zip(specs, range(number), strict=True)))
    return attached, [p for adapter in adapters for p in adapter.named_parameters().values()]


def _clear(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def losses(base: nn.Module, ids_BS: torch.Tensor, rank: int, dora: bool) -> list[list[float]]:
    """Losses of packlora, of PEFT, and of PEFT in float32, step by step from the same adapter."""
    found: list[list[float]] = []
    start: dict[str, torch.Tensor] = {}
    for name in ("packlora", "peft_bnb", "float32"):
        torch.manual_seed(1)
        model = over_the_same_codes(base)
        model = with_adapter(dense(model) if name == "float32" else model, rank, 0.0, False, dora)
        trained = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
        for path, parameter in trained.items():
            parameter.data = start.setdefault(path, parameter.detach().clone()).to(parameter.dtype, copy=True)
            if name == "float32":
                parameter.data = parameter.data.float()
        if name == "packlora":
            accelerated(name, model)
        optimizer = torch.optim.AdamW(list(trained.values()), lr=1e-3)
        own: list[float] = []
        for _ in range(LOSS_STEPS):
            loss = model(input_ids=ids_BS[:1], labels=ids_BS[:1], use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        found.append(own)
    return found


def measure_quantised(one: Case, names: list[str], options: Options) -> Row:
    check_quantization(QuantizationConfig(method="nf4"), options.device, "quantised")
    use_liger(options.device)
    config = config_of("Llama-3.1-8B", options.tiny, depth(options, 32))
    base = options.shared(("nf4", config.num_hidden_layers), lambda: quantised(build(config, options.device)))
    ids = torch.randint(0, config.vocab_size, (JOBS, 32 if options.tiny else 2048), device=options.device)
    rank = NF4_DORA_RANK if one.dora else 16
    make: Callable[..., Work] = one_job if one.jobs == 1 else several_jobs
    own = [name for name in names if name != ("sequential" if one.jobs == 1 else "peft_bnb")]
    contenders = [Contender(name, partial(make, name, base, ids, rank, one.dora)) for name in own]
    row = timed(contenders, options, stored_bytes(base), **ROUNDS)
    row |= {f"vs_{peer}": ratio for peer, ratio in row.pop("vs_peft").get("packlora", {}).items()}
    if {"packlora", "peft_bnb"} <= {*own}:
        row["losses"] = losses(base, ids, rank, one.dora)
    return {"layers": config.num_hidden_layers, "T": ids.numel(), **row}


def quantised_summary(rows: list[Row]) -> Row:
    """Figures of LoRA have no prefix. A difference of losses is a mean over the steps."""
    out: Row = {}
    for row in rows:
        start = f"dora_r{NF4_DORA_RANK}_" if row["dora"] else ""
        if row["jobs"] > 1:
            out[f"{start}four_jobs_vs_sequential"] = row.get("vs_sequential")
            out[f"{start}four_jobs_over_frozen"] = row["over_frozen"].get("packlora")
            continue
        out[f"{start}one_job_vs_peft_bnb"] = row.get("vs_peft_bnb")
        out[f"{start}one_job_over_frozen"] = row["over_frozen"].get("packlora")
        gib = row["gib"]
        out[f"{start}peak_gib_minus_peft"] = (
            gib["packlora"] - gib["peft_bnb"] if {"packlora", "peft_bnb"} <= {*gib} else None
        )
        if "losses" in row:
            ours, theirs, *exact = row["losses"]
            out[f"{start}loss_mean_abs_vs_peft"] = apart(ours, theirs)
            for name, own in (("", ours), ("peft_", theirs)) if exact else ():
                out[f"{start}{name}loss_mean_abs_vs_float32"] = apart(own, exact[0])
    return out


def apart(one: list[float], other: list[float]) -> float:
    """Mean of the absolute differences."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


QUANTISED = Benchmark(
    quantised_cases, measure_quantised, quantised_summary,
    "Llama-3.1-8B's shape, random weights in bitsandbytes' NF4 with double quantisation, output layer and "
    "embeddings bfloat16; LoRA r 16, alpha 32, or DoRA r 64, alpha 128, no dropout, bfloat16 adapters, on all "
    "linear layers. one job: 4 x 2048 random tokens, forward with labels and backward; peft_bnb: PEFT over "
    "Linear4bit as it is; packlora: packlora.accelerate on the same PEFT model. liger-kernel where it is installed. "
    "four jobs: float32 adapters of training, 2048 tokens each in one sample; packlora: all in one microbatch; "
    f"sequential: one microbatch for each; frozen: the four samples without an adapter. losses: {LOSS_STEPS} steps "
    "of AdamW (1e-3) on one sample by packlora and by PEFT from the same adapter, and by PEFT in float32 over what "
    f"the codes stand for. {TIMING}",
    ["frozen", "packlora", "peft_bnb", "sequential"], by_case=True,
)  # fmt: skip


# --- experts -----------------------------------------------------------------------------------------------------------

EXPERT_TARGETS: dict[str, Any] = {
    "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}  # fmt: skip
SAMPLES = 4
PROCESS_ROUNDS = {False: 20, True: 8}
"""Rounds on several processes, which must be as many on each; of --quick."""


def experts_cases(options: Options) -> list[Case]:
    size = options.mesh.size
    tail = f" ep{size}" if size > 1 else ""
    return [
        case(
            f"{jobs}job{'s' * (jobs > 1)} {'dora' if dora else 'lora'}_r16 T{T}{tail}", jobs=jobs, dora=dora, T=T,
            processes=size,
        )
        for T in ((32,) if options.tiny else (8192,) if options.quick else (2048, 8192))
        for dora in (False, True)
        for jobs in (1, JOBS)
    ]  # fmt: skip


def expert_work(name: str, base: Any, ids_BS: torch.Tensor, one: Case) -> Work:
    """Forward of the decoder and backward of a random gradient."""
    torch.manual_seed(1)  # adapters and gradients are alike on all processes
    model, trained, owners = shared_copy(base), list[torch.Tensor](), None
    attached: Any = None
    decoder = model.model
    if name == "peft":
        with ids_BS.device:
            model = get_peft_model(model, LoraConfig(**EXPERT_TARGETS), autocast_adapter_dtype=False)
        decoder, trained = model.base_model.model.model, [p for p in model.parameters() if p.requires_grad]
    elif name.startswith("packlora"):
        attached, trained = attached_jobs(model, LoraConfig(**EXPERT_TARGETS, use_dora=one.dora), one.jobs)
        each = one.T // one.jobs
        owners = TokenOwners(one.T, tuple((job, job * each, (job + 1) * each) for job in range(one.jobs)))
    with torch.no_grad():
        for parameter in trained:
            if not parameter.any():
                parameter.normal_(std=0.002)
    model.enable_input_require_grads()
    dy = torch.randn(*ids_BS.shape, base.config.hidden_size, device=ids_BS.device, dtype=torch.bfloat16)

    def step() -> None:
        active = nullcontext() if owners is None else attached.active(owners)
        with mock.patch.object(low_rank, "KERNELS", name != "packlora_torch"), active:
            decoder(input_ids=ids_BS).last_hidden_state.backward(dy)

    return Work(step, lambda: _clear(trained))


def measure_experts(one: Case, names: list[str], options: Options) -> Row:
    """Under torchrun the experts are shared out to the processes; messages are counted beside the time."""
    several = one.processes > 1
    layers = options.layers or (1 if options.tiny else 4)
    config = config_of("Qwen3-30B-A3B", options.tiny, layers)

    def make() -> Any:
        base = build(config, options.device)
        base.lm_head = nn.Identity()
        if several:
            shard_experts(base, everyone())
        return base

    base, made = options.shared(("experts", layers), make), dict[str, Work]()
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (SAMPLES, one.T // SAMPLES), device=options.device)
    own = [name for name in names if name != "peft" or (one.jobs == 1 and not one.dora and not several)]
    contenders = [
        aligned(name, partial(expert_work, name, base, ids, one), options.mesh, options.device, made) for name in own
    ]
    rounds = PROCESS_ROUNDS[options.quick]
    row = timed(contenders, options, stored_bytes(base), **({"rounds": (rounds, rounds)} if several else ROUNDS))
    row["vs_peft"] = row["vs_peft"].get("packlora", {}).get("peft")
    return {"layers": layers, **row, **({"messages": messages(made)} if several else {})}


def experts_summary(rows: list[Row]) -> Row:
    """Figures of the most tokens have no T in their names; those of several processes end in ep and their number."""
    out: Row = {}
    most = max((row["T"] for row in rows), default=0)
    for row in rows:
        size = row.get("processes", 1)
        end = ("" if row["T"] == most else f"_T{row['T']}") + (f"_ep{size}" if size > 1 else "")
        kind, over, gib = "dora" if row["dora"] else "lora", row["over_frozen"], row["gib"]
        if row["jobs"] > 1:
            out[f"{'dora_' * row['dora']}four_jobs_over_frozen{end}"] = over.get("packlora")
            continue
        out[f"{kind}_over_frozen{end}"], out[f"{kind}_gib{end}"] = over.get("packlora"), gib.get("packlora")
        if kind == "lora" and size == 1:
            out[f"frozen_gib{end}"], out[f"peft_gib{end}"] = gib.get("frozen"), gib.get("peft")
            out[f"peft_over_frozen{end}"], out[f"vs_peft{end}"] = over.get("peft"), row["vs_peft"]
    return out


EXPERTS = Benchmark(
    experts_cases, measure_experts, experts_summary,
    "Qwen3-30B-A3B's shape (4 layers, without the output layer), random bfloat16 weights, 4 samples of random "
    "tokens, forward of the decoder and backward of a random gradient. LoRA or DoRA r 16, alpha 32, no dropout, on "
    "q, k, v, o and on gate_up_proj and down_proj of all experts, B away from zero. Experts of frozen by "
    "transformers' grouped_mm. peft: PEFT's parameters in bfloat16 over the same, LoRA alone. packlora: float32 "
    "adapters of training (_torch: without its kernels); of four jobs each has a sample. ep: experts shared out to "
    "the processes by experts.cut.shard_experts, all else and the tokens alike, without optimizer steps, the "
    "GPUs aligned before each run; messages: collectives of a forward and backward by process 0, and sent: their "
    f"bytes where messages go round in a ring. {TIMING}",
    ["frozen", "packlora", "peft"], ["packlora_torch"], by_case=True, where="either",
)  # fmt: skip


# --- images ------------------------------------------------------------------------------------------------------------

IMAGE_TOKEN = 7
_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
VISION: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16, "out_hidden_size": 4096,
    "num_position_embeddings": 2304, "spatial_merge_size": 2,
}  # fmt: skip
TINY_VISION = VISION | {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip


def vlm_cases(options: Options) -> list[Case]:
    ranks: tuple[int, ...] = (24,) if options.tiny else (384,) if options.quick else (384, 512, 768)
    return [
        case(f"{'step' if back else 'forward'} dora_r{r} {regime}", r=r, regime=regime, backward=back)
        for back in (False, True)
        for regime in ("bf16", "fp32")
        for r in ranks
    ]


def vlm_config(layers: int, tiny: bool) -> Any:
    text = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rope_parameters": _MROPE,
    }  # fmt: skip
    if tiny:
        text |= {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
                 "num_key_value_heads": 2, "rope_parameters": _MROPE | {"mrope_section": [4, 2, 2]}}  # fmt: skip
    return Qwen3VLConfig(
        text_config=text | {"num_hidden_layers": layers, "use_cache": False},
        vision_config=(TINY_VISION if tiny else VISION)
        | {"depth": layers, "deepstack_visual_indexes": list(range(min(3, layers)))},
        image_token_id=IMAGE_TOKEN, attn_implementation="sdpa",
    )  # fmt: skip


def vlm_inputs(config: Any, grid: int, words: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One sample: four words, an image of grid x grid patches, the other words."""
    torch.manual_seed(1)
    vision = config.vision_config
    image = torch.full((grid**2 // vision.spatial_merge_size**2,), IMAGE_TOKEN)
    text = torch.randint(IMAGE_TOKEN + 1, config.text_config.vocab_size, (words,))
    ids = torch.cat([text[:4], image, text[4:]])[None]
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids.to(device), "mm_token_type_ids": (ids == IMAGE_TOKEN).int().to(device),
        "pixel_values": torch.randn(grid**2, width).to(device, torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, grid, grid]], device=device),
    }  # fmt: skip


def vlm_work(name: str, base: nn.Module, inputs: dict[str, torch.Tensor], loss_tokens: int, one: Case) -> Work:
    model, note, wide = shared_copy(base), "", one.regime == "fp32"
    if name != "frozen":
        model = with_adapter(model, one.r, 0.0, wide, True, "all-linear")
        note = accelerated(name, model) if name == "packlora" else ""
    model.train(one.backward)
    inner = model if name == "frozen" else model.base_model.model
    if one.backward:
        inner.enable_input_require_grads()
    plain = lambda given: inner(**given)  # noqa: E731
    call = under_autocast(plain, inputs["input_ids"].device) if name == "peft" and wide else plain
    labels = inputs["input_ids"][0, -loss_tokens:]

    def step() -> None:
        with torch.set_grad_enabled(one.backward):
            logits = call(inputs | {"logits_to_keep": loss_tokens + 1}).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits.float(), labels)
        if one.backward:
            loss.backward()

    return Work(step, lambda: model.zero_grad(set_to_none=True), note)


def measure_vlm(one: Case, names: list[str], options: Options) -> Row:
    layers = depth(options, 8)
    config = vlm_config(layers, options.tiny)
    base = options.shared(("vlm", layers), lambda: build(config, options.device, Qwen3VLForConditionalGeneration))
    grid, words, loss_tokens = (8, 24, 8) if options.tiny else (64, 3072, 1024)
    inputs = vlm_inputs(config, grid, words, options.device)
    contenders = [Contender(name, partial(vlm_work, name, base, inputs, loss_tokens, one)) for name in names]
    row = timed(contenders, options, stored_bytes(base), **ROUNDS)
    row["vs_peft"] = row["vs_peft"].get("packlora", {}).get("peft")
    return {"layers": layers, "T": inputs["input_ids"].numel(), "patches": grid**2, **row}


def vlm_summary(rows: list[Row]) -> Row:
    """PEFT's time over packlora's, the least over ranks and regimes, and by these; GiB over PEFT's, the most."""
    out: Row = {}
    for name, backward in (("forward", False), ("step", True)):
        own = [row for row in rows if row["backward"] is backward]
        out[f"{name}_vs_peft"] = least(row["vs_peft"] for row in own)
        for row in own:
            key = f"{name}_r{row['r']}_{row['regime']}"
            out[f"{key}_vs_peft"], out[f"{key}_over_frozen"] = row["vs_peft"], row["over_frozen"].get("packlora")
    more = [row["gib"]["packlora"] - row["gib"]["peft"] for row in rows if {"packlora", "peft"} <= {*row["gib"]}]
    out["peak_gib_minus_peft_max"] = max(more) if more and len(more) == len(rows) else None
    return out


VLM = Benchmark(
    vlm_cases, measure_vlm, vlm_summary,
    "Qwen3-VL-8B's shape (8 layers of the language model and as many blocks of the vision tower), random bfloat16 "
    "weights, one sample: an image of 64 by 64 patches, a quarter as many tokens, and 3072 random tokens of text, "
    "the loss on the last 1024. DoRA on all linear layers of both (all-linear), alpha = 2 r, no dropout, B and "
    "magnitudes away from their initial values. forward: without gradients, in eval mode; step: forward and "
    "backward, no optimizer step. bf16: bfloat16 adapters; fp32: PEFT's default float32 adapters under "
    "torch.autocast. packlora: packlora.accelerate on the PEFT model, without autocast; its DoRA norms are made "
    f"once for the values that there are, PEFT's in every forward. {TIMING}",
    ["frozen", "packlora", "peft"],
)  # fmt: skip
