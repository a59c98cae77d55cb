"""Which samples go into which microbatch, in what order. Pure Python: nothing here imports torch."""
