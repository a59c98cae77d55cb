"""The rule of dependencies between the rooms of the package, read from its imports, and the sizes of classes and functions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

GROUND = {
    "changes", "config", "errors", "events", "files", "form", "functions", "given", "lora_config", "modality", "patterns",
    "portable", "renaming", "weight_form",
    "overrides", "result", "run_file", "run_file_errors", "seeding", "terminal",
}  # fmt: skip
"""Files beside the rooms that every room but ops may use; they use only one another."""
FACE = {"", "cli", "command_line", "options", "__main__", "callbacks"}
"""What users call; no room imports it."""
MAY_USE: dict[str, set[str]] = {
    "ops": set(),
    "plans": {"ops"},
    "adapters": {"plans", "ops"},
    "base": {"ops"},
    "live": {"adapters", "plans", "ops"},
    "data": set(),
    "schedule": set(),
    "report": {"schedule"},
    "parallel": {"ops", "plans", "adapters", "base", "schedule"},
    "megatron": {"ops", "plans", "adapters"},
    "engine": {"ops", "adapters", "base", "data", "parallel"},
    "runtime": {"ops", "plans", "adapters", "base", "data", "engine", "schedule", "report", "parallel"},
}
MAY_USE["codes"] = {"ops", "base", "live"}
MAY_USE["fp8"] = {"ops", "base", "live", "codes"}
MAY_USE["images"] = {"ops", "adapters", "base", "data"}
MAY_USE["sweep"] = {*MAY_USE["runtime"], "runtime"}
MAY_USE["experts"] = {*MAY_USE["runtime"], "runtime"}
MAY_USE["pipeline"] = {*MAY_USE["runtime"], "runtime", "experts"}
MAY_USE["rl"] = {*MAY_USE["runtime"], "runtime"}
MAY_USE["serve"] = {*MAY_USE["runtime"], "runtime"}
MAY_USE["tune"] = {*MAY_USE}
MAY_USE["commands"] = {*MAY_USE, "answers"}
MAY_USE["export"] = MAY_USE["answers"] = {*MAY_USE}
MAY_USE["api"] = MAY_USE["serve"] = {*MAY_USE}
MOST_LINES_OF_A_CLASS, MOST_LINES_OF_A_FUNCTION = 250, 60

WITHOUT_RUN_FILE = {"adapters", "live"}
"""Rooms that know nothing of run files."""

Arrows = dict[str, set[str]]


@cache
def modules() -> dict[str, ast.Module]:
    out = {}
    for path in sorted((ROOT / "packlora").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        out[name] = ast.parse(path.read_text())
    return out


def named(node: ast.stmt) -> list[str]:
    """Modules, or names in modules, that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module is not None, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def arrows() -> tuple[Arrows, Arrows]:
    """By module, those that it imports when it is imported itself (or for types alone), and those that its functions import."""
    at_once, later = defaultdict(set), defaultdict(set)
    for module, tree in modules().items():
        for node, in_function in imports(tree, False):
            for name in named(node):
                found = name if name in modules() else name.rpartition(".")[0]
                if found in modules() and found != module:
                    (later if in_function else at_once)[module].add(found)
    return at_once, later


def imports(node: ast.AST, in_function: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Import statements below a node, and whether each stands in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, in_function
        elif not isinstance(child, ast.expr):
            yield from imports(child, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def room(module: str) -> str:
    return [*module.split("."), ""][1]


def test_the_design_page_names_every_room_and_every_file_beside_them() -> None:
    """Rooms that import no more than a list of others are listed with exactly these."""
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|.*\| (.*) \|$", page.split("## Rooms and")[1], re.MULTILINE)
    told = {name: says for names, says in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.keys() == MAY_USE.keys()
    for name, says in told.items():
        if re.fullmatch(r"(`\w+`(, )?)+", says) and says != "all":
            assert {*re.findall(r"`(\w+)`", says)} == MAY_USE[name], name
    beside = re.search(r"Files beside the rooms \((.*?)\)", page, re.DOTALL)
    assert beside and {*re.findall(r"`(\w+)(?:\.py|/)`", beside[1])} == GROUND


def test_no_arrow_goes_against_the_rule() -> None:
    wrong = []
    for module in modules():
        own = room(module)
        if own in MAY_USE:
            allowed = MAY_USE[own] | {own} | (set() if own == "ops" else GROUND | {""})
            allowed -= {"config", "run_file"} if own in WITHOUT_RUN_FILE else set()
        elif own in GROUND:
            allowed = GROUND | {""}
        else:
            assert own in FACE, f"{module} is in no room: {', '.join([*MAY_USE, *GROUND])}"
            continue
        used = {other for found in arrows() for other in found.get(module, ())}
        wrong += [
            f"{module} imports {other}; {own} may use {', '.join(sorted(allowed))}"
            for other in used
            if room(other) not in allowed
        ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_files_import_one_another_in_a_circle() -> None:
    at_once, later = arrows()
    both = {module: at_once.get(module, set()) | later.get(module, set()) for module in modules()}
    reach = {module: _reached(both, module) for module in modules() if module != "packlora"}
    circles = {frozenset(n for n in reach[m] if m in reach.get(n, ())) for m in reach if m in reach[m]}
    assert not circles, "\n".join(" <-> ".join(sorted(circle)) for circle in circles)


def _reached(graph: Arrows, module: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[module])
    while todo:
        one = todo.pop()
        if one not in seen and one != "packlora":  # the package's own file names its public parts, and imports none
            seen.add(one)
            todo += graph[one]
    return seen


def test_classes_and_functions_can_be_read_on_one_screen() -> None:
    long = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1 - _lines_of_docstring(node)
                most = MOST_LINES_OF_A_CLASS if isinstance(node, ast.ClassDef) else MOST_LINES_OF_A_FUNCTION
                if lines > most:
                    long.append(f"{module}.{node.name} has {lines} lines; at most {most}")
    assert not long, "\n".join(long)


def test_nothing_reads_or_sends_pickles() -> None:
    """Neither modules that do, nor the collectives of torch that take objects."""
    modules_of_pickles, found = {"pickle", "cPickle", "dill", "cloudpickle", "shelve"}, []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            names = named(node) if isinstance(node, ast.stmt) else []
            if modules_of_pickles & {name.partition(".")[0] for name in names}:
                found.append(f"{module} imports {names}")
            if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list")):
                found.append(f"{module}:{node.lineno} {node.attr}")
    assert not found


def _lines_of_docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return (first.end_lineno or 0) - first.lineno + 1
    return 0
