"""Static sections of the page of a run (words, tables and drawings), as HTML by the name of their place on the page.

charts.py has the scales and marks, run_files.py the files; curves are drawn in the browser, from the numbers of series.py.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

import yaml

from packlora.changes import shown_of
from packlora.report import charts
from packlora.report.follow import Line
from packlora.report.metrics import PIPELINE
from packlora.report.run_files import JobFiles, RunFiles

SHOWN_MICROBATCHES = 40
"""Microbatches drawn from the beginning of a run, and again from its end."""
TIMED_MICROBATCHES = 500
"""Microbatches whose time is drawn against the predicted one."""
UNKNOWN = "&ndash;"
COLUMNS = (
    "Kind", "r", "&alpha;", "Dropout", "Learning rate", "Steps", "Training loss", "Held-out loss", "Tokens", "Trainable",
    "Status",
)  # fmt: skip
"""Columns of the table of jobs after the name. On a narrow screen each job is a card, where every value stands under its
heading."""
SYMBOLS = {
    "done": "✓",
    "failed": "✕",
    "interrupted": "◼",
    "stopped": "◼",
    "broken off": "◼",
    "running": "▶",
    "waiting": "…",
}


# --- numbers as text ---------------------------------------------------------------------------------------------------


def _three(number: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _short(number: float) -> str:
    for limit, unit, suffix in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if number >= limit:
            return f"{_three(number / unit)}\u202f{suffix}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def _bytes(number: float) -> str:
    return f"{_three(number / 2**30)} GiB" if number >= 2**30 else f"{_three(number / 2**20)} MiB"


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.3f}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- the parts of the page ---------------------------------------------------------------------------------------------


def parts(run: RunFiles) -> dict[str, str]:
    """HTML by the name of its place; empty where there is nothing to say."""
    nothing = "No optimizer step has finished yet; the curves appear here."
    return {
        "header": _header(run),
        "tiles": _tiles(run),
        "warnings": _warnings(run),
        "sweep": "" if (shown := shown_of(run.folder)) is None else shown.section(run.folder),
        "legend": _legend(run),
        "nothing": "" if run.has_steps else f'<p class="empty">{nothing}</p>',
        "jobs": _job_table(run),
        "microbatches": _microbatches(run),
        "schedule": _schedule(run),
        "pipeline": _pipeline(run),
        "lengths": _lengths(run),
        "reproducibility": _reproducibility(run),
    }


def _pipeline(run: RunFiles) -> str:
    if not (run.folder / PIPELINE).exists():
        return ""
    from packlora.report import timeline

    return timeline.section(run.folder, {job.name: job.style for job in run.jobs})


def title(run: RunFiles) -> str:
    """Title of the page, as text."""
    return f"{model_of(run)} · {run.status} · packlora"


def model_of(run: RunFiles) -> str:
    """Base model of the run, or the name of its folder."""
    return str(run.config.get("base_model") or run.folder.resolve().name)


def _badge(status: str) -> str:
    return f'<span class="badge {escape(status.replace(" ", "-"))}">{SYMBOLS.get(status, "")} {escape(status)}</span>'


def _header(run: RunFiles) -> str:
    about = run.about.get("model") or {}
    facts = [
        f"{_short(about['parameters'])} frozen parameters" if about.get("parameters") else "",
        about.get("type"),
        run.config.get("dtype"),
        run.about.get("device"),
        f"started {_time(run.about['created'])}" if run.about.get("created") else "",
    ]
    line = "".join(f"<span>{escape(str(fact))}</span>" for fact in facts if fact)
    name = f"{escape(model_of(run))} {_badge(run.status)}"
    return f'<header><p class="over">packlora run</p><h1>{name}</h1><p>{line}</p></header>'


def _time(value: Any) -> str:
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return str(value)


def _tiles(run: RunFiles) -> str:
    # The result of a resumed run counts from where it was resumed, the metrics from the beginning.
    tokens = max(int(run.result.get("tokens") or 0), sum(job.tokens for job in run.jobs))
    seconds = max(float(run.result.get("seconds") or 0.0), run.elapsed)
    states = [run.status_of(job) for job in run.jobs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in SYMBOLS if state in states)
    total = sum(int(job.info.get("steps") or 0) for job in run.jobs)
    held = sum(sum(line["tokens"].values()) for line in run.microbatches)
    room = sum(line["capacity"] for line in run.microbatches)
    peak = run.result.get("peak_memory_bytes")
    where = "of the process" if str(run.about.get("device")).startswith("cpu") else "on the GPU"
    passes = f"{len(run.microbatches):,} microbatch{'' if len(run.microbatches) == 1 else 'es'}"
    tiles = [
        ("Jobs", f"{len(run.jobs)}", counts),
        ("Optimizer steps", f"{sum(job.step for job in run.jobs):,}", f"of {total:,}" if total else ""),
        ("Tokens", _short(tokens), f"{tokens:,}" if tokens >= 1e5 else "trained on"),
        ("Tokens per second", f"{tokens / seconds:,.0f}" if seconds else UNKNOWN, "over the whole run"),
        ("Microbatch fill", f"{100 * held / room:.1f} %" if room else UNKNOWN, f"padding 0, {passes}" if room else ""),
        ("Peak memory", _bytes(peak) if peak else UNKNOWN, where if peak else "known at the end"),
        ("Wall time", _duration(seconds) if seconds else UNKNOWN, "" if run.result else "so far"),
    ]
    cells = (f"<div><dt>{name}</dt><dd>{value}</dd><dd class='sub'>{sub}</dd></div>" for name, value, sub in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _warnings(run: RunFiles) -> str:
    """Warnings at the top of the page. A failure that the run has also recorded as a warning is shown once."""
    recorded = [str(text) for text in run.about.get("warnings") or []]
    items = []
    for job in run.jobs:
        if run.status_of(job) == "failed":
            reason = str(job.result.get("failure") or "no reason is recorded")
            recorded = [text for text in recorded if repr(job.name) not in text or reason not in text]
            items.append(f'<li class="bad">✕ <b>{escape(job.name)}</b> failed: {escape(reason)}</li>')
    said = "\n".join(recorded)
    for job in run.jobs:
        for key, verb in (("truncated", "cut as too long"), ("dropped", "dropped as too long")):
            older = "cut to max_length" if key == "truncated" else verb  # in folders that earlier versions wrote
            if job.info.get(key) and not re.search(f"{re.escape(repr(job.name))}.*({verb}|{older})", said):
                items.append(f"<li>⚠ <b>{escape(job.name)}</b> {_plural(job.info[key], 'sample')} {verb}</li>")
    items += [f"<li>⚠ {escape(text)}</li>" for text in recorded]
    return f'<ul class="warnings" aria-label="Warnings">{"".join(items)}</ul>' if items else ""


def _legend(run: RunFiles) -> str:
    entries = (
        f'<button type="button" class="{job.style}" data-job="{index}" aria-pressed="true">{escape(job.name)}</button>'
        for index, job in enumerate(run.jobs)
    )
    return "".join(entries)


def _job_table(run: RunFiles) -> str:
    if not run.jobs:
        return ""
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("Job", *COLUMNS))
    return (
        f"<section><h2>Jobs</h2><div class='scroll' tabindex='0'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(_job_row(run, job) for job in run.jobs)}</tbody></table></div>"
        "<p class='caption'>Training loss: mean of the first and of the last quarter of the steps, at most ten. "
        "Held-out loss: before training, where it was evaluated, and after.</p></section>"
    )


def _of_preferences(job: JobFiles) -> str:
    """Metrics of a job with preferences, from held-out samples where there are some."""
    lines = [(job.evals, "eval_rewards/"), (job.metrics, "rewards/")]
    line, start = next(((own[-1], start) for own, start in lines if own), ({}, ""))
    found = [(name, line.get(f"{start}{name}")) for name in ("accuracies", "margins")]
    return ", ".join(f"{name} {value:.3g}" for name, value in found if isinstance(value, int | float))


def _job_row(run: RunFiles, job: JobFiles) -> str:
    adapter, train, info = job.config.get("adapter", {}), job.config.get("train", {}), job.info
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
    numbers = (adapter.get(key) for key in ("r", "lora_alpha", "lora_dropout"))
    cells = [
        job.kind,
        *(UNKNOWN if number is None else f"{number:g}" for number in numbers),
        (f"{rate:g}" if rate else UNKNOWN) + _sub(str(train.get("lr_scheduler_type", "")).replace("_", " ")),
        f"{job.step:,}" + (f" / {total:,}" if total else "") + bar + _sub(f"batch {batch}" if batch else ""),
        _change(_mean(losses[:window]), _mean(losses[-window:]) if len(losses) > 1 else None),
        _change(before, after) + _sub(_of_preferences(job)),
        f"{job.tokens:,}" + _sub(_plural(info["samples"], "sample") if "samples" in info else ""),
        (_short(info["trainable_parameters"]) if "trainable_parameters" in info else UNKNOWN)
        + _sub(_plural(info["adapted_modules"], "module") if "adapted_modules" in info else ""),
        _badge(run.status_of(job)) + _sub(f"gradient 0 from step {idle} on" if idle else ""),
    ]
    targets = adapter.get("target_modules", "")
    targets = targets if isinstance(targets, str) else ", ".join(targets)
    name = f"<th scope='row'><span class='name'>{escape(job.name)}</span>{_sub(targets)}</th>"
    keys = [
        job.kind, *(adapter.get(key) for key in ("r", "lora_alpha", "lora_dropout")), rate, job.step, _mean(losses[-window:]),
        before if after is None else after, job.tokens, info.get("trainable_parameters"), run.status_of(job),
    ]  # fmt: skip
    values = "".join(
        f'<td data-label="{label}" data-key="{escape(str("" if key is None else key))}">{cell}</td>'
        for label, cell, key in zip(COLUMNS, cells, keys, strict=True)
    )
    return f'<tr id="{job.style}" class="{job.style}" data-key="{escape(job.name)}">{name}{values}</tr>'


def _sub(text: str) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def _change(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return _loss(first if last is None else last)
    percent = f"{100 * (last / first - 1):+.0f} %".replace("-", "&minus;") if first > 0 else ""
    return f"{_loss(first)} → <b>{_loss(last)}</b><small>{percent}</small>"


def _smooth(points: Sequence[charts.Point]) -> list[charts.Point]:
    return charts.running_mean(points, max(3, len(points) // 15))


def _microbatches(run: RunFiles) -> str:
    rows = run.microbatches
    if not rows:
        return ""
    if len(rows) > 2 * SHOWN_MICROBATCHES:
        parts = [rows[:SHOWN_MICROBATCHES], rows[-SHOWN_MICROBATCHES:]]
        extent = f"The first and the last {SHOWN_MICROBATCHES} of {len(rows):,} are drawn."
    else:
        half = -(-len(rows) // 2) if len(rows) > SHOWN_MICROBATCHES else len(rows)
        parts = [rows[start : start + half] for start in range(0, len(rows), half)]
        extent = f"All {len(rows):,} are drawn."
    widest = max(max(row["capacity"], sum(row["tokens"].values())) for part in parts for row in part)
    titles = ["All"] if len(parts) == 1 else ["First", "Last"]
    figures = "".join(
        _microbatch_chart(run, f"{title} {len(part)}", part, widest) for title, part in zip(titles, parts, strict=True)
    )
    fills = sorted(sum(row["tokens"].values()) / row["capacity"] for row in rows if row["capacity"])
    sharing = _mean([sum(1 for count in row["tokens"].values() if count) for row in rows]) or 0.0
    median = f"{100 * fills[len(fills) // 2]:.1f} %" if fills else "unknown"
    return (
        f"<section><h2>Microbatches</h2><div class='pair'>{figures}</div><p class='caption'>{extent} A bar is one forward "
        "and backward pass of the frozen model, its colours are the jobs that share it, the dark line is the capacity. "
        f"Median fill {median}, {sharing:.2g} jobs in a microbatch on average. A round holds one global batch of every job "
        "still in training; what is left over of it shares a microbatch with the beginning of the next where no job would meet "
        "itself.</p></section>"
    )


def _schedule(run: RunFiles) -> str:
    """Section on the schedule: its form, its distance from the optimum, and measured against predicted times of
    microbatches."""
    facts = _schedule_facts(run)
    timed = [
        (1e3 * float(row["predicted"]), 1e3 * float(row["seconds"]))
        for row in run.microbatches
        if isinstance(row.get("predicted"), (int, float)) and isinstance(row.get("seconds"), (int, float))
    ]
    timed = [(predicted, measured) for predicted, measured in timed if predicted > 0 and measured > 0]
    if not facts and not timed:
        return ""
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f"<section><h2>Schedule</h2><dl class='facts'>{cells}</dl>{_predicted(timed)}</section>"


def _schedule_facts(run: RunFiles) -> dict[str, str]:
    rows, about = run.windows, run.about.get("schedule") or {}
    facts = {}
    if rows:
        slots = sum(row["microbatches"] + (row.get("noops") or 0) for row in rows)
        bound = sum(row["bound"] for row in rows)
        reasons: dict[str, int] = {}
        for row in rows:
            why = escape(str(row.get("stopped") or "unknown"))
            reasons[why] = reasons.get(why, 0) + 1
        facts = {
            "method": escape(", ".join(dict.fromkeys(str(row.get("method")) for row in rows))),
            "windows": f"{len(rows):,} of {max(row.get('rounds') or 0 for row in rows)} rounds",
            "microbatches planned": f"{slots:,}, the lower bound is {bound:,}",
            "gap": f"{100 * (slots / bound - 1):.1f} %" if bound else UNKNOWN,
            "no better one sought because": ", ".join(
                f"{why} ({count} of {len(rows)} windows)" for why, count in reasons.items()
            ),
            "planning took": _duration(sum(float(row.get("seconds") or 0.0) for row in rows)) + ", beside training",
        }
    if about.get("budget"):
        how = "auto" if run.config.get("max_tokens_per_microbatch") == "auto" else "max_tokens_per_microbatch"
        facts["most tokens of a microbatch"] = f"{about['budget']:,}, {how}"
    if about.get("profile"):
        facts["times predicted from"] = {
            "estimated": "the model's shape and one matrix product",
            "measured": "microbatches measured before training",
            "remembered": "microbatches measured in an earlier run",
        }.get(str(about["profile"].get("origin")), "")
    return {name: value for name, value in facts.items() if value}


def _predicted(timed: list[charts.Point]) -> str:
    """Measured against predicted times of microbatches, [ms], and both in the order of the run."""
    if not timed:
        return ""
    ratios = sorted(measured / predicted for predicted, measured in timed)
    shown = timed[:: -(-len(timed) // TIMED_MICROBATCHES)]
    # one microbatch in a hundred may be off the scale: the first ones compile kernels
    slow = sorted(measured for _, measured in timed)[: len(timed) - len(timed) // 100]
    x = charts.linear_axis("predicted, ms", [predicted for predicted, _ in shown], zero=True, count=5)
    y = charts.linear_axis("measured, ms", slow, zero=True, count=5)
    top = min(x.high, y.high)
    dots = [
        charts.line([(0.0, 0.0), (top, top)], x, y, "even"),
        charts.dots(shown, x, y, "small neutral", "microbatch: predicted and measured ms"),
    ]
    order = charts.linear_axis("microbatch", [0, max(1, len(timed) - 1)], tight=True, whole=True, count=5)
    both = charts.linear_axis("ms", slow + [predicted for predicted, _ in timed], zero=True, count=5)
    lines = [
        charts.line(charts.thin([(float(n), pair[1]) for n, pair in enumerate(timed)]), order, both, "faint neutral"),
        charts.line(
            charts.thin(_smooth([(float(n), pair[1]) for n, pair in enumerate(timed)])), order, both, "bold neutral"
        ),
        charts.line(charts.thin(_smooth([(float(n), pair[0]) for n, pair in enumerate(timed)])), order, both, "even"),
    ]
    median, low, high = (ratios[round(part * (len(ratios) - 1))] for part in (0.5, 0.1, 0.9))
    pair = charts.chart("Time of a microbatch", dots, x, y) + charts.chart("In order", lines, order, both)
    return (
        f"<div class='pair'>{pair}</div>"
        f"<p class='caption'>Measured over predicted: median {median:.2f}, four fifths between {low:.2f} and {high:.2f}. "
        "On the dashed line of the left chart both are the same; on the right it is the prediction, and solid what was "
        "measured, light for each and bold as a running mean.</p>"
    )


def _microbatch_chart(run: RunFiles, title: str, rows: list[Line], widest: float) -> str:
    x = charts.linear_axis("tokens", [0, widest * 1.02], tight=True, whole=True, count=5)
    rounds, ticks, labelled = [row.get("round") for row in rows], [], -9
    for index, number in enumerate(rounds):
        if (index == 0 or number != rounds[index - 1]) and index - labelled >= 4 and number is not None:
            ticks.append((float(index), str(number)))
            labelled = index
    y = charts.Axis("by round, one bar each", len(rows), 0, tuple(ticks))
    marks, styles = [], {job.name: job.style for job in run.jobs}
    for index, row in enumerate(rows):
        left, total, samples = 0, sum(row["tokens"].values()), row.get("samples") or {}
        where = f"microbatch {row.get('index', index)}, round {row.get('round', '?')}, {total:,} of {row['capacity']:,} tokens"
        for name, tokens in row["tokens"].items():
            tip = f"{name}: {tokens:,} tokens in {_plural(samples.get(name, 0), 'sample')}\n{where}"
            style = f"mark fill {styles.get(name, '')}"
            marks.append(charts.bar(left, left + tokens, index + 0.92, index + 0.14, x, y, style, tip))
            left += tokens
    edge = [(float(row["capacity"]), index + end) for index, row in enumerate(rows) for end in (0.0, 1.0)]
    marks.append(charts.line(edge, x, y, "capacity"))
    return charts.chart(title, marks, x, y, height=max(60, 9 * len(rows)))


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
            tip = f"{_plural(count, 'sample')} of {low:.0f} to {high:.0f} tokens"
            marks.append(charts.bar(low + gap, high - gap, 0, count, x, y, f"mark fill {job.style}", tip))
        facts = [_plural(job.info["samples"], "sample")] if "samples" in job.info else []
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
