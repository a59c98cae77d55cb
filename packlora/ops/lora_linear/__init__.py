"""The linear layer with adapters: reference.py says what it is, autograd.py has the call, torch_path.py and
triton_path.py compute it."""
