"""Files and modules that the package and the pages name in words are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("packlora", "tests", "benchmarks", "examples", "docs")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*sorted((ROOT / "packlora").rglob("*.py")), *PAGES]


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


def module_is_there(name: str) -> bool:
    """Whether `packlora.a.b` is a module, or a name in one (which the type checker and the other tests look at)."""
    path = name.replace(".", "/")
    return any((ROOT / f"{part}.py").exists() or (ROOT / part).is_dir() for part in (path, path.rpartition("/")[0]))


def test_files_and_modules_that_a_text_names_are_there() -> None:
    stale = []
    for text in TEXTS:
        words = text.read_text()
        examples = re.findall(
            r"^# ((?:\w+/)*(\w+\.py))$", words, re.MULTILINE
        )  # files that a page shows, with their names
        named = set(re.findall(r"(?<![\w/.{}*<>-])[a-z_]\w*(?:/\w+)*\.py\b", words)).difference(*examples)
        modules = set(re.findall(r"\bpacklora(?:\.[a-z_]\w*){2,}", words))
        wrong = [name for name in named if not found(name, text)] + [
            name for name in modules if not module_is_there(name)
        ]
        stale += [f"{text.relative_to(ROOT)} names {name}" for name in sorted(wrong)]
    assert not stale, "not there, or several:\n" + "\n".join(stale)
