"""Launch a Triton kernel with little work on the host.

A layer's forward and backward are seven launches; through the usual door each costs the host 20 to 30 us (binding and
specialising every argument), which at 2048 tokens is more than the GPU needs. Here a launch looks its compiled kernel up by
what Triton specialises on (dtypes, alignment, and which integers are 1 or multiples of 16) and hands over the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

_COMPILED: dict[Any, Any] = {}
_KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
"""Releases whose compiled kernels were seen to take arguments this way; others go through the usual door."""


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return None


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **constants: Any) -> None:
    """kernel[grid](*args, **constants), with num_warps and num_stages last among the constants.

    Args:
        kernel: a triton.jit function whose compile-time arguments come last, in the order of `constants`.
        grid: one to three sizes; nothing is launched where one is 0.
        args: tensors, integers and None.
    """
    if 0 in grid:
        return
    if not (_KNOWN and isinstance(kernel, JITFunction)):  # the interpreter is no JITFunction
        kernel[grid](*args, **constants)
        return
    *own, _, _ = constants.values()
    device = torch.cuda.current_device()
    key = (kernel, device, *constants.values(), *map(_kind, args))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid](*args, **constants)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *own)
