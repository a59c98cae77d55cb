"""Assignment of samples to microbatches, and the order of microbatches. No module here imports torch.

Read the modules in this order: types.py (terms), planner.py (the entry point), solve.py (one window); rules.py (what is
tried, and what is better); stream.py, bins.py and compact.py (packing); bounds.py and verify.py (proofs);
cost.py (cost); milp.py (integer programs).
"""
