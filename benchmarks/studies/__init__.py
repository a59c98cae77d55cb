"""Benchmarks that answer one question each, with options of their own. They write to benchmarks/results."""
