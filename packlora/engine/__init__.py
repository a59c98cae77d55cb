"""The engine: what a microbatch is made of, how it is packed, and what is learnt of it."""
