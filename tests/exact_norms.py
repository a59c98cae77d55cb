"""Row norms of W + s B A in float64, and what float32 makes of them: the oracle of ops.row_norm's tests; and a window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from packlora.adapters.norms import RowNorms


@contextmanager
def checked(norms: RowNorms) -> Iterator[None]:
    """A window, as there is one around a forward."""
    norms.open()
    try:
        yield
    finally:
        norms.close()


def exact(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float) -> torch.Tensor:
    return (W.double() + s * B.double() @ A.double()).norm(dim=1).clamp(min=1e-12)


def in_float32(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float) -> torch.Tensor:
    """What a plain float32 computation gives, written out."""
    return (W.float() + s * (B.float() @ A.float())).square().sum(1).sqrt().clamp(min=1e-12)


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want) / want).abs().max())


def as_exact_as_float32(W: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float, got: torch.Tensor) -> None:
    want = exact(W, A, B, s)
    assert got.dtype == torch.float32
    assert got.shape == (len(W),)
    error, plain = worst(got, want), worst(in_float32(W, A, B, s), want)
    assert error <= 2 * plain + 1e-6, f"{error:.3g} against {plain:.3g} of float32"
