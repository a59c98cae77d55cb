"""README and docs: figures come from result files, links lead somewhere, nothing is left to fill in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from packlora.bench.studies import readme

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_figures_in_the_readme_are_those_of_the_result_files() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme.filled(text) == text, "run python -m packlora.bench.studies.readme"
    assert text.count("x)") >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_to_files_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    assert not re.search(r"\b[A-Z]+_[A-Z]+\b(?!=)", text.replace("PACKLORA_CACHE", "")), "a placeholder"


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda file: file.name)
def test_result_files_say_how_they_were_obtained(file: Path) -> None:
    content = json.loads(file.read_text())
    for key in ("name", "commit", "date", "device", "versions", "protocol", "rows", "summary"):
        assert content[key], key


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
