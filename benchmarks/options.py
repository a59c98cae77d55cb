"""What a benchmark is asked to do and what it answers: the same for every name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import Case, Progress
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import Plan, named_plan

PARTS = {
    "model": ("lora", "dora", "layers"),
    "dora": ("norm", "compose", "layer", "multi", "model", "paper-model", "inference", "quality"),
    "replicas": ("jobs", "fsdp2"),
    "small": ("models", "layers", "train"),
    "peers": ("lora", "dropout", "dora"),
    "workloads": ("xsum", "cnn_dailymail", "wikisum", "mix", "het"),
}
"""Of benchmarks that can be measured in pieces; a piece replaces its rows in the file and leaves the others."""
WITH_LAYERS = (
    "model",
    "dora",
    "quantised",
    "experts",
    "sweep",
    "vlm",
    "replicas",
    "tensor-parallel",
    "pipeline",
    "workloads",
)
"""Benchmarks whose models can be shrunk."""
USUAL_SHAPES = {"replicas": "0.6B", "pipeline": "70B"}
"""Of the models in these, unless another one is asked for."""


@dataclass(frozen=True, slots=True)
class Options:
    """only: words that choose contenders and cases, see `choose`; layers: of the model, None for all of them; parts: of the
    benchmark that are measured, none meaning all; kept: rows of the other parts, from the file that is written again; out: that
    file; progress: where rows go as they are measured; shape: of the model in benchmarks of USUAL_SHAPES; units: that are
    counted in `pipeline`, None for the usual number; lengths: of samples there."""

    device: torch.device
    quick: bool = False
    only: tuple[str, ...] = ()
    layers: int | None = None
    parts: tuple[str, ...] = ()
    kept: tuple[dict[str, Any], ...] = ()
    out: Path | None = None
    progress: Progress | None = None
    shape: str = ""
    units: int | None = None
    lengths: str = "short"

    @property
    def tiny(self) -> bool:
        """Sizes that a CPU runs in seconds: they test the benchmark and measure nothing."""
        return self.device.type == "cpu"

    def each(self, cases: Sequence[Case], rows: list[dict[str, Any]]) -> Iterable[Case]:
        """The cases to measure, each of which adds its row to `rows`; see progress.Progress."""
        return cases if self.progress is None else self.progress.each(cases, rows)

    def wants(self, part: str) -> bool:
        return not self.parts or part in self.parts

    def keys(self, summary: dict[str, Any], by_case: bool = False) -> dict[str, Any]:
        """The summary, with keys that begin with `part_` where less than everything was measured: no figure of a part can
        be taken for one of the whole.

        Args:
            by_case: each figure is of one case, or None where a case is missing; so they keep their names when time is up.
        """
        ended = self.progress is not None and bool(self.progress.left) and not by_case
        part = self.quick or self.only or self.layers is not None or self.units is not None or ended
        return {f"part_{key}": value for key, value in summary.items()} if part else summary


@dataclass(frozen=True, slots=True)
class Outcome:
    """table: the lines to print last. A figure of the summary that could not be measured is None."""

    protocol: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    table: list[str]


def choose(
    only: Sequence[str],
    contenders: Sequence[str],
    optional: Sequence[str],
    cases: Sequence[Case],
    always: str = "frozen",
) -> tuple[list[str], list[Case]]:
    """Contenders and cases that `only` names.

    A word is a contender, `packlora:PLAN` for packlora with a plan given by name, or one of the words of a case's label
    (`4096x4096`, `T8192`). Words for the same place of a label are alternatives, words for different places must all
    hold. Where no word names a contender, all of `contenders` take part.

    Args:
        optional: contenders that take part only where they are named.
        always: the contender that the others are compared with; it takes part unnamed.

    Raises:
        InputError: a word that is none of these, or words that no case satisfies together.
    """
    places: dict[int, set[str]] = {}
    named: list[str] = []
    words = {(place, word) for case in cases for place, word in enumerate(case.label.split())}
    for word in only:
        found = {place for place, known in words if known == word}
        if word in contenders or word in optional:
            named.append(word)
        elif word.startswith("packlora:"):
            plan_from_name(word.partition(":")[2])
            named.append(word)
        elif found:
            for place in found:
                places.setdefault(place, set()).add(word)
        else:
            known = sorted({known for _, known in words})
            raise InputError(
                f"only: {word!r} is neither a contender ({', '.join([*contenders, *optional])}, packlora:PLAN) "
                f"nor a word of a case ({', '.join(known)})"
            )
    chosen = [
        case
        for case in cases
        if all(
            place < len(case.label.split()) and case.label.split()[place] in accepted
            for place, accepted in places.items()
        )
    ]
    if not chosen:
        raise InputError(f"only: no case has all of {', '.join(sorted(w for p in places.values() for w in p))}")
    if not named:
        return list(contenders), chosen
    return list(dict.fromkeys([always, *named])), chosen


def plan_from_name(name: str) -> Plan:
    """See named_plan. Raises InputError where there is none."""
    try:
        return named_plan(name)
    except ValueError as error:
        raise InputError(f"plan {name!r}: {error}") from None
