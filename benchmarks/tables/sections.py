"""The sections of docs/benchmarks.md, of the files in benchmarks/results; readme.py writes them."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.tables.anchors import anchors
from benchmarks.tables.candidates import candidates
from benchmarks.tables.every_mode import command, every_mode
from benchmarks.tables.four_bits import four_bits
from benchmarks.tables.other_projects import peers, plan_memory, workloads
from benchmarks.tables.peft_ahead import peft_ahead
from benchmarks.tables.result_files import measured, of_each, ratio, results
from benchmarks.tables.two_gpus import two_gpus
from benchmarks.tables.whole_models import experts, vlm


def parity() -> list[str]:
    """Loss differences to PEFT."""
    file = results("parity-cpu")
    summary = file["summary"]
    lines = [
        f"Against real PEFT, {file['rows'][0]['steps']} optimizer steps on SmolLM2-135M in float32, the same samples in the "
        "same order, from the same initial adapter ([parity-cpu.json](../benchmarks/results/parity-cpu.json)):",
        "",
        "| adapter | trained | mean loss difference | largest | final adapters differ by |",
        "|---|---|---|---|---|",
    ]
    for kind, title in (("lora", "LoRA"), ("rslora", "rsLoRA"), ("dora", "DoRA")):
        for setting, words in (("solo", "alone"), ("shared", "beside three other jobs")):
            mean, largest, apart = (summary[f"{kind}_{setting}_{key}"] for key in ("mean", "max", "adapter"))
            lines.append(f"| {title} | {words} | {mean:.1e} | {largest:.1e} | {apart:.1e} |")
    return lines


def trl() -> list[str]:
    """TRL's losses with the one line and without it."""
    files = {name: file for name in ("trl-cpu", "trl-h200") if (file := measured(name)) is not None}
    if not files:
        return []
    links = ", ".join(f"[{name}.json](../benchmarks/results/{name}.json)" for name in files)
    steps = min(row["steps"] for file in files.values() for row in file["rows"])
    titles = {"tiny": "tiny", "wide": "two layers of Llama-3.1-8B's shape", "smollm2-135m": "SmolLM2-135M"}
    lines = [
        f"`examples/trl_sft.py`, TRL's `SFTTrainer` with `packlora.accelerate` and without it, losses of {steps} steps without "
        f"dropout ({links}); for bfloat16 also how far each is from PEFT in float32, on average:",
        "",
        "| model | device | dtype | first loss | mean difference | largest | PEFT to float32 | packlora to float32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file in files.values():
        device = "CPU" if file["device"].startswith("cpu") else file["device"]
        for row in file["rows"]:
            title = titles[row["case"]] + (", random weights" if row["random_weights"] else "")
            exact = [f"{row['to_fp32'][way]:.1e}" if "to_fp32" in row else "" for way in ("peft", "packlora")]
            lines.append(
                f"| {title} | {device} | {row['dtype']} | {row['losses_peft'][0]:.4f} | {row['mean_abs']:.1e} "
                f"| {row['max_abs']:.1e} | {exact[0]} | {exact[1]} |"
            )
    return lines


def small_updates() -> list[str]:
    """What is left of an adapter's first steps in bfloat16."""
    files = {name: file for name in ("small-updates-cpu", "small-updates-h200") if (file := measured(name)) is not None}
    links = ", ".join(f"[{name}.json](../benchmarks/results/{name}.json)" for name in files)
    lines = [
        "What is left in bfloat16 of what an adapter has learnt in its first steps (SmolLM2-135M, float32 adapters under "
        "autocast, PEFT's default): loss of the same parameters less their loss in float32, and by how much training had "
        f"lowered that ({links}):",
        "",
        "| device | adapter, steps | lowered by | PEFT: too high by | packlora: too high by |",
        "|---|---|---|---|---|",
    ]
    for file in files.values():
        device = "CPU" if file["device"].startswith("cpu") else file["device"]
        for row in file["rows"]:
            if row["steps"]:
                cells = [f"{value:.4f}" for value in (row["gained"], row["excess"]["peft"], row["excess"]["packlora"])]
                lines.append(f"| {device} | {row['kind']}, {row['steps']} | {' | '.join(cells)} |")
    return lines


def speed() -> list[str]:
    """Tokens per second against PEFT."""
    file = results("speed-cpu")
    summary = file["summary"]
    lines = [
        f"Training speed on a CPU ({file['device']}), SmolLM2-135M in float32, real tokens per second, paired in one loop "
        "([speed-cpu.json](../benchmarks/results/speed-cpu.json)):",
        "",
        "| work | packlora | PEFT, packed batches | PEFT, padded batches |",
        "|---|---|---|---|",
    ]
    for key, words in (("one_job", "one LoRA r 8 job"), ("four_jobs", "four LoRA jobs (PEFT: one after the other)")):
        own = f"{summary[f'{key}_packlora_tokens_per_s']:.0f}"
        cells = [
            f"{summary[f'{key}_peft_{peer}_tokens_per_s']:.0f} ({summary[f'{key}_vs_peft_{peer}']:.2f}x)"
            for peer in ("packed", "padded")
        ]
        lines.append(f"| {words} | {own} | {' | '.join(cells)} |")
    lines += ["", "In brackets: PEFT's time over packlora's, median over steps."]
    return lines


def means(T: int, keys: list[str], summary: dict[str, Any]) -> list[str]:
    """Rows of a table of layers: geometric means, and those of the GPU alone, where the host is ahead of it."""
    lines = [f"| geometric mean, {T} | | {' | '.join(ratio(summary.get(key)) for key in keys)} |"]
    if f"ahead_{keys[0]}" in summary:
        cells = " | ".join(ratio(summary.get(f"ahead_{key}")) for key in keys)
        lines.append(f"| the same, host ahead of the GPU | | {cells} |")
    return lines


def layer() -> list[str]:
    """One layer over the frozen layer, and over PEFT."""
    file = measured("layer-h200")
    if file is None:
        return []
    summary = file["summary"]
    names = {
        "packlora": "packlora", "packlora_fp32": "packlora, fp32 adapters", "peft_bf16": "PEFT",
        "peft_compiled": "PEFT, torch.compile", "peft_fp32_autocast": "PEFT, fp32 adapters",
    }  # fmt: skip
    lines = [
        f"One linear layer with LoRA r 16, dropout 0.1, on one {file['device']}, bfloat16: time of forward and backward over "
        "that of the same frozen layer, forward and input gradient "
        "([layer-h200.json](../benchmarks/results/layer-h200.json)):",
        "",
        f"| inputs x outputs, tokens | frozen, ms | {' | '.join(names.values())} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for T in (8192, 2048):
        for row in file["rows"]:
            if row["main"] and row["T"] == T:
                cells = [ratio(row["over_frozen"].get(name)) for name in names]
                lines.append(f"| {row['K']} x {row['N']}, {T} | {row['ms']['frozen']:.3f} | {' | '.join(cells)} |")
        keys = [f"over_frozen_T{T}_geomean" + ("" if name == "packlora" else f"_{name}") for name in names]
        lines += means(T, keys, summary)
    lines += ["", "![throughput over tokens](../benchmarks/results/layer-h200-throughput.svg)"]
    if summary["worst_vs_peft"] is not None:
        lines += [
            "",
            f"Over all {len(file['rows'])} cases of that file (ranks to 384, with and without dropout, 2048 to 16384 tokens) "
            f"packlora is at least {summary['worst_vs_peft']:.2f}x as fast as the fastest way of PEFT "
            f"(least at {summary['worst_vs_peft_case']}).",
        ]
    return lines


LORAFUSION_TRAFFIC = {4096: 0.626, 5120: 0.663, 8192: 0.765}
"""Bytes that LoRAFusion moves over those of eager PEFT, as published (arXiv 2510.00206), by K = N."""


def traffic() -> list[str]:
    """Bytes moved, over those of PEFT."""
    file = measured("traffic-h200")
    if file is None:
        return []
    summary = file["summary"]
    lines = [
        f"Bytes that one forward and backward of a layer moves between the GPU and its memory, over those of PEFT, counted by "
        f"ncu on one {file['device']} (8192 tokens, r 16, dropout 0.1; "
        "[traffic-h200.json](../benchmarks/results/traffic-h200.json)):",
        "",
        "| inputs x outputs | frozen layer | packlora | LoRAFusion, published |",
        "|---|---|---|---|",
    ]
    for width, published in LORAFUSION_TRAFFIC.items():
        own = [f"{summary[f'{name}_of_eager_{width}']:.2f}" for name in ("frozen", "packlora")]
        lines.append(f"| {width} x {width} | {' | '.join(own)} | {published:.2f} |")
    return lines


def multi() -> list[str]:
    """Four adapters in one batch over the frozen layer."""
    file = measured("multi-h200")
    if file is None:
        return []
    names = {"packlora": "packlora", "peft_bf16": "PEFT", "peft_fp32_autocast": "PEFT, fp32 adapters"}
    lines = [
        f"Four adapters in one batch (ranks 8, 16, 32, 64) on one {file['device']}, time over that of the frozen layer; PEFT "
        "runs one adapter after the other ([multi-h200.json](../benchmarks/results/multi-h200.json)):",
        "",
        f"| inputs x outputs, tokens | frozen, ms | {' | '.join(names.values())} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for T in (8192, 2048):
        for row in file["rows"]:
            if row["T"] == T:
                cells = [ratio(row["over_frozen"].get(name)) for name in names]
                lines.append(f"| {row['K']} x {row['N']}, {T} | {row['ms']['frozen']:.3f} | {' | '.join(cells)} |")
        keys = [f"over_frozen_T{T}_geomean" + ("" if name == "packlora" else f"_{name}") for name in names]
        lines += means(T, keys, file["summary"])
    return lines


def graphs() -> list[str]:
    """RunLoRA's settings over the frozen model, one device after the other."""
    return of_each("graphs-h200", "graphs-h100", section=_graphs)


def _graphs(name: str, file: dict[str, Any]) -> list[str]:
    names = {
        "packlora": "packlora", "packlora_merged": "packlora, merged (rounds more)", "peft_bf16": "PEFT",
        "peft_fp32_autocast": "PEFT, fp32 adapters",
    }  # fmt: skip
    titles = {"llama60m": "Llama 60M", "llama250m": "Llama 250M", "llama1_3b": "Llama 1.3B"}
    lines = [
        f"Whole models in RunLoRA's settings on one {file['device']}, time of a step over that of the frozen model "
        f"([{name}.json](../benchmarks/results/{name}.json)):",
        "",
        f"| model, rank | frozen, ms | {' | '.join(names.values())} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for row in file["rows"]:
        cells = [ratio(row["over_frozen"].get(own)) for own in names]
        lines.append(f"| {titles[row['case']]}, r {row['r']} | {row['ms']['frozen']:.0f} | {' | '.join(cells)} |")
    return lines


def model() -> list[str]:
    """A whole model and single decoder layers over the frozen ones."""
    file = measured("model-h200")
    if file is None:
        return []
    lines = [
        f"Llama-3.1-8B's shape, 4 x 2048 tokens on one {file['device']}, forward and backward; LoRA r 16 with dropout 0.1, "
        "DoRA r 384 ([model-h200.json](../benchmarks/results/model-h200.json)):",
        "",
        "| | ms | over frozen | peak GiB |",
        "|---|---|---|---|",
    ]
    for row in file["rows"]:
        if row["kind"] != "model":
            continue
        tail = ", checkpointing" if row["checkpointing"] else ""
        kind = "DoRA" if row.get("dora") else "LoRA"
        titles = {
            "frozen": "frozen", "packlora": f"packlora, {kind}",
            "packlora_recompute": f"packlora, {kind}, recompute=True, keep_outputs=True",
            "peft_bf16": f"PEFT, {kind}",
        }  # fmt: skip
        if row.get("dora"):
            titles |= {
                "packlora_stepped": "packlora, DoRA, norms in every pass",
                "peft_fp32_autocast": "PEFT, DoRA, fp32 adapters",
            }
        for name, title in titles.items():
            if name in row["ms"]:
                over = "1" if name == "frozen" else ratio(row["over_frozen"].get(name))
                lines.append(f"| {title}{tail} | {row['ms'][name]:.0f} | {over} | {row['gib'][name]:.1f} |")
            elif name in row["failed"]:
                lines.append(f"| {title}{tail} | failed | | |")
    if measured("model-profile-h200") is not None:
        lines += ["", "By kernel: [model-profile-h200.json](../benchmarks/results/model-profile-h200.json)."]
    lines += [
        "",
        "One decoder layer, time over that of the frozen layer:",
        "",
        "| layer, tokens | packlora | PEFT |",
        "|---|---|---|",
    ]
    for row in file["rows"]:
        if row["kind"] == "layer":
            cells = " | ".join(ratio(row["over_frozen"].get(name)) for name in ("packlora", "peft_bf16"))
            lines.append(f"| {row['shape']}, {row['T']} | {cells} |")
    return lines


def dora() -> list[str]:
    """DoRA layers over the frozen layer, the norm, the protocol of Scaling-DoRA, and how DoRA trains."""
    file = measured("dora-h200")
    if file is None:
        return []
    names = {
        "packlora_accelerate": "`packlora.accelerate`", "packlora": "the operator by itself",
        "packlora_stepped": "the operator, norm in every pass", "peft_bf16": "PEFT",
        "peft_fp32_autocast": "PEFT, fp32 adapters", "paper": "Scaling-DoRA's formulas",
    }  # fmt: skip
    lines = [
        f"One linear layer with DoRA on one {file['device']}, bfloat16, 8192 tokens, time over that of the frozen layer; in "
        "brackets of the GPU alone, with the host ahead of it, and on the wall "
        "([dora-h200.json](../benchmarks/results/dora-h200.json)):",
        "",
        f"| inputs x outputs, rank | frozen, ms | {' | '.join(names.values())} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for row in file["rows"]:
        if row["part"] == "layer" and row["T"] == 8192 and not row["dropout"]:
            others = [row[key] for key in ("ahead_over_frozen", "wall_over_frozen") if key in row]
            cells = [
                ratio(row["over_frozen"].get(name))
                + (f" ({', '.join(found)})" if (found := [ratio(of[name]) for of in others if name in of]) else "")
                for name in names
            ]
            lines.append(f"| {row['K']} x {row['N']}, r {row['r']} | {row['ms']['frozen']:.3f} | {' | '.join(cells)} |")
    return [*lines, *_dora_norm(file["summary"]), *_dora_models(file["rows"]), *_dora_quality()]


def _dora_norm(summary: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for start, words in (("", "with the host's launches"), ("ahead_", "of the GPU alone")):
        if summary.get(f"{start}norm_refresh_us") is not None:
            peers = ", ".join(
                f"{title} {summary[key]:.0f}"
                for title, name in (
                    ("PEFT", "peft_identity"),
                    ("dense", "dense"),
                    ("factored in fp32", "factored_fp32"),
                )
                if summary.get(key := f"{start}norm_refresh_{name}_us") is not None
            )
            own = f"{summary[f'{start}norm_refresh_us']:.0f} us"
            lines += ["", f"The norm of a 4096 x 4096 layer at r 384, {words}: {own} ({peers})."]
    return lines


def _dora_models(rows: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for part, words in (
        ("paper-model", "in the protocol of Scaling-DoRA (4096 tokens, checkpointing, loss on the last 1024)"),
        ("inference", "the forward alone, in eval mode (4096 tokens, logits of the last 1024)"),
    ):
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            lines += [
                "",
                f"Qwen3-8B's shape {words}, ms (peak GiB):",
                "",
                "| rank | frozen | packlora | PEFT | packlora, fp32 adapters | PEFT, fp32 adapters |",
                "|---|---|---|---|---|---|",
            ]
        for row in chosen:
            cells = [
                (f"{row['ms'][name]:.0f}" if name in row["ms"] else "failed")
                + (f" ({row['gib'][name]:.1f})" if name in row["gib"] else "")
                for name in ("frozen", "packlora", "peft_bf16", "packlora_fp32", "peft_fp32_autocast")
            ]
            lines.append(f"| {row['r']} | {' | '.join(cells)} |")
    return lines


REGIMES = {
    "fp32": "float32", "bf16": "bfloat16", "bf16_autocast": "bfloat16, adapters in float32 under autocast", "fp16": "float16",
}  # fmt: skip


def _dora_quality() -> list[str]:
    lines: list[str] = []
    for device in ("cpu", "h200"):
        if (run := measured(f"dora-convergence-{device}")) is not None:
            figures, where = run["summary"], "CPU, float32" if device == "cpu" else f"{run['device']}, bfloat16"
            steps, over = min(len(row["losses_peft"]) for row in run["rows"]), figures.get("convergence_over_noise")
            lines += [
                "",
                f"Losses beside PEFT's, SmolLM2-135M, {steps} steps of {len(run['rows'])} seed(s) on "
                f"{where}: mean difference {figures['convergence_mean_abs']:.1e}, largest {figures['convergence_max_abs']:.1e}"
                + (
                    f"; the mean is {over:.2f} times that of two runs of PEFT's that differ in the order of sums alone, whose "
                    f"largest is {figures['convergence_noise_max_abs']:.1e}"
                    if over
                    else ""
                )
                + f" ([dora-convergence-{device}.json](../benchmarks/results/dora-convergence-{device}.json)).",
            ]
    if (file := measured("dora-fidelity-h200")) is not None:
        lines += [
            "",
            "Logits with DoRA, B and magnitudes away from their first values, SmolLM2-135M: how far the cosine to the exact "
            "logits is from 1, in the mean over tokens (for the worst one) "
            "([dora-fidelity-h200.json](../benchmarks/results/dora-fidelity-h200.json)):",
            "",
            "| dtype | packlora | PEFT | the model without an adapter |",
            "|---|---|---|---|",
        ]
        for row in file["rows"]:
            cells = [
                f"{1 - row[pair]['mean']:.1e} ({1 - row[pair]['min']:.1e})"
                for pair in ("packlora_exact", "peft_exact", "base_exact")
            ]
            lines.append(f"| {REGIMES[row['case']]} | {' | '.join(cells)} |")
    return lines


SHORT_JOBS = {"short-jobs-h200": "Llama-3.1-8B's shape", "short-jobs-06b-h200": "Qwen3-0.6B's shape"}
"""Results by name, with the model."""


def short_jobs() -> list[str]:
    """Four jobs of short samples at once against PEFT one after the other."""
    files = {name: file for name in SHORT_JOBS if (file := measured(name)) is not None}
    if not files:
        return []
    sources = ", ".join(f"[{name}.json](../benchmarks/results/{name}.json)" for name in files)
    ways = ("packed", "rows", "padded")
    lines = [
        f"Training four jobs of short samples (ranks 8 to 64) at once on one {next(iter(files.values()))['device']}, real "
        f"tokens per second, optimizer steps included ({sources}). PEFT trains one job after the other: packed into rows that "
        "keep samples apart; in equal rows of 1024 tokens that do not, the easiest for it; padded. All of PEFT's ways here "
        f"run from the host; compiled it is several times as fast on a small model, see [below](#{anchor('every_mode')}):",
        "",
        "| | packlora | PEFT, packed | PEFT, rows cut without regard to samples | PEFT, padded |",
        "|---|---|---|---|---|",
    ]
    for name, file in files.items():
        summary = file["summary"]
        peers = [
            f"{summary[f'peft_{way}_tokens_per_s']:.0f} ({summary[f'throughput_vs_peft_{way}']:.2f}x)"
            if f"throughput_vs_peft_{way}" in summary
            else "-"
            for way in ways
        ]
        lines.append(f"| {SHORT_JOBS[name]} | {summary['packlora_tokens_per_s']:.0f} | {' | '.join(peers)} |")
    return lines


def schedule() -> list[str]:
    """The scheduler: time, quality, simulated bubbles."""
    file = measured("schedule-cpu")
    if file is None:
        return []
    summary = file["summary"]
    bubbles = " | ".join(
        f"{summary[key]:.1%}"
        for key in ("bubble_1job_4stages", "bubble_2jobs_4stages", "bubble_3jobs_4stages", "bubble_4jobs_4stages")
    )
    return [
        f"The scheduler on a CPU ({file['device']}; [schedule-cpu.json](../benchmarks/results/schedule-cpu.json)): "
        f"25,600 samples of four jobs on four stages in {summary['solve_s_25600']:.1f} s, 10^6 samples in "
        f"{summary['solve_s_1e6']:.0f} s with {summary['rss_mib_1e6']:.0f} MiB; {summary['at_bound_fraction']:.1%} of the "
        "batches at their lower bound. Idle share of a simulated pipeline of four stages, Llama-3.1-70B's shape, estimated "
        "lengths (LoRAFusion publishes figures that were measured, on other lengths):",
        "",
        "| | 1 job | 2 jobs | 3 jobs | 4 jobs |",
        "|---|---|---|---|---|",
        f"| packlora, simulated | {bubbles} |",
        "| LoRAFusion, published | 44.2% | 15.0% | 12.2% | 11.1% |",
        "",
        "![bubble by number of jobs](../benchmarks/results/schedule-cpu-bubble.svg)",
    ]


SECTIONS = (
    anchors,
    peft_ahead,
    parity,
    trl,
    small_updates,
    speed,
    layer,
    traffic,
    multi,
    graphs,
    model,
    four_bits,
    dora,
    experts,
    vlm,
    short_jobs,
    every_mode,
    command,
    candidates,
    two_gpus,
    schedule,
    peers,
    workloads,
    plan_memory,
)
"""Of docs/benchmarks.md, in order."""
TITLES = {
    "anchors": "One job beside what people use",
    "peft_ahead": "Where PEFT is ahead",
    "parity": "Losses beside PEFT's",
    "trl": "With TRL",
    "small_updates": "First steps in bfloat16",
    "speed": "Training on a CPU",
    "layer": "One layer",
    "traffic": "Memory traffic",
    "multi": "Four adapters in one batch",
    "graphs": "Small models",
    "model": "An 8B model",
    "four_bits": "A model of 4-bit weights",
    "dora": "DoRA",
    "experts": "A model with experts",
    "vlm": "A vision-language model",
    "short_jobs": "Four jobs of short samples",
    "every_mode": "Small models in every mode",
    "command": "The command, from start to end",
    "candidates": "Candidates of a sweep",
    "two_gpus": "Two GPUs",
    "schedule": "The scheduler",
    "peers": "Other projects' kernels",
    "workloads": "LoRAFusion's workloads",
    "plan_memory": "Predicted memory",
}
"""Headings, by section."""


def anchor(section: str) -> str:
    return re.sub("[^a-z0-9-]", "", TITLES[section].lower().replace(" ", "-"))
