"""`python -m benchmarks schedule`: microbatch counts, gaps, bubbles and planning time, beside LoRAFusion's published figures.

    python -m benchmarks schedule --out benchmarks/results/schedule-cpu.json

No GPU takes part: bubbles are simulated with the analytic cost of an 8B- and a 70B-like model, whose last stage also holds the
output layer. Planning time and memory are measured, each in a process of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import check_writable, text_table, write_results
from benchmarks.schedule_cases import (
    SETS,
    Job,
    are_estimates,
    efficiency,
    make_cost,
    make_jobs,
    random_order,
)
from benchmarks.schedule_plots import write_plots
from benchmarks.schedule_time import BATCH, CAPACITY, STAGES, measure
from packlora.schedule.planner import Planner
from packlora.schedule.simulate import check_causality, simulate

PROTOCOL = (
    "Four jobs of 1000 samples (the paper's number), global batches of 16 samples, microbatches of at most 4096 tokens, "
    "seeds fixed. Lengths of XSum, CNN/DM and WikiSum are drawn from ESTIMATED log-normal fits (rows with estimates: true),"
    " those of `real` from percentiles of measured data sets; all are cut at 4096 tokens. at_bound: global batches of a "
    "group that open no more microbatches than a lower bound says they must. gap: slots, no-ops included, above the lower "
    "bound of the whole window. part ablation: the five workloads with 160 samples a job; greedy: no integer programs; "
    "milp: them everywhere; apart: each round planned alone, so that no tail of a global batch is merged with the next; "
    "time: of the simulated run. bubble: idle part of the stages' time of the whole run in a simulated 1F1B pipeline "
    "without flushes, from the first forward to the last backward; costs are analytic (FLOPs at half of an H100's peak, "
    "weights read once per microbatch, activation checkpointing), layers are cut by packlora.schedule.cost.balance where "
    "balanced is true. of_ideal: time with full microbatches, equal stages and no bubble over the simulated time. random: "
    "each round's samples in random order, cut where the next one does not fit. Every plan is proved valid and its "
    "simulated timeline checked for causality. seconds: wall time of all windows, made one by one, proof included; in a "
    "process of its own, whose peak memory above its start is rss_mib; cpu_s: its CPU time and its children's. published: "
    "LoRAFusion (arXiv 2510.00206), on its authors' machines and lengths; not measured here."
)
PUBLISHED: dict[str, Any] = {
    "bubble_by_jobs": {1: 0.4417, 2: 0.15, 3: 0.1223, 4: 0.1109},
    "bubble_megatron": 0.4879,
    "bubble_mlora": 0.3411,
    "seconds_by_samples": {640: 15.74, 25600: 102.12},
}
SAMPLES = (640, 1280, 2560, 6400, 12800, 25600)


def run_schedule(out: Path, quick: bool = False, plots: bool = False) -> int:
    """Measure, write the results and print tables. Returns the exit code.

    Args:
        out: the JSON file to write.
        quick: small jobs, in seconds.
        plots: also write pictures beside the file.

    Raises:
        InputError: the file cannot be written.
    """
    check_writable(out)
    rows = shape_rows(quick) + ablation_rows(quick) + job_rows(quick) + time_rows(quick)
    summary = make_summary(rows)
    if quick:
        summary = {f"part_{key}": value for key, value in summary.items()}
    print()
    for line in table(rows):
        print(line)
    write_results(out, "schedule-cpu", PROTOCOL, rows, summary)
    if plots:
        for path in write_plots(rows, PUBLISHED, out):
            print(f"wrote {path}")
    return 0


# --- rows ------------------------------------------------------------------------------------------------------------------


def shape_rows(quick: bool) -> list[dict[str, Any]]:
    """Every set of lengths on every number of stages, by every method."""
    rows = []
    for name, kinds in list(SETS.items())[3:4] if quick else SETS.items():
        for stages in (1, 4) if quick else (1, 2, 4, 8):
            for method in ("solo", "greedy", "auto"):
                jobs = make_jobs(kinds, 100 if quick else 1000, BATCH)
                rows.append(plan_row("shape", name, jobs, kinds, stages, method, "70b"))
    return rows


def ablation_rows(quick: bool) -> list[dict[str, Any]]:
    """What integer programs and merging save on LoRAFusion's five workloads. Few rounds: programs everywhere take long."""
    rows = []
    for name in ("mix",) if quick else [name for name in SETS if name != "real"]:
        jobs = make_jobs(SETS[name], 32 if quick else 160, BATCH)
        for stages in (1, STAGES):
            for method in ("greedy", "auto", "apart") if quick else ("greedy", "auto", "milp", "apart"):
                rows.append(plan_row("ablation", name, jobs, SETS[name], stages, method, "70b"))
    return rows


