"""Chat templates that always terminate: compiled by transformers, with a limit on their steps, and with one clock.

A template is a program of an unknown author. transformers' sandbox keeps it from the machine, but lets it run for ever, or fill
the memory. Here every turn of a loop and every call of a macro is counted, and results of `+`, `~`, `*` and `**` have a
largest size. What a conversation needs is far below these limits.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from packlora.errors import EndlessError

MOST_STEPS = 10_000_000
"""Turns of loops and calls of macros in one rendering; one more for every pair of messages, as some templates look at each."""
MOST_SECONDS = 60.0
"""Time of the processor that one rendering takes. Few steps take long where each sorts or joins a long list."""
MOST_CHARACTERS = 2**28
"""Length of a text or a list that a template puts together."""
MOST_BITS = 2**14
"""Bits of the largest integer that a template may compute; Python prints no longer ones."""
STEP, JOIN, READY = "packlora_step", "packlora_join", "packlora_counts"
"""Filters that count and join, which no template can name by chance; and the attribute of a program that has them."""


@dataclass(slots=True)
class _Rendering:
    """Rendering that is in progress. moment: what its clock says. most: its steps."""

    moment: datetime
    started: float
    most: int
    steps: int = 0


_NOW: ContextVar[_Rendering] = ContextVar("rendering")


@contextmanager
def limits(moment: datetime, messages: int) -> Iterator[None]:
    """A rendering of so many messages with a count of its own, whose clock stands at a moment."""
    token = _NOW.set(_Rendering(moment, time.thread_time(), MOST_STEPS + messages**2))
    try:
        yield
    finally:
        _NOW.reset(token)


def compiled(source: str) -> str:
    """The source by which transformers finds the counted program of a chat template.

    transformers compiles and keeps a comment with the template's digest, in an environment of its own, which then gets the
    program. The template itself is never compiled without limits: that computes its constants, as 10 ** 10 ** 10.
    """
    key = _key(source)
    program = chat_template_utils._compile_jinja_template(key)
    if not hasattr(program, READY):
        _count(program, source)
        setattr(program, READY, True)
    return key


@lru_cache
def _key(source: str) -> str:
    digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    return f"{{% generation %}}{{# {digest} #}}{{% endgeneration %}}"


def _count(program: Template, source: str) -> None:
    """Give a compiled template the program of a source, which counts."""
    environment: Any = program.environment
    environment.intercepted_binops = frozenset(("+", "*", "**"))
    environment.binop_table |= {"+": _sum, "*": _product, "**": _power}
    environment.filters |= {STEP: _step, JOIN: _joined}
    environment.globals |= {"strftime_now": _strftime_now}
    tree = _Counted().visit(environment.parse(source))
    counted = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
    program.blocks, program.root_render_func = counted.blocks, counted.root_render_func


class _Counted(NodeTransformer):
    """Transformer of a template's syntax tree that counts a step in the body of every loop, macro and block, and in every
    loop's condition."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_filter(STEP, [nodes.Const(None)], node.lineno), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(JOIN, node.nodes, node.lineno)


def _filter(name: str, values: list[nodes.Expr], line: int) -> nodes.Filter:
    """A filter costs a tenth of a call, which the sandbox looks at each time."""
    made = nodes.Filter(values[0], name, values[1:], [], None, None)
    made.set_lineno(line)
    return made


def _statement(line: int) -> nodes.Node:
    return nodes.ExprStmt(_filter(STEP, [nodes.Const(None)], line)).set_lineno(line)


@pass_context  # so that it is not computed when the template is compiled
def _step(context: Context, nothing: None) -> bool:
    now = _NOW.get()
    now.steps += 1
    if now.steps > now.most:
        raise EndlessError(f"it takes more than {now.most} turns of its loops")
    if now.steps % 64 == 0 and time.thread_time() - now.started > MOST_SECONDS:
        raise EndlessError(f"it takes more than {MOST_SECONDS:g} seconds")
    return True


def _strftime_now(form: str) -> str:
    return _NOW.get().moment.strftime(form)


def _sized(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise EndlessError(f"it makes a text of more than {MOST_CHARACTERS} characters")


def _short(bits: int) -> None:
    if bits > MOST_BITS:
        raise EndlessError(f"it computes a number of more than {MOST_BITS} bits")


def _joined(*parts: Any) -> str:
    texts = list(map(str, parts))
    _sized(sum(map(len, texts)))
    return "".join(texts)


def _sum(left: Any, right: Any) -> Any:
    if hasattr(left, "__len__") and hasattr(right, "__len__"):
        _sized(len(left) + len(right))
    return operator.add(left, right)


def _product(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            _sized(len(value) * times)
        elif isinstance(value, int) and isinstance(times, int):
            _short(value.bit_length() + times.bit_length())
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _short(left.bit_length() * right)
    return operator.pow(left, right)
