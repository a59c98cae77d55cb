"""What a newcomer reads: a slip in the run file at once, a plan in 80 columns, last words that are true."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_progress import job, shown, stepped
from waiting import SECONDS

from packlora.commands import plan_tables
from packlora.errors import InputError
from packlora.events import JobDone, Note
from packlora.report import summary
from packlora.report.screen import Screen
from packlora.result import JobResult, Result
from packlora.run_file import load_run
from packlora.runtime.early import read_early

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from packlora.cli import app; app()"
"""Whatever imports torch fails."""


@pytest.mark.parametrize("command", ["train", "plan", "tune"])
def test_a_slip_in_the_run_file_is_refused_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("base_model: m\noutput_dir: o\njobs: [{name: a, data: {path: d.jsonl}, train: {learningrate: 1}}]\n")
    words = [sys.executable, "-c", WITHOUT_TORCH, command, str(run)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert process.returncode == 2, process.stderr
    assert "train.learningrate: unknown key; did you mean 'learning_rate'?" in process.stderr
    assert "Traceback" not in process.stderr


SLIPS = {
    '{"prompt": "a"': "job 'a': {}/d.jsonl, line 2: not valid JSON",
    '{"prompt": "a"}': "job 'a': {}/d.jsonl, line 2:",
    "base_model=./nowhere": "base_model './nowhere': there is no such folder",
    "jobs.a.data.path=no.jsonl": "job 'a': the data file no.jsonl does not exist",
    "jobs.a.adapter.init_from=nowhere": "job 'a': nowhere is not a PEFT adapter folder",
}
"""A second line of the data file, or a key: with what is said of it."""


@pytest.mark.parametrize(("slip", "said"), SLIPS.items())
def test_a_slip_in_data_or_a_folder_is_refused_by_what_is_read_early(slip: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("base_model: m\noutput_dir: o\njobs: [{name: a, data: {path: d.jsonl}}]\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + (slip if slip[0] == "{" else ""))
    with pytest.raises(InputError) as caught:
        read_early(load_run(tmp_path / "run.yaml", [] if slip[0] == "{" else [slip]), resume=False)
    assert said.format(tmp_path) in str(caught.value)


def test_data_is_read_before_torch_is_loaded_and_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("base_model: m\noutput_dir: o\njobs: [{name: a, data: {path: d.jsonl}}]\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\nno\n')
    words = [sys.executable, "-c", WITHOUT_TORCH, "train", str(tmp_path / "run.yaml")]
    process = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert process.returncode == 2 and "d.jsonl, line 2: not valid JSON" in process.stderr, process.stderr
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    run = load_run(tmp_path / "run.yaml")
    reader = read_early(run, resume=False)
    (tmp_path / "d.jsonl").unlink()
    assert len(reader.rows(run.jobs[0])[0].read.rows) == 1
    reader.forget()
    with pytest.raises(InputError):
        reader.rows(run.jobs[0])


def test_a_request_to_a_run_loads_no_torch_and_does_not_say_so(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH, "stop", str(tmp_path), "a"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert process.returncode == 2 and str(tmp_path) in process.stderr, process.stderr
    assert "loading" not in process.stderr and "Traceback" not in process.stderr


def test_a_data_file_in_the_place_of_a_run_file_and_none_at_all_are_sent_to_init(tmp_path: Path) -> None:
    (tmp_path / "my rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for file, said in (
        ("my rows.jsonl", "is a data file, and this takes a run file; `packlora init '{}'` writes one for it"),
        ("run.yaml", "cannot read the run file {}: it does not exist; packlora init DATA -o RUN.yaml writes one"),
    ):
        with pytest.raises(InputError) as caught:
            load_run(tmp_path / file)
        assert said.format(tmp_path / file) in str(caught.value)


HEADINGS = ("job", "samples", "tokens", "a longer heading", "lengths")
ROWS = [("colours", "16", "2,388", "123456789", "▁▂▃▄▅▆▇█" * 2), ("an-adapter-of-r-16-and-lr-1e-4", "7", "9", "8", "█")]


def printed(width: int) -> list[str]:
    out = io.StringIO()
    plan_tables.print_table(Screen(file=out, force_terminal=True, no_color=True, width=width), HEADINGS, ROWS)
    return [line.rstrip() for line in out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_of_a_plan_is_continued_below_itself_where_the_terminal_is_narrow(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert all(cell in "\n".join(lines) for cell in (*HEADINGS, *ROWS[0]))
    assert not any("…" in line for line in lines)
    heads = [line.split() for line in lines if line.startswith("job")]
    assert len(heads) == {40: 3, 60: 2, 80: 1}[width]
    assert sum(line.startswith("colours") for line in lines) == len(heads)


def test_a_table_of_a_plan_is_one_table_where_it_fits() -> None:
    lines = printed(120)
    assert len(lines) == 3
    assert lines[2].startswith(ROWS[1][0] + " ")


def words(result: Result, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    monkeypatch.setattr(summary, "standard_output", lambda: out)
    summary.print_summary(result, "packlora train run.yaml --max-steps 3 --resume", "packlora train run.yaml --resume")
    return out.getvalue()


def ended(statuses: dict[str, str], tokens: int, signal: int | None = None) -> Result:
    jobs = {name: JobResult(status, 3, Path("o") / name) for name, status in statuses.items()}
    return Result("done", 5.0, tokens, Path("o"), Path("o/report.html"), jobs, signal)


def test_last_words_name_only_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    done = words(ended({"a": "done", "b": "done"}, 10), monkeypatch)
    assert "adapters: o/<job>\n" in done and "checkpoint" not in done
    assert "ask them: packlora chat o/a o/b\n" in done
    stopped = words(ended({"a": "running", "b": "running"}, 10, 2), monkeypatch)
    assert "adapters:" not in stopped and "checkpoints: o/<job>/checkpoint-<step>\n" in stopped
    mixed = words(ended({"a": "running", "b": "done"}, 10, 2), monkeypatch)
    assert "adapters: o/<job>, of the jobs that have ended\n" in mixed
    assert "checkpoints: o/<job>/checkpoint-<step>\n" in mixed and "ask it: packlora chat o/b\n" in mixed


def test_what_max_steps_has_left_is_said_with_the_command_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ended({"a": "done", "b": "done"}, 10)
    assert "left" not in words(result, monkeypatch)
    result.jobs["b"].steps_left = 9
    said = words(result, monkeypatch)
    assert "optimizer steps left by --max-steps: b 9; take them with: packlora train run.yaml --resume\n" in said
    result.signal = 15
    assert "--max-steps 3 --resume\n" in words(result, monkeypatch)


def test_jobs_beside_a_sweep_are_told_below_its_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ended({"a-000": "done", "b": "done"}, 10)
    result.output_dir, result.jobs["b"].eval_after = tmp_path, 1.25
    candidate = {"rank": 1, "name": "a-000", "parameters": {"seed": 1}, "step": 3, "eval_loss": 2.5, "status": "done"}
    (tmp_path / "sweep.json").write_text(json.dumps({"candidates": [candidate]}))
    (tmp_path / "best").mkdir()
    said = words(result, monkeypatch)
    assert said.count("a-000") == 1 and "2.5000" in said and "1.2500" in said
    assert f"ask them: packlora chat {tmp_path}/best {tmp_path}/b\n" in said


def test_a_run_that_was_done_already_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    again = words(ended({"a": "done"}, 0), monkeypatch)
    assert "every job was done already; report: o/report.html" in again
    assert "tokens in" not in again
    assert "0 tokens in" in words(ended({"a": "running"}, 0, 2), monkeypatch)


def test_the_last_picture_of_the_live_table_has_no_rate_and_no_time_left() -> None:
    with shown(job("a"), terminal=True) as progress:
        progress(stepped("a", 2))
        assert "tokens/s" in str(progress._table().renderables[1])
        progress(stepped("a", 4))
        progress(JobDone("a", 4, Path("o/a")))
        foot = str(progress._table().renderables[1])
    assert "elapsed" in foot
    assert "tokens/s" not in foot and "left" not in foot


def test_the_time_left_runs_down_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = shown(job("a"))
    for step in (1, 2):
        now = 10.0 * step
        progress(stepped("a", step))
    assert progress.time_left() == pytest.approx(20)  # two steps of four are left, ten seconds each
    now += 8
    assert progress.time_left() == pytest.approx(12)
    now += 80
    assert progress.time_left() == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_is_broken_between_words_on_a_terminal_and_nowhere_else(terminal: bool) -> None:
    note = "some words that go on " * 8 + "and end"
    progress = shown(job("a"), terminal=terminal)
    progress._stop()  # of the live table, which draws between the lines
    out = progress.console.file = io.StringIO()
    progress(Note(note))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert " ".join(lines) == f"note: {note}"
    assert len(lines) == (3 if terminal else 1)
