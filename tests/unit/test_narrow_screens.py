"""Many jobs and narrow screens: the live table in 80 columns, the report on a telephone and with more jobs than a palette."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import typer
from test_progress import began, job, stepped
from test_report import write_run
from typer.testing import CliRunner

from packlora.cli import app
from packlora.events import Evaluated, JobDone, JobFailed
from packlora.report import charts
from packlora.report.page import STYLE
from packlora.report.progress import Progress
from packlora.report.report import write_report
from packlora.report.screen import Screen
from packlora.report.summary import print_summary
from packlora.result import JobResult, Result


def table(width: int, *names: str) -> list[str]:
    """Lines of the live table in the middle of long runs, the first job evaluated, the last one failed."""
    out = io.StringIO()
    console = Screen(file=out, force_terminal=True, width=width, no_color=True)
    progress = Progress(console)
    progress(began(*(job(name, 9000) for name in names)))
    progress._stop()  # the table is drawn below, once
    progress._start -= 1000
    for name in names:
        progress(stepped(name, 1234, 2.34567, 0.512345, 2e-4, 20_000_000))
    progress(Evaluated(names[0], 1234, 3.2))
    progress(JobFailed(names[-1], 1234, "loss nan"))
    out.seek(0)
    out.truncate()
    console.print(progress._table())
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140])
@pytest.mark.parametrize(
    "names", [("colours", "greetings"), tuple(f"an-adapter-of-r-16-and-lr-{n}e-4" for n in (1, 2))]
)
def test_the_live_table_fits_its_terminal_and_no_number_is_cut(width: int, names: tuple[str, ...]) -> None:
    head, first, last, foot = table(width, *names)
    assert max(map(len, (head, first, last))) <= width
    for word in ("1234/4500", "2.3457"):
        assert word in first and word in last
    assert re.search(r" \d{5}$", first) and last.endswith(" failed")
    assert {"job", "step", "loss", "tokens/s"} <= set(head.split())
    assert "elapsed" in foot
    assert first.split()[0] != last.split()[0]  # a name that is cut keeps both its ends
    if "…" not in first:
        assert first.startswith(names[0])


def test_on_a_wide_terminal_a_long_name_is_whole() -> None:
    assert table(240, "x" * 100, "y")[1].startswith("x" * 100)


def test_more_jobs_than_lines_leave_the_last_line_and_those_that_train_in_sight() -> None:
    names = tuple(f"job-{number}" for number in range(40))
    progress, out = Progress(Screen(file=io.StringIO(), force_terminal=True, width=100, height=20)), io.StringIO()
    progress(began(*(job(name, 9000) for name in names)))
    progress._stop()
    for name in names[:30]:
        progress(JobDone(name, 9000, Path(name)) if name != "job-7" else JobFailed(name, 3, "loss nan"))
    Screen(file=out, force_terminal=True, width=100, height=20, no_color=True).print(progress._table())
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert len(lines) <= 18
    shown = [line.split()[0] for line in lines[1:-1]]
    assert shown == ["job-7", *(f"job-{number}" for number in range(25, 40))]
    assert lines[-1].endswith(", 24 of 40 jobs not shown")


def test_without_a_terminal_the_last_words_have_a_line_for_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 100
    jobs = {name: JobResult("failed", 7, Path("o"), "loss nan", 3.0, 2.0, 5.0)}
    print_summary(Result("failed", 5.0, 10, Path("o"), Path("o/report.html"), jobs), "packlora train run.yaml --resume")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("x")] == [
        [name, "failed", "7", "3.0000", "->", "2.0000", "5"]
    ]
    assert f"job {name!r} failed: loss nan" in lines


# --- the report --------------------------------------------------------------------------------------------------------

MANY = tuple(f"job-{number}-of-a-sweep-over-learning-rates" for number in range(12))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, 20, "done", MANY)
    return write_report(folder).read_text(encoding="utf-8")


def test_the_first_column_is_headed_job(page: str) -> None:
    assert re.findall("<th scope='col'>(.*?)</th>", page)[:2] == ["Job", "Kind"]


@pytest.mark.parametrize("paper", ["light", "dark"])
def test_no_two_of_forty_jobs_have_the_same_colour(paper: str) -> None:
    assert len({charts.colour(index, paper) for index in range(40)}) == 40


def test_from_the_eighth_job_on_lines_are_dashed_and_the_legend_shows_it(page: str) -> None:
    for index in range(len(MANY)):
        (rule,) = re.findall(rf"(?<!legend )\.job-{index}{{(--ink:[^}}]*;[^}}]*)}}", page)
        assert ("--dash" in rule) == ("--swatch" in rule) == (index >= 7)
    assert "background:var(--swatch,var(--ink))" in page


def test_the_legend_shows_every_name_whole(page: str) -> None:
    (legend,) = re.findall('<nav class="legend".*?</nav>', page)
    assert all(f">{name}</button>" in legend for name in MANY)
    (rule,) = re.findall(r"\.legend{(.*?)}", STYLE, re.DOTALL)[:1]
    assert "flex-wrap:wrap" in rule
    (entries,) = re.findall(r"\.legend button\[data-job\]{(.*?)}", STYLE, re.DOTALL)[:1]
    assert "ellipsis" not in entries and "overflow:hidden" not in entries


def test_on_a_narrow_screen_every_value_of_a_job_stands_under_its_own_heading(page: str) -> None:
    headings = re.findall("<th scope='col'>(.*?)</th>", page)[1:]
    rows = re.findall("<tr id=.*?</tr>", page)
    assert len(rows) == len(MANY)
    for row in rows:
        assert re.findall('<td data-label="(.*?)"', row) == headings
    narrow = STYLE.partition("@media(max-width:900px){")[2]
    assert "thead{display:none}" in narrow and "content:attr(data-label)" in narrow
    assert "white-space:normal" in narrow and "display:grid" in narrow


def test_no_word_of_a_command_s_help_is_cut_in_80_columns() -> None:
    for command in ([], *([name] for name in typer.main.get_command(app).commands)):
        out = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
        assert out.exit_code == 0 and "…" not in out.output, command
        assert CliRunner().invoke(app, [*command, "-h"], env={"COLUMNS": "80"}).output == out.output
