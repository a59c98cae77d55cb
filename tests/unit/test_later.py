"""Libraries that are loaded when they are first asked for something."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from packlora.later import load_later


def test_a_library_is_loaded_when_something_of_it_is_wanted_and_not_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("asked_later", "sub_asked_later"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("answer = 42\n")
        (tmp_path / name / "part.py").write_text("piece = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_later("asked_later")
    import asked_later

    assert (
        importlib.util.find_spec("asked_later") is not None
    )  # as PEFT and transformers ask whether a library is there
    assert "answer" not in vars(sys.modules["asked_later"])
    assert asked_later.answer == 42
    assert vars(sys.modules["asked_later"])["answer"] == 42 and asked_later.answer == 42
    load_later("asked_later")  # it is there
    assert vars(sys.modules["asked_later"])["answer"] == 42

    load_later("sub_asked_later")
    from sub_asked_later.part import piece

    assert piece == 7 and "answer" in vars(sys.modules["sub_asked_later"])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = asked_later.nothing


def test_a_library_that_is_not_there_cannot_be_imported() -> None:
    load_later("no_such_library_at_all")
    with pytest.raises(ImportError):
        importlib.import_module("no_such_library_at_all")
