"""distillation in run files: the cross entropy of soft targets, a teacher's probabilities of several tokens in one place."""

from __future__ import annotations

from packlora.config.trainers import Declaration

DECLARATION = Declaration(rows="completions", learning_rate=2e-4, units=("nats per token",), takes_targets=True)
