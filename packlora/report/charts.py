"""Charts as HTML with inline SVG, for the report: scales, ticks, marks and the style sheet. What they show is report.py's.

The SVG of a chart is stretched to its box while strokes keep their width, and tick labels are text beside it; so a chart
fits any screen and its text stays as large as the page's. Colours come from the page's style sheet: a mark of class
`job-3` is drawn in `var(--ink)` of that class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")
"""Colours of the jobs: Okabe and Ito's palette, distinguishable with any colour vision (Color Universal Design, 2008)."""
DARK = ("#3b9bdb", "#e8711a", "#1dbf92", "#dd92bc", "#f0b429", "#8ccff7", "#a0a0a0")
SHADES = {"light": (26, 40, 54), "dark": (78, 66, 54)}
"""Lightness, in percent, of the colours of further jobs, on light and on dark paper."""
FIRST_HUE, GOLDEN_ANGLE = 96, 137.508
"""In degrees: hues so far apart never come back, and are never near the last ones; from this one on they are farthest from the
palette's."""
SIZE = 1000
"""Height and width of every chart in SVG units, whatever its size on the screen."""


@dataclass(frozen=True)
class Axis:
    """A scale from data to 0..SIZE, with its ticks as (value, text). `low` may be the larger end."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Position of a value; what lies outside the scale is drawn on its edge."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-300))
        return SIZE * min(max((value - low) / (high - low), 0.0), 1.0)


def linear_axis(
    label: str, values: Iterable[float], *, zero: bool = False, tight: bool = False, whole: bool = False, count: int = 5
) -> Axis:
    """An axis over the values, widened to its ticks.

    Args:
        zero: begin at 0.
        tight: end at the largest value instead of at a tick.
        whole: no ticks between whole numbers.
        count: about how many ticks.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = 0.0 if zero else min(finite), max(finite)
    if high <= low:
        high = low + (abs(low) / 10 or 1.0)
    step = _tick_step((high - low) / count)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((index * step, tick_text(index * step, step)) for index in range(first, last + 1))
    top = high if tight else last * step
    return Axis(label, first * step, top, tuple(tick for tick in ticks if tick[0] <= top * (1 + 1e-9)))


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis over whole decades; values that are not positive are left out."""
    positive = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    last = max(last, first + 1)
    stride = max(1, round((last - first) / 6))
    ticks = tuple((10.0**power, tick_text(10.0**power, 10.0**power)) for power in range(first, last + 1, stride))
    return Axis(label, 10.0**first, 10.0**last, ticks, log=True)


def _tick_step(at_least: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A number with as many digits as the distance between ticks asks for: 1.25, 2e-4, 12k."""
    if value == 0:
        return "0"
    if step >= 1e6:
        return f"{value / 1e6:g}M"
    if step >= 1000:
        return f"{value / 1000:g}k"
    if step < 0.001:
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        mantissa, power = f"{value:.{digits}e}".split("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def thin(points: Sequence[Point], most: int = 400) -> list[Point]:
    """At most about `most` points with the same outline: of every stretch, the lowest and the highest."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return kept


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """The mean over `window` points around each point, over those of them that exist at both ends."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smooth = []
    for index, (position, _) in enumerate(points):
        start, stop = max(0, index - window // 2), min(len(points), index + window // 2 + 1)
        smooth.append((position, (sums[stop] - sums[start]) / (stop - start)))
    return smooth


# --- marks -------------------------------------------------------------------------------------------------------------


def line(points: Sequence[Point], x: Axis, y: Axis, style: str) -> str:
    """A line through the points; `style` are class names."""
    if len(points) < 2:
        return dots(points, x, y, style)
    return f'<polyline class="{style}" points="{" ".join(_place(point, x, y) for point in points)}"/>'


def dots(points: Sequence[Point], x: Axis, y: Axis, style: str, name: str = "") -> str:
    """A round dot at each point, a stroke of no length, which the stretched SVG cannot make an ellipse."""
    return "".join(
        f'<path class="dot {style}" d="M{_place(point, x, y)}h0">'
        f"<title>{escape(name)} {point[0]:g}: {point[1]:.4g}</title></path>"
        for point in points
    )


def bar(left: float, right: float, bottom: float, top: float, x: Axis, y: Axis, style: str, tip: str = "") -> str:
    """A rectangle in the data's coordinates; `tip` is shown under the pointer."""
    x0, x1 = sorted((x.at(left), x.at(right)))
    y0, y1 = sorted((SIZE - y.at(bottom), SIZE - y.at(top)))
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect class="{style}" x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}">{title}</rect>'
    )


def _place(point: Point, x: Axis, y: Axis) -> str:
    return f"{x.at(point[0]):.1f},{SIZE - y.at(point[1]):.1f}"


