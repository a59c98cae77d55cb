"""Write api.md, the reference of the public Python names, beside this file, from their signatures and docstrings.

python docs/reference.py
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import packlora

HEAD = """# Python reference

<!-- written by docs/reference.py -->

Every public name of the package, from its docstring. [Python](python.md) shows how they are used together.
"""
IN_RUN_FILE = "Its fields are the keys of a run file: [The run file](run-file.md)."


def page() -> str:
    """The whole page."""
    names = [name for name in packlora.__all__ if name not in ("__version__", "callbacks", "events")]
    parts = [_entry(f"packlora.{name}", getattr(packlora, name)) for name in names]
    return "\n".join([HEAD, *parts, _events(packlora.events)])


def _entry(name: str, thing: Any) -> str:
    """Heading, signature and docstring of a function or a class, with the class's fields and methods."""
    body = [f"## {name}\n"]
    if inspect.isfunction(thing):
        return "\n".join([*body, _code(_signature(name, thing)), _text(thing)])
    own = [one for one in vars(thing).values() if inspect.isfunction(one) and not one.__name__.startswith("_")]
    made = vars(thing).get("__init__")
    if inspect.isfunction(made) and made.__qualname__ == f"{thing.__name__}.__init__" and not _is_generated(made):
        body.append(_code(_signature(name, made)))
    body.append(_text(thing))
    body += [IN_RUN_FILE + "\n"] if hasattr(thing, "model_fields") else _fields(thing)
    for one in [] if hasattr(thing, "model_fields") else own:
        body += [_code(_signature(f"{thing.__name__}.{one.__name__}", one)), _text(one)]
    return "\n".join(body)


def _events(module: ModuleType) -> str:
    """Table of the types of events."""
    listed: list[str] = list(module.__all__)
    kinds = [(name, getattr(module, name)) for name in listed]
    rows = [f"| `{name}` | {_first(one)} |" for name, one in kinds if isinstance(one, type)]
    head = "`packlora.callbacks` is its older name. Fields are explained in `packlora/events.py`.\n"
    return "\n".join(["## packlora.events\n", _text(module), head, "| type | meaning |", "|---|---|", *rows]) + "\n"


def _first(thing: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _text(thing: Any) -> str:
    return f"```text\n{inspect.getdoc(thing)}\n```\n"


def _is_generated(function: Any) -> bool:
    """Whether dataclasses wrote a function."""
    return bool(function.__code__.co_filename == "<string>")


def _signature(name: str, function: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    if node.args.args and node.args.args[0].arg == "self":
        del node.args.args[0]
    returned = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    arguments = ast.unparse(node.args)
    whole = f"{name}({arguments}){returned}"
    return whole if len(whole) <= 100 else textwrap.fill(whole, 100, subsequent_indent="    ", break_long_words=False)


def _fields(thing: type) -> list[str]:
    """Fields and properties of a class with their docstrings."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(node, ast.ClassDef)
    rows = []
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(said, str):
            rows.append((one.target.id, ast.unparse(one.annotation), said))
        elif isinstance(one, ast.FunctionDef) and any(ast.unparse(own) == "property" for own in one.decorator_list):
            rows.append((one.name, ast.unparse(one.returns) if one.returns else "", ast.get_docstring(one) or ""))
    escaped = [(name, kind.replace("|", "\\|"), " ".join(said.split())) for name, kind, said in rows]
    lines = [f"| `{name}` | `{kind}` | {said} |" for name, kind, said in escaped]
    return ["| field | type | meaning |", "|---|---|---|", *lines, ""] if lines else []


if __name__ == "__main__":
    (Path(__file__).parent / "api.md").write_text(page())
