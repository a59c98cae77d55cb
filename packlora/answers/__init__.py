"""Answers of adapters: `packlora generate`, `packlora chat` and the Python API load adapters on a base model here."""
