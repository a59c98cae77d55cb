"""Kernel of 4-bit codes: see four_bit.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["B", "zero"])
def four_bit_kernel(
    stored_ptr, scales_ptr, code_ptr, outer_ptr, offset_ptr, table_ptr, out_ptr, B, zero,
    NESTED: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < B
    if NESTED:
        code = tl.load(scales_ptr + block, mask=there, other=0).to(tl.int32)
        product = tl.load(code_ptr + code) * tl.load(outer_ptr + block // OUTER, mask=there, other=0.0)
        # zero, which the compiler does not know, keeps it from adding before the product is rounded
        scale = (product.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True) + tl.load(offset_ptr)
    else:
        scale = tl.load(scales_ptr + block, mask=there, other=0.0)
    place = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    pair = tl.load(stored_ptr + place, mask=there[:, None], other=0).to(tl.int32)
    first = tl.load(table_ptr + (pair >> 4)) * scale[:, None]
    second = tl.load(table_ptr + (pair & 15)) * scale[:, None]
    both = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    numbers = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out_ptr + numbers, both, mask=there[:, None])
