"""All benchmarks. `packlora bench NAME` is run.py with one module per name; studies/ answers one question per script; peers/ is
what packlora is compared with. Results lie in benchmarks/results, beside the log of what was measured.
"""
