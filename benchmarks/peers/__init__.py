"""Peers of packlora: kernels of other projects, the formulas of Scaling-DoRA, plain PyTorch operations."""
