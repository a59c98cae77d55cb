"""Label smoothing (Szegedy et al. 2016) as a term beside the cross entropy.

With a share e of every label spread over all V words, a loss is

    (1 - e) (lse - x_y) + e (lse - mean(x)) = (lse - x_y) + e (x_y - mean(x)),        lse = log(sum(exp(x)))

and of logits x = W h + b the second term is e (h (W_y - mean(W)) + b_y - mean(b)), means over words: it needs no logits.

Shapes: C rows of a chunk, D hidden size, V words, v words that are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from packlora.ops.cross_entropy.reference import IGNORE

if TYPE_CHECKING:
    from packlora.ops.cross_entropy.parts import VocabularyPart


class Smoothing:
    """The term for rows of labels, by chunks.

    Args:
        weight_vD, bias_v: of the output layer, or of its words that are here.
        words: V. start: the first word that is here.
        wide: dtype of the term, float32 at least.
    """

    def __init__(
        self, weight_vD: torch.Tensor, bias_v: torch.Tensor | None, words: int, start: int, wide: torch.dtype
    ) -> None:
        self.weight_vD, self.bias_v, self.start, self.wide = weight_vD, bias_v, start, wide
        self._mean_D = weight_vD.sum(0, dtype=wide) / words
        self._mean_bias = 0.0 if bias_v is None else bias_v.sum(dtype=wide) / words

    def term(
        self, hidden_CD: torch.Tensor, labels_C: torch.Tensor, smoothing_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The term [C] and its gradient [C, D] by the hidden states, 0 where nothing is smoothed; what is here of them: others'
        are to be added."""
        here_C = labels_C - self.start
        is_here_C = (here_C >= 0) & (here_C < len(self.weight_vD))
        at_C = here_C.where(is_here_C, 0)
        direction_CD = self.weight_vD[at_C].to(self.wide).masked_fill_(~is_here_C[:, None], 0) - self._mean_D
        value_C = (hidden_CD.to(self.wide) * direction_CD).sum(1)
        if self.bias_v is not None:
            value_C += self.bias_v[at_C].to(self.wide).masked_fill_(~is_here_C, 0) - self._mean_bias
        counts_C = (smoothing_C != 0) & (labels_C != IGNORE)
        return torch.where(counts_C, smoothing_C * value_C, 0), torch.where(
            counts_C[:, None], smoothing_C[:, None] * direction_CD, 0
        )


def smooth(
    losses_L: torch.Tensor, gradient_LD: torch.Tensor | None, hidden_LD: torch.Tensor, weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None, labels_L: torch.Tensor, weights_L: torch.Tensor, rows: list[int],
    part: VocabularyPart | None, smoothing_L: torch.Tensor,
) -> None:  # fmt: skip
    """Add what smoothing of labels makes of the losses, and of the gradient that is here."""
    words, first = (len(weight_VD), 0) if part is None else (part.words, part.start)
    smoothing, added_L, start = (
        Smoothing(weight_VD, bias_V, words, first, weights_L.dtype),
        torch.empty_like(losses_L),
        0,
    )
    for count in rows:
        chunk = slice(start, start + count)
        added_L[chunk], gradient_CD = smoothing.term(hidden_LD[chunk], labels_L[chunk], smoothing_L[chunk])
        if gradient_LD is not None:
            gradient_LD[chunk] += (weights_L[chunk, None] * gradient_CD).to(gradient_LD.dtype)
        start += count
    if part is not None:
        part.add_up(added_L)
    losses_L += added_L
