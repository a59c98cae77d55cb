"""`parity`, `dora-fidelity`, `dora-convergence` and `sweep`: what is trained and computed on SmolLM2-135M, beside real PEFT.

parity        losses of 200 optimizer steps against a plain script with PEFT, alone and beside other jobs
dora-fidelity logits with DoRA against the exact ones, PEFT in float64 on the same rounded numbers
dora-convergence  losses of the same loop over a PEFT model as it is, accelerated, and with each batch in reverse order
sweep         what successive halving saves of a grid of 32 candidates
"""

from __future__ import annotations

import copy
import json
import os
import re
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.contenders import accelerated
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.models import apart
from benchmarks.training import DATA, padded, run_of
from packlora.base.demo_model import demo_model_folder
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.runtime.prepare import prepare
from packlora.runtime.run import train

CPU = torch.device("cpu")


def real_model() -> Any:
    """SmolLM2-135M-Instruct, frozen, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        demo_model_folder(), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    return model.requires_grad_(False)


def short_rows(file: str, out: Path, count: int) -> Path:
    """Rows of debian_synopsis with the package's name alone as prompt: real completions, few tokens."""
    rows = [json.loads(line) for line in (DATA / "debian_synopsis" / file).read_text().splitlines()[:count]]
    names = [re.search(r"^Package: (\S+)", row["prompt"], re.MULTILINE) for row in rows]
    short = [
        {"prompt": f"Describe the package {name[1]} in one line.", "completion": row["completion"]}
        for name, row in zip(names, rows, strict=True)
        if name
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in short))
    return out


# --- parity ------------------------------------------------------------------------------------------------------------

KINDS: dict[str, Row] = {
    "lora": {"r": 8, "lora_alpha": 16},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
}
LR, BATCH, CLIP, STEPS = 2e-4, 2, 1.0, 200


def parity_cases(options: Options) -> list[Case]:
    kinds = ["lora"] if options.quick else list(KINDS)
    settings = ("solo",) if options.quick else ("solo", "shared")
    return [case(f"{kind} {setting}", kind=kind, setting=setting) for setting in settings for kind in kinds]


class Parity:
    """PEFT's losses and adapters by kind, and packlora's run that all kinds share."""

    def __init__(self, steps: int) -> None:
        self.held, self.steps = tempfile.TemporaryDirectory(), steps
        self.folder = Path(self.held.name)
        self.data = short_rows("train.jsonl", self.folder / "short.jsonl", 64)
        self.losses: dict[str, list[float]] = {}
        self.together: tuple[Path, dict[str, list[float]]] | None = None

    def job(self, name: str, adapter: Row, **more: Any) -> Row:
        keys = {
            "max_steps": self.steps,
            "global_batch_size": BATCH,
            "learning_rate": LR,
            "max_grad_norm": CLIP,
            "shuffle": False,
        }
        return {"name": name, "data": {"path": str(self.data)}, "adapter": adapter, "train": keys | more}

    def run(self, name: str, jobs: list[Row]) -> Run:
        return run_of(jobs, CPU, 1024, self.folder / name, base_model="smollm2-135m", dtype="float32")

    def reference(self, kind: str) -> list[float]:
        """Train with PEFT as its users do; the loss of every step. The adapter is saved before and after."""
        if kind not in self.losses:
            data = prepare(self.run(f"plain-{kind}", [self.job(kind, KINDS[kind])])).jobs[0].data
            torch.manual_seed(0)
            config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **KINDS[kind])
            model: Any = get_peft_model(real_model(), config)
            model.save_pretrained(self.folder / f"initial-{kind}")
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer, own = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0), list[float]()
            for step in range(data.num_steps):
                samples = [data.samples[number] for number in data.global_batch(step)]
                own.append(one_step(model, parameters, optimizer, padded(samples)))
            model.save_pretrained(self.folder / f"peft-{kind}")
            self.losses[kind] = own
        return self.losses[kind]

    def packlora(self, kind: str, shared: bool) -> tuple[Path, list[float]]:
        """Folder of the trained adapter and its losses, from PEFT's initial adapter."""
        names = list(KINDS) if shared else [kind]
        for name in names:
            self.reference(name)
        if not shared:
            folder, losses = self._trained(f"solo-{kind}", names)
            return folder / kind, losses[kind]
        if self.together is None:
            self.together = self._trained("shared", names)
        return self.together[0] / kind, self.together[1][kind]

    def _trained(self, label: str, names: list[str]) -> tuple[Path, dict[str, list[float]]]:
        jobs = [self.job(name, {"init_from": str(self.folder / f"initial-{name}")}) for name in names]
        if len(jobs) > 1:
            other = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05}
            jobs.append(self.job("other", other, shuffle=True, learning_rate=2 * LR))
        run = self.run(label, jobs)
        result = train(run)
        assert result.status == "done", result
        folder, losses = Path(run.output_dir), dict[str, list[float]]()
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            losses.setdefault(values["job"], []).append(values["loss"])
        return folder, losses


