"""Progress display of a run in a notebook: one output, a table and a curve of the losses, that changes in place.

IPython is there where a notebook is; nothing of it is needed elsewhere.
"""

from __future__ import annotations

import importlib
import io
import math
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from packlora.events import Evaluated, Event, JobJoined, RunBegan, RunEnded, Stepped
from packlora.report.charts import Point, colour, linear_axis
from packlora.report.progress import Progress, duration
from packlora.report.run_files import loss_of
from packlora.report.screen import Screen
from packlora.report.tables import table

PAUSE = 0.5
"""Seconds between two changes of the output."""
WIDTH, HEIGHT, MARGIN = 560, 220, 40
"""Size of a curve in pixels, and the room for its labels."""
MOST_POINTS = 1000
"""Points of a job's curve."""


class Notebook(Progress):
    """The display of one run, a subscriber: it makes one output and changes that one."""

    def __init__(self) -> None:
        super().__init__(Screen(file=io.StringIO()))
        self._notes: list[str] = []
        self._losses: dict[str, tuple[str, str]] = {}
        """Kind and unit of each job's loss."""
        self._curves: dict[str, list[Point]] = {}
        self._held_out: dict[str, list[Point]] = {}
        self._ipython: Any = importlib.import_module("IPython.display")
        self._output = self._ipython.display(self._ipython.HTML("packlora: preparing"), display_id=True)
        self._changed = 0.0

    @property
    def in_lines(self) -> bool:
        """Never: the output shows the steps."""
        return False

    def __exit__(self, *exc: object) -> None:
        self._change()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        match event:
            case RunBegan(config=config, earlier=earlier):
                self._losses = {job["name"]: loss_of(job.get("train", {})) for job in config.get("jobs", ())}
                for one in earlier:
                    self._take(one)
            case JobJoined(job=name, config=config):
                self._losses[name] = loss_of(config.get("train", {}))
            case Stepped() | Evaluated():
                self._take(event)
        if isinstance(event, RunBegan | RunEnded) or time.monotonic() - self._changed > PAUSE:
            self._change()

    def _take(self, event: Stepped | Evaluated) -> None:
        if isinstance(event, Stepped):
            _add(self._curves.setdefault(event.job, []), event.step, event.loss)
        else:
            _add(self._held_out.setdefault(event.job, []), event.step, event.eval_loss)

    def _print(self, text: str) -> None:
        """Keep a note for the end of the output, each once."""
        if text not in self._notes:
            self._notes.append(text)

    def _change(self) -> None:
        self._changed = time.monotonic()
        self._output.update(self._ipython.HTML(self._html()))

    def _html(self) -> str:
        rows = [self._row(job) | {"status": job.status} for job in self.jobs.values()]
        columns = tuple(name for name in (rows[0] if rows else {}) if name != "progress")
        jobs = table(columns, [[row[name] for name in columns] for row in rows])
        left = self.time_left()
        foot = f"{duration(time.perf_counter() - self._start)} elapsed" + (f", {duration(left)} left" if left else "")
        notes = "".join(f"<div>{escape(text)}</div>" for text in [foot, *self._notes])
        kinds: dict[tuple[str, str], dict[str, str]] = {}
        for number, name in enumerate(self.jobs):
            kinds.setdefault(self._losses.get(name, ("", "")), {})[name] = colour(number, "light")
        return f"{jobs}{''.join(self._curve(*kind, own) for kind, own in kinds.items())}<small>{notes}</small>"

    def _curve(self, kind: str, unit: str, inks: dict[str, str]) -> str:
        """Losses of one kind by step as SVG, a line a job; held-out losses are dots. inks: colours by job."""
        every = [point for curves in (self._curves, self._held_out) for name in inks for point in curves.get(name, ())]
        if not every:
            return ""
        x = linear_axis("step", (step for step, _ in every), whole=True, tight=True)
        y = linear_axis("loss", (loss for _, loss in every))

        def place(point: Point) -> tuple[float, float]:
            across, up = x.at(point[0]) / 1000, y.at(point[1]) / 1000
            return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN / 2 - up * (HEIGHT - MARGIN)

        marks = [
            f'<text x="{MARGIN - 4}" y="{place((x.low, value))[1]:.0f}" text-anchor="end">{escape(text)}</text>'
            for value, text in y.ticks
        ]
        marks += [
            f'<text x="{place((value, y.low))[0]:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(text)}</text>'
            for value, text in x.ticks
        ]
        for name, ink in inks.items():
            line = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in self._curves.get(name, ()))
            marks.append(
                f'<polyline fill="none" stroke="{ink}" points="{line}"><title>{escape(name)}</title></polyline>'
            )
            for point in self._held_out.get(name, ()):
                across, down = place(point)
                marks.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{ink}"/>')
        title = f"<b>{escape(kind)} loss</b>{escape(f', {unit}' * bool(unit))}, dots: held-out"
        names = " ".join(f'<span style="color:{ink}">&#9632;</span> {escape(name)} ' for name, ink in inks.items())
        style = 'font-size="11" fill="currentColor" style="display:block"'
        return (
            f'<div style="display:inline-block;max-width:100%;margin:8px 16px 8px 0">{title}<br>{names}'
            f'<svg width="{WIDTH}" height="{HEIGHT}" {style}>{"".join(marks)}</svg></div>'
        )


def _add(points: list[Point], step: int, loss: float) -> None:
    if math.isfinite(loss):
        points.append((float(step), loss))
    if len(points) > 2 * MOST_POINTS:
        points[:] = thin(points, MOST_POINTS)


def thin(points: Sequence[Point], most: int = 400) -> list[Point]:
    """Reduce points to about `most` with the same outline: each stretch keeps its lowest and highest point."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return kept
