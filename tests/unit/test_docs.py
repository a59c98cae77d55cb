"""README and docs: figures come from result files, links lead somewhere, nothing is left to fill in. No network."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs import drawings, reference, site_hooks
from packlora.run_file import load_run

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]  # fmt: skip
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Those that headings have on GitHub and on the site alike."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).strip()
        if words.replace(" ", "-") == re.sub(r"[-\s]+", "-", words):
            found.add(words.replace(" ", "-"))
    return found


# --- figures -----------------------------------------------------------------------------------------------------------


def test_every_row_of_the_table_of_all_figures_leads_to_its_figures_with_commit_and_day() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    titles = re.findall(r"^\|.*\[([^\]]+)\]\(#[a-z0-9-]+\) \|$", page, re.MULTILINE)
    assert len(titles) == 11
    for title in titles:
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        assert re.search(r"\.json\), commits? [0-9a-f]{7}(, [0-9a-f]{7})*, \d{4}-\d\d-\d\d", section), title


def test_the_readme_is_short_and_its_table_names_its_sources() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 130
    table = page.split("<!-- table\n")[1].split("-->")[0].splitlines()
    assert len(table) == 5
    for name in {line.split()[0] for line in table}:
        assert f"](benchmarks/results/{name}.json)" in page


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_what_its_script_draws(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == drawings.DRAWINGS[name](), "run python docs/drawings.py"


def test_the_python_reference_is_what_its_script_writes() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == reference.page(), "run python docs/reference.py"


# --- links -------------------------------------------------------------------------------------------------------------


def test_local_links_lead_to_files_and_headings() -> None:
    wrong = []
    for page in PAGES:
        for target in LINK.findall(without_code(page.read_text())):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append(f"{name_of(page)}: {target}")
    assert not wrong, "no such file, or no such heading on GitHub and on the site:\n" + "\n".join(wrong)


def test_a_link_is_turned_into_that_of_the_same_file_on_the_site() -> None:
    turned = site_hooks.link_on_site
    assert turned("README.md", "docs/run-file.md") == "run-file.md"
    assert turned("README.md", "CONTRIBUTING.md") == "contributing.md"
    assert turned("CONTRIBUTING.md", "docs/how-to/add-a-test.md") == "how-to/add-a-test.md"
    assert turned("docs/design.md", "../CONTRIBUTING.md") == "contributing.md"
    assert turned("docs/how-to/add-a-test.md", "../promises.md") == "../promises.md"
    assert turned("docs/benchmarks.md", "../benchmarks/results/layer-h200.json") == "benchmarks/results/layer-h200.json"


def test_pages_on_how_to_add_something_are_found_from_contributing() -> None:
    for page in HOW_TO:
        assert f"](docs/how-to/{page.name})" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_reading_order_is_over_twelve_files_and_names_functions_that_are_there() -> None:
    """They are to be read in ten minutes: at most 550 lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    order = page.split("## Reading order\n")[1].split("**From here**")[0]
    steps = re.findall(r"^(\d+)\. `(packlora/[\w/]+\.py)`: (.*?)\. ", order, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _, _ in steps] == list(range(1, 13))
    lines = 0
    for _, file, names in steps:
        tree = ast.parse((ROOT / file).read_text())
        for name in re.findall(r"`([\w.]+)`", names):
            within: Any = tree
            for part in name.split("."):
                found = [node for node in within.body if getattr(node, "name", None) == part]
                assert found, f"{file} has no {name}"
                within = found[0]
            lines += within.end_lineno - within.lineno + 1
    assert 300 < lines <= 550, lines


def test_members_that_pages_for_contributors_name_are_there() -> None:
    """A `Class.name` in code marks, of a class of packlora: a method, or an attribute that one sets or reads."""
    named = [
        (name_of(page), *one)
        for page in [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md", *HOW_TO]
        for one in re.findall(r"`([A-Z]\w*)\.(\w+)`", page.read_text())
    ]
    wanted, members = {own for _, own, _ in named}, dict[str, set[str]]()
    for file in (ROOT / "packlora").rglob("*.py"):
        text = file.read_text()
        there = wanted.intersection(re.findall(r"^class (\w+)", text, re.MULTILINE))
        for own in ast.parse(text).body if there else ():
            if isinstance(own, ast.ClassDef) and own.name in there:
                found = {getattr(node, key, "") for node in ast.walk(own) for key in ("name", "attr", "id")}
                members.setdefault(own.name, set()).update(found)
    known = [one for one in named if one[1] in members]
    assert len(known) > 40
    assert not [one for one in known if one[2] not in members[one[1]]]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]


@pytest.mark.parametrize("page", ["README.md", "docs/how-do-i.md", "docs/coming-from.md"])
def test_run_files_that_pages_show_are_read(page: str, tmp_path: Path) -> None:
    """A block with a base model and jobs is a run file; one of another tool has no jobs."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    whole = [block for block in blocks if "base_model:" in block and "\njobs:" in block]
    assert whole
    for block in whole:
        (tmp_path / "run.yaml").write_text(block)
        assert load_run(tmp_path / "run.yaml").jobs


# --- what pages say ----------------------------------------------------------------------------------------------------


def test_result_files_say_how_they_were_obtained() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        content = json.loads(file.read_text())
        for key in ("name", "commit", "date", "device", "versions", "protocol", "rows", "summary"):
            assert content[key], f"{file.name}: {key}"


def test_run_file_page_names_every_key_with_its_default() -> None:
    from packlora.config import AdapterConfig, DataConfig, Run, ScheduleConfig, TrainConfig

    text = (ROOT / "docs" / "run-file.md").read_text()
    for model, prefix in ((Run, ""), (DataConfig, "data."), (AdapterConfig, "adapter."), (TrainConfig, "train.")):
        for key, field in model.model_fields.items():
            assert f"`{prefix}{key}`" in text or f"`{key}`" in text or f"`{key}." in text, prefix + key
            if isinstance(field.default, bool | int | float | str) and f"`{prefix}{key}` |" in text:
                row = next(line for line in text.splitlines() if line.startswith(f"| `{prefix}{key}` |"))
                shown = row.split("|")[2].strip()
                default = (
                    {True: "true", False: "false"}.get(field.default, field.default)
                    if isinstance(field.default, bool)
                    else field.default
                )
                assert shown == str(default) or float(shown) == float(default), row
    assert "`schedule.method`" in text
    assert ScheduleConfig().method == "auto"


def test_every_test_that_the_promises_name_is_there() -> None:
    """A line without a test promises nothing."""
    text = (ROOT / "docs" / "promises.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 60
    for row in rows:
        file, found = "", re.findall(r"`([\w/]*\.py)?::(\w+)`", row)
        assert found, row
        for named, test in found:
            file = named or file
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M), (file, test)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    """Every three words in a row, but where … stands for what differs; rows of other programs begin with their name."""
    literals = re.compile(r"""["']\s*\n\s*f?["']""")
    source = " ".join(literals.sub("", file.read_text()) for file in sorted((ROOT / "packlora").rglob("*.py")))
    rows = [row for row in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines() if row.startswith("| `")]
    messages = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    for message in messages:
        for part in re.split(r"…|'[^']*'|\b[\d.]+\b", message):
            words = part.split()
            for three in zip(words, words[1:], words[2:], strict=False):
                assert " ".join(three) in source, (message, three)
    assert len(messages) > 40
