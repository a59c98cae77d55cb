"""What commands say, at once, and where nobody listens."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packlora import terminal
from packlora.cli import app
from packlora.errors import unwritten
from packlora.report.metrics import JsonLines, read_lines


def test_train_says_what_it_does_before_it_loads_much(tmp_path: Path) -> None:
    """Modules that are loaded before its first words, each a line of the interpreter's own."""
    command = [sys.executable, "-X", "importtime", "-m", "packlora", "train", str(tmp_path / "run.yaml")]
    said = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    first = next(number for number, line in enumerate(said) if line.startswith("packlora: "))
    assert said[first].startswith("packlora: reading ") and 100 < first < 400


def test_a_process_that_has_loaded_everything_does_not_say_that_it_loads(tmp_path: Path) -> None:
    import packlora.runtime.run  # noqa: F401

    assert "loading" not in CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")]).stderr


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise self.error


def test_a_library_that_advertises_a_package_is_not_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "bitsandbytes.backends.cpu.ops"  # it says so when it is imported, before the command's own first words
    logging.getLogger(name).setLevel(logging.NOTSET)
    CliRunner().invoke(app, ["plan", str(tmp_path / "none.yaml")])
    logging.getLogger(name).warning("please install kernels")
    assert "kernels" not in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [(BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"), (ValueError("closed file"), "closed file")],
)
def test_output_that_is_not_taken_is_dropped_and_said_once(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken(error)
    monkeypatch.setattr(sys, "stdout", broken)
    for _ in range(2):
        out = terminal.standard_output()
        for text in ("one\n", "two\n"):
            out.write(text)
            out.flush()
    assert not out.isatty()
    assert broken.getvalue() == "one\n"
    assert (
        capsys.readouterr().err == f"packlora: standard output takes no more ({reason}); the run goes on without it\n"
    )


def test_without_any_standard_streams_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    out = terminal.standard_output()
    out.write("text")
    out.flush()
    assert not out.isatty()
    terminal.say("text")
    terminal.settle()


PRINTS = """
import sys, types
doctor = sys.modules["packlora.commands.doctor"] = types.ModuleType("doctor")
doctor.print_doctor = lambda: print("text", flush=True) or True
from packlora.cli import app
app(["doctor"])
"""


@pytest.mark.parametrize("sink", ["/dev/full", "pipe"])
def test_a_command_whose_output_is_not_taken_ends_without_a_traceback(sink: str) -> None:
    if sink == "pipe":
        unread, out = os.pipe()
        os.close(unread)
    else:
        out = os.open(sink, os.O_WRONLY)
    done = subprocess.run([sys.executable, "-c", PRINTS], stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(out)
    full = ["packlora: cannot write: No space left on device; free some space there"]
    said = ["packlora: loading PyTorch and Transformers", *(full if sink == "/dev/full" else [])]
    assert (done.returncode, done.stderr.splitlines()) == (1, said)


def test_only_what_cannot_be_written_is_told_in_a_sentence() -> None:
    assert unwritten(OSError(errno.ENOSPC, "no", "out/a")) == "No space left on device: out/a; free some space there"
    assert unwritten(OSError(errno.EIO, "no")) == "Input/output error"
    assert unwritten(FileNotFoundError(errno.ENOENT, "no", "data")) is None
    assert unwritten(ValueError("no space")) is None

    class SafetensorError(Exception):
        pass

    assert unwritten(SafetensorError("I/O error: No space left on device (os error 28)")) == unwritten(
        OSError(errno.ENOSPC, "")
    )
    assert unwritten(SafetensorError("invalid header")) is None


def test_a_log_that_fails_loses_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    log = JsonLines(tmp_path / "log.jsonl", lambda name, error: failures.append(f"{name}: {error.strerror}"))
    log.write(step=1)
    write = os.write
    answers = iter([lambda file, data: write(file, data[:4])])

    def short(file: int, data: Any) -> int:
        for answer in answers:
            return answer(file, data)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", short)
    log.write(step=2)
    log.write(step=3)
    monkeypatch.undo()
    log.write(step=4)
    log.close()
    assert failures == ["log.jsonl: full"] * 2
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 4]