def job_rows(quick: bool) -> list[dict[str, Any]]:
    """Bubbles by number of jobs, four stages, mixed lengths."""
    rows: list[dict[str, Any]] = []
    for model in ("70b",) if quick else ("70b", "8b"):
        for count in (1, 2, 3, 4) if not quick else (1, 4):
            jobs = make_jobs(SETS["mix"][:count], 100 if quick else 1000, BATCH)
            for balanced in (True, False):
                for method in ("auto", "random"):
                    row = plan_row("jobs", "mix", jobs, SETS["mix"], STAGES, method, model, balanced)
                    row["published_bubble"] = PUBLISHED["bubble_by_jobs"][count]
                    rows.append(row)
    return rows


def plan_row(
    part: str,
    name: str,
    jobs: Sequence[Job],
    kinds: Sequence[str],
    stages: int,
    method: str,
    model: str,
    balanced: bool = True,
) -> dict[str, Any]:
    """Plan, simulate and count once."""
    cost = make_cost(model, stages, balanced)
    row: dict[str, Any] = {
        "part": part, "case": f"{name} {len(jobs)} jobs S{stages} {model} {method}{'' if balanced else ' even'}",
        "lengths": name, "estimates": are_estimates(kinds), "jobs": len(jobs), "stages": stages, "model": model,
        "method": method, "balanced": balanced, "capacity": CAPACITY, "global_batch_size": BATCH, "failed": {},
    }  # fmt: skip
    begun = time.perf_counter()
    if method == "random":
        plan = random_order(jobs, CAPACITY, stages)
        row["microbatches"] = sum(not microbatch.is_noop for microbatch in plan)
        row["noops"] = len(plan) - row["microbatches"]
    else:
        alone = {"method": "auto", "window_rounds": 1} if method == "apart" else {"method": method}
        planner = Planner(jobs, CAPACITY, stages=stages, cost=cost, **alone)
        windows = list(planner.windows())
        plan = [microbatch for window in windows for microbatch in window.microbatches]
        reports = [window.report for window in windows]
        packs = [pack for report in reports for pack in report.packs]
        bound = sum(report.bound for report in reports)
        row |= {
            "microbatches": sum(report.microbatches for report in reports),
            "noops": sum(report.noops for report in reports),
            "bound": bound,
            "gap": len(plan) / bound - 1,
            "packs": len(packs),
            "packs_at_bound": sum(pack.at_bound for pack in packs),
            "packs_at_bound_or_optimal": sum(pack.at_bound or pack.stopped == "optimal" for pack in packs),
            "stopped": dict(Counter(pack.stopped for pack in packs)),
            "tokens_per_microbatch": sorted({report.tokens_per_microbatch for report in reports}),
            "notes": sorted({note for report in reports for note in report.notes}),
        }
    row["seconds"] = time.perf_counter() - begun
    timeline = simulate(plan, cost, stages)
    if method != "random":
        check_causality(timeline, plan, stages)
    row |= {
        "time": timeline.makespan,
        "bubble": timeline.bubble,
        "of_ideal": efficiency(plan, cost, CAPACITY, timeline.makespan),
    }
    print(_line(row), flush=True)
    return row


def time_rows(quick: bool) -> list[dict[str, Any]]:
    """Planning time and memory over the number of samples; a million at the end."""
    wanted = [(samples, "auto", 0) for samples in ((640, 2560) if quick else SAMPLES)]
    if not quick:
        wanted += [(640, "milp", 0), (25600, "greedy", 0), (25600, "auto", 2), (100_000, "auto", 0)]
        wanted += [(1_000_000, "auto", 0)]
    rows = []
    for samples, method, workers in wanted:
        row = measure(samples, method, workers)
        row |= {
            "part": "time", "case": f"{samples} samples {method} {workers} workers", "estimates": True, "failed": {},
            "published_seconds": PUBLISHED["seconds_by_samples"].get(samples),
        }  # fmt: skip
        print(f"{row['case']}: {row['seconds']:.2f} s, {row['rss_mib']:.0f} MiB above the start", flush=True)
        rows.append(row)
    return rows


# --- what is quoted -------------------------------------------------------------------------------------------------------


