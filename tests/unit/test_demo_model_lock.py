"""The demo model is converted by one process at a time, and is there whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from packlora.base import demo_model
from packlora.errors import InputError

CONVERT = """
    import os, sys, time
    from pathlib import Path
    from packlora.base import demo_model

    def convert(source, out):
        with (Path(sys.argv[1]) / "conversions").open("a") as log:
            log.write("one\\n")
        for name in demo_model.FILES:
            time.sleep(0.15)
            (out / name).write_text(name)

    demo_model._convert = convert
    demo_model._gguf_folder = lambda scratch: scratch
    cache, together = Path(sys.argv[1]), int(sys.argv[2])
    (cache / f"ready-{os.getpid()}").touch()
    while len(list(cache.glob("ready-*"))) < together:  # to load what is imported takes one longer than another
        time.sleep(0.01)
    folder = demo_model.demo_model_folder()
    assert all((folder / name).read_text() == name for name in demo_model.FILES)
    print(folder)
"""


def start(cache: Path, monkeypatch: pytest.MonkeyPatch, together: int = 1) -> subprocess.Popen[str]:
    monkeypatch.setenv("PACKLORA_CACHE", str(cache))
    command = [sys.executable, "-c", textwrap.dedent(CONVERT), str(cache), str(together)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_convert_it_once_and_both_get_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [start(tmp_path, monkeypatch, together=2) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [out for out, _ in said] == [f"{tmp_path / demo_model.DEMO_MODEL}\n"] * 2
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert sorted(error.split()[1] for _, error in said) == ["converting", "waiting"]


def test_a_conversion_that_was_killed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = start(tmp_path, monkeypatch)
    while not list(tmp_path.glob(f".tmp-*/{demo_model.FILES[0]}")):
        assert killed.poll() is None, killed.communicate()
    killed.kill()
    killed.communicate()
    assert not (tmp_path / demo_model.DEMO_MODEL).exists()
    again = start(tmp_path, monkeypatch)
    said = again.communicate(timeout=60)
    assert again.returncode == 0, said


def test_a_folder_that_was_left_partial_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / demo_model.DEMO_MODEL
    partial.mkdir()
    (partial / "config.json").write_text("config.json")
    process = start(tmp_path, monkeypatch)
    said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="PACKLORA_CACHE chooses another folder"):
        demo_model.demo_model_folder()
