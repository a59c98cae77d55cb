"""One GEMM kernel for a base product with the low-rank product in it, where one adapter owns all tokens:
forward y = x W' + S B' + bias, backward dx = d W + mask (dS A). Persistent, with the copy engine of Hopper (tensor
descriptors); 16-bit operands.

The low-rank product of a tile is made first and is where the accumulator starts, so it costs no write and no read of the
output. There is one accumulator: a second one of 128 x 256 would not fit the registers, and spilling serialises the products
(measured: 8 times slower).

Shapes: T tokens, K inputs, N outputs. Here X [T, P] is x or d, V is W, and Y [T, Q] is y or dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.lora_linear.kernels import _drop, _keys


@triton.jit(do_not_specialize=["salt"])
def fused_kernel(
    X, V, Y, Z, L, R, bias, g, keys, salt, threshold, T, P, Q, width, rank,
    FORWARD: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_G: tl.constexpr,
    KEEP: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Forward: L is S [T, width], R is B [Q, rank]. Backward: L is dS, R the stacked A [rank, Q]. WIDE: L and R are tensor
    descriptors of their first `rank` columns and rows. HAS_G: the product z is scaled before the bias; KEEP: z is stored."""
    num_m, num_n = tl.cdiv(T, BM), tl.cdiv(Q, BN)
    steps = tl.cdiv(P, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=False):
        group = tile // (GROUP * num_n)
        size = min(num_m - group * GROUP, GROUP)
        m = group * GROUP + (tile % (GROUP * num_n)) % size
        n = (tile % (GROUP * num_n)) // size
        rows = m * BM + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        inside = rows < T
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for r in range(0, rank, BR):
            if WIDE:
                if FORWARD:
                    acc = tl.dot(L.load([m * BM, r]), R.load([n * BN, r]).T, acc)
                else:
                    acc = tl.dot(L.load([m * BM, r]), R.load([r, n * BN]), acc)
            else:
                ranks = r + tl.arange(0, BR)
                has = ranks < rank
                L_at = L + rows.to(tl.int64)[:, None] * width + ranks[None, :]
                L_tile = tl.load(L_at, mask=inside[:, None] & has[None, :], other=0.0)
                if FORWARD:
                    R_at = R + cols[None, :] * rank + ranks[:, None]
                else:
                    R_at = R + ranks[:, None] * Q + cols[None, :]
                R_tile = tl.load(R_at, mask=has[:, None] & (cols < Q)[None, :], other=0.0)
                acc = tl.dot(L_tile, R_tile, acc)
        if DROP:
            key_0, key_1 = _keys(keys, rows, inside, salt)
            acc = _drop(acc.to(DTYPE), key_0, key_1, n * BN, threshold, BN, ASM).to(tl.float32)
        if HAS_BIAS and not HAS_G:
            acc += tl.load(bias + cols, mask=cols < Q, other=0.0).to(tl.float32)[None, :]
        for k in range(steps):
            X_tile = X.load([m * BM, k * BK])
            if FORWARD:
                acc = tl.dot(X_tile, V.load([n * BN, k * BK]).T, acc)
            else:
                acc = tl.dot(X_tile, V.load([k * BK, n * BN]), acc)
        if HAS_G:
            if KEEP:
                Z.store([m * BM, n * BN], acc.to(DTYPE))
            acc *= tl.load(g + cols, mask=cols < Q, other=0.0)[None, :]
            if HAS_BIAS:
                acc += tl.load(bias + cols, mask=cols < Q, other=0.0).to(tl.float32)[None, :]
        Y.store([m * BM, n * BN], acc.to(DTYPE))