def one_step(model: Any, parameters: list[Any], optimizer: Any, batch: dict[str, torch.Tensor]) -> float:
    """An optimizer step; the loss before it."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def distance(ours: Path, theirs: Path) -> float:
    """Relative Frobenius distance of two adapter files."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    a = {
        key.replace("magnitude_vector.weight", "magnitude_vector"): value for key, value in a.items()
    }  # as PEFT writes
    assert a.keys() == b.keys()
    difference = sum(float((a[key].double() - b[key].double()).square().sum()) for key in b)
    return float((difference / sum(float(value.double().square().sum()) for value in b.values())) ** 0.5)


def measure_parity(one: Case, names: list[str], options: Options) -> Row:
    state: Parity = options.shared("parity", lambda: Parity(2 if options.quick else STEPS))
    reference = state.reference(one.kind)
    folder, losses = state.packlora(one.kind, one.setting == "shared")
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return {
        "steps": len(gaps), "mean": sum(gaps) / len(gaps), "max": max(gaps),
        "adapter": distance(folder, state.folder / f"peft-{one.kind}"), "first_loss": reference[0], "last_loss": reference[-1],
    }  # fmt: skip


def parity_summary(rows: list[Row]) -> Row:
    return {f"{row['kind']}_{row['setting']}_{key}": row[key] for row in rows for key in ("mean", "max", "adapter")}


PARITY = Benchmark(
    parity_cases, measure_parity, parity_summary,
    f"SmolLM2-135M-Instruct, float32, CPU. {STEPS} optimizer steps of AdamW (lr {LR}, global batch {BATCH}, clipping "
    f"at {CLIP}, dropout 0, all linear layers) on 64 rows of examples/data/debian_synopsis (package name -> "
    "synopsis), file order. Reference: real PEFT, padded batches with attention mask, sdpa attention, the loss of "
    "transformers (mean over label tokens). packlora starts from the same adapter files (init_from); solo = the job "
    "alone, shared = in microbatches with the other kinds and a fourth job (LoRA r 4, dropout 0.05, twice the "
    "learning rate, shuffled). mean and max are of |loss - PEFT's loss| over all steps; adapter is the relative "
    "Frobenius distance of all final adapter tensors together.",
    ["packlora"], by_case=True, where="cpu",
)  # fmt: skip


# --- DoRA's logits -----------------------------------------------------------------------------------------------------

REGIMES: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False), "bf16": (torch.bfloat16, False), "bf16_autocast": (torch.bfloat16, True),
    "fp16": (torch.float16, False),
}  # fmt: skip
"""Dtype of the base, and whether adapters are float32 under torch.autocast, PEFT's default."""
PAIRS = (("packlora", "peft"), ("packlora", "exact"), ("peft", "exact"), ("base", "base_exact"))


def with_dora(base: Any, wide: bool) -> Any:
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    return get_peft_model(base, config, autocast_adapter_dtype=wide)


def fidelity_cases(options: Options) -> list[Case]:
    return [case(regime) for regime in (list(REGIMES)[:1] if options.quick else REGIMES)]


