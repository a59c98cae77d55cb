"""Benchmarks that answer one question each: `python -m packlora.bench.studies.NAME`, in a checkout.

They write to benchmarks/results. readme.py measures nothing: it writes the README's figures from what lies there.
"""
