"""Page of a run: one HTML file that needs nothing but a browser, written by a run and served by packlora watch alike.

This module assembles its pieces: the HTML of sections.py, or of compare.py for several runs, the numbers of series.py as JSON,
page.css, and the scripts, which draw the curves. The page runs no script but its own, whose hash its Content-Security-Policy
names, and sends requests only to the address that it came from.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from packlora.report import charts, sections
from packlora.report.run_files import FollowedRun, RunFiles
from packlora.report.series import PageData

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
SCRIPTS = [(Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8") for name in ("numbers", "chart", "page")]
SCRIPT = f'"use strict";{{\n{"".join(SCRIPTS)}}}'
PLACES = (
    "header", "tiles", "warnings", "sweep", "legend", "nothing", "jobs", "completions", "microbatches", "schedule", "pipeline",
    "lengths", "reproducibility",
)  # fmt: skip
"""Names of the parts of the page that are HTML."""


def policy(is_live: bool) -> str:
    """The Content-Security-Policy of a page."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
        + "; connect-src 'self'" * is_live
    )


def whole_page(output_dir: Path) -> str:
    """Page of everything that a run has written so far, to be opened as a file."""
    run = FollowedRun(output_dir)
    data = PageData(run)
    while data.follow():
        pass
    return assembled(data, parts_of(data.files), is_live=False)


def parts_of(run: RunFiles, parts: Callable[[Any], dict[str, str]] = sections.parts) -> dict[str, str]:
    """HTML of all places, and the title and the colours as text. parts: of several runs, compare.parts."""
    own = parts(run)
    return {**dict.fromkeys(PLACES, ""), **own, "colours": charts.job_style(len(run.jobs))}


def assembled(data: PageData, part: Mapping[str, str], is_live: bool) -> str:
    """The page of these numbers and parts."""

    def place(name: str) -> str:
        return f'<div data-part="{name}">{part[name]}</div>'

    numbers = embedded({**data.numbers(), "live": is_live})
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy(is_live)}">
<title>{escape(part["title"])}</title>
<style>{STYLE}</style><style class="job-colours">{part["colours"]}</style></head>
<body><main>
{place("header")}{place("tiles")}{place("warnings")}{place("sweep")}
<noscript><p class="empty">The curves are drawn by JavaScript, which is off.</p></noscript>
<nav class="legend" aria-label="Jobs"><div data-part="legend">{part["legend"]}</div></nav>
{place("nothing")}
<div data-chart="curves"></div>
{place("jobs")}
<div data-chart="optimization"></div>
<div data-chart="machine"></div>
<div data-chart="samples"></div>
{place("completions")}
{place("microbatches")}{place("schedule")}{place("pipeline")}{place("lengths")}{place("reproducibility")}
</main>
<script type="application/json" class="numbers">{numbers}</script>
<script>{SCRIPT}</script>
</body></html>
"""
    return page.encode(errors="replace").decode()  # users' texts may hold halves of characters


def embedded(value: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
