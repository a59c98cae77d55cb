"""Ready run files are read as `packlora train` reads them, and what is published holds together without being built."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from packlora.commands.doctor import OPTIONAL
from packlora.run_file import load_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_ready_run_file_is_read_and_its_data_here_is_found(file: Path) -> None:
    for job in load_run(file).jobs:
        for path, _ in job.data.sources:
            assert Path(path).is_file() or not path.startswith("data/"), path


def test_the_notebook_s_code_is_python_and_its_run_file_is_read(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "free-gpu.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    trees = [ast.parse(text) for text in texts if text[0] not in "!%"]
    (run,) = [
        ast.literal_eval(node.value)
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUN"
    ]
    (tmp_path / "run.yaml").write_text(run)
    assert [job.name for job in load_run(tmp_path / "run.yaml").jobs] == ["r8", "dora16"]
    assert any("packlora train run.yaml" in text for text in texts)


def test_extras_that_messages_name_are_those_of_the_package() -> None:
    named = set()
    for file in (ROOT / "packlora").rglob("*.py"):
        named |= set(re.findall(r"packlora\[([a-z]+)\]", file.read_text()))
        named |= set(re.findall(r'needed\("[^"]+", "([a-z]+)"', file.read_text()))
    assert named <= PROJECT["optional-dependencies"].keys() and {"gguf", "parquet", "plot"} <= named
    told = {found[1] for name, _ in OPTIONAL.values() if (found := re.search(r"\[([a-z]+)\]", name))}
    assert told <= PROJECT["optional-dependencies"].keys()


def test_links_of_the_page_on_an_index_are_whole() -> None:
    namespace: dict[str, object] = {"__file__": str(ROOT / "setup.py")}
    code = (ROOT / "setup.py").read_text().partition("\nsetup(")[0]
    exec(compile(code, "setup.py", "exec"), namespace)
    page = namespace["with_whole_addresses"]((ROOT / "README.md").read_text())  # type: ignore[operator]
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links), links
    assert "<!--" not in page and f"{PROJECT['urls']['Source']}/raw/main/docs/report.png" in page