@torch.no_grad()
def logits(model: Any, batch: dict[str, torch.Tensor], autocast: bool = False) -> torch.Tensor:
    """The logits of real tokens, [tokens, V] in float64 on the CPU; in training mode, where PEFT makes the norms anew."""
    model.train()
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return out[batch["attention_mask"] == 1].double().cpu()  # type: ignore[no-any-return]


def measure_fidelity(one: Case, names: list[str], options: Options) -> Row:
    """Cosines of two models' logits by token: smallest, the hundredth part, mean."""
    dtype, autocast = REGIMES[one.label]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder(), trust_remote_code=False)
    rows = [json.loads(line) for line in (DATA / "debian_synopsis" / "eval.jsonl").read_text().splitlines()]
    texts = [f"{row['prompt']} {row['completion']}" for row in rows[: 2 if options.quick else 16]]
    every = [torch.tensor(tokenizer(text)["input_ids"][:128]).int().numpy() for text in texts]
    batch = {name: value.to(options.device) for name, value in padded([Sample(ids, ids >= 0) for ids in every]).items()}
    torch.manual_seed(0)
    base = real_model().to(options.device, dtype)
    found = {"base": logits(base, batch), "base_exact": logits(copy.deepcopy(base).double(), batch)}
    model = with_dora(base, wide=autocast)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    found |= {"exact": logits(copy.deepcopy(model).double(), batch), "peft": logits(model, batch, autocast)}
    note = accelerated("packlora", model)
    found["packlora"] = logits(model, batch, autocast)
    out: Row = {"tokens": len(found["exact"]), "plans": note}
    for a, b in PAIRS:
        cosine = torch.nn.functional.cosine_similarity(found[a], found[b], dim=1)
        measures = {"min": cosine.min(), "hundredth": cosine.quantile(0.01), "mean": cosine.mean()}
        out["base_exact" if a == "base" else f"{a}_{b}"] = {key: float(value) for key, value in measures.items()}
    return out


def fidelity_summary(rows: list[Row]) -> Row:
    """16bit_minus_peft: packlora's smallest cosine to exact less PEFT's, the least over the regimes but fp32."""
    narrow = [row for row in rows if row["case"] != "fp32"]
    out: Row = {"logit_cosine_min": min(row["packlora_peft"]["min"] for row in rows)}
    if len(narrow) < len(rows):
        out["logit_cosine_min_float32"] = next(row for row in rows if row["case"] == "fp32")["packlora_peft"]["min"]
    gaps = [row["packlora_exact"]["min"] - row["peft_exact"]["min"] for row in narrow]
    out["logit_cosine_16bit_minus_peft"] = min(gaps, default=None)
    for row in rows:
        for pair in ("packlora_peft", "packlora_exact", "peft_exact", "base_exact"):
            out[f"{row['case']}_{pair}_min"] = row[pair]["min"]
    return out


FIDELITY = Benchmark(
    fidelity_cases, measure_fidelity, fidelity_summary,
    "SmolLM2-135M-Instruct; DoRA r 16, alpha 32 on all linear layers, B normal with deviation 0.02, magnitudes "
    "multiplied by 1 + 0.02 normal. 16 samples of debian_synopsis/eval of at most 128 tokens, padded, no dropout. "
    "Per real token the cosine of the logits of two models, computed in float64; smallest, the hundredth part, mean "
    "over tokens. exact: real PEFT in float64 on the same rounded parameters. packlora: packlora.accelerate on the "
    "PEFT model. base_exact: the model without an adapter against itself in float64. Regimes: base and adapters in "
    "one dtype; bf16_autocast: bfloat16 base, float32 adapters under torch.autocast.",
    ["packlora"],
)  # fmt: skip


# --- DoRA's convergence ------------------------------------------------------------------------------------------------

TRAINED, HELD_OUT, LENGTH, SAMPLES = 1500, 24, 128, 8
NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
"""Folders of the standard library that are not of it, or not everywhere."""


