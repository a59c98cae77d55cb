"""sft in run files: the cross entropy of completions, conversations and texts."""

from __future__ import annotations

from packlora.config.trainers import Declaration

DECLARATION = Declaration(rows="completions", learning_rate=2e-4, units=("nats per token",))
