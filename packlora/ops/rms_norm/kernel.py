"""The Triton kernels of triton_path.py: an RMS norm, and the gradient of its input.

A program holds a tile of whole rows in registers: x is read once, and in the backward dy once; each result is written once.
Sums are made in float32, of each row by itself.

Shapes: R rows, D features.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, first, R, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of ROWS rows from `first` on, and which are inside."""
    rows = first + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    return x + rows[:, None] * stride + cols[None, :], (rows < R)[:, None] & (cols < D)[None, :]


@triton.jit
def _rstd(x_tile, EPS: tl.constexpr, D: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x_tile * x_tile, 1) * (1.0 / D) + EPS))[:, None]


@triton.jit
def _factor(weight, OFFSET: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    return (tl.load(weight + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET)[None, :]


@triton.jit(do_not_specialize=["R"])
def rms_forward_kernel(
    x, weight, y, R, stride, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDED: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x rstd (weight + OFFSET). Grid (blocks of rows).

    Args:
        x: [R, D].
        weight: [D].
        y: [R, D], dense; written.
        R, stride: rows, and elements from one row of x to the next.
        EPS: added to the mean of squares.
        OFFSET: added to the weight.
        ROUNDED: x rstd is rounded to x's dtype before it meets the weight.
        D: features.
        ROWS: of a program.
        BLOCK: columns of the tile, D and what is missing to a power of two.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    x_at, inside = _tile(x, first, R, stride, D, ROWS, BLOCK)
    y_at, _ = _tile(y, first, R, D, D, ROWS, BLOCK)
    x_tile = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    factor = _factor(weight, OFFSET, D, BLOCK)
    normed = x_tile * _rstd(x_tile, EPS, D)
    if ROUNDED:
        normed = normed.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y_at, (normed * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def rms_backward_kernel(
    x, weight, dy, dx, R, x_stride, dy_stride, EPS: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = rstd (g - xh mean(g xh)) with g = dy (weight + OFFSET) and xh = x rstd. Grid (blocks of rows).

    Args:
        x: [R, D].
        weight: [D].
        dy: [R, D].
        dx: [R, D], dense; written.
        R: rows.
        x_stride, dy_stride: elements from one row to the next.
        EPS, OFFSET, D, ROWS, BLOCK: as in rms_forward_kernel.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    x_at, inside = _tile(x, first, R, x_stride, D, ROWS, BLOCK)
    dy_at, _ = _tile(dy, first, R, dy_stride, D, ROWS, BLOCK)
    dx_at, _ = _tile(dx, first, R, D, D, ROWS, BLOCK)
    x_tile = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32) * _factor(weight, OFFSET, D, BLOCK)
    rstd = _rstd(x_tile, EPS, D)
    mean = tl.sum(g * x_tile, 1)[:, None] * rstd * (1.0 / D)
    tl.store(dx_at, (rstd * (g - x_tile * rstd * mean)).to(dx.dtype.element_ty), mask=inside)