def chart(title: str, marks: Iterable[str], x: Axis, y: Axis, *, height: int = 240, overlay: str = "") -> str:
    """A chart with its grid, labels and title.

    Args:
        title: plain text, shown above together with the label of the y axis.
        marks: SVG from line, dots and bar, drawn in this order.
        height: in CSS pixels; the width is the container's.
        overlay: HTML placed over the chart, e.g. from `note`.
    """
    grid = "".join(f'<path class="grid" d="M0,{SIZE - y.at(value):.1f}H{SIZE}"/>' for value, _ in y.ticks)
    labels = [f'<i class="y" style="bottom:{y.at(value) / 10:.2f}%">{escape(text)}</i>' for value, text in y.ticks]
    labels += [f'<i class="x" style="left:{x.at(value) / 10:.2f}%">{escape(text)}</i>' for value, text in x.ticks]
    return (
        f"<figure><figcaption><b>{escape(title)}</b> <span>{escape(y.label)}</span></figcaption>"
        f'<div class="plot" style="height:{height}px">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{grid}{''.join(marks)}</svg>"
        f'{"".join(labels)}{overlay}<i class="axis">{escape(x.label)}</i></div></figure>'
    )


def note(text: str, point: Point, x: Axis, y: Axis, style: str, tip: str) -> str:
    """A short text at a point of the chart, for `overlay`."""
    place = f"left:{x.at(point[0]) / 10:.2f}%;bottom:{y.at(point[1]) / 10:.2f}%"
    return f'<i class="note {style}" style="{place}" title="{escape(tip)}">{escape(text)}</i>'


# --- style -------------------------------------------------------------------------------------------------------------


def colour(index: int, paper: str) -> str:
    """Of a job, by its number; no two jobs have the same. paper: light or dark."""
    palette = {"light": LIGHT, "dark": DARK}[paper]
    if index < len(palette):
        return palette[index]
    lightness = SHADES[paper][index % len(SHADES[paper])]
    return f"hsl({(FIRST_HUE + GOLDEN_ANGLE * index) % 360:.1f} 60% {lightness}%)"


