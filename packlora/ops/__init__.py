"""Operators: per folder a reference that is the specification, and the paths that compute it. Imports nothing of packlora."""
