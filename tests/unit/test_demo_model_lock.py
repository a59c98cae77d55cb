"""The demo model is converted by one process at a time, and is there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import SECONDS

from packlora.base import demo_model
from packlora.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """A process that gets the demo model from a cache in tmp_path, once so many are ready."""
    env = os.environ | {"PACKLORA_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start(together: int = 1) -> subprocess.Popen[str]:
        words = [sys.executable, str(ROOT / "tests" / "converting.py"), str(tmp_path), str(together)]
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_two_processes_at_once_convert_it_once_and_both_get_it_whole(tmp_path: Path, start: Any) -> None:
    both = [start(together=2) for _ in range(2)]
    said = [process.communicate(timeout=SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [out for out, _ in said] == [f"{tmp_path / demo_model.DEMO_MODEL}\n"] * 2
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert sorted(error.split()[1] for _, error in said) == ["converting", "waiting"]


@pytest.mark.soak
def test_a_conversion_that_was_killed_is_made_again(tmp_path: Path, start: Any) -> None:
    killed = start()
    while not list(tmp_path.glob(f".tmp-*/{demo_model.FILES[0]}")):
        assert killed.poll() is None, killed.communicate()
    killed.kill()
    killed.communicate()
    assert not (tmp_path / demo_model.DEMO_MODEL).exists()
    again = start()
    said = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, said


def test_a_folder_that_was_left_partial_is_made_again(tmp_path: Path, start: Any) -> None:
    partial = tmp_path / demo_model.DEMO_MODEL
    partial.mkdir()
    (partial / "config.json").write_text("config.json")
    process = start()
    said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="PACKLORA_CACHE chooses another folder"):
        demo_model.demo_model_folder()
