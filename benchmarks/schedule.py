"""`schedule`: microbatch counts, bounds, simulated bubbles and planning time, beside LoRAFusion's published figures.

No GPU takes part: bubbles are simulated with the analytic cost of a 70B-like model, whose last stage also holds the output
layer. Planning time and memory are measured, each in a process of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.planning import (
    BATCH,
    CAPACITY,
    SETS,
    STAGES,
    are_estimates,
    check_causality,
    make_cost,
    make_jobs,
    planning_time,
    random_order,
)
from packlora.pipeline.timeline import simulate
from packlora.schedule.planner import Planner

PUBLISHED: dict[str, Any] = {"bubble_by_jobs": {1: 0.4417, 2: 0.15, 3: 0.1223, 4: 0.1109}, "bubble_mlora": 0.3411}
"""LoRAFusion's figures (arXiv 2510.00206)."""


def schedule_cases(options: Options) -> list[Case]:
    sets, stages = (["mix"], [4]) if options.quick else (list(SETS), [1, 2, 4, 8])
    out = [
        case(f"shape {name} S{stage} {method}", part="shape", lengths=name, jobs=4, stages=stage, method=method)
        for name in sets
        for stage in stages
        for method in (("auto",) if options.quick else ("solo", "auto"))
    ]
    for jobs in (1, 4) if options.quick else (1, 2, 3, 4):
        for method in ("auto", "random"):
            out.append(
                case(
                    f"jobs {jobs} S{STAGES} {method}",
                    part="jobs",
                    lengths="mix",
                    jobs=jobs,
                    stages=STAGES,
                    method=method,
                )
            )
    times = (640,) if options.quick else (640, 1280, 2560, 6400, 12800, 25600, 1_000_000)
    return [*out, *(case(f"time {samples}", part="time", samples=samples, lengths="mix") for samples in times)]


def measure_schedule(one: Case, names: list[str], options: Options) -> Row:
    """Plan, prove, simulate and count once."""
    if one.part == "time":
        return {"estimates": True, **planning_time(one.samples), "failed": {}}
    kinds = SETS[one.lengths][: one.jobs]
    jobs, cost = make_jobs(kinds, 64 if options.quick else 1000), make_cost(one.stages)
    row: Row = {"estimates": are_estimates(kinds), "capacity": CAPACITY, "global_batch_size": BATCH, "failed": {}}
    begun = time.perf_counter()
    if one.method == "random":
        plan = random_order(jobs, CAPACITY, one.stages)
    else:
        planner = Planner(jobs, CAPACITY, lag=one.stages, cost=cost, method=one.method)
        windows = list(planner.windows())
        plan = [microbatch for window in windows for microbatch in window.microbatches]
        reports = [window.report for window in windows]
        packs = [pack for report in reports for pack in report.packs]
        row |= {
            "bound": sum(report.bound for report in reports), "packs": len(packs),
            "packs_at_bound": sum(pack.at_bound for pack in packs), "stopped": dict(Counter(pack.stopped for pack in packs)),
        }  # fmt: skip
    noops = sum(microbatch.is_noop for microbatch in plan)
    row |= {"seconds": time.perf_counter() - begun, "microbatches": len(plan) - noops, "noops": noops}
    timeline = simulate(plan, cost)
    if one.method != "random":
        check_causality(timeline, plan, one.stages)
    return row | {"time": timeline.makespan, "bubble": timeline.bubble}


def schedule_summary(rows: list[Row]) -> Row:
    auto = [row for row in rows if row["part"] == "shape" and row["method"] == "auto"]
    packs = sum(row["packs"] for row in auto)
    out: Row = {"at_bound_fraction": sum(row["packs_at_bound"] for row in auto) / packs if packs else None}
    for row in rows:
        if row["part"] == "jobs":
            end = "" if row["method"] == "auto" else "_random_order"
            out[f"bubble_{row['jobs']}job{'s' * (row['jobs'] > 1)}_{STAGES}stages{end}"] = row["bubble"]
        elif row["part"] == "time":
            samples = "1e6" if row["samples"] == 10**6 else row["samples"]
            out[f"solve_s_{samples}"], out[f"rss_mib_{samples}"] = row["seconds"], row["rss_mib"]
    return out


def plot_bubbles(rows: list[Row], out: Path) -> None:
    """The bubble by number of jobs: the picture of docs/benchmarks.md."""
    from matplotlib.figure import Figure

    mine = {method: {row["jobs"]: row["bubble"] for row in rows if row["part"] == "jobs" and row["method"] == method}
            for method in ("auto", "random")}  # fmt: skip
    counts = sorted(mine["auto"])
    bars = {
        "random order (simulated)": ("#8a8a8a", mine["random"]),
        "LoRAFusion (published, measured by its authors)": ("#d9822b", PUBLISHED["bubble_by_jobs"]),
        "packlora (simulated)": ("#0b6e99", mine["auto"]),
    }
    figure = Figure(figsize=(6.4, 3.6))
    panel = figure.subplots()
    for place, (title, (colour, heights)) in enumerate(bars.items()):
        at = [n + (place - 1) * 0.27 for n in range(len(counts))]
        drawn = panel.bar(at, [100 * heights[count] for count in counts], 0.25, color=colour, label=title)
        panel.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    level = 100 * PUBLISHED["bubble_mlora"]
    panel.axhline(level, color="#b5483a", linestyle=":", linewidth=1)
    panel.text(len(counts) - 0.55, level + 0.6, "mLoRA (published)", fontsize=7, ha="right")
    panel.set_xticks(range(len(counts)), [f"{count} job{'s' * (count > 1)}" for count in counts])
    panel.set(ylabel="pipeline bubble, %", title="4 stages, 70B shape, mixed lengths (estimates)")
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
    figure.savefig(out.with_name(f"{out.stem}-bubble.svg"), bbox_inches="tight")


SCHEDULE = Benchmark(
    schedule_cases, measure_schedule, schedule_summary,
    "Four jobs of 1000 samples (LoRAFusion's number), global batches of 16 samples, microbatches of at most 4096 "
    "tokens, seeds fixed. Lengths of XSum, CNN/DM and WikiSum are drawn from ESTIMATED log-normal fits (rows with "
    "estimates: true), those of `real` from percentiles of measured data sets; all are cut at 4096 tokens. "
    "at_bound: global batches of a group that open no more microbatches than a lower bound says they must. bubble: "
    "idle part of the stages' time of the whole run in a simulated 1F1B pipeline without flushes, from the first "
    "forward to the last backward; costs are analytic (FLOPs at half of an H100's peak, weights read once per "
    "microbatch, activation checkpointing), layers are cut by packlora.pipeline.estimate.balance. random: each round's "
    "samples in random order, cut where the next one does not fit. Every plan is proved valid and its simulated "
    "timeline checked for causality. seconds: wall time of all windows, made one by one, proof included; of part "
    "time in a process of its own, whose peak memory above its start is rss_mib; cpu_s: its CPU time.",
    ["packlora"], by_case=True, where="cpu", plot=plot_bubbles,
)  # fmt: skip
