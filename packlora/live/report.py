"""Report of what accelerate() found in a model and of the calls of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

from packlora.live.forward import ASKED_FOR, Calls, OwnForward, Warned


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One adapted module: its path in the model, and its kind. reason says why it is left to PEFT, as things stand; plan (its
    name), group (its siblings' paths) and evidence are of those that are not.

    evidence: by what the plan was chosen; what it saves against the plain chain, in milliseconds where both were measured, else
    in floating-point operations where these differ; and what is kept of S for the backward, for all of the group.
    """

    path: str
    kind: str
    plan: str | None = None
    group: tuple[str, ...] = ()
    reason: str | None = None
    evidence: str = ""

    @property
    def accelerated(self) -> bool:
        """Whether packlora's operator computes it."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """Counts of the calls of one module: how many were computed by this package, and how many by PEFT, by reason."""

    served: int
    left: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of accelerate() when it was called; call it again after a change of adapters. print() shows all of it."""

    modules: tuple[ModuleReport, ...]
    """All adapted modules, in the model's order."""
    groups: tuple[tuple[str, ...], ...]
    """Paths of the modules that are computed together, in order of their calls."""
    notes: tuple[str, ...] = field(default=())
    """Other notes for the user, in sentences."""
    calls: tuple[Calls, ...] = field(default=(), repr=False, compare=False)

    @property
    def accelerated(self) -> int:
        """Modules that packlora's operator computes."""
        return sum(module.accelerated for module in self.modules)

    def served(self) -> dict[str, ModuleCalls]:
        """Calls since accelerate(), by path of the modules whose forward it replaced: calls in forwards, and in
        recomputations of checkpointing; none of those inside of compiled graphs."""
        return {calls.path: ModuleCalls(calls.served, dict(calls.left)) for calls in self.calls}

    def __str__(self) -> str:
        together = sum(len(group) for group in self.groups)
        lines = [
            f"packlora: {self.accelerated} of {len(self.modules)} adapted modules accelerated, "
            f"{together} of them in {len(self.groups)} sibling groups"
        ]
        lines += self._left_since()
        texts: dict[tuple[str, str], dict[str, None]] = {}
        kinds = {module.path: module.kind for module in self.modules}
        for module in self.modules:
            if module.reason is not None:
                text = f"PEFT's own forward: {module.reason}"
            else:
                text = f"plan {module.plan}" + (f" ({module.evidence})" if module.evidence else "")
            text = f"{module.kind}: {text}"
            alike = [path for path in module.group if kinds[path] == module.kind]
            name = _together(alike or [module.path])
            texts.setdefault((re.sub(r"\d+", "{}", name), text), {})[name] = None
        for (_, text), names in texts.items():
            lines += [f"  {_ranges([*names])}", f"      {text}"]
        return "\n".join(lines + [f"  {note}" for note in self.notes])

    def _left_since(self) -> list[str]:
        """Calls that PEFT has computed of modules that are called accelerated."""
        by_reason: dict[str, list[int]] = {}
        for calls in self.calls:
            for reason, number in list(calls.left.items()):  # another thread may count
                if calls.promised and reason not in ASKED_FOR:
                    by_reason.setdefault(reason, []).append(number)
        return [
            f"  but PEFT's own forward has computed {sum(numbers)} calls of {len(numbers)} of them since: {reason}"
            for reason, numbers in by_reason.items()
        ]


def report_of(
    model: torch.nn.Module,
    layers: Mapping[str, BaseTunerLayer],
    forwards: Mapping[str, OwnForward],
    foreign: Mapping[str, str],
    found: Mapping[str, object],
    groups: Iterable[tuple[str, ...]],
    notes: Iterable[str],
) -> Report:
    """The report on a model whose forwards are in place. From here on their calls are counted anew.

    Args:
        layers: PEFT's, by path.
        forwards: of those that are not left to PEFT whatever happens.
        foreign: of the others, the reason.
        found: by path, what `ready` gave of those with forwards.
    """
    modules: list[ModuleReport] = []
    for path, layer in layers.items():
        kind = f"{type(layer).__module__.removeprefix('peft.tuners.').partition('.')[0]}.{type(layer).__name__}"
        if path in foreign:
            modules.append(ModuleReport(path, kind, reason=foreign[path]))
        elif isinstance(reason := found[path], str):
            modules.append(ModuleReport(path, kind, reason=reason))
        else:
            plan, evidence = forwards[path].planned(found)
            modules.append(ModuleReport(path, kind, plan, forwards[path].siblings(), evidence=evidence))
    modules += [
        ModuleReport(path, type(module).__name__, reason="trained itself, not through LoRA")
        for path, module in model.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, TrainableTokensWrapper)
    ]  # fmt: skip
    computed = {module.path for module in modules if module.accelerated}
    groups = [group for group in groups if len(computed & {*group}) > 1]
    warned, counted = Warned(), []
    for module_report in modules:
        forward = forwards.get(module_report.path)
        if forward is not None:
            forward.calls = Calls(module_report.path, module_report.accelerated, warned)
            counted.append(forward.calls)
    return Report(tuple(modules), tuple(groups), tuple(notes), tuple(counted))


# --- names of many modules ---------------------------------------------------------------------------------------------


def _together(paths: Sequence[str]) -> str:
    """One name for siblings: `self_attn.q_proj, k_proj`."""
    parents = {path.rpartition(".")[0] for path in paths}
    return ", ".join((paths[0], *(path.rpartition(".")[2] if len(parents) == 1 else path for path in paths[1:])))


def grouped(paths: Iterable[str]) -> list[str]:
    """One name for paths that differ in numbers alone: `layers.{0-31}.q_proj`."""
    like: dict[str, list[str]] = {}
    for path in paths:
        like.setdefault(re.sub(r"\d+", "{}", path), []).append(path)
    return [_ranges(own) for own in like.values()]


def _ranges(paths: list[str]) -> str:
    """See grouped."""
    if len(paths) == 1:
        return paths[0]
    columns = list(zip(*(map(int, re.findall(r"\d+", path)) for path in paths), strict=True))
    if sum(len(set(column)) > 1 for column in columns) > 1:
        return f"{paths[0]} and {len(paths) - 1} more like it"
    pieces = re.split(r"\d+", paths[0])
    name = pieces[0]
    for column, piece in zip(columns, pieces[1:], strict=True):
        name += (str(column[0]) if len(set(column)) == 1 else f"{{{_spans(sorted(set(column)))}}}") + piece
    return name


def _spans(numbers: list[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
