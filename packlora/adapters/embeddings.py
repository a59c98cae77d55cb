"""Changes to the embeddings of a model in training, made by the columns of the tokens that are running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from packlora.adapters.linear import Attached


def change_embeddings(
    model: Any, attached: Attached, change: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
) -> None:
    """Let the model's embeddings be changed wherever the microbatch that is running has columns of tokens.

    Args:
        change: gives embeddings [..., T, D] from these and the columns of the T tokens.
    """

    def after(_: torch.nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        owners = attached.microbatch
        return None if owners is None or not owners.columns else change(embedded, owners.columns)

    attached.after_embedding = after
    hook_embeddings(model, attached)


def hook_embeddings(model: Any, attached: Attached) -> None:
    """Do so once more where something was put in their place: the change is made to what the model calls."""
    if attached.embedding_hook is not None:
        attached.embedding_hook.remove()
    if attached.after_embedding is not None:
        attached.embedding_hook = model.get_input_embeddings().register_forward_hook(attached.after_embedding)
