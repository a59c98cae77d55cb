"""Sections of the page of a run on its microbatches and its schedule: which jobs share a forward pass, how far the plan is
from the optimum, and measured against predicted times.
"""

from __future__ import annotations

from html import escape

from packlora.errors import plural
from packlora.report import charts
from packlora.report.cells import UNKNOWN, duration, mean
from packlora.report.follow import Line
from packlora.report.run_files import RunFiles

SHOWN_MICROBATCHES = 40
"""Microbatches drawn from the beginning of a run, and again from its end."""
TIMED_MICROBATCHES = 500
"""Microbatches whose time is drawn against the predicted one."""


def microbatches(run: RunFiles) -> str:
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
    sharing = mean([sum(1 for count in row["tokens"].values() if count) for row in rows]) or 0.0
    median = f"{100 * fills[len(fills) // 2]:.1f} %" if fills else "unknown"
    return (
        f"<section><h2>Microbatches</h2><div class='pair'>{figures}</div><p class='caption'>{extent} A bar is one forward "
        "and backward pass of the frozen model, its colours are the jobs that share it, the dark line is the capacity. "
        f"Median fill {median}, {sharing:.2g} jobs in a microbatch on average. A round holds one global batch of every job "
        "still in training; what is left over of it shares a microbatch with the beginning of the next where no job would meet "
        "itself.</p></section>"
    )


def schedule(run: RunFiles) -> str:
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
            "planning took": duration(sum(float(row.get("seconds") or 0.0) for row in rows)) + ", beside training",
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
    """Measured against predicted times of microbatches, [ms]."""
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
    median, low, high = (ratios[round(part * (len(ratios) - 1))] for part in (0.5, 0.1, 0.9))
    return (
        f"{charts.chart('Time of a microbatch', dots, x, y)}"
        f"<p class='caption'>Measured over predicted: median {median:.2f}, four fifths between {low:.2f} and {high:.2f}. "
        "On the dashed line both are the same.</p>"
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
            tip = f"{name}: {tokens:,} tokens in {plural(samples.get(name, 0), 'sample')}\n{where}"
            style = f"mark fill {styles.get(name, '')}"
            marks.append(charts.bar(left, left + tokens, index + 0.92, index + 0.14, x, y, style, tip))
            left += tokens
    edge = [(float(row["capacity"]), index + end) for index, row in enumerate(rows) for end in (0.0, 1.0)]
    marks.append(charts.line(edge, x, y, "capacity"))
    return charts.chart(title, marks, x, y, height=max(60, 9 * len(rows)))
