"""Rows of a weight in pinned memory of the host, read there by the GPU itself: nobody waits, and a CUDA graph can hold it.

Shapes: T ids, V rows, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from packlora.ops import launcher
from packlora.ops.gpu import on_device
from packlora.ops.host_rows.kernel import host_rows_kernel

BLOCK = 2048
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


def host_rows(weight_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Rows [T, D] on the device of the ids, which are int64 and below V."""
    T, D = len(ids_T), weight_VD.shape[1]
    out_TD = torch.empty(T, D, dtype=weight_VD.dtype, device=ids_T.device)
    key = ids_T.device, out_TD.dtype, T, D, weight_VD.data_ptr() % 16, ids_T.data_ptr() % 16
    with on_device(ids_T.device):
        launcher.launch(
            host_rows_kernel, (T, -(-D // BLOCK)), (weight_VD, ids_T, out_TD, D), launcher.bounded(_LAUNCHES), key,
            BLOCK=BLOCK, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out_TD