def make_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """None where a figure was not measured."""
    auto = [row for row in rows if row["part"] == "shape" and row["method"] == "auto"]
    packs = sum(row["packs"] for row in auto)

    def seconds(samples: int, method: str = "auto", workers: int = 0, key: str = "seconds") -> float | None:
        wanted = (samples, method, workers)
        return next(
            (
                row[key]
                for row in rows
                if row["part"] == "time" and (row["samples"], row["method"], row["workers"]) == wanted
            ),
            None,
        )

    def bubble(jobs: int, method: str = "auto", model: str = "70b", balanced: bool = True) -> float | None:
        wanted = (jobs, method, model, balanced)
        return next(
            (
                row["bubble"]
                for row in rows
                if row["part"] == "jobs" and (row["jobs"], row["method"], row["model"], row["balanced"]) == wanted
            ),
            None,
        )

    return {
        "solve_s_25600": seconds(25600),
        "solve_s_25600_two_workers": seconds(25600, workers=2),
        "solve_s_640": seconds(640),
        "solve_s_640_milp": seconds(640, "milp"),
        "solve_s_1e6": seconds(1_000_000),
        "rss_mib_1e6": seconds(1_000_000, key="rss_mib"),
        "at_bound_fraction": sum(row["packs_at_bound"] for row in auto) / packs,
        "at_bound_or_optimal_fraction": sum(row["packs_at_bound_or_optimal"] for row in auto) / packs,
        "microbatches_over_bound_one_stage": _over(row for row in auto if row["stages"] == 1),
        **{f"bubble_{jobs}job{'s' if jobs > 1 else ''}_4stages": bubble(jobs) for jobs in (1, 2, 3, 4)},
        **{
            f"{key}_without_{what}_{stages}stage{'s' * (stages > 1)}": _without(rows, stages, key, method)
            for what, method in (("milp", "greedy"), ("merging", "apart"))
            for stages, key in ((1, "microbatches"), (STAGES, "time"))
        },
        "bubble_4jobs_4stages_8b": bubble(4, model="8b"),
        "bubble_4jobs_4stages_even_layers": bubble(4, balanced=False),
        "bubble_4jobs_4stages_random_order": bubble(4, "random"),
    }


def _without(rows: Sequence[dict[str, Any]], stages: int, key: str, method: str) -> float | None:
    """What all ablated workloads take planned in another way, over what they take as training plans them."""
    own = [row for row in rows if row["part"] == "ablation" and row["stages"] == stages]
    sums = {name: sum(row[key] for row in own if row["method"] == name) for name in (method, "auto")}
    return sums[method] / sums["auto"] if sums["auto"] else None


def _over(rows: Any) -> float | None:
    rows = list(rows)
    bound = sum(row["bound"] for row in rows)
    return sum(row["microbatches"] for row in rows) / bound if bound else None


def _line(row: dict[str, Any]) -> str:
    mark = " (lengths are estimates)" if row["estimates"] else ""
    return (
        f"{row['part']}: {row['case']}: {row['microbatches']} microbatches, {row['noops']} no-ops, "
        f"bound {row.get('bound', '-')}, bubble {row['bubble']:.2%}, {row['seconds']:.2f} s{mark}"
    )


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for the terminal."""
    planned = [row for row in rows if "bubble" in row]
    lines = text_table(
        ["part, case", "microbatches", "no-ops", "bound", "at bound", "bubble", "published", "of ideal", "s"],
        [
            [
                f"{row['part']}: {row['case']}{' *' if row['estimates'] else ''}", str(row["microbatches"]),
                str(row["noops"]), str(row.get("bound", "")),
                f"{row['packs_at_bound'] / row['packs']:.1%}" if row.get("packs") else "", f"{row['bubble']:.2%}",
                f"{row['published_bubble']:.2%}" if "published_bubble" in row else "", f"{row['of_ideal']:.1%}",
                f"{row['seconds']:.2f}",
            ]
            for row in planned
        ],
    )  # fmt: skip
    timed = [row for row in rows if row["part"] == "time"]
    lines += ["", "* lengths are estimates, see protocol", ""]
    lines += text_table(
        ["planning", "s", "CPU s", "published s", "first window s", "MiB above start"],
        [
            [
                row["case"], f"{row['seconds']:.2f}", f"{row['cpu_s']:.2f}",
                f"{row['published_seconds']:.2f}" if row["published_seconds"] else "", f"{row['first_window_s']:.2f}",
                f"{row['rss_mib']:.0f}",
            ]
            for row in timed
        ],
    )  # fmt: skip
    return lines
