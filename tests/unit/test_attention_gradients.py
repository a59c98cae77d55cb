"""Gradients reach the projections as they lie, without a copy of each."""

from __future__ import annotations

from typing import Any

import torch
from conftest import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from packlora.base.packing import hidden_states, prepare_model


class Copies(TorchDispatchMode):
    """Shapes of what is copied or zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("copy_", "clone", "zeros", "new_zeros", "select_backward"):
            self.found.append((name, tuple(out.shape)))
        return out


def test_the_backward_of_packed_attention_makes_no_zeros_to_copy_into() -> None:
    model = tiny_model("qwen3", num_hidden_layers=1)
    prepare_model(model, False)
    model.get_input_embeddings().weight.requires_grad_(True)
    ids = torch.arange(24) % 50 + 3
    hidden = hidden_states(model, ids, torch.arange(24), (24,))
    with Copies() as copies:
        hidden.sum().backward()
    assert not [name for name, _ in copies.found if name in ("select_backward", "new_zeros", "zeros")], copies.found
