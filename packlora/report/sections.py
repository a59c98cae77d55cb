"""Static sections of the page of a run (words, tables and drawings), as HTML by the name of their place on the page.

charts.py has the scales and marks, cells.py the texts, run_files.py the files. Curves are drawn in the browser from the numbers
of series.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from packlora.changes import shown_of
from packlora.errors import plural
from packlora.report import charts
from packlora.report.cells import SYMBOLS, UNKNOWN, badge, change, duration, mean, row, short, size, sub, table
from packlora.report.follow import Line
from packlora.report.metrics import PIPELINE
from packlora.report.microbatches import microbatches, schedule
from packlora.report.run_files import JobFiles, RunFiles, is_number, number_at

COLUMNS = (
    "Kind", "r", "&alpha;", "Dropout", "Learning rate", "Steps", "Training loss", "Held-out loss", "Tokens", "Trainable",
    "Status",
)  # fmt: skip
"""Columns of the table of jobs after the name."""
RECENT = 20
"""Steps of a job from which the time that it still takes is told."""


# --- the parts of the page ---------------------------------------------------------------------------------------------


def parts(run: RunFiles) -> dict[str, str]:
    """HTML by the name of its place; empty where there is nothing to say."""
    nothing = "No optimizer step has finished yet; the curves appear here."
    styles = {job.name: job.style for job in run.jobs}
    return {
        "title": f"{run.name} · {run.status} · packlora",
        "header": _header(run),
        "tiles": _tiles(run),
        "warnings": _warnings(run),
        "sweep": "" if (shown := shown_of(run.folder)) is None else shown.section(run.folder, styles),
        "legend": legend(run),
        "nothing": "" if run.has_steps else f'<p class="empty">{nothing}</p>',
        "jobs": job_table(run),
        "completions": _completions(run),
        "microbatches": microbatches(run),
        "schedule": schedule(run),
        "pipeline": _pipeline(run, styles),
        "lengths": _lengths(run),
        "reproducibility": _reproducibility(run),
    }


def _completions(run: RunFiles) -> str:
    if not any(job.config.get("rollout") for job in run.jobs):
        return ""
    page = import_module("packlora.rl.page")
    found: str = page.section(run.folder, [(job.name, job.style) for job in run.jobs if job.config.get("rollout")])
    return found


def _pipeline(run: RunFiles, styles: dict[str, str]) -> str:
    if not (run.folder / PIPELINE).exists():
        return ""
    found: str = import_module("packlora.pipeline.page").section(run.folder, styles)
    return found


def base_of(run: RunFiles) -> str:
    """Name of the run's base model; of a folder its last part."""
    name = str(run.config.get("base_model") or "")
    return Path(name).name if name.startswith((".", "/", "~")) else name


def _header(run: RunFiles) -> str:
    about = run.about.get("model") or {}
    facts = [
        base_of(run),
        f"{short(about['parameters'])} frozen parameters" if about.get("parameters") else "",
        about.get("type"),
        run.config.get("dtype"),
        run.about.get("device"),
        f"started {_time(run.about['created'])}" if run.about.get("created") else "",
    ]
    line = "".join(f"<span>{escape(str(fact))}</span>" for fact in facts if fact)
    name = f"{escape(run.name)} {badge(run.status)}"
    return f'<header><p class="over">packlora run</p><h1>{name}</h1><p>{line}</p></header>'


def _time(value: Any) -> str:
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return str(value)


@dataclass(frozen=True, slots=True)
class Figures:
    """Headline figures of a run. total: steps of all jobs; 0 where they are not known. peak: bytes, so far while it trains.
    left: seconds until the last job in training is done; None where that is not known."""

    steps: int
    total: int
    tokens: int
    seconds: float
    peak: int | None
    left: float | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def figures(run: RunFiles) -> Figures:
    """Headline figures of a run from its files."""
    left = [_time_left(job) for job in run.jobs if run.status_of(job) == "running"]
    seen = (int(number_at(line, "memory")) for line in run.microbatches)
    return Figures(
        steps=sum(job.step for job in run.jobs),
        total=sum(int(job.info.get("steps") or 0) for job in run.jobs),
        # the result of a resumed run counts from where it was resumed, the metrics from the beginning
        tokens=max(int(run.result.get("tokens") or 0), sum(job.tokens for job in run.jobs)),
        seconds=max(float(run.result.get("seconds") or 0.0), run.elapsed),
        peak=run.result.get("peak_memory_bytes") or max(seen, default=0) or None,
        left=None if not left or None in left else max(filter(None, left), default=0.0),
    )


def _time_left(job: JobFiles) -> float | None:
    """Seconds that a job still takes if it keeps the pace of its last steps; None where it has none yet."""
    last, total = job.metrics[-RECENT:], int(job.info.get("steps") or 0)
    if len(last) < 2 or not total:
        return None
    steps, seconds = (number_at(last[-1], key) - number_at(last[0], key) for key in ("step", "elapsed"))
    return max(0, total - job.step) * max(0.0, seconds) / max(1.0, steps)


