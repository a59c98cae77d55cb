"""Experts' weights with LoRA and DoRA adapters: one grouped low-rank operator; `reference` is its specification."""
