"""The Triton kernels of triton_path.py: losses of a chunk of logits, and their gradient written over them.

One program to a row, which is read twice and written once; the sum of the exponentials is kept relative to the largest
logit so far (Milakov & Gimelshein 2018, Online normalizer calculation for softmax).

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(logits, columns, V, width, PADDED: tl.constexpr):
    """Load the logits of a row in float32; columns past V are -inf. The load is masked by the row's padded width, whose end is
    aligned, so that vectors are loaded."""
    x = tl.load(logits + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    if PADDED:
        x = tl.where(columns < V, x, float("-inf"))
    return x


@triton.jit
def softmax_gradient_kernel(
    logits, labels, weights, losses, V, width, stride, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows). The row of an ignored label becomes 0 without being read: a NaN there counts nothing either.

    Args:
        logits: [C, V]; GRADIENT writes weight * (softmax - one-hot) over them.
        labels: [C] int64; one outside the vocabulary gives NaN.
        weights: [C] float32, of each loss in the total.
        losses: [C] float32, written.
        V, width, stride: words, columns that a row has room for, and elements from one row to the next.
        IGNORE: label of rows that count nothing.
        PADDED: width is more than V. Columns of no word are not used, and GRADIENT writes 0.
        BLOCK: columns read at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, width, BLOCK):
                zero = tl.zeros((BLOCK,), dtype=logits.dtype.element_ty)
                tl.store(logits + start + columns, zero, mask=start + columns < width)
    else:
        known = (label >= 0) & (label < V)
        at_label = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(0, width, BLOCK):
            x = _logits(logits, start + columns, V, width, PADDED)
            higher = tl.maximum(largest, tl.max(x, 0))
            # a row may begin with -inf alone, and -inf - -inf is no number
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
            largest = higher
        tl.store(losses + row, tl.log(total) + largest - at_label)
        if GRADIENT:
            weight = tl.where(known, tl.load(weights + row), float("nan"))
            factor = weight / total
            for start in range(0, width, BLOCK):
                here = start + columns
                x = _logits(logits, here, V, width, PADDED)
                d = tl.exp(x - largest) * factor - tl.where(here == label, weight, 0.0)
                if PADDED:
                    d = tl.where(here < V, d, 0.0)
                tl.store(logits + here, d.to(logits.dtype.element_ty), mask=here < width)


@triton.jit(do_not_specialize=["C"])
def part_sums_kernel(logits, here, found, C, V, width, stride, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows), of the logits of a part of the vocabulary.

    Args:
        logits: [C, V].
        here: [C] int64, the label's place in the part.
        found: [2, C] float32, written: the logarithm of the sum of the exponentials; the label's logit, 0 where it is not here.
        V, width, stride, PADDED, BLOCK: see softmax_gradient_kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(here + row)
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        x = _logits(logits, start + columns, V, width, PADDED)
        higher = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = higher
    tl.store(found + row, tl.log(total) + largest)
    at_label = tl.load(logits + label, mask=(label >= 0) & (label < V), other=0.0).to(tl.float32)
    tl.store(found + C + row, at_label)


@triton.jit
def part_gradient_kernel(
    logits, here, weights, sums, ignored, V, width, stride, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows): writes weight * (softmax - one-hot) over the logits of a part of the vocabulary, 0 in ignored rows.

    Args:
        here: see part_sums_kernel.
        V, width, stride, PADDED, BLOCK: see softmax_gradient_kernel.
        weights, sums: [C] float32; of each loss in the total, and the logarithm of the sum over the whole vocabulary.
        ignored: [C] int32.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label, weight, log_sum = tl.load(here + row), tl.load(weights + row), tl.load(sums + row)
    counts = tl.load(ignored + row) == 0
    columns = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        at = start + columns
        x = _logits(logits, at, V, width, PADDED)
        d = tl.exp(x - log_sum) * weight - tl.where(at == label, weight, 0.0)
        if PADDED:
            d = tl.where(at < V, d, 0.0)
        tl.store(logits + at, tl.where(counts, d, 0.0).to(logits.dtype.element_ty), mask=at < width)
