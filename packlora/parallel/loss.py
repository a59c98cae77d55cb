"""The loss of a model that is cut: its output layer is whole on every process, so each computes the losses of some of the rows.

At 8B and four processes the output layer is a fifth of what a process multiplies for a token with a label, were it to take all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from packlora.ops.cross_entropy.linear_cross_entropy import ROWS_WITH_EQUAL_BITS
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.parallel.collectives import all_of, own_tokens


class LossRows:
    """Equal shares of label rows over a group, in order; the last ones are filled up with rows of no loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def own(
        self, hidden_LD: torch.Tensor, labels_L: torch.Tensor, weights_L: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states, labels and weights of this process's rows, from those of all. In a backward the hidden states have
        the gradients of all rows."""
        degree, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        share = max(ROWS_WITH_EQUAL_BITS, -(-len(labels_L) // degree))
        more = share * degree - len(labels_L)
        hidden = own_tokens(pad(hidden_LD, (0, 0, 0, more))[None], self.group)[0]
        labels = pad(labels_L, (0, more), value=IGNORE).chunk(degree)[rank]
        return hidden, labels, None if weights_L is None else pad(weights_L, (0, more)).chunk(degree)[rank]

    def joined(self, losses: torch.Tensor, count: int) -> torch.Tensor:
        """The losses of all `count` rows, from those of this process's."""
        return torch.cat(all_of(losses, self.group))[:count]
