"""orpo in run files: which of two completions is preferred, without a reference."""

from __future__ import annotations

from packlora.config.trainers import ACCURACIES, MARGINS, Declaration

DECLARATION = Declaration(
    rows="pairs",
    learning_rate=5e-6,
    units=("per pair",),
    shared=("beta",),
    metrics=(ACCURACIES, MARGINS),
    learns_prompt=True,
)
