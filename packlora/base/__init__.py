"""The frozen base model: read (load.py), run on packed samples (packing.py, proof.py), and put together for a run (model.py).

The storage of frozen weights belongs here too: today dense tensors of the run's dtype, read whole (load.py) or by rows
(weight_files.py) for parallel/sharded.py; 4-bit and 8-bit weights will be read, checked and laid out in this room, and hand the
operators of `ops` what they ask of a frozen weight.
"""