def convergence_cases(options: Options) -> list[Case]:
    return [case(f"seed {seed}", seed=seed) for seed in range(1 if options.quick else 2)]


def source_rows(count: int) -> list[list[int]]:
    """Samples of the source of Python's standard library, of LENGTH tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder(), trust_remote_code=False)
    root, ids = Path(sysconfig.get_paths()["stdlib"]), list[int]()
    for path in sorted(root.rglob("*.py")):
        if NO_SOURCE.isdisjoint(path.relative_to(root).parts):
            ids += tokenizer(path.read_text(errors="replace"))["input_ids"]
        if len(ids) >= count * LENGTH:
            break
    return [ids[at * LENGTH : (at + 1) * LENGTH] for at in range(len(ids) // LENGTH)][:count]


def measure_convergence(one: Case, names: list[str], options: Options) -> Row:
    """A step of each way in turn, from the same initial adapter on the same samples."""
    steps = 2 if options.quick else TRAINED
    rows = options.shared(
        "rows", lambda: torch.tensor(source_rows(HELD_OUT + (16 if options.quick else steps * SAMPLES)))
    )
    rows = rows.to(options.device)
    order = HELD_OUT + torch.randperm(len(rows) - HELD_OUT, generator=torch.Generator().manual_seed(one.seed))
    on_gpu, base = options.device.type == "cuda", real_model()
    if on_gpu:  # parameters alone, as from_pretrained(dtype=...) does: the rotary frequencies stay float32
        for parameter in base.parameters():
            parameter.data = parameter.data.bfloat16()
    ways: dict[str, tuple[Any, list[Any], Any]] = {}
    for name in names:
        torch.manual_seed(one.seed)
        model = with_dora(copy.deepcopy(base).to(options.device), wide=True).train()
        if name == "packlora":
            accelerated(name, model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ways[name] = model, parameters, torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(steps):
        ids = rows[order[(torch.arange(SAMPLES) + step * SAMPLES) % len(order)].to(rows.device)]
        for name, (model, parameters, optimizer) in ways.items():
            batch = ids.flip(0) if name == "peft_reversed" else ids
            with torch.autocast(options.device.type, torch.bfloat16, enabled=on_gpu):
                losses[name].append(one_step(model, parameters, optimizer, {"input_ids": batch, "labels": batch}))
    row: Row = {"steps": steps, **{f"losses_{name}": own for name, own in losses.items()}}
    for start, name in (("", "packlora"), ("noise_", "peft_reversed")):
        gaps = [abs(a - b) for a, b in zip(losses[name], losses["peft"], strict=True)]
        row |= {f"{start}mean_abs": apart(losses[name], losses["peft"]), f"{start}max_abs": max(gaps)}
    with torch.no_grad(), torch.autocast(options.device.type, torch.bfloat16, enabled=on_gpu):
        held = rows[:HELD_OUT]
        row |= {f"eval_{name}": float(model(input_ids=held, labels=held).loss) for name, (model, _, _) in ways.items()}
    return row | {"eval_abs": abs(row["eval_packlora"] - row["eval_peft"])}


def convergence_summary(rows: list[Row]) -> Row:
    """Over all seeds: means and the largest difference, and the mean over that of PEFT's two runs."""
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("mean_abs", "noise_mean_abs")}
    most = {key: max(row[key] for row in rows) for key in ("max_abs", "noise_max_abs", "eval_abs")}
    over = mean["mean_abs"] / mean["noise_mean_abs"] if mean["noise_mean_abs"] else None
    figures = {"steps": min(row["steps"] for row in rows), **mean, **most, "over_noise": over}
    return {f"convergence_{key}": value for key, value in figures.items()}


