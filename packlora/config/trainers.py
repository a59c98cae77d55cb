"""Built-in objectives by the names that `train.trainer` has. Each is a folder of engine/objectives/, whose own file declares,
without torch, which keys, losses and rows it has. Other rooms ask here, and know no trainer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from packlora.config.shared import Strict

FOLDER = "packlora.engine.objectives"
FIRST = ("sft", "dpo", "kto", "orpo", "grpo")
"""Trainers that messages list first; the others follow by name."""
ACCURACIES, MARGINS = "eval_rewards/accuracies", "eval_rewards/margins"
Rows = Literal["completions", "pairs", "judged", "rewards"]
"""Rows of a trainer; of `rewards` they are prompts, whose completions are generated and rewarded."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A built-in objective in run files.

    learning_rate: of a job that gives none; docs/settings.md has the reasons.
    losses: values of loss_type, the first one by default. adds_losses: whether a job may have several. names_trainer: whether
        one of them sets the trainer where none is written. refused: losses of TRL's that are not taken, with reasons.
    shared: those of the keys beta, loss_type and reference that it has. keys: model of its own ones, null by default.
    check: raises ValueError for keys of training that do not go together.
    metrics: of held-out samples, which may choose the best adapter; compared: others that a sweep compares. More is better.
    units: of the first loss and of others, in reports. reads_fields: whether further fields of rows are columns of samples.
    takes_images, takes_targets: whether rows may have them. learns_prompt: whether the tokens of prompts are labels.
    """

    rows: Rows
    learning_rate: float
    losses: tuple[str, ...] = ()
    adds_losses: bool = False
    names_trainer: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    keys: type[Strict] = Strict
    check: Callable[[Any], None] = lambda train: None
    metrics: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    units: tuple[str, ...] = ("",)
    takes_images: bool = False
    takes_targets: bool = False
    learns_prompt: bool = False
    reads_fields: bool = False


@cache
def built_in() -> Mapping[str, Declaration]:
    """Declarations by trainer."""
    found = {module.name for module in iter_modules(import_module(FOLDER).__path__) if module.ispkg}
    names = [*FIRST, *sorted(found.difference(FIRST))]
    return {name: import_module(f"{FOLDER}.{name}").DECLARATION for name in names}


def trainers(which: Callable[[Declaration], bool]) -> list[str]:
    """Trainers whose declaration is such a one."""
    return [name for name, own in built_in().items() if which(own)]
