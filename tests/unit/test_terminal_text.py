"""What reaches a terminal: texts of others move nothing there, and one that takes no escape sequences is sent none. What goes
to a file stays as it is."""

from __future__ import annotations

import ast
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text
from terminals import Tty, is_tame
from test_progress import began, job, stepped
from waiting import SECONDS

from packlora import terminal
from packlora.errors import spelt_out
from packlora.events import JobFailed, Note
from packlora.report.progress import Progress
from packlora.report.screen import Screen
from packlora.report.summary import print_summary
from packlora.result import JobResult, Result
from packlora.terminal import Activity, say, show

PACKAGE = Path(__file__).parents[2] / "packlora"
OBEYED = {
    "a title": "\x1b]0;pwned\x07", "the clipboard": "\x1b]52;c;ZXZpbA==\x07", "a link": "\x1b]8;;http://evil\x1b\\x",
    "a question": "\x1b[c", "the screen": "\x1b[2J", "a colour": "\x1b[31m", "eight bits": "\x9b2J\x9d0;x\x9c",
    "a device string": "\x1bP+q544e\x1b\\", "an overwritten line": "safe\rEVIL", "backspaces": "EVIL\b\b\b\bsafe",
    "a bell": "\a", "nothing": "\0", "delete": "\x7f", "another direction": "abc\u202edcba\u202c", "isolates": "\u2067x\u2069",
    "a line of Unicode": "a\u2028b\u2029c\x85d", "half a character": "a\udcffb\ud800", "a page": "\f\v",
}  # fmt: skip
"""That no text may bring to a terminal."""
SHOWN = [
    "two\nlines", "a\ttab", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\u00a0b", "\u3000\u4e2d\u6587",
    "\u0645\u06cc\u200c\u0634\u0648\u062f",
    "na\u00efve e\u0301", "\ue0b0",
]  # fmt: skip
"""Texts of people, which stay."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[io.StringIO, io.StringIO]]:
    """Standard output and standard error, terminals or files."""

    def make(is_terminal: bool, term: str = "xterm-256color") -> tuple[io.StringIO, io.StringIO]:
        monkeypatch.setenv("TERM", term)
        out, err = (Tty() if is_terminal else io.StringIO() for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return make


@pytest.mark.parametrize("text", OBEYED.values(), ids=OBEYED)
def test_what_a_terminal_would_obey_is_spelt_out(text: str) -> None:
    found = spelt_out(f"before {text} after")
    assert found.startswith("before ") and found.endswith(" after") and "\\" in found
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", found)


@pytest.mark.parametrize("text", SHOWN, ids=ascii)
def test_what_people_write_stays(text: str) -> None:
    assert spelt_out(text) == text
    assert spelt_out("a\r\nb") == "a\nb"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_are_spelt_out_on_a_terminal_and_stay_in_a_file(is_terminal: bool, streams: Callable[..., Any]) -> None:
    out, err = streams(is_terminal)
    for text in OBEYED.values():
        say(text)
        show(text)
    if is_terminal:
        assert is_tame(out.getvalue()) and is_tame(err.getvalue()) and "\\x1b]0;pwned\\x07\n" in out.getvalue()
    else:
        assert out.getvalue() == "".join(f"{text}\n" for text in OBEYED.values())
        assert err.getvalue() == "".join(f"packlora: {text}\n" for text in OBEYED.values())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_texts_and_cells_are_spelt_out_on_a_terminal_and_stay_in_a_file(
    is_terminal: bool, streams: Callable[..., Any]
) -> None:
    out, _ = streams(is_terminal)
    screen, odd = Screen(width=4000), "\x1b[6n\x1b]0;pwned\x1b\\ and what makes the column wide"
    table = Table(title=Text(odd), caption=odd, box=None)
    table.add_column(odd)
    table.add_row(Text.assemble("a ", (odd, "red")))
    screen.print(odd, Text(odd, style="bold"), "plain")
    screen.print(table)
    screen.print(Text(f"note: {odd}"), soft_wrap=True)
    assert is_tame(out.getvalue()) == is_terminal and out.getvalue().count("pwned") == 7
    assert out.getvalue().count("\\x1b]0;pwned" if is_terminal else "\x1b]0;pwned") == 7


def narrated(progress: Progress) -> None:
    """A run whose notes have names of files in them."""
    odd = "".join(OBEYED.values())
    with progress:
        progress(began(job("a"), notes=(f"job 'a': {odd}.jsonl: its rows are of another tool",)))
        progress(stepped("a", 1))
        progress(Note(f"{odd} is slow"))
        progress(JobFailed("a", 1, odd))
    done = Result("failed", 1.0, 1, Path(f"out{odd}"), Path("r"), {"a": JobResult("failed", 1, Path("a"), odd)})
    print_summary(done, f"again {odd}")
    with Activity() as told:
        told(odd, 1, 2)


def test_a_terminal_that_obeys_nothing_is_sent_no_escape_sequence(streams: Callable[..., Any]) -> None:
    for term in ("dumb", "unknown"):
        out, err = streams(True, term)
        narrated(Progress())
        say("text")
        Screen().print(Text("text", style="bold red"))
        with Bars(console=Screen(), transient=True) as bars:
            bars.advance(bars.add_task("measuring", total=2))
        assert "\x1b" not in out.getvalue() + err.getvalue() and "\r" not in out.getvalue() + err.getvalue()
        assert "a  step 1/4  loss 1.0000" in out.getvalue()


def test_a_text_that_the_encoding_has_not_is_spelt_out_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "utf-8", errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    show("a\udcffb")
    Screen(file=terminal.standard_output()).print(Text("c\udcffd"))
    show("end")
    terminal.standard_output().flush()
    assert raw.getvalue().decode() == "a\\udcffb\nc\\udcffd\nend\n" and sys.stderr.getvalue() == ""


# --- what libraries write ----------------------------------------------------------------------------------------------------


def test_of_what_libraries_write_a_terminal_gets_colours_and_bars_alone(streams: Callable[..., Any]) -> None:
    out, err = streams(True)
    terminal.tame_streams()
    terminal.tame_streams()  # once
    for stream, into in ((sys.stdout, out), (sys.stderr, err)):
        assert stream.isatty() and stream.write("\x1b[1;31mred\x1b[0m \r\x1b[2K\x1b[A\n\t\x1b[?25l") > 0
        before = into.getvalue()
        assert before == "\x1b[1;31mred\x1b[0m \r\x1b[2K\x1b[A\n\t\x1b[?25l"
        stream.writelines([*OBEYED.values(), "\x1b[6n", "\x1b[?1049h", "\x1b[99999;1m"])
        new = into.getvalue()[len(before) :].replace("\x1b[31m", "").replace("\r", "")
        assert spelt_out(new) == new


def test_files_and_missing_streams_are_left_alone(streams: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = streams(False)
    terminal.tame_streams()
    assert sys.stdout is out and sys.stderr is err
    monkeypatch.setattr(sys, "stdout", None)
    terminal.tame_streams()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_spelt_out_in_output_of_every_library(encoding: str) -> None:
    words = "import sys; from packlora.terminal import tame_streams; tame_streams(); print('\\u2584 \\u2026')"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    run = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=env, timeout=SECONDS)
    assert (run.stdout, run.stderr) == ("\\u2584 \\u2026\n", "")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_command_brings_nothing_of_its_arguments_to_a_terminal(term: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    odd = "x\x1b]0;pwned\x07"
    run = subprocess.Popen(
        [sys.executable, "-m", "packlora", "report", odd, odd], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path,
        env={**os.environ, "TERM": term},
    )  # fmt: skip
    os.close(theirs)
    data = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:
            break
        if not block:
            break
        data += block
    os.close(ours)
    assert run.wait(SECONDS) == 2 and b"pwned" in data
    assert b"\x1b]" not in data and b"\x07" not in data
    assert term != "dumb" or b"\x1b" not in data


# --- the one place -----------------------------------------------------------------------------------------------------------


def test_everything_that_is_printed_passes_the_terminal_s_own_files() -> None:
    own = {"terminal.py", "report/screen.py", "command_line.py"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text()
        if name in own or not re.search(r"print\(|Console|echo\(|sys\._*std", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("print", "Console", "rich.print", "typer.echo", "click.echo") or re.fullmatch(
                    r"sys\.(__)?std(out|err)(__)?\.(write|writelines|buffer.*)", called
                ):
                    found.append(f"{name}:{node.lineno}: {called}")
    assert not found
