"""The loss of a microbatch between two replays: what comes after the decoder, which no graph holds.

The output layer is called for the rows of labels, whose number and whose owners each microbatch has of its own. So adapters and
copies on it need no room in a graph: their gradients are made here, and are added up once those of the decoder were.

Shapes: T tokens, D hidden size, L label rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from packlora.adapters.linear import AdaptedModule
from packlora.engine.collate import PackedBatch
from packlora.engine.heads import head_losses
from packlora.engine.passes import MicrobatchResult, Pending, SingleDevice, pending_of


class Between:
    """Loss of microbatches whose decoder runs by graphs.

    Args:
        single: runs what graphs do not.
        trained: parameters of the adapters that may own tokens.
    """

    def __init__(self, single: SingleDevice, trained: Iterable[torch.nn.Parameter]) -> None:
        self._single = single
        head, known = single.base.model.get_output_embeddings(), set(map(id, trained))
        weights = head.trained().values() if isinstance(head, AdaptedModule) else ()
        own = {id(parameter): parameter for one in weights for parameter in one.named_parameters().values()}
        self.parameters = [parameter for key, parameter in own.items() if key in known]
        """Parameters on the output layer. Rows of an embedding that is tied to it are among them."""

    def forward(self, batch: PackedBatch, outputs: Sequence[torch.Tensor]) -> Pending:
        """Losses of a microbatch. outputs: hidden states [T, D] and what routers give, as of recorded.Body.forward."""
        base, (hidden_TD, *routed) = self._single.base, outputs
        with self._single.attached.active(batch.owners):
            losses = head_losses(base.model, hidden_TD[batch.rows_L], batch, batch.weights_L)
        return pending_of(base, batch, losses, routed)

    def evaluate(self, batch: PackedBatch, outputs: Sequence[torch.Tensor]) -> MicrobatchResult:
        """Each label's loss, of weight 1, without gradients. outputs: as of forward."""
        with self._single.attached.active(batch.owners):
            losses = head_losses(self._single.base.model, outputs[0][batch.rows_L], batch)
        return Pending(batch, losses).result()

    def backward(
        self, pending: Pending, outputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the outputs, and of `parameters`; None where there is none. Nothing is added to a parameter."""
        roots, gradients = pending.roots()
        inputs = [*outputs, *self.parameters]
        wanted = [one for one in inputs if one.requires_grad]
        found = torch.autograd.grad(roots, wanted, gradients, allow_unused=True) if roots and wanted else ()
        own = {id(one): grad for one, grad in zip(wanted, found, strict=False)}
        all_of_them = [own.get(id(one)) for one in inputs]
        return all_of_them[: len(outputs)], all_of_them[len(outputs) :]
