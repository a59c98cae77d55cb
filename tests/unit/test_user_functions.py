"""Functions of a user in files: what a message says of one that raises, is not there, or cannot be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from packlora.errors import InputError
from packlora.functions import load_function, place_of, why_not_called

CODE = "class Game:\n    pass\n\n\ndef judge(prompts, completions, level):\n    return level['x']\n"


@pytest.mark.parametrize("folder", ["", "sub/", "{}/"])
def test_a_file_that_is_named_from_here_or_wholly_is_told_with_the_line(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(folder.format(tmp_path)) / "own.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(CODE)
    file, judge = load_function(f"{path}:judge", "rollout.reward")
    with pytest.raises(KeyError) as caught:
        judge([], [], {})
    assert place_of(caught.value, file) == f"{path}, line 6,"
    path.write_text("import math\nimport no_such_module_here\n")
    with pytest.raises(InputError, match=r"own\.py, line 2, failed: ModuleNotFoundError"):
        load_function(f"{path}:judge", "rollout.reward")


def test_a_name_that_is_not_there_is_answered_with_functions_and_classes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from pathlib import Path\n" + CODE)
    with pytest.raises(InputError, match=r"own\.py has no 'Gam'; it has Game, judge$"):
        load_function(f"{tmp_path}/own.py:Gam", "rollout.environment_factory")


def test_a_function_is_asked_whether_it_takes_what_it_is_given() -> None:
    def judge(prompts: list[str], completions: list[str], level: int) -> None: ...

    assert why_not_called(judge, {"prompts": [], "completions": [], "level": 1}) is None
    assert why_not_called(judge, {"prompts": [], "completions": []}) == "missing a required argument: 'level'"
    assert "'more'" in str(why_not_called(judge, {"prompts": [], "completions": [], "level": 1, "more": 2}))
    assert why_not_called(max, {"prompts": []}) is None, "it has no signature"
