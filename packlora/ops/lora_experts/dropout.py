"""Dropout of what experts read: masks that depend on the token, and on the expert where each reads something of its own.

What all experts of a token read is dropped once, for all of them. What an expert made itself is dropped as a part of one long
vector in which the features of all experts stand one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.ops.dropout import dropout
from packlora.ops.dropout.keys import STRIDE, signed


def expert_keys(keys_S2: torch.Tensor, salt: int, expert_S: torch.Tensor, features: int) -> torch.Tensor:
    """Keys [S, 2] with which the mask of an expert's features is that of its part of the long vector.

    features: of one expert.
    """
    word, stride = signed(salt), signed(STRIDE)
    before = expert_S.to(torch.int32) * ((features + 1) // 2) * stride
    return torch.stack([((keys_S2[:, 0] ^ word) + before) ^ word, keys_S2[:, 1]], 1)


def dropped_rows(
    x_RK: torch.Tensor, keys_R2: torch.Tensor, salt: int, rates: Sequence[float], owner_R: torch.Tensor | None
) -> torch.Tensor:
    """x with every row dropped at the rate of its owner. owner_R: None where there is one."""
    different = dict.fromkeys(rates)
    if len(different) == 1:
        return dropout(x_RK, keys_R2, salt, rates[0])
    assert owner_R is not None
    out = x_RK
    for rate in different:
        if rate:
            whose = [owner_R == owner for owner, own in enumerate(rates) if own == rate]
            out = torch.where(torch.stack(whose).any(0)[:, None], dropout(x_RK, keys_R2, salt, rate), out)
    return out