def job_style(count: int) -> str:
    """CSS: per job its colour; its dashes, from the eighth job on, shown in the legend too; and that its legend entry dims the
    other jobs when it is pointed at."""
    rules, dark = [], []
    for index in range(count):
        long = 4 + 3 * (index // len(LIGHT))
        dash = f"--dash:{long} 3;--swatch:{STRIPES};" if index >= len(LIGHT) else ""
        rules.append(f".job-{index}{{--ink:{colour(index, 'light')};{dash}}}")
        rules.append(f"body:has(.legend .job-{index}:is(:hover,:focus)) .mark:not(.job-{index}){{opacity:.1}}")
        dark.append(f".job-{index}{{--ink:{colour(index, 'dark')}}}")
    return f"{''.join(rules)}@media(prefers-color-scheme:dark){{{''.join(dark)}}}"


STRIPES = "repeating-linear-gradient(90deg,var(--ink) 0 4px,transparent 4px 6px)"
STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfa;--text:#1c1d1f;--soft:#63666b;--rule:#e3e3de;--panel:#f4f4f0;
--bad:#b3261e;--badbg:#fbeae8;--warn:#7a5200;--warnbg:#fbf3df;--good:#1c7a45}
@media(prefers-color-scheme:dark){:root{--paper:#15171a;--text:#e8e8e4;--soft:#9a9da3;--rule:#2d3034;--panel:#1d2024;
--bad:#ff8a80;--badbg:#3a1f1e;--warn:#f0c060;--warnbg:#332a17;--good:#5fd08f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 28px 48px}
h1{font-size:30px;line-height:1.25;font-weight:650;letter-spacing:-.015em;margin:2px 0 8px;overflow-wrap:anywhere}
h2{font-size:19px;font-weight:650;letter-spacing:-.01em;margin:0 0 10px}
p{margin:0}section{margin-top:44px}
header p{color:var(--soft)}header p span:not(:last-child)::after{content:" · "}
.over{font-size:13px;letter-spacing:.04em}
.badge{white-space:nowrap;font-size:13px;font-weight:600;letter-spacing:0;color:var(--soft)}
h1 .badge{display:inline-block;vertical-align:middle;padding:2px 11px;margin-left:6px;border:1px solid;border-radius:99px}
.badge.done{color:var(--good)}.badge.failed{color:var(--bad)}.badge:is(.interrupted,.stopped){color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:1px;margin:26px 0 0;
border:1px solid var(--rule);border-radius:10px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--rule);padding:12px 14px}.tiles dt{color:var(--soft);font-size:13px}
dd{margin:0}.tiles dd{font-size:23px;font-weight:600;letter-spacing:-.01em;white-space:nowrap;line-height:1.35}
.tiles .sub{font-size:13px;font-weight:400;color:var(--soft);letter-spacing:0;white-space:normal}
.warnings{list-style:none;margin:20px 0 0;padding:0;display:grid;gap:6px}
.warnings li{background:var(--warnbg);border-left:3px solid var(--warn);padding:7px 12px;border-radius:4px;
overflow-wrap:anywhere;white-space:pre-line}
.warnings .bad{background:var(--badbg);border-color:var(--bad)}
.legend{position:sticky;top:0;z-index:3;display:flex;flex-wrap:wrap;gap:4px 20px;margin:26px -28px -20px;padding:10px 28px;
max-height:30vh;overflow-y:auto;background:var(--paper);border-bottom:1px solid var(--rule)}
.legend a{color:inherit;text-decoration:none;font-weight:550;overflow-wrap:anywhere}
.name{display:block;padding-left:18px;width:max-content;max-width:200px;white-space:normal;overflow-wrap:anywhere}
.legend a::before,.name::before{content:"";display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px;
background:var(--swatch,var(--ink))}.name::before{margin-left:-18px}
[id]{scroll-margin-top:31vh}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:9px 10px;text-align:right;vertical-align:top;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:500;font-size:13px}
th:first-child{text-align:left;padding-left:0}td:nth-child(2),thead th:nth-child(2){text-align:left}
tbody th{font-weight:600;position:sticky;left:0;background:var(--paper)}
tr:target th,tr:target td{background:var(--panel)}
small{display:block;font-size:12.5px;font-weight:400;color:var(--soft)}
th small{white-space:normal;max-width:190px;padding-left:18px;overflow-wrap:anywhere}
.bar{display:block;height:3px;min-width:64px;margin:5px 0 3px;border-radius:2px;background:var(--rule)}
.bar span{display:block;height:3px;border-radius:2px;background:var(--ink)}
.caption{color:var(--soft);font-size:13.5px;margin-top:8px;max-width:86ch}
.empty{color:var(--soft);padding:36px;text-align:center;border:1px dashed var(--rule);border-radius:10px}
figure{display:flow-root;margin:0;min-width:0}figcaption span{color:var(--soft);font-size:13.5px}
.plot{position:relative;margin:10px 14px 44px 48px}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.plot i{position:absolute;font:12.5px/1 system-ui,sans-serif;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.plot .y{right:100%;margin-right:8px;transform:translateY(50%)}
.plot .x{top:100%;margin-top:8px;transform:translateX(-50%)}
.plot .axis{right:0;top:100%;margin-top:27px}
.plot .note{transform:translate(-50%,50%);font-size:18px;font-weight:700;color:var(--ink);
text-shadow:0 0 2px var(--paper),0 0 3px var(--paper),0 0 4px var(--paper)}
svg *{vector-effect:non-scaling-stroke}
svg polyline{fill:none;stroke:var(--ink);stroke-linejoin:round;stroke-dasharray:var(--dash,none)}
.grid{stroke:var(--rule);stroke-width:1}.faint{stroke-width:1;opacity:.4}.bold{stroke-width:2.2}
.neutral{--ink:var(--soft)}.dot.small{stroke-width:5;opacity:.55}
svg .even{stroke:var(--text);stroke-width:1.2;stroke-dasharray:5 4}
svg .thread{stroke-width:1.2;stroke-dasharray:2 4}
.dot{stroke:var(--ink);stroke-width:8;stroke-linecap:round}.dot.ring{stroke:var(--paper);stroke-width:12}
.fill{fill:var(--ink)}.area{shape-rendering:crispEdges}.fill:hover{filter:brightness(1.15)}
svg .capacity{stroke:var(--text);stroke-width:1.5}
.mark{transition:opacity .15s}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:8px 32px}
.many{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,270px),1fr));gap:20px 24px}
.many .plot{margin-bottom:42px}.many .caption{margin-top:0}.many b{overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,200px),1fr));gap:12px 24px;margin:0 0 18px}
.facts dt{color:var(--soft);font-size:13px}.facts dd{overflow-wrap:anywhere}
summary{cursor:pointer;font-weight:550}
pre{background:var(--panel);border-radius:8px;padding:14px 16px;overflow-x:auto;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
@media(max-width:900px){table,tbody{display:block}thead{display:none}
tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:8px 16px;padding:14px 0;
border-bottom:1px solid var(--rule)}
th,td,td:nth-child(2){padding:0;border:0;text-align:left;white-space:normal}
tbody th{grid-column:1/-1;position:static}th small,.name{width:auto;max-width:none}
td::before{content:attr(data-label);display:block;font-size:12.5px;color:var(--soft)}}
@media(max-width:600px){main{padding:22px 16px 36px}h1{font-size:24px}
tr{grid-template-columns:repeat(auto-fill,minmax(100px,1fr))}
.legend{position:static;max-height:none;margin-inline:-16px;padding-inline:16px}[id]{scroll-margin-top:8px}
.tiles{grid-template-columns:1fr 1fr}.plot{margin-left:42px}}
@media(prefers-reduced-motion:reduce){.mark{transition:none}}
"""
