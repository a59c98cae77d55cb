"""The mask of keys.py on a GPU: device functions for kernels that drop in registers, and one that writes a dropped copy."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from packlora.ops.dropout.keys import MIX_1, MIX_2, STRIDE, dropout_threshold, signed
from packlora.ops.gpu import capability
from packlora.ops.launcher import launch, launched

_STRIDE = tl.constexpr(STRIDE)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


# One hash serves two neighbouring features, 16 bits each. $in: the pair's counter times STRIDE plus the token's first key,
# the second key, the rate's limit less one in both halves, and all ones where nothing is dropped.
_HASH = """
{{
.reg .b32 v, t;
shr.u32 t, {v}, 16;
xor.b32 v, {v}, t;
mul.lo.u32 v, v, 0x{MIX_1:x};
xor.b32 v, v, {key};
shr.u32 t, v, 15;
xor.b32 v, v, t;
mul.lo.u32 v, v, 0x{MIX_2:x};
shr.u32 t, v, 15;
xor.b32 v, v, t;
xor.b32 v, v, 0x80008000;
max.u16x2 v, v, {limit};
sub.u32 v, v, {limit};
mov.b32 t, 0x00010001;
min.u16x2 v, v, t;
mul.lo.u32 v, v, 0xffff;
or.b32 v, v, {all};
{use}
}}
"""
_ONE = tl.constexpr(
    _HASH.format(v="$2", key="$4", limit="$6", all="$8", use="and.b32 $0, $1, v;", MIX_1=MIX_1, MIX_2=MIX_2)
)
_TWO = tl.constexpr(
    _HASH.format(
        v="$4", key="$6", limit="$8", all="$10", use="and.b32 $0, $2, v;\nand.b32 $1, $3, v;", MIX_1=MIX_1, MIX_2=MIX_2
    )
)


@triton.jit
def _keys(keys, rows, inside, salt):
    """Both key words of tokens, the first with the salt in it."""
    pairs = tl.load(keys + 2 * rows[:, None] + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0)
    key_0, key_1 = tl.split(pairs.to(tl.uint32, bitcast=True))
    return key_0 ^ salt.to(tl.uint32), key_1


@triton.jit
def _kept(key_0, key_1, first_column, threshold, BK: tl.constexpr):
    """Mask of the elements of a tile that survive dropout, bool [rows, BK]; keys.py is the specification."""
    pairs = (first_column // 2 + tl.arange(0, BK // 2)).to(tl.uint32)
    v = (pairs * _STRIDE)[None, :] + key_0[:, None]
    v ^= v >> 16
    v = (v * _MIX_1) ^ key_1[:, None]
    v ^= v >> 15
    v *= _MIX_2
    v ^= (v >> 15) ^ 0x80008000
    limit = threshold.to(tl.uint32) << 16
    return tl.interleave((v << 16) >= limit, v >= limit)


@triton.jit
def _limits(threshold):
    """The operands of _HASH that say the rate."""
    limit = tl.maximum(threshold, 1) - 1
    return limit * 0x10001, tl.where(threshold == 0, -1, 0)


@triton.jit
def _drop(x, key_0, key_1, first_column, threshold, BK: tl.constexpr, ASM: tl.constexpr):
    """x [rows, BK] with dropped elements 0, unscaled. ASM (16-bit x, sm_90): two elements at a time in packed registers."""
    if ASM:
        cols = first_column + tl.arange(0, BK)
        counter = (cols // 2).to(tl.uint32) * _STRIDE
        limit, every = _limits(threshold)
        return tl.inline_asm_elementwise(
            _ONE, "=r,r,r,r,r,r,r,r,r,r",
            [x, key_0[:, None] + counter[None, :], key_1[:, None], limit, every],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(_kept(key_0, key_1, first_column, threshold, BK), x, tl.zeros_like(x))


@triton.jit
def _drop_two(x, y, key_0, key_1, first_column, threshold, BK: tl.constexpr, ASM: tl.constexpr):
    """_drop of two tensors with the same mask."""
    if ASM:
        cols = first_column + tl.arange(0, BK)
        counter = (cols // 2).to(tl.uint32) * _STRIDE
        limit, every = _limits(threshold)
        return tl.inline_asm_elementwise(
            _TWO, "=r,=r,r,r,r,r,r,r,r,r,r,r",
            [x, y, key_0[:, None] + counter[None, :], key_1[:, None], limit, every],
            dtype=(x.dtype, y.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        kept = _kept(key_0, key_1, first_column, threshold, BK)
        return tl.where(kept, x, tl.zeros_like(x)), tl.where(kept, y, tl.zeros_like(y))


@triton.jit(do_not_specialize=["salt", "threshold", "T"])
def masked_kernel(
    x,
    y,
    keys,
    salt,
    threshold,
    T,
    K,
    x_stride,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """y = drop(x), or scaled as torch's dropout scales it: the product is rounded to the dtype. Grid (blocks of K, of T)."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = rows < T
    mask = inside[:, None] & (cols < K)[None, :]
    x_tile = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    if SCALED:
        x_tile = (x_tile.to(tl.float32) * (65536.0 / (65536 - threshold))).to(y.dtype.element_ty)
    key_0, key_1 = _keys(keys, rows, inside, salt)
    x_tile = _drop(x_tile, key_0, key_1, tl.program_id(0) * BK, threshold, BK, ASM)
    tl.store(y + rows.to(tl.int64)[:, None] * K + cols[None, :], x_tile, mask=mask)


def packed_dropout(x_TK: torch.Tensor) -> bool:
    """Whether the kernels may drop two elements at a time, by instructions that Hopper has and the interpreter has not.

    Only where rows are aligned: the compiler then keeps neighbours of a row together in a register.
    """
    return (
        x_TK.is_cuda and x_TK.element_size() == 2 and x_TK.shape[1] % 16 == 0 and x_TK.stride(0) % 16 == 0
        and x_TK.data_ptr() % 16 == 0 and capability(x_TK.device) >= (9, 0)
    )  # fmt: skip


def masked(
    x_TK: torch.Tensor, keys_T2: torch.Tensor, salt: int, p: float, scaled: bool, launches: dict[Hashable, Any] | None = None
) -> torch.Tensor:  # fmt: skip
    """ops.dropout.masked in one kernel, for products that read a dropped copy of x."""
    (T, K), keys_T2 = x_TK.shape, keys_T2.contiguous()
    y = torch.empty(T, K, dtype=x_TK.dtype, device=x_TK.device)
    numbers = (signed(salt), dropout_threshold(p), T, K, x_TK.stride(0))
    args, aligned = (x_TK, y, keys_T2, *numbers), (x_TK.data_ptr() % 16, keys_T2.data_ptr() % 16)
    key = ("masked", x_TK.dtype, scaled, *numbers, *aligned)
    if launches is None or not launched(launches, key, args):
        launch(
            masked_kernel, (-(-K // 256), -(-T // 16)), args, launches, key,
            SCALED=scaled, ASM=packed_dropout(x_TK), BM=16, BK=256, num_warps=4, num_stages=1,
        )  # fmt: skip
    return y
