"""Launch a Triton kernel with little work on the host.

A layer's forward and backward are seven launches; through the usual door each costs the host 20 to 50 us (binding and
specialising every argument), which at 2048 tokens is more than the GPU needs. Here a launch looks its compiled kernel up by
what Triton specialises on (dtypes, alignment, and which integers are 1 or multiples of 16): about 10 us. A caller who knows
that nothing of that changes gives the launch a key in a dict of its own: about 4 us.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_COMPILED: dict[Any, Any] = {}
_KNOWN = triton.__version__.startswith("3.6.")
"""Releases whose compiled kernels were seen to take arguments this way; others go through the usual door."""


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """TensorDescriptor without its checks, which take the host longer than the launch; see launch.described.

    Of a tensor, or of `shape` from the tensor's first element on, with `strides`.
    """

    def __init__(
        self,
        base: torch.Tensor,
        block_shape: list[int],
        shape: list[int] | None = None,
        strides: list[int] | None = None,
    ) -> None:
        self.base, self.block_shape, self.padding = base, block_shape, "zero"
        self.shape = base.shape if shape is None else shape
        self.strides = base.stride() if strides is None else strides


class Site:
    """A launch whose kernel, grid and compile-time arguments are settled."""

    __slots__ = ("before", "constants", "device", "grid", "launch")

    def __init__(self, compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: int) -> None:
        launcher = compiled.run
        assert not launcher.global_scratch_size and not launcher.profile_scratch_size
        self.launch, self.constants, self.device = launcher.launch, constants, device
        self.grid = (*grid, 1, 1)[:3]
        self.before = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata,
            None, None, None,
        )  # fmt: skip

    def __call__(self, args: tuple[Any, ...]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.launch(*self.grid, stream, *self.before, *args, *self.constants)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return None


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], sites: dict[Hashable, Site] | None = None, key: Hashable = None,
    **constants: Any,
) -> None:  # fmt: skip
    """kernel[grid](*args, **constants), with num_warps and num_stages last among the constants.

    Args:
        kernel: a triton.jit function whose compile-time arguments come last, in the order of `constants`.
        grid: one to three sizes; nothing is launched where one is 0.
        args: tensors, tensor descriptors, integers and None.
        sites: where the launch is remembered under `key` with its grid; the same key must always mean the same grid and
            constants, and arguments of the same dtypes, alignment and (for integers) values.
    """
    if sites is not None and (site := sites.get(key)) is not None:
        site(args)
        return
    if 0 in grid:
        return
    if not (_KNOWN and isinstance(kernel, JITFunction)):  # the interpreter is no JITFunction
        kernel[grid](*args, **constants)
        return
    device = torch.cuda.current_device()
    full = (kernel, device, *constants.values(), *map(_kind, args))
    compiled = _COMPILED.get(full)
    *own, _, _ = constants.values()
    if compiled is None:
        compiled = _COMPILED[full] = kernel[grid](*args, **constants)
        made = Site(compiled, grid, tuple(own), device)
    else:
        made = Site(compiled, grid, tuple(own), device)
        made(args)
    if sites is not None:
        sites[key] = made
