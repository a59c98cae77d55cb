"""Launch a Triton kernel with little work on the host.

A layer's forward and backward are seven launches; through the usual door each costs the host 20 to 50 us (binding and
specialising every argument), which at 2048 tokens is more than the GPU needs. Here a launch looks its compiled kernel up by
what Triton specialises on (dtypes, alignment, and which integers are 1 or multiples of 16). A caller who knows that nothing
of that changes but where operands lie gives the launch a key in a dict of its own: then their addresses are all that is read of
them, and what a tensor descriptor needs is kept by address.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_COMPILED: dict[Any, Any] = {}
_KNOWN = triton.__version__.startswith("3.6.")
"""Releases whose compiled kernels were seen to take arguments this way; others go through the usual door."""
MAPS = 4096
"""How many encoded descriptors a site keeps of one argument."""


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

    def encoded(self, meta: dict[str, Any]) -> tuple[Any, ...]:
        """What a compiled kernel takes in its place."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        return tuple(make_tensordesc_arg(self, meta))


class Site:
    """A launch whose kernel, grid and compile-time arguments are settled. Operands that lay at multiples of 16 bytes when it
    was made must do so."""

    __slots__ = ("before", "constants", "described", "device", "grid", "launch", "loose", "pointers")

    def __init__(
        self, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], device: int
    ) -> None:
        launcher = compiled.run
        assert not launcher.global_scratch_size and not launcher.profile_scratch_size
        self.launch, metas = _innermost(launcher.launch)
        self.constants, self.device, self.grid = constants, device, (*grid, 1, 1)[:3]
        self.before = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata,
            None, None, None,
        )  # fmt: skip
        tensors = [(at, value.data_ptr() % 16 == 0) for at, value in enumerate(args) if isinstance(value, torch.Tensor)]
        self.pointers = tuple(at for at, aligned in tensors if aligned)
        self.loose = tuple(at for at, aligned in tensors if not aligned)
        descriptors = [at for at, value in enumerate(args) if isinstance(value, TensorDescriptor)]
        # last first: what takes a descriptor's place has another length
        self.described: tuple[tuple[int, dict[str, Any], dict[int, tuple[Any, ...]]], ...] = ()
        if metas is not None:
            self.described = tuple((at, meta, {}) for at, meta in zip(descriptors, metas, strict=True))[::-1]

    def __call__(self, args: tuple[Any, ...]) -> bool:
        """Whether it could be launched: not where an operand does not lie as it must."""
        values, found = list(args), 0
        for at in self.pointers:
            values[at] = pointer = values[at].data_ptr()
            found |= pointer
        for at in self.loose:
            values[at] = values[at].data_ptr()
        for at, meta, maps in self.described:
            descriptor = values[at]
            pointer = descriptor.base.data_ptr()
            found |= pointer
            encoded = maps.get(pointer)
            if encoded is None:
                if pointer & 15:
                    return False
                if len(maps) >= MAPS:
                    maps.clear()
                encoded = maps[pointer] = descriptor.encoded(meta)
            values[at : at + 1] = encoded
        if found & 15:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.launch(*self.grid, stream, *self.before, *values, *self.constants)
        return True


def _innermost(launch: Callable[..., Any]) -> tuple[Callable[..., Any], list[dict[str, Any]] | None]:
    """The function that takes encoded descriptors, and what each is encoded with; or the one that encodes them itself."""
    code = getattr(launch, "__code__", None)
    if code is not None and "tensordesc_meta" in code.co_freevars:
        own = dict(zip(code.co_freevars, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True))
        if "launcher" in own and None not in own["tensordesc_meta"]:
            return own["launcher"], own["tensordesc_meta"]
    return launch, None


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return None


def launched(sites: dict[Hashable, Site], key: Hashable, args: tuple[Any, ...]) -> bool:
    """Whether this launch was made before and could be made again; `launch` is for those that could not."""
    site = sites.get(key)
    return site is not None and site(args)


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
            constants, and arguments of the same kind, dtypes and (for integers) values, descriptors of the same sizes.
            Constants may rest on an operand's lying at a multiple of 16 bytes: one that does not is launched anew.
    """
    if sites is not None and launched(sites, key, args):
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
        made = Site(compiled, grid, args, tuple(own), device)
    else:
        made = Site(compiled, grid, args, tuple(own), device)
        if not made(args):
            kernel[grid](*args, **constants)
    if sites is not None:
        sites.setdefault(key, made)
