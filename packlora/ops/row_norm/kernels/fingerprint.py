"""Change detection: two sums of 32-bit numbers stand for A and B of a problem, two for the sampled elements of W.

They are compared on the device, so that no host waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.row_norm.kernels.common import WIDTH


@triton.jit
def _mixed(v):
    v ^= v >> 16
    v *= 0x85EBCA6B
    v ^= v >> 13
    v *= 0xC2B2AE35
    return v ^ (v >> 16)


@triton.jit
def _bits(values):
    if values.dtype.primitive_bitwidth == 32:
        return values.to(tl.uint32, bitcast=True)
    else:
        return values.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def fingerprint_kernel(
    problems, items, W_like, A_like, B_like, parts, ALIGNED: tl.constexpr, ALIGNED_B: tl.constexpr, BLOCK: tl.constexpr
):
    """Two sums of 32-bit numbers over the bits of a piece of A (kind 0), B (1), or 8 elements of each of some rows of W (2).

    Every element is mixed with its place, so that values which trade places count.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 3]: problem, kind, first element.
        W_like, A_like, B_like: any tensors of their dtypes.
        parts: int64 [programs, 2], the sums; written.
        ALIGNED: the address of A and the number of its elements are multiples of 16.
        ALIGNED_B: the same of B.
        BLOCK: elements of a piece.
    """
    item = items + 3 * tl.program_id(0)
    problem, kind, first = tl.load(item), tl.load(item + 1), tl.multiple_of(tl.load(item + 2), BLOCK)
    own = problems + problem * WIDTH
    N, K, rank = tl.load(own + 2), tl.load(own + 3), tl.load(own + 6)
    at = first.to(tl.int64) + tl.arange(0, BLOCK)
    if kind == 0:
        A, count = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty)), rank * K
        if ALIGNED:
            A, count = tl.multiple_of(A, 16), tl.multiple_of(count, 16)
        word = _bits(tl.load(A + at, mask=at < count, other=0.0))
    elif kind == 1:
        B, count = tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty)), N * rank
        if ALIGNED_B:
            B, count = tl.multiple_of(B, 16), tl.multiple_of(count, 16)
        word = _bits(tl.load(B + at, mask=at < count, other=0.0))
    else:
        row = at // 8
        col = ((row * 40503) % tl.maximum(K // 8, 1)) * 8 + at % 8
        W = tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty))
        word = _bits(tl.load(W + row * tl.load(own + 1) + col, mask=(row < N) & (col < K), other=0.0))
    seed = at.to(tl.uint32) * 0x9E3779B1 + kind.to(tl.uint32) * 0x7F4A7C15
    one = _mixed(_mixed(word ^ seed) + seed)
    two = _mixed(_mixed(word + 0x165667B1) ^ (seed * 0x27D4EB2F))
    out = parts + 2 * tl.program_id(0)
    tl.store(out, tl.sum(one.to(tl.int64), 0))
    tl.store(out + 1, tl.sum(two.to(tl.int64), 0))


@triton.jit
def _summed(parts, first, last, BLOCK: tl.constexpr):
    one = tl.zeros((BLOCK,), dtype=tl.int64)
    two = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        one += tl.load(parts + 2 * at, mask=at < last, other=0)
        two += tl.load(parts + 2 * at + 1, mask=at < last, other=0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def compare_kernel(ranges, parts, seen, stale, BLOCK: tl.constexpr):
    """The flag of each problem: 0 where its sums are those in `seen`, else bit 0, and bit 1 too where those of W are others.

    Grid (problems). `seen` is brought up to date.

    Args:
        ranges: int32 [P, 3]: where the items of A and B begin, those of W, and where they end.
        parts: what fingerprint_kernel wrote.
        seen: int64 [P, 5]: sums of A and B, of W, and 1 where they mean anything; written.
        stale: int32 [P], written.
        BLOCK: items at a time.
    """
    problem = tl.program_id(0)
    own, bounds = seen + 5 * problem, ranges + 3 * problem
    first, middle, last = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)
    one, two = _summed(parts, first, middle, BLOCK)
    three, four = _summed(parts, middle, last, BLOCK)
    never = tl.load(own + 4) != 1
    low_rank = (tl.load(own) != one) | (tl.load(own + 1) != two) | never
    frozen = (tl.load(own + 2) != three) | (tl.load(own + 3) != four) | never
    tl.store(stale + problem, (low_rank | frozen).to(tl.int32) + 2 * frozen.to(tl.int32))
    tl.store(own, one)
    tl.store(own + 1, two)
    tl.store(own + 2, three)
    tl.store(own + 3, four)
    tl.store(own + 4, 1)