CONVERGENCE = Benchmark(
    convergence_cases, measure_convergence, convergence_summary,
    "SmolLM2-135M-Instruct; DoRA r 16, alpha 32 on all linear layers, no dropout; on a GPU bfloat16 base, float32 "
    f"adapters under torch.autocast, else float32; AdamW, lr {LR}, clipping at {CLIP}, {TRAINED} steps of {SAMPLES} "
    f"samples of the source of Python's standard library ({LENGTH} tokens each), order drawn by seed. Three runs per "
    "seed of one loop over a PEFT model from the same initial adapter, a step of each in turn: as it is, after "
    "packlora.accelerate, and as it is with the samples of each batch in reverse order, which changes the order of "
    "sums alone. mean_abs, max_abs: of the difference of packlora's and PEFT's losses per step; noise: of PEFT's "
    f"two runs; over_noise: mean_abs over noise_mean_abs, means over seeds; eval: mean loss on {HELD_OUT} held-out "
    "samples after the last step.",
    ["peft", "packlora", "peft_reversed"],
)  # fmt: skip


# --- what halving saves ------------------------------------------------------------------------------------------------

RATES = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2]
RULES: dict[str, Row] = {
    "halving": {"method": "successive_halving", "min_resource": 2, "reduction_factor": 3},
    "grid": {"method": "none"},
}


def sweep_cases(options: Options) -> list[Case]:
    return [case(name) for name in RULES]


def measure_sweep(one: Case, names: list[str], options: Options) -> Row:
    """A run of all candidates at the same time; seconds and the processors' own, which other work does not lengthen."""
    rates = RATES[:1] if options.quick else RATES
    parameters: Row = {
        "train.learning_rate": rates,
        "adapter.r": [4, 16],
        "adapter.lora_alpha": [16] if options.quick else [16, 32],
    }
    count = len(rates) * 2 * len(parameters["adapter.lora_alpha"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {"path": str(short_rows("train.jsonl", folder / "train.jsonl", 24)),
                "eval_path": str(short_rows("eval.jsonl", folder / "eval.jsonl", 2 if options.quick else 8))}  # fmt: skip
        keys = {"max_steps": 4 if options.quick else 12, "global_batch_size": 2, "eval_on_start": False}
        job = {"name": "lora", "data": data, "adapter": {"lora_dropout": 0.0}, "train": keys}
        sweep = {"job": "lora", "parameters": parameters, "concurrent": count, "stopping": RULES[one.label]}
        more: Row = {"base_model": "smollm2-135m", "dtype": "float32", "eval_every": 2, "sweep": sweep}
        run = run_of([job], CPU, 1024, folder / "out", **more)
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        result = train(run)
        seconds, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu
        found = json.loads((folder / "out" / "sweep.json").read_text())["candidates"]
    return {
        "sweep": one.label, "seconds": seconds, "cpu_seconds": cpu, "tokens": result.tokens, "candidates": len(found),
        "stopped": sum(line["status"] == "stopped" for line in found), "best": found[0]["parameters"],
        "eval_loss": found[0]["eval_loss"],
    }  # fmt: skip


def sweep_summary(rows: list[Row]) -> Row:
    by_name = {row["sweep"]: row for row in rows}
    if by_name.keys() != RULES.keys():
        return {}
    keys = {
        "time_over_grid": "seconds",
        "cpu_time_over_grid": "cpu_seconds",
        "tokens_over_grid": "tokens",
        "loss_over_grid_best": "eval_loss",
    }
    return {key: by_name["halving"][own] / by_name["grid"][own] for key, own in keys.items()}


SWEEP = Benchmark(
    sweep_cases, measure_sweep, sweep_summary,
    "SmolLM2-135M-Instruct, float32, CPU. 32 LoRA candidates (all linear layers): eight learning rates, ranks 4 and "
    "16, alpha 16 and 32. 12 optimizer steps of AdamW, global batch 2, on 24 rows of examples/data/debian_synopsis "
    "(package name -> synopsis), 8 held-out rows evaluated every 2 steps, not before the first, all candidates at "
    "the same time in one run. grid: all take all steps. halving: successive_halving with min_resource 2 and "
    "reduction_factor 3. seconds: of the whole run, loading, evaluations and saving included; one after the other "
    "in one process. cpu_seconds: of the processors meanwhile. eval_loss: of the best candidate at its end.",
    ["packlora"], where="cpu",
)  # fmt: skip
