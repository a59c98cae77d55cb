"""The three low-rank products of the operator, by Triton's kernels where they compute them, else by torch's grouped product.

Shapes: S sorted rows, G groups, K features, N columns, r rank.
"""

from __future__ import annotations

import torch

from packlora.ops.gpu import HAS_TRITON, why_no_kernels
from packlora.ops.lora_experts.grouped import rows_times, sums_of_products
from packlora.ops.lora_experts.routing import Routing

if HAS_TRITON:
    from packlora.ops.lora_experts import triton_path

KERNELS = True
KERNELS_ON_CPU = False
"""Whether the kernels also run on the CPU, in Triton's interpreter; tests set it."""


def down(x: torch.Tensor, w_GrK: torch.Tensor, routing: Routing, repeated: bool) -> torch.Tensor:
    """x w_g' for every sorted row, [S, r]. x: of tokens where it is `repeated`, else sorted rows."""
    if not _by_kernels(x, w_GrK.shape[1]):
        return rows_times(routing.rows_of(x) if repeated else x, w_GrK.transpose(1, 2), routing.by_pair)
    index = routing.token_of_row() if repeated else None
    return triton_path.down(x, index, w_GrK, _blocks(routing), len(routing.order))


def add_(y_SN: torch.Tensor, s_Sr: torch.Tensor, w_GrN: torch.Tensor, routing: Routing) -> torch.Tensor:
    """y += s w_g for every sorted row, in place; y. By kernels the sum is rounded once."""
    if not _by_kernels(y_SN, w_GrN.shape[1]):
        return y_SN.add_(rows_times(s_Sr, w_GrN, routing.by_pair))
    return triton_path.add_(y_SN, s_Sr, w_GrN, _blocks(routing))


def add_scaled_(
    y_SN: torch.Tensor, base_SN: torch.Tensor, s_Sr: torch.Tensor, w_GrN: torch.Tensor, more_GN: torch.Tensor, routing: Routing,
    z_SN: torch.Tensor | None,
) -> None:  # fmt: skip
    """y += more_g base + (1 + more_g) s w_g for every sorted row, in place and rounded once; z = base + s w_g, where there is
    one. base: may be y; more: in a wide dtype."""
    if not _by_kernels(y_SN, w_GrN.shape[1]):
        low_SN, more_SN = rows_times(s_Sr, w_GrN, routing.by_pair), more_GN[routing.pair]
        if z_SN is not None:
            z_SN.copy_(base_SN + low_SN)
        y_SN.copy_(y_SN + (more_SN * base_SN + (1 + more_SN) * low_SN))
        return
    triton_path.add_scaled_(y_SN, base_SN, s_Sr, w_GrN, more_GN, _blocks(routing), z_SN)


def sums(s_Sr: torch.Tensor, x: torch.Tensor, routing: Routing, repeated: bool) -> torch.Tensor:
    """The sums of s' x over the rows of every group, [G, r, K], zeros where it has none; float32 by kernels."""
    if not _by_kernels(x, s_Sr.shape[1]):
        return sums_of_products(s_Sr, routing.rows_of(x) if repeated else x, routing.by_pair)
    index = routing.token_of_row() if repeated else None
    return triton_path.sums(s_Sr, x, index, routing.by_pair.ends)


def _blocks(routing: Routing) -> torch.Tensor:
    return routing.kept("blocks", lambda: triton_path.blocks_of(routing.by_pair, len(routing.order)))


def _by_kernels(x: torch.Tensor, rank: int) -> bool:
    return (
        KERNELS and HAS_TRITON and x.dtype.itemsize == 2 and rank <= triton_path.MOST_RANK
        and (why_no_kernels(x.device) is None or (KERNELS_ON_CPU and not x.is_cuda))
    )  # fmt: skip
