"""Matrix products by groups of consecutive rows: torch's grouped product, or a loop over the groups where it computes none.

The sizes of the groups are known to the device alone, so the first one never waits for it. The loop does; it serves float64,
sizes that are no multiples of 16 bytes, and builds of torch without the product.

Shapes: S rows, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
"""Torch's grouped product, from 2.10 on. Before, it is inner and for CUDA alone."""
NARROW = (torch.bfloat16, torch.float16, torch.float32)
ALIGNED = 16
"""Bytes that every stride must be a multiple of."""


@dataclass(slots=True)
class Groups:
    """Consecutive groups of rows, some of them empty.

    lengths: rows of each, int64 [G]. ends: their sums up to each, int32 [G].
    """

    lengths: torch.Tensor
    ends: torch.Tensor
    _bounds: list[int] | None = field(default=None, repr=False)

    @staticmethod
    def of(lengths: torch.Tensor) -> Groups:
        return Groups(lengths, lengths.cumsum(0).to(torch.int32))

    def merged(self, each: int) -> Groups:
        """`each` neighbours as one group."""
        return (
            self if each == 1 else Groups(self.lengths.view(-1, each).sum(1), self.ends[each - 1 :: each].contiguous())
        )

    def bounds(self) -> list[tuple[int, int, int]]:
        """(group, start, stop) of those that are not empty. Waits for the device, once."""
        if self._bounds is None:
            self._bounds = [0, *self.ends.tolist()]
        pairs = zip(self._bounds, self._bounds[1:], strict=False)
        return [(group, start, stop) for group, (start, stop) in enumerate(pairs) if start < stop]


def rows_times(x_SK: torch.Tensor, w_GKN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """x_s @ w_g for every row s of every group g, [S, N]."""
    if _computes(x_SK, w_GKN):
        assert _grouped_mm is not None
        out: torch.Tensor = _grouped_mm(x_SK, w_GKN, offs=groups.ends)
        return out.contiguous()  # torch's rows begin at aligned places, whatever N is
    y_SN = x_SK.new_zeros(x_SK.shape[0], w_GKN.shape[2])
    for group, start, stop in groups.bounds():
        torch.mm(x_SK[start:stop], w_GKN[group], out=y_SN[start:stop])
    return y_SN


def sums_of_products(a_SM: torch.Tensor, b_SN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """a_g' b_g over the rows of every group g, [G, M, N]; zeros for a group without rows."""
    if _computes(a_SM.t(), b_SN):
        assert _grouped_mm is not None
        out: torch.Tensor = _grouped_mm(a_SM.t(), b_SN, offs=groups.ends)
        # the kernel's result for an empty group is undefined
        return out.masked_fill_((groups.lengths == 0)[:, None, None], 0.0)
    out = a_SM.new_zeros(len(groups.lengths), a_SM.shape[1], b_SN.shape[1])
    for group, start, stop in groups.bounds():
        torch.mm(a_SM[start:stop].t(), b_SN[start:stop], out=out[group])
    return out


def sums_of_rows(x_SN: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The sum of the rows of every group, [G, N]. x: float32 or float64."""
    if not len(x_SN):
        return x_SN.new_zeros(len(groups.lengths), x_SN.shape[1])
    sums: torch.Tensor = torch.segment_reduce(x_SN, "sum", lengths=groups.lengths, axis=0, unsafe=True)
    return sums


def _computes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _grouped_mm is not None and a.dtype in NARROW and a.numel() > 0 and _aligned(a) and _aligned(b)


def _aligned(t: torch.Tensor) -> bool:
    """Whether one of the last two dimensions is contiguous and the strides of all others are multiples of 16 bytes."""
    *outer, rows, columns = t.stride()
    if rows != 1 and columns != 1:
        return False
    large = [*outer, rows if columns == 1 else columns]
    return t.data_ptr() % ALIGNED == 0 and all(stride * t.itemsize % ALIGNED == 0 for stride in large)
