"""Which samples go into which microbatch, in what order. Nothing here imports torch.

To be read in this order: types.py (the words), planner.py (the front door), solve.py (one window); group.py, stream.py, bins.py
and compact.py (how it is packed); bounds.py and verify.py (what is proved); cost.py and
simulate.py (what it costs); milp.py and columns.py (integer programs); process.py, worker.py, wire.py, background.py
(the process that plans).
"""
