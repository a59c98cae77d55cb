"""torch's products as the operator uses them: into given buffers, in given dtypes, and sums of products, rounded once."""

from __future__ import annotations

import torch

from packlora.ops.gpu import rounds_before_adding


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a @ b, rounded once."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def mm_in(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b in another dtype; where that is not float32 on CUDA, rounded to theirs first."""
    if dtype == a.dtype:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a @ b).to(dtype)


def sum_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """out = a b, or out += a b; out may be float32 where a and b have 16 bits (CUDA)."""
    if out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def write_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    """out = scale a b, written and not read."""
    if scale == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


def low_dtype(x_TK: torch.Tensor) -> torch.dtype:
    """In which a low-rank part must be for base_onto to lose nothing of it: float32 where the library rounds before it adds."""
    return torch.float32 if x_TK.element_size() == 2 and rounds_before_adding(x_TK.device) else x_TK.dtype


def base_onto(
    low_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """low + x W' + bias in x's dtype, [T, N]. low, of low_dtype or x's dtype, is written over. The bias comes last: beside a
    large one a small low would be lost."""
    if low_TN.dtype == x_TK.dtype:
        y_TN = low_TN.addmm_(x_TK, weight_NK.t())
    else:
        y_TN = torch.addmm(low_TN, x_TK, weight_NK.t(), out_dtype=low_TN.dtype, out=low_TN)
    if bias_N is not None:
        y_TN.add_(bias_N)
    return y_TN if y_TN.dtype == x_TK.dtype else y_TN.to(x_TK.dtype)
