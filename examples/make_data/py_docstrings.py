"""Make the data set py_docstrings: the code of a Python function -> its docstring.

The source are the wheels of four packages under the 3-clause BSD licence.  To get and unpack them:

    pip download --no-deps --dest wheels numpy==2.4.6 scipy==1.17.1 networkx==3.6.1 sympy==1.14.0
    for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" unpacked; done

Then, with a folder that holds the tokenizer.json of SmolLM2:

    python examples/make_data/py_docstrings.py --unpacked unpacked \\
        --tokenizer TOKENIZER_FOLDER --out examples/data/py_docstrings

The wheels of numpy and scipy hold some code of other origin under other licences.  It is left out: by its
folder (see SKIPPED), and by leaving out every file that speaks of a copyright or a licence of its own.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from common import Candidate, Plan, load_tokenizer, select, words, write_set

PACKAGES = ("networkx", "numpy", "scipy", "sympy")
PLAN = Plan(
    n_train=300,
    n_eval=16,
    min_tokens=150,
    max_tokens=410,
    max_overlap=0.3,
    group_limits={"networkx": 85, "numpy": 85, "scipy": 85, "sympy": 85},
)
# fmt: off
# Folders of tests, of generated code, and of code that was taken over from other projects.
SKIPPED = frozenset((
    "_antlr", "_inspect", "_lib", "_pocketfft", "_pyinstaller", "_shgo_lib", "_uarray", "_vendor",
    "_vendored_ccl",
    "array_api_compat", "array_api_extra", "autolev", "benchmarks", "conftest", "deprecated", "external",
    "f2py", "lapack_lite", "latex", "ma", "multipledispatch", "pyprima", "random", "testing", "tests",
))
# fmt: on
_OTHER_ORIGIN = re.compile(
    r"copyright|licen[cs]e|adapted|(borrowed|copied|ported|stolen|taken|translated) (\w+ )?from",
    re.IGNORECASE,
)
# Examples and references cannot be guessed from the code; templates are filled in at import time.
_NOT_DERIVABLE = re.compile(
    r">>>|\.\. \[|https?://|%\(|\.\. plot|deprecated|^(examples?|references|see also):?$",
    re.IGNORECASE | re.MULTILINE,
)


def split_function(source: list[str], node: ast.FunctionDef) -> tuple[str, str] | None:
    """Return (code without docstring, docstring), or None where the two cannot be told apart by lines."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None or len(node.body) < 2:
        return None
    doc_node = node.body[0]
    assert doc_node.end_lineno is not None and node.end_lineno is not None
    if doc_node.lineno == node.lineno or node.body[1].lineno == doc_node.end_lineno:
        return None
    code = source[node.lineno - 1 : doc_node.lineno - 1] + source[doc_node.end_lineno : node.end_lineno]
    code = [line.rstrip() for line in code]
    return textwrap.dedent("\n".join(code)).strip(), inspect.cleandoc(docstring)


def candidates(unpacked: Path) -> Iterator[Candidate]:
    """Yield one candidate for each function and method with a docstring."""
    for package in PACKAGES:
        for path in sorted((unpacked / package).rglob("*.py")):
            relative = path.relative_to(unpacked)
            if SKIPPED & set(relative.with_suffix("").parts):
                continue
            text = path.read_text(encoding="utf-8")
            if _OTHER_ORIGIN.search(text):
                continue
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                pair = split_function(lines, node) if isinstance(node, ast.FunctionDef) else None
                if pair is None:
                    continue
                code, docstring = pair
                assert isinstance(node, ast.FunctionDef)
                prompt = f"Write the docstring of this Python function.\n\n{code}\n\nDocstring:"
                source = (relative.as_posix(), str(node.lineno), node.name)
                yield Candidate(":".join(source), prompt, docstring, f"{code}\n{docstring}", source, package)


def accept(c: Candidate) -> bool:
    """Keep functions of some substance whose docstring is long and says what the code shows."""
    code_lines = c.prompt.count("\n") - 3  # the first line and "Docstring:" with empty lines around
    return (
        code_lines >= 5
        and 25 <= len(words(c.completion)) <= 150
        and not c.source[2].startswith("test")
        and not _NOT_DERIVABLE.search(c.completion)
    )


def main() -> None:
    """Read the arguments and write the set."""
    parser = argparse.ArgumentParser(description="Make the data set py_docstrings.")
    parser.add_argument("--unpacked", type=Path, required=True, help="folder with the unpacked wheels")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with SmolLM2's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train, held_out = select(candidates(args.unpacked), PLAN, load_tokenizer(args.tokenizer), accept)
    write_set(args.out, train, held_out, ("path", "line", "function"))


if __name__ == "__main__":
    main()
