"""Drawings as HTML with inline SVG, for the page of a run: scales, ticks and marks. What they show is sections.py's.

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
"""Hues of further jobs in degrees: the first is the farthest from the palette's, and steps by the golden angle never repeat a
hue nor come near the last ones."""
SIZE = 1000
"""Height and width of every chart in SVG units, whatever its size on the screen."""


@dataclass(frozen=True)
class Axis:
    """A scale from data to 0..SIZE, with its ticks as (value, text). `low` may be the larger end."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Position of a value; what lies outside the scale is drawn on its edge."""
        return SIZE * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


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


def _tick_step(at_least: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """Format a number with as many digits as the distance between ticks needs: 1.25, 2e-4, 12k."""
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
    """Colour of a job, by its number; no two jobs share one. paper: light or dark."""
    palette = {"light": LIGHT, "dark": DARK}[paper]
    if index < len(palette):
        return palette[index]
    lightness = SHADES[paper][index % len(SHADES[paper])]
    return f"hsl({(FIRST_HUE + GOLDEN_ANGLE * index) % 360:.1f} 60% {lightness}%)"


def job_style(count: int) -> str:
    """CSS: per job its colour; its dashes, from the eighth job on, shown in the legend too."""
    rules, dark = [], []
    for index in range(count):
        long = 4 + 3 * (index // len(LIGHT))
        dash = f"--dash:{long} 3;--swatch:{STRIPES};" if index >= len(LIGHT) else ""
        rules.append(f".job-{index}{{--ink:{colour(index, 'light')};{dash}}}")
        dark.append(f".job-{index}{{--ink:{colour(index, 'dark')}}}")
    return f"{''.join(rules)}@media(prefers-color-scheme:dark){{{''.join(dark)}}}"


STRIPES = "repeating-linear-gradient(90deg,var(--ink) 0 4px,transparent 4px 6px)"
