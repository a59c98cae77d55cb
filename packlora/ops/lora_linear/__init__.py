"""Linear layer with adapters: reference.py is the specification, autograd.py has the call, torch_path.py and triton_path.py
compute it."""
