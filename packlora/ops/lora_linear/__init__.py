"""The linear layer with adapters: reference.py says what it is, chain.py computes it with plain PyTorch products."""
