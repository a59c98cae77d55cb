"""Benchmarks that stand outside of the package: `python -m benchmarks NAME --out FILE`."""
