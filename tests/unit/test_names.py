"""Names of files, folders, modules and functions, in the words of the package and of the pages about it, lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("packlora", "tests", "benchmarks", "examples")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def files() -> dict[str, list[Path]]:
    """All Python files, by each ending of their path: plan.py, lora_linear/plan.py, ..."""
    out: dict[str, list[Path]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            for start in range(len(parts)):
                out.setdefault("/".join(parts[start:]), []).append(path)
    return out


def found(name: str, text: Path) -> bool:
    """Whether a name means one file: one beside the text, one in the text's room, or the only one of that name. A page, which
    names files in lists of their folders, may name one of several."""
    named = files().get(name, [])
    if text in PAGES:
        return bool(named)
    near = [path for path in named if path.parent == text.parent]
    room = [path for path in named if path.relative_to(ROOT).parts[:2] == text.relative_to(ROOT).parts[:2]]
    return len(near) == 1 or len(room) == 1 or len(named) == 1


@pytest.mark.parametrize(
    "text", [*sorted((ROOT / "packlora").rglob("*.py")), *PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_file_that_a_text_names_is_there(text: Path) -> None:
    words = text.read_text()
    stale = {name for name in re.findall(r"(?<![\w/.{}*<>-])[a-z_]\w*(?:/\w+)*\.py\b", words) if not found(name, text)}
    assert not stale, f"no such file, or several: {', '.join(sorted(stale))}"


@pytest.mark.parametrize(
    "text", [*sorted((ROOT / "packlora").rglob("*.py")), *PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_module_that_a_text_names_is_there(text: Path) -> None:
    """`packlora.a.b`: a module, or a name in one (which the type checker and the other tests look at)."""
    stale = set()
    for name in re.findall(r"\bpacklora(?:\.[a-z_]\w*){2,}", text.read_text()):
        path = name.replace(".", "/")
        if not any(
            (ROOT / f"{part}.py").exists() or (ROOT / part).is_dir() for part in (path, path.rpartition("/")[0])
        ):
            stale.add(name)
    assert not stale, f"no such module: {', '.join(sorted(stale))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_and_what_is_in_a_file_that_a_page_names_are_there(page: Path) -> None:
    """`packlora/room/`; `file.py`, `function`, `Class.method`; `function` in `file.py`; `function` (`file.py`)."""
    words = page.read_text()
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)}|docs)/[\w./-]*)`", words)
    stale = {name for name in named if not name.endswith(".py") and not (ROOT / name).exists()}
    inside = [
        (file, name)
        for file, names in re.findall(r"`([\w/]+\.py)`((?:,\s+`[A-Za-z_][\w.]*`)+)", words)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    inside += [(file, name) for name, file in re.findall(r"`([A-Za-z_][\w.]*)`\s(?:in\s|\()`([\w/]+\.py)`", words)]
    stale |= {f"{file}: {name}" for file, name in inside if not name.endswith(".py") and not defines(file, name)}
    assert not stale, f"not there: {', '.join(sorted(stale))}"


def defines(file: str, name: str) -> bool:
    """Whether a file of that name has a function, class or constant with each part of the name."""
    texts = [path.read_text() for path in files().get(file, [])]
    return any(
        all(
            re.search(rf"^ *(?:(?:async )?def |class ){part}\b|^ *{part}(?:: [^=\n]*)? = ", text, re.MULTILINE)
            for part in name.split(".")
        )
        for text in texts
    )
