"""The section of docs/benchmarks.md on a model of 4-bit weights."""

from __future__ import annotations

from typing import Any

from benchmarks.quantised import DORA_RANK
from benchmarks.tables.result_files import measured, ratio

NAMES = {
    "frozen": "frozen", "packlora": "packlora", "peft_bnb": "PEFT with bitsandbytes",
    "sequential": "packlora, one job after the other",
}  # fmt: skip
ADAPTERS = {False: "LoRA r 16", True: "DoRA r 64"}


def four_bits() -> list[str]:
    """Every case, and how far the losses are from PEFT's."""
    file = measured("quantised-h200")
    if file is None:
        return []
    summary = file["summary"]
    lines = [
        f"Llama-3.1-8B's shape in bitsandbytes' NF4 with double quantisation on one {file['device']}, forward and backward of "
        "8192 tokens in bfloat16, without dropout ([quantised-h200.json](../benchmarks/results/quantised-h200.json)). PEFT "
        "runs over bitsandbytes' layers as they are. Four jobs have 2048 tokens each:",
        "",
        "| work | | ms | over frozen | peak GiB |",
        "|---|---|---|---|---|",
        *(line for row in file["rows"] for line in _of(row)),
        "",
        f"One job is {ratio(summary['one_job_vs_peft_bnb'])}x as fast as under PEFT with LoRA and "
        f"{ratio(summary['dora_r64_one_job_vs_peft_bnb'])}x with DoRA; four jobs together, for which each weight is made of "
        f"its codes once, {ratio(summary['four_jobs_vs_sequential'])}x and "
        f"{ratio(summary['dora_r64_four_jobs_vs_sequential'])}x as fast as one after the other.",
        f"Losses of ten steps on one sample, which fall from 12.6 to near 0, differ from PEFT's by "
        f"{summary['loss_mean_abs_vs_peft']:.1e} on average with LoRA and {summary['dora_r64_loss_mean_abs_vs_peft']:.1e} with "
        "DoRA. Both round in bfloat16; the goal, 1e-3, is missed. In float32 on a CPU they are equal (a test).",
        *_from_float32(summary),
    ]
    return lines


def _from_float32(summary: dict[str, Any]) -> list[str]:
    """How far each side is from float32, where that was measured."""
    if "loss_mean_abs_vs_float32" not in summary:
        return []
    ours, theirs = (
        [summary[f"{start}{who}loss_mean_abs_vs_float32"] for start in ("", f"dora_r{DORA_RANK}_")]
        for who in ("", "peft_")
    )
    return [
        f"From float32 over the same codes packlora is {ours[0]:.1e} away with LoRA and {ours[1]:.1e} with DoRA, PEFT "
        f"{theirs[0]:.1e} and {theirs[1]:.1e}."
    ]


def _of(row: dict[str, Any]) -> list[str]:
    title = f"{'four jobs' if row['jobs'] > 1 else 'one job'}, {ADAPTERS[row['dora']]}"
    return [
        f"| {title} | {NAMES[name]} | {ms:.0f} | {ratio(row['over_frozen'].get(name, 1.0))} | {row['gib'][name]:.1f} |"
        for name, ms in row["ms"].items()
    ]
