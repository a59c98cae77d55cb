"""What commands tell whoever waits for them, and what they say when they are ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminals import Tty
from typer.testing import CliRunner

import packlora
from packlora import terminal
from packlora.cli import app
from packlora.command_line import again, loading
from packlora.errors import InputError, ProcessError
from packlora.terminal import Activity


def test_training_tells_on_a_terminal_what_it_does_before_the_first_step(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stderr", screen)
    base = tiny_base("shallow")
    job = {"name": "first", "data": {"path": write_rows("rows", 4)}, "train": {"max_steps": 1}}
    packlora.train({"base_model": base, "output_dir": str(tmp_path / "out"), "jobs": [job]})
    said = screen.getvalue().split(terminal.WIPE)
    order = [next(n for n, line in enumerate(said) if part in line) for part in ("reading", "encoding", "loading")]
    assert order == sorted(order)
    assert said[-1] == ""  # the line is gone when the table comes


@pytest.mark.parametrize("stream", [None, "closed"])
def test_work_goes_on_in_a_process_without_standard_error(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = None if stream is None else Tty()
    if gone is not None:
        gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    done = 0
    with Activity() as told:
        for done in range(3):
            told("reading", done)
    terminal.say("done")
    assert done == 2


def test_what_is_said_takes_the_place_of_the_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stderr", screen)
    with Activity() as told:
        told("reading", 1)
        terminal.say("a note")
    assert screen.getvalue().split(terminal.WIPE) == ["", "reading 1", "packlora: a note\n", ""]


@pytest.mark.parametrize(
    ("command", "where", "said"),
    [
        (["train", "run.yaml"], "packlora.run_file.load_run", "--resume continues"),
        (["tune"], "packlora.tune.plans.tune", "the same command goes on"),
        (["demo"], "packlora.commands.demo.run_demo", "the same command continues"),
        (["doctor"], "packlora.commands.doctor.print_doctor", "stopped\n"),
    ],
)
def test_a_command_that_is_ended_says_how_it_goes_on(
    command: list[str], where: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, end)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 130
    assert said in result.stderr
    assert ("--resume" in result.stderr) == (command[0] == "train")


def test_ctrl_c_that_a_library_swallows_while_it_is_loaded_ends_the_command_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Held:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    lost: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: lost.append(str(told.exc_type)))
    with pytest.raises(KeyboardInterrupt), loading():
        Held()
    assert len(lost) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def known(error: ProcessError) -> ProcessError:
    error.is_news = False
    return error


@pytest.mark.parametrize(
    ("error", "said_by", "code"),
    [
        (KeyboardInterrupt(), ["0"], 130),
        (InputError("wrong"), ["0"], 2),
        (ProcessError("process 2 of 3 failed"), ["0", "1"], 1),
        (known(ProcessError("process 2 of 3 failed")), [], 1),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_one_says_what_ended_the_run(
    error: BaseException, said_by: list[str], code: int, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("packlora.runtime.run.train_read", end)
    result = CliRunner().invoke(app, ["train", "run.yaml"])
    assert result.exit_code == code
    told = [line for line in result.stderr.splitlines() if "checking the run" not in line]
    assert len(told) == (rank in said_by), told


@pytest.mark.parametrize(
    ("world", "here", "started"),
    [
        (None, None, "packlora"),
        ("4", "4", "torchrun --standalone --nproc-per-node 4 -m packlora"),
        ("8", "4", "torchrun ... -m packlora"),
    ],
)
def test_a_run_that_stopped_says_with_which_command_it_goes_on(
    world: str | None, here: str | None, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert again(["train", "my run.yaml"]) == f"{started} train 'my run.yaml' --resume"
