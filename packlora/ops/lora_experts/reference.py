"""The specification: the operator over experts, expert by expert and owner by owner, in plain torch, for any dtype.

    y_s = g_e * ( W_e x_s + s B_e A_e drop(x_s) ) + bias_e         s a row, e its expert; A, B, g its owner's

Shapes: T tokens, k experts a token, S = T k rows in the order of (token, choice), N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from packlora.ops.dropout import dropout
from packlora.ops.lora_experts.dropout import expert_keys
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight, a_by_expert, b_by_expert


def lora_experts(
    x_SK: torch.Tensor,
    frozen: ExpertWeight,
    expert_S: torch.Tensor,
    owner_S: torch.Tensor,
    adapters: Sequence[ExpertLowRank | None],
    keys_S2: torch.Tensor | None = None,
    salt: int = 0,
    own_masks: bool = False,
) -> torch.Tensor:
    """y [S, N], differentiable by autograd in x and in the operands of the adapters. Slow.

    Args:
        x_SK: rows, in any order.
        expert_S, owner_S: of each row; the owner is a place in `adapters`, where None is the frozen experts alone.
        keys_S2: dropout keys of each row's token.
        own_masks: each expert has a mask of its own.
    """
    E, N, K = frozen.shape
    y_SN = x_SK.new_zeros(len(x_SK), N)
    for e in range(E):
        W_NK = frozen.from_outputs()[e]
        for owner, adapter in enumerate(adapters):
            rows = ((expert_S == e) & (owner_S == owner)).nonzero()[:, 0]
            if not len(rows):
                continue
            x_sK = x_SK[rows]
            y_sN = x_sK @ W_NK.T
            if adapter is not None:
                xd_sK = x_sK
                if adapter.dropout:
                    assert keys_S2 is not None
                    keys = expert_keys(keys_S2[rows], salt, expert_S[rows], K) if own_masks else keys_S2[rows]
                    xd_sK = dropout(x_sK, keys, salt, adapter.dropout)
                A_rK, B_Nr = a_by_expert(adapter.A, E)[e], b_by_expert(adapter.B, E)[e]
                low_rank_sN = adapter.scaling * (xd_sK @ A_rK.T) @ B_Nr.T
                if adapter.magnitude is None:
                    y_sN = y_sN + low_rank_sN
                else:
                    assert adapter.norm is not None
                    g_N = adapter.magnitude[e] / adapter.norm[e]
                    base_sN = (xd_sK if adapter.base_dropped else x_sK) @ W_NK.T
                    y_sN = y_sN + (g_N - 1) * base_sN + g_N * low_rank_sN
            if frozen.bias is not None:
                y_sN = y_sN + frozen.bias[e]
            y_SN = y_SN.index_add(0, rows, y_sN)
    return y_SN
