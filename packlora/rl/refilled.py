"""Record of dynamic sampling for a step: in its file, in the columns of its samples and in its logs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packlora.data.encode import Sample

FIGURES = ("rounds", "drawn", "idle", "missing")
"""Names of the columns, after `refill_`."""


@dataclass(frozen=True, slots=True)
class Refilled:
    """Refilling of a step (refill.py).

    drawn: groups that were drawn in all. numbers: which of them stands in each place. missing: places whose group still teaches
    nothing.
    """

    rounds: int
    drawn: int
    missing: int
    numbers: list[int]

    @property
    def idle(self) -> int:
        """Groups that were drawn and teach nothing."""
        return self.drawn - len(self.numbers) + self.missing

    def columns(self) -> dict[str, np.ndarray]:
        """Columns of each sample of the step."""
        return {f"refill_{name}": np.array(float(getattr(self, name))) for name in FIGURES}


def figures_of(sample: Sample) -> dict[str, float]:
    """Figures of the logs by a sample of the step; none without dynamic sampling. The share of groups without deviation is
    that of all groups that were drawn."""
    if "refill_drawn" not in sample.columns:
        return {}
    rounds, drawn, idle, missing = (float(sample.columns[f"refill_{name}"]) for name in FIGURES)
    return {
        "frac_reward_zero_std": idle / drawn, "dynamic_sampling/rounds": rounds, "dynamic_sampling/groups_drawn": drawn,
        "dynamic_sampling/groups_missing": missing,
    }  # fmt: skip
