"""Ask: the plan that a user requests, for all layers or by patterns of their paths.

A value is checked and spread over the layers here, for `accelerate` and for run files alike; select.py, PlanChooser acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from packlora.errors import quoted
from packlora.ops.lora_linear.plan import PLANS, Plan, named_plan
from packlora.patterns import pattern_key

Prefer = Literal["time", "memory"]
RULES = ("measured", "flops")
"""Rules that choose a plan; names of plans are accepted beside them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Requested plan of a layer, or of all layers.

    plan: measured, the fastest plan by measurements on the device, else by the cost model; flops, the fewest floating-point
    operations; the name of a plan, from the list or by its parts; or a Plan. lossy: plans with merged weights may be chosen,
    and a named one may round as it does. prefer: with memory, rules do not keep S where computing it again costs little.
    """

    plan: str | Plan = "measured"
    lossy: bool = False
    prefer: Prefer = "time"

    @property
    def given(self) -> Plan | None:
        """Plan that is requested itself; None where a rule chooses."""
        if isinstance(self.plan, Plan):
            return self.plan
        return None if self.plan in RULES else named_plan(self.plan)


MEASURED = Ask()


def asks_of(
    plan: object, lossy: bool = False, prefer: str = "time", paths: Iterable[str] = (), matched: Mapping[str, str] | None = None
) -> dict[str, Ask]:  # fmt: skip
    """Requested plan of each layer.

    Args:
        plan: see Ask, None for measured; or a mapping from patterns to these. A pattern matches paths as those of PEFT's
            rank_pattern do: it is the end of a path, from a dot on, or a regular expression for it. The first one that matches
            counts; layers that none matches are measured.
        lossy, prefer: see Ask.
        paths: of the layers.
        matched: what patterns are compared with in the place of a path, by path.

    Raises:
        ValueError: a value is none of these, a plan that merges weights is named without `lossy`, or a pattern matches nothing.
    """
    if not isinstance(plan, Mapping):
        return dict.fromkeys(paths, _ask_of(plan, lossy, prefer))
    otherwise = _ask_of(None, lossy, prefer)
    asks = {pattern: _ask_of(value, lossy, prefer, f" of {quoted(pattern)}") for pattern, value in plan.items()}
    names = {path: (matched or {}).get(path, path) for path in paths}
    for pattern in asks:
        try:
            found = any(pattern_key([pattern], name) == pattern for name in names.values())
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"plan has {quoted(pattern)}, which is not a valid regular expression: {error}") from None
        if not found:
            raise ValueError(f"plan has {quoted(pattern, 300)}, which matches no adapted linear layer")
    return {path: asks.get(pattern_key(list(asks), name), otherwise) for path, name in names.items()}


def _ask_of(plan: Any, lossy: bool, prefer: Any, whose: str = "") -> Ask:
    """Requested plan from one value. whose: the pattern that has it, for messages."""
    if prefer not in get_args(Prefer):
        raise ValueError(f"prefer is {quoted(prefer)}; accepted are {', '.join(get_args(Prefer))}")
    if type(lossy) is not bool:
        raise ValueError(f"lossy is {quoted(lossy)}; accepted are true and false")
    ask = Ask("measured" if plan is None else plan, lossy, prefer)
    if not _is_known(ask.plan):
        accepted = (*RULES, *(one.name for one in PLANS))
        raise ValueError(
            f"plan{whose} is {quoted(plan)}; accepted are {', '.join(accepted)}, and plans by their parts, as reports "
            "write them"
        )
    if isinstance(plan, str) and ask.given is not None and ask.given.lossy and not lossy:
        raise ValueError(
            f"plan{whose} is {quoted(plan)}, which merges weights and so rounds more than the plain chain; it is taken "
            "only where lossy is true"
        )
    return ask


def _is_known(plan: Any) -> bool:
    if isinstance(plan, Plan) or plan in RULES:
        return True
    try:
        return isinstance(plan, str) and named_plan(plan) is not None
    except ValueError:
        return False
