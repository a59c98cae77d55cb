"""Frozen linear layers whose products are in FP8 (`compute: fp8`): rows and their codes, weights, layers, and how a base model
gets them. The rest of the package finds this by name: see packlora/form.py."""
