"""The Triton kernel of triton_path.py: losses of a chunk of logits, and their gradient written over them.

One program to a row, which is read twice and written once; the sum of the exponentials is kept relative to the largest
logit so far (Milakov & Gimelshein 2018, Online normalizer calculation for softmax).

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_gradient_kernel(
    logits, labels, weights, losses, V, stride, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows). The row of an ignored label becomes 0 without being read: a NaN there counts nothing either.

    Args:
        logits: [C, V]; GRADIENT writes weight * (softmax - one-hot) over them.
        labels: [C] int64; one outside the vocabulary gives NaN.
        weights: [C] float32, of each loss in the total.
        losses: [C] float32, written.
        V, stride: columns, and elements from one row to the next.
        IGNORE: label of rows that count nothing.
        BLOCK: columns read at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zero = tl.zeros((BLOCK,), dtype=logits.dtype.element_ty)
                tl.store(logits + start + columns, zero, mask=start + columns < V)
    else:
        known = (label >= 0) & (label < V)
        at_label = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + columns, mask=start + columns < V, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(largest, tl.max(x, 0))
            # a row may begin with -inf alone, and -inf - -inf is no number
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
            largest = higher
        tl.store(losses + row, tl.log(total) + largest - at_label)
        if GRADIENT:
            weight = tl.where(known, tl.load(weights + row), float("nan"))
            factor = weight / total
            for start in range(0, V, BLOCK):
                here = start + columns
                x = tl.load(logits + here, mask=here < V, other=0.0).to(tl.float32)
                d = tl.exp(x - largest) * factor - tl.where(here == label, weight, 0.0)
                tl.store(logits + here, d.to(logits.dtype.element_ty), mask=here < V)
