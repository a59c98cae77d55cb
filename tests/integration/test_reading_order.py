"""The reading order of CONTRIBUTING is the order of the calls: each function that it names is called by one that it names
before, through no other file than those that it names too."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from test_hops import T, run
from test_owners import Fixed
from test_training import train

import packlora
from packlora.adapters.attach import attach
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.ops import launcher
from packlora.ops.lora_linear.plan import ROUTED

ROOT = Path(packlora.__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().split("## Reading order\n")[1].split("**From here**")[0]
Function = tuple[str, str]
"""File and qualified name."""


def read() -> tuple[list[Function], list[Function], set[str]]:
    """Functions that are to be read on the way down, in their order; those on the way back; names in brackets, which are those
    of functions that need not be read and of their files."""
    functions = []
    for file, names in re.findall(r"^\d+\. `(packlora/[\w/]+\.py)`: (.*?)\. ", PAGE, re.MULTILINE | re.DOTALL):
        functions += [(file, name) for name in re.findall(r"`([\w.]+)`", names)]
    files = list(dict.fromkeys(file for file, _ in functions))
    back = [(files[int(number) - 1], name) for number, name in re.findall(r"file (\d+), `([\w.]+)`", PAGE)]
    brackets = re.findall(r"\((`.*?)\)", PAGE.split("**Down**")[1], re.DOTALL)
    return functions, back, {name for text in brackets for name in re.findall(r"`([\w./]+)`", text)}


def function_of(code: CodeType) -> Function | None:
    """None of other packages."""
    own = code.co_filename.removeprefix(f"{ROOT}/")
    return (own, code.co_qualname) if own.startswith("packlora/") else None


@contextmanager
def callers_of(functions: list[Function], found: dict[Function, list[Function]]) -> Iterator[None]:
    """Note, at the first call of each function in this thread, the functions of packlora that are running, innermost first."""

    def look(frame: FrameType, event: str, arg: Any) -> None:
        own = function_of(frame.f_code) if event == "call" else None
        if own not in functions or own in found:
            return
        found[own], outer = [], frame.f_back
        while outer is not None:
            if (function := function_of(outer.f_code)) is not None:
                found[own].append(function)
            outer = outer.f_back

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def forward_and_backward() -> None:
    """Run a model whose adapted layers are computed by kernels."""
    model = tiny_model("llama", torch.bfloat16)
    spec = resolve(LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), model, "job")
    attached, _ = attach(model, {"job": spec}, 0, Fixed(ROUTED))
    with attached.active(TokenOwners(T, ((0, 0, T),))):
        run(model)


def test_each_function_of_the_reading_order_is_called_by_one_before_it(
    tiny_base: Callable[..., str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions, back, bracketed = read()
    files, calls, launched = {file for file, _ in functions}, dict[Function, list[Function]](), set[str]()
    job = {"name": "a", "data": {"path": write_rows("a", 4)}, "adapter": {"r": 2}, "train": {"max_steps": 1}}
    common = {"base_model": tiny_base("llama"), "device": "cpu", "jobs": [job], "output_dir": str(tmp_path / "out")}
    with callers_of([*functions, *back], calls):
        train(common)

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.add(kernel.fn.__name__)

    monkeypatch.setattr(launcher, "launch", launch)
    with callers_of(functions, calls):
        forward_and_backward()
    kernels = [own for own in functions if own[1] in launched]
    assert [own for own in [*functions, *back] if own not in calls and own not in kernels] == [] and len(kernels) == 1
    assert len(back) == 3
    passed: set[Function] = set()
    for place, function in enumerate(functions[1:], 1):
        if function in kernels:
            continue
        outer = next((own for own in calls[function] if own in functions), None)
        assert outer in functions[:place], f"{function} is called by {outer}, which the page does not name before it"
        passed |= {*calls[function][: calls[function].index(outer)]}
    for file, name in passed:
        assert file in files or {file, name} <= bracketed, f"the way goes through {name} of {file}"
    assert bracketed == {part for own in passed for part in own} & bracketed
