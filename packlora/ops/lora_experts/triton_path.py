"""Launches of the kernels of kernel.py. Nothing here waits for the device: there are as many programs as there can be blocks.

Shapes: S rows, K features, N columns, r rank, G groups.
"""

from __future__ import annotations

import torch
import triton

from packlora.ops import launcher
from packlora.ops.gpu import on_device
from packlora.ops.lora_experts.grouped import Groups
from packlora.ops.lora_experts.kernel import (
    experts_add_kernel,
    experts_add_scaled_kernel,
    experts_blocks_kernel,
    experts_down_kernel,
    experts_sums_kernel,
)

BLOCK_ROWS = 64
MOST_RANK = 128
"""Beyond it a block's tiles would not fit; torch's products compute these."""


def blocks_of(groups: Groups, rows: int) -> torch.Tensor:
    """Blocks of rows of one group each, int32 [as many as there can be, 3]: group, first row, end; those that are not there end
    where they begin."""
    ends, G = groups.ends, len(groups.ends)
    out = torch.empty(rows // BLOCK_ROWS + G, 3, dtype=torch.int32, device=ends.device)
    with on_device(ends.device):
        launcher.launch(
            experts_blocks_kernel, (len(out),), (ends, out, G), BM=BLOCK_ROWS, BG=_power(G), num_warps=4, num_stages=1
        )
    return out


def down(
    x: torch.Tensor, index_S: torch.Tensor | None, w_GrK: torch.Tensor, blocks: torch.Tensor, rows: int
) -> torch.Tensor:
    """x w_g' for every row, [S, r]. index: which row of x every sorted row is; None: itself."""
    x, (_, r, K) = _rowwise(x), w_GrK.shape
    out = torch.empty(rows, r, dtype=x.dtype, device=x.device)
    with on_device(x.device):
        launcher.launch(
            experts_down_kernel, (len(blocks),),
            (x, index_S, w_GrK, out, blocks, x.stride(0), K, r),
            INDEXED=index_S is not None, BM=BLOCK_ROWS, BK=64, BR=_power(r), num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def add_(y_SN: torch.Tensor, s_Sr: torch.Tensor, w_GrN: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """y += s w_g for every row, in place; y."""
    _, r, N = w_GrN.shape
    with on_device(y_SN.device):
        launcher.launch(
            experts_add_kernel, (len(blocks), -(-N // 128)),
            (y_SN, s_Sr, w_GrN, blocks, N, r), BM=BLOCK_ROWS, BN=128, BR=_power(r), num_warps=4, num_stages=1,
        )  # fmt: skip
    return y_SN


def add_scaled_(
    y_SN: torch.Tensor, base_SN: torch.Tensor, s_Sr: torch.Tensor, w_GrN: torch.Tensor, more_GN: torch.Tensor,
    blocks: torch.Tensor, z_SN: torch.Tensor | None,
) -> None:  # fmt: skip
    """See low_rank.add_scaled_."""
    _, r, N = w_GrN.shape
    with on_device(y_SN.device):
        launcher.launch(
            experts_add_scaled_kernel, (len(blocks), -(-N // 64)),
            (y_SN, base_SN, s_Sr, w_GrN, more_GN, z_SN, blocks, N, r), KEEP=z_SN is not None,
            BM=BLOCK_ROWS, BN=64, BR=_power(r), num_warps=4, num_stages=1,
        )  # fmt: skip


def sums(s_Sr: torch.Tensor, x: torch.Tensor, index_S: torch.Tensor | None, ends_G: torch.Tensor) -> torch.Tensor:
    """The sum of s' x over the rows of every group, float32 [G, r, K]. ends: of every group, int32."""
    x, r = _rowwise(x), s_Sr.shape[1]
    G, K = len(ends_G), x.shape[1]
    out = torch.empty(G, r, K, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        launcher.launch(
            experts_sums_kernel, (G, -(-K // 128)),
            (s_Sr, x, index_S, out, ends_G, x.stride(0), K, r),
            INDEXED=index_S is not None, BM=BLOCK_ROWS, BK=128, BR=_power(r), num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _power(r: int) -> int:
    return max(16, int(triton.next_power_of_2(r)))
