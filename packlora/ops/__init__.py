"""Operators: per folder a reference that is the specification, and the ways to compute it. Imports nothing of packlora."""
