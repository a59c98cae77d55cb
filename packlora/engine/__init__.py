"""Engine: the content of a microbatch, its packing, and its objectives."""