def _tiles(run: RunFiles) -> str:
    known = figures(run)
    states = [run.status_of(job) for job in run.jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in SYMBOLS if state in states)
    held = sum(sum(line["tokens"].values()) for line in run.microbatches)
    room = sum(line["capacity"] for line in run.microbatches)
    where = "of the process" if str(run.about.get("device")).startswith("cpu") else "on the GPU"
    so_far = "" if run.result else "so far"
    shares = [line["gpu"] for line in run.microbatches if is_number(line.get("gpu"))]
    busy = f"GPU busy {100 * sum(shares) / len(shares):.0f} %" if shares else ""
    tiles = [
        ("Jobs", f"{len(run.jobs)}", counts),
        ("Optimizer steps", f"{known.steps:,}", f"of {known.total:,}" if known.total else ""),
        ("Tokens", short(known.tokens), f"{known.tokens:,}" if known.tokens >= 1e5 else "trained on"),
        ("Tokens per second", f"{known.rate:,.0f}" if known.seconds else UNKNOWN, busy or "over the whole run"),
        ("Microbatch fill", f"{100 * held / room:.1f} %" if room else UNKNOWN,
         f"padding 0, {plural(len(run.microbatches), 'microbatch', 'es')}" if room else ""),
        ("Peak memory", size(known.peak) if known.peak else UNKNOWN, f"{where} {so_far}" if known.peak else "known at the end"),
        ("Wall time", duration(known.seconds) if known.seconds else UNKNOWN, so_far),
    ]  # fmt: skip
    if known.left is not None:
        tiles[-1] = ("Time left", duration(known.left), f"{duration(known.seconds)} so far")
    cells = (f"<div><dt>{name}</dt><dd>{value}</dd><dd class='sub'>{under}</dd></div>" for name, value, under in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _warnings(run: RunFiles) -> str:
    """Warnings at the top of the page. A failure that the run has also recorded as a warning is shown once. The early
    end of a job, as a sweep or a person has decided, is no warning and stands in the table of jobs."""
    recorded = [text for text in run.notes if run.early_end(text) is None]
    items = []
    for job in run.jobs:
        if run.status_of(job) == "failed":
            reason = str(job.result.get("failure") or "no reason is recorded")
            recorded = [text for text in recorded if repr(job.name) not in text or reason not in text]
            items.append(f'<li class="bad">✕ <b>{escape(job.name)}</b> failed: {escape(reason)}</li>')
    said = "\n".join(recorded)
    for job in run.jobs:
        for key, verb in (("truncated", "cut as too long"), ("dropped", "dropped as too long")):
            if job.info.get(key) and not re.search(f"{re.escape(repr(job.name))}.*{verb}", said):
                items.append(f"<li>⚠ <b>{escape(job.name)}</b> {plural(job.info[key], 'sample')} {verb}</li>")
    items += [f"<li>⚠ {escape(text)}</li>" for text in recorded]
    return f'<ul class="warnings" aria-label="Warnings">{"".join(items)}</ul>' if items else ""


def legend(run: RunFiles) -> str:
    """Buttons of the jobs."""
    entries = (
        f'<button type="button" class="{job.style}" data-job="{index}" aria-pressed="true">{escape(job.name)}</button>'
        for index, job in enumerate(run.jobs)
    )
    return "".join(entries)


def job_table(run: RunFiles) -> str:
    """Table of the jobs: settings, progress, losses."""
    if not run.jobs:
        return ""
    return (
        f"<section><h2>Jobs</h2>{table(('Job', *COLUMNS), [_job_row(run, job) for job in run.jobs])}"
        "<p class='caption'>Training loss: mean of the first and of the last quarter of the steps, at most ten. "
        "Held-out loss: before training, where it was evaluated, and after.</p></section>"
    )


def _of_rewards(lines: Sequence[Line], prefix: str) -> str:
    """Rewards in the last line of a job, also of preferences. prefix: of their names, eval_ for those of held-out samples."""
    line = lines[-1] if lines else {}
    names = ("reward", "rewards/accuracies", "rewards/margins")
    found = [(name.rpartition("/")[2], line.get(f"{prefix}{name}")) for name in names]
    return ", ".join(f"{name} {value:.3g}" for name, value in found if isinstance(value, int | float))


def _job_row(run: RunFiles, job: JobFiles) -> str:
    adapter, train, info = job.adapter, job.config.get("train", {}), job.info
    losses = [value for _, value in job.series("loss")]
    window = min(10, max(1, len(losses) // 4))
    before, after = job.result.get("eval_before"), job.result.get("eval_after")
    if before is None and job.held_out and job.held_out[0][0] == 0:
        before = job.held_out[0][1]
    if after is None and job.held_out and job.held_out[-1][0] > 0:
        after = job.held_out[-1][1]
    total = int(info.get("steps") or 0)
    bar = f"<span class='bar'><span style='width:{100 * min(1, job.step / total):.0f}%'></span></span>" if total else ""
    rate, batch = train.get("learning_rate"), train.get("global_batch_size")
    idle = job.result.get("idle_since")
    why = "" if run.config.get("sweep") else run.ends.get(job.name, "")  # the table of a sweep says it
    numbers = (adapter.get(key) for key in ("r", "lora_alpha", "lora_dropout"))
    cells = [
        job.kind,
        *(UNKNOWN if number is None else f"{number:g}" for number in numbers),
        (f"{rate:g}" if rate else UNKNOWN) + sub(str(train.get("lr_scheduler_type", "")).replace("_", " ")),
        f"{job.step:,}" + (f" / {total:,}" if total else "") + bar + sub(f"batch {batch}" if batch else ""),
        change(mean(losses[:window]), mean(losses[-window:]) if len(losses) > 1 else None)
        + sub(_of_rewards(job.metrics, ""), "wrap"),
        change(before, after) + sub(_of_rewards(job.evals, "eval_"), "wrap"),
        f"{job.tokens:,}" + sub(plural(info["samples"], "sample") if "samples" in info else ""),
        (short(info["trainable_parameters"]) if "trainable_parameters" in info else UNKNOWN)
        + sub(plural(info["adapted_modules"], "module") if "adapted_modules" in info else ""),
        badge(run.status_of(job)) + sub(f"gradient 0 from step {idle} on" if idle else "") + sub(why, "why"),
    ]
    targets = adapter.get("target_modules") or ""
    targets = targets if isinstance(targets, str) else ", ".join(targets)
    name = f"<span class='name'>{escape(job.name)}</span>{sub(targets)}"
    keys = [
        job.kind, *(adapter.get(key) for key in ("r", "lora_alpha", "lora_dropout")), rate, job.step, mean(losses[-window:]),
        before if after is None else after, job.tokens, info.get("trainable_parameters"), run.status_of(job),
    ]  # fmt: skip
    pairs = list(zip(cells, keys, strict=True))
    return row(COLUMNS, name, job.name, pairs, f'id="{job.style}" class="{job.style}"')


def _lengths(run: RunFiles) -> str:
    figures = []
    for job in run.jobs:
        histogram = job.info.get("length_histogram") or {}
        edges, counts = histogram.get("edges") or [], histogram.get("counts") or []
        if not counts or len(edges) != len(counts) + 1:
            continue
        x = charts.linear_axis("tokens of a sample", edges, tight=True, whole=True, count=4)
        y = charts.linear_axis("samples", counts, zero=True, whole=True, count=3)
        gap = (edges[-1] - edges[0]) * 0.003
        marks = []
        for low, high, count in zip(edges, edges[1:], counts, strict=False):
            tip = f"{plural(count, 'sample')} of {low:.0f} to {high:.0f} tokens"
            marks.append(charts.bar(low + gap, high - gap, 0, count, x, y, f"mark fill {job.style}", tip))
        facts = [plural(job.info["samples"], "sample")] if "samples" in job.info else []
        facts += [f"{job.info['eval_samples']:,} held out"] if job.info.get("eval_samples") else []
        facts += [f"{job.info['tokens']:,} tokens"] if "tokens" in job.info else []
        facts += [f"{job.info['label_tokens']:,} with loss"] if "label_tokens" in job.info else []
        figures.append(
            f"<div>{charts.chart(job.name, marks, x, y, height=130)}<p class='caption'>{', '.join(facts)}</p></div>"
        )
    return f"<section><h2>Sample lengths</h2><div class='many'>{''.join(figures)}</div></section>" if figures else ""


@functools.lru_cache(maxsize=1)
def _as_yaml(config: str) -> str:
    """Convert a config from JSON to YAML. The result is cached for all pages of a run, since a conversion takes some 20 ms a
    job."""
    return yaml.safe_dump(json.loads(config), sort_keys=False, allow_unicode=True, width=100)


def _reproducibility(run: RunFiles) -> str:
    versions = run.about.get("versions") or {}
    facts = {
        "packlora": run.about.get("packlora"),
        **versions,
        "device": run.about.get("device"),
        "commit": run.about.get("commit"),
        "seed": run.config.get("seed"),
        "schedule": (run.config.get("schedule") or {}).get("method"),
        "max tokens per microbatch": run.config.get("max_tokens_per_microbatch"),
    }
    known = ((escape(name), escape(str(value))) for name, value in facts.items() if value is not None)
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in known)
    config = _as_yaml(json.dumps(run.config)) if run.config else ""
    details = f"<details><summary>The run file, with every default</summary><pre>{escape(config)}</pre></details>"
    return (
        f"<section><h2>Reproducibility</h2><dl class='facts'>{cells}</dl>{details if config else ''}"
        "<p class='caption'>From run.json and the jsonl files beside it.</p></section>"
    )
