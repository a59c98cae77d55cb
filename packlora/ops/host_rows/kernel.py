"""Kernel of host_rows.py."""

import triton
import triton.language as tl


@triton.jit
def host_rows_kernel(weight_ptr, ids_ptr, out_ptr, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    found = tl.load(weight_ptr + row * D + place, mask=place < D)
    tl.store(out_ptr + token * D + place, found, mask=place < D)
