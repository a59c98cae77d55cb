"""NEFTune (Jain et al. 2023): uniform noise on the embeddings of a training sample, of alpha / sqrt(tokens * width).

The noise is a function of the job's seed, step, sample, position and feature, as dropout masks are (ops/dropout/keys.py): it is
the same whatever else is in the microbatch, on whatever device.

Shapes: T tokens, D width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from packlora.engine.objective import Column, Term
from packlora.engine.rows import Row
from packlora.ops.dropout.keys import layer_salt, packed_token_keys, uniform

SALT = layer_salt("neftune")
KEYS, SCALE = "neftune keys", "neftune scale"
"""Columns of tokens: the words of a key as one of 64 bits, and alpha / sqrt(tokens of the sample)."""


class Neftune(Term):
    """Noise of one job. key: of everything that it draws."""

    columns = MappingProxyType({KEYS: Column("token", dtype=torch.int64), SCALE: Column("token")})

    def __init__(self, key: int, alpha: float) -> None:
        self.key, self.alpha = key, alpha

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Keys int64 [T] and scales [T]."""
        lengths = [row.sample.num_tokens for row in rows]
        steps, numbers = zip(*[row.draw[1:] for row in rows if row.draw is not None], strict=True)
        words = packed_token_keys([self.key] * len(lengths), steps, numbers, lengths).view(np.int64)[:, 0]
        return {KEYS: words, SCALE: np.repeat([self.alpha * n**-0.5 for n in lengths], lengths)}


def add_noise(embedded: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Embeddings [..., T, D] with noise; those of tokens of scale 0 as they are, and all where there are no such columns."""
    if KEYS not in columns:
        return embedded
    width = embedded.shape[-1]
    scale_T1 = columns[SCALE].float()[:, None] * width**-0.5
    drawn = (uniform(columns[KEYS].view(torch.int32).view(-1, 2), SALT, width) * scale_T1).to(embedded.dtype)
    return torch.where(scale_T1 == 0, embedded, embedded + drawn)
