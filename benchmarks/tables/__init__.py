"""Tables of docs/benchmarks.md and the README, written from benchmarks/results: `python -m benchmarks tables`."""
