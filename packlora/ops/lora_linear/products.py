"""Torch's products of an adapter's matrices, whose bits no other adapter decides.

On a CPU the library rounds a product by where its operands and its result lie, and which part of what matrix they are: that is
decided by the adapters beside it. So each product is made of matrices as they lie by themselves, and copied where it belongs.
"""

from __future__ import annotations

import torch

ALIGNED = 64
"""Bytes at whose multiples a CPU's memory begins."""


def by_itself(x: torch.Tensor) -> torch.Tensor:
    """A matrix as it lies where it is no part of another: a CPU's library rounds a product by where its operands lie, which
    other adapters decide. On other devices the matrix as it is."""
    if x.device.type != "cpu":
        return x
    is_whole = x.is_contiguous() or (x.stride(0) == 1 and x.stride(1) == x.shape[0])
    if is_whole and x.data_ptr() % ALIGNED == 0:
        return x
    if x.stride(0) < x.stride(1):
        return x.t().clone(memory_format=torch.contiguous_format).t()
    return x.clone(memory_format=torch.contiguous_format)


def scaled_mm(unread: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale a b. unread: any tensor of its dtype and device."""
    assert unread is not None
    a, b = by_itself(a), by_itself(b)
    return torch.mm(a, b) if scale == 1.0 else torch.addmm(unread, a, b, beta=0, alpha=scale)


def summed_mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b in a dtype, which may be float32 where a and b have 16 bits (CUDA)."""
    a, b = by_itself(a), by_itself(b)
    return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def sum_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """out = a b, or out += a b; out may be float32 where a and b have 16 bits (CUDA)."""
    if out.device.type == "cpu":
        if add:
            add_mm(out, a, b)
        else:
            out.copy_(summed_mm(a, b, out.dtype))
    elif out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a b."""
    sum_ = by_itself(out)
    sum_.addmm_(by_itself(a), by_itself(b))
    if sum_.data_ptr() != out.data_ptr():
        out.copy_(sum_)


def write_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """out = scale a b, written and not read."""
    if out.device.type == "cpu":
        a, b = by_itself(a), by_itself(b)
        out.copy_(torch.mm(a, b) if scale == 1.0 else torch.addmm(out.new_empty(1), a, b, beta=0, alpha=scale))
    elif scale == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)
