"""The embedding of a base model in the memory of the host, where the rows of a microbatch's tokens are read: they are a
hundredth of it, and the device has room for more. No number changes.

Shapes: V vocabulary, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.config import Run
from packlora.errors import InputError
from packlora.ops.gpu import runs_triton

IN_PARTS = "the base model is in parts on several processes (parallel)"


class HostEmbedding(torch.nn.Module):
    """Rows of an embedding, on the device of the ids. The weight is no parameter: those say where the model is."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        weight = embedding.weight.detach()
        self.waits = weight.is_cuda
        """Whether the host reads rows, and waits for the device before: without kernels, or where no memory is pinned."""
        if weight.is_cuda and runs_triton(weight.device):
            with contextlib.suppress(RuntimeError):
                pinned = torch.empty_like(weight, device="cpu", pin_memory=True)
                weight, self.waits = pinned.copy_(weight), False
        self._held = [weight.cpu()]

    @property
    def weight(self) -> torch.Tensor:
        """The weight [V, D] on the CPU."""
        return self._held[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., D] of ids [...]."""
        if ids.is_cuda and not self.waits:
            from packlora.ops.host_rows.host_rows import host_rows

            return host_rows(self.weight, ids.flatten()).view(*ids.shape, -1)
        rows = self.weight.new_empty(ids.numel(), self.embedding_dim, pin_memory=ids.is_cuda)
        torch.index_select(self.weight, 0, ids.flatten().cpu(), out=rows)
        return rows.to(ids.device, non_blocking=True).view(*ids.shape, -1)


def why_host_waits(model: PreTrainedModel) -> str | None:
    """Reason, in words, why no CUDA graph holds a forward of a loaded model; None where the device reads its embedding."""
    embedding: Any = model.get_input_embeddings()
    if not (isinstance(embedding, HostEmbedding) and embedding.waits):
        return None
    return "the embedding lies on the host, which looks up its rows"


def check_host(run: Run, skeleton: PreTrainedModel, adapted: Collection[str]) -> None:
    """Raises InputError where the embedding is to lie on the host, and cannot. adapted: see why_on_device."""
    reason = why_on_device(skeleton, adapted)
    if run.parallel.divided:
        reason = IN_PARTS
    if reason is not None:
        remedy = "fit chose it; set offload_embedding: false" if run.leaves("offload_embedding") else "leave it out"
        raise InputError(f"offload_embedding: true is not for base_model {run.base_model!r}: {reason}; {remedy}")


def move_to_host(model: PreTrainedModel, is_whole: bool) -> None:
    """Put a HostEmbedding in the place of a model's embedding. Raises InputError where it is not whole on its device."""
    if not is_whole:
        raise InputError(f"offload_embedding: true is not for this run: {IN_PARTS}; leave it out")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    model.set_input_embeddings(HostEmbedding(embedding))


def why_on_device(model: PreTrainedModel, adapted: Collection[str]) -> str | None:
    """Reason, in words, why a model's embedding stays on the device; None where it may lie on the host.

    Args:
        model: also one without weights.
        adapted: paths of modules that jobs train.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or embedding.max_norm is not None:
        return f"its embedding is a {type(embedding).__name__} that changes what it looks up"
    if head is None or head.weight is embedding.weight or getattr(model.config, "tie_word_embeddings", False):
        return "its output layer is the embedding, and is multiplied on the device"
    path = next(path for path, module in model.named_modules() if module is embedding)
    return f"{path} is trained" if path in adapted else None
