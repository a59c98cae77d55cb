"""grpo in run files: losses of policies, which learn from rewards of what the adapter generates."""

from __future__ import annotations

from pydantic import Field

from packlora.config.shared import MOST_WEIGHT, Strict
from packlora.config.trainers import Declaration


class Keys(Strict):
    """Bounds of the ratio of probabilities."""

    epsilon: float | None = Field(None, ge=0, lt=1)
    """grpo: how far below 1 a ratio of probabilities counts. null: 0.2."""
    epsilon_high: float | None = Field(None, ge=0, le=MOST_WEIGHT)
    """grpo: how far above 1; null: as epsilon. Of cispo the largest ratio itself; null: 5."""


LOSSES = {
    "dapo": ("ppo", "tokens"), "grpo": ("ppo", "samples"), "dr_grpo": ("ppo", "constant"), "bnpo": ("ppo", "tokens"),
    "cispo": ("cispo", "tokens"), "gspo": ("gspo", "samples"), "dro": ("dro", "tokens"), "ppo": ("ppo", "tokens"),
    "importance_sampling": ("importance_sampling", "tokens"),
}  # fmt: skip
"""By loss type, name of the loss of policies (policy.py) and what its mean is over."""

DECLARATION = Declaration(
    rows="rewards", learning_rate=1e-5, losses=tuple(LOSSES), names_trainer=True, shared=("beta", "loss_type"), keys=Keys,
    metrics=("eval_reward",), compared=("reward",),
)  # fmt: skip
