"""Launch a Triton kernel with little work on the host.

A layer's forward and backward are seven launches; through the usual door each costs the host 20 to 50 us (binding and
specialising every argument), which at 2048 tokens is more than the GPU needs. Here a launch looks its compiled kernel up by
what Triton specialises on (dtypes, alignment, and which integers are 1 or multiples of 16, but for those that the kernel has
among its do_not_specialize). A caller who knows that nothing of that changes but where operands lie gives the launch a key in a
dict of its own: then their addresses are all that is read of them, and what a tensor descriptor needs is kept by address.

Numbers that go from microbatch to microbatch, of tokens and of what they are cut into, belong among do_not_specialize: each
kernel is compiled once more for every kind of them that it meets.

How Triton passes arguments to the function that launches is its own affair and differs from release to release. It is therefore
not written down here but recorded, from Triton's own launcher (`Passage`), and tried once in a process: `why_usual`.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from packlora.ops.gpu import has_copy_engine
from packlora.ops.probe_kernel import probe_kernel

_COMPILED: dict[Any, tuple[Any, Passage | None]] = {}
MAPS = 4096
"""Number of encoded descriptors that a cached launch keeps for one argument."""
KEPT = 4096
"""Number of launches that `bounded` lets a dict hold."""
Shaped = tuple[list[int], Sequence[int], Sequence[int]]
"""Blocks, shape and strides of a tensor descriptor."""


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """TensorDescriptor without its checks, which take the host longer than the launch; see launch.described.

    Of a tensor, or of `shape` from the tensor's first element on, with `strides`.
    """

    def __init__(
        self,
        base: torch.Tensor,
        block_shape: list[int],
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        self.base, self.block_shape, self.padding = base, block_shape, "zero"
        self.shape = base.shape if shape is None else shape
        self.strides = base.stride() if strides is None else strides

    def encoded(self, meta: dict[str, Any]) -> tuple[Any, ...]:
        """Encode the descriptor into the arguments that a compiled kernel takes for it."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        unread = make_tensordesc_arg.__code__.co_argcount - 2  # from Triton 3.8 on: what else the launch passes
        return tuple(make_tensordesc_arg(self, meta, *[None] * unread))


class Passage:
    """Call that launches a compiled kernel: the function, and the arguments that Triton's own launcher passes to it between the
    stream and the kernel's arguments. `nested`: the kernel's arguments are passed as one sequence."""

    __slots__ = ("launch", "metas", "nested", "rest")

    def __init__(self, launch: Callable[..., Any], rest: tuple[Any, ...], nested: bool) -> None:
        self.launch, self.metas = _innermost(launch)
        self.rest, self.nested = rest, nested

    @staticmethod
    def recorded(compiled: Any, values: tuple[Any, ...]) -> Passage | None:
        """Record the arguments that the kernel's own launcher passes on, with a copy of the launcher that launches nothing.
        None where the launcher's call is not recognised, or where it allocates something for every launch (scratch memory)."""
        calls: list[tuple[Any, ...]] = []
        launcher = copy.copy(compiled.run)
        launcher.launch = lambda *args: calls.append(args)
        before = (1009, 1013, 1019, 1021)  # a grid and a stream that are recognised
        launcher(*before, compiled.function, compiled.packed_metadata, None, None, None, *values)
        (call,) = calls
        nested = isinstance(call[-1], tuple | list) and _same_objects(call[-1], values)
        rest = call[4:-1] if nested else call[4 : len(call) - len(values)]
        if call[:4] != before or not (nested or _same_objects(call[4 + len(rest) :], values)):
            return None
        if any(hasattr(value, "data_ptr") for value in rest):
            return None
        return Passage(compiled.run.launch, rest, nested)


def _same_objects(found: Any, values: tuple[Any, ...]) -> bool:
    return len(found) == len(values) and all(a is b for a, b in zip(found, values, strict=True))


class CachedLaunch:
    """A launch whose kernel, grid and compile-time arguments are settled. Operands that lay at multiples of 16 bytes when it
    was made must do so."""

    __slots__ = ("constants", "described", "device", "grid", "launch", "loose", "nested", "pointers", "rest")

    def __init__(
        self, passage: Passage, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], device: int
    ) -> None:
        self.launch, self.rest, self.nested = passage.launch, passage.rest, passage.nested
        self.constants, self.device, self.grid = constants, device, (*grid, 1, 1)[:3]
        tensors = [(at, value.data_ptr() % 16 == 0) for at, value in enumerate(args) if isinstance(value, torch.Tensor)]
        self.pointers = tuple(at for at, aligned in tensors if aligned)
        self.loose = tuple(at for at, aligned in tensors if not aligned)
        descriptors = [at for at, value in enumerate(args) if isinstance(value, TensorDescriptor)]
        # last first: what takes a descriptor's place may have another length
        metas = passage.metas if passage.metas is not None else [None] * len(descriptors)
        self.described: tuple[tuple[int, Shaped, dict[str, Any] | None, dict[int, tuple[Any, ...]]], ...] = tuple(
            (at, (args[at].block_shape, args[at].shape, args[at].strides), meta, {})
            for at, meta in zip(descriptors, metas, strict=True)
        )[::-1]

    def __call__(self, args: tuple[Any, ...]) -> bool:
        """Whether it could be launched: not where an operand does not lie as it must."""
        values, found = list(args), 0
        for at in self.pointers:
            values[at] = pointer = values[at].data_ptr()
            found |= pointer
        for at in self.loose:
            values[at] = values[at].data_ptr()
        for at, shaped, meta, maps in self.described:
            value = values[at]
            base = value.base if isinstance(value, TensorDescriptor) else value
            pointer = base.data_ptr()
            found |= pointer
            encoded = maps.get(pointer)
            if encoded is None:
                if pointer & 15:
                    return False
                descriptor = Descriptor(value, *shaped) if base is value else value
                if meta is None:  # encoded by the function that launches
                    values[at] = descriptor
                    continue
                if len(maps) >= MAPS:
                    maps.clear()
                encoded = maps[pointer] = descriptor.encoded(meta)
            values[at : at + 1] = encoded
        if found & 15:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if self.nested:
            self.launch(*self.grid, stream, *self.rest, (*values, *self.constants))
        else:
            self.launch(*self.grid, stream, *self.rest, *values, *self.constants)
        return True


def _innermost(launch: Callable[..., Any]) -> tuple[Callable[..., Any], list[dict[str, Any]] | None]:
    """The function that takes encoded descriptors, and what each is encoded with; or the one that encodes them itself."""
    code = getattr(launch, "__code__", None)
    if code is not None and "tensordesc_meta" in code.co_freevars:
        own = dict(zip(code.co_freevars, (cell.cell_contents for cell in launch.__closure__ or ()), strict=True))
        if "launcher" in own and None not in own["tensordesc_meta"]:
            return own["launcher"], own["tensordesc_meta"]
    return launch, None


@functools.cache
def _varying(kernel: Any) -> frozenset[int]:
    """Indices of the arguments whose values do not affect compilation."""
    return frozenset(at for at, param in enumerate(kernel.params) if param.do_not_specialize)


def _kind(value: Any, varies: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        fits = -(2**31) <= value < 2**31
        return fits if varies else (value == 1, value % 16 == 0, fits)
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return None


def bounded(launches: dict[Hashable, CachedLaunch]) -> dict[Hashable, CachedLaunch]:
    """The launches, forgotten where they are too many: each number of tokens is one."""
    if len(launches) >= KEPT:
        launches.clear()
    return launches


def launched(launches: dict[Hashable, CachedLaunch], key: Hashable, args: tuple[Any, ...]) -> bool:
    """Whether this launch was made before and could be made again; `launch` is for those that could not. In the place of a
    descriptor its tensor will do."""
    cached = launches.get(key)
    return cached is not None and cached(args)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], launches: dict[Hashable, CachedLaunch] | None = None,
    key: Hashable = None, **constants: Any,
) -> None:  # fmt: skip
    """kernel[grid](*args, **constants), with num_warps and num_stages last among the constants.

    Args:
        kernel: a triton.jit function whose compile-time arguments come last, in the order of `constants`.
        grid: one to three sizes; nothing is launched where one is 0.
        args: tensors, tensor descriptors, integers and None.
        launches: where the launch is remembered under `key` with its grid; the same key must always mean the same grid and
            constants, and arguments of the same kind, dtypes and (for integers) values, descriptors of the same sizes.
            Constants may rest on an operand's lying at a multiple of 16 bytes: one that does not is launched anew.
    """
    if launches is not None and launched(launches, key, args):
        return
    if 0 in grid:
        return
    if _rehearsal is not None:
        _rehearsal.take(kernel, grid, args, constants)
        return
    if not (isinstance(kernel, JITFunction) and is_quick()):  # the interpreter is no JITFunction
        kernel[grid](*args, **constants)
        return
    device = torch.cuda.current_device()
    full = _known_by(kernel, device, args, constants)
    *own, _, _ = constants.values()
    known = _COMPILED.get(full)
    if known is None:
        compiled = kernel[grid](*args, **constants)
        known = _COMPILED[full] = compiled, Passage.recorded(compiled, (*args, *own))
        made = None if known[1] is None else CachedLaunch(known[1], grid, args, tuple(own), device)
    else:
        made = None if known[1] is None else CachedLaunch(known[1], grid, args, tuple(own), device)
        if made is None or not made(args):
            kernel[grid](*args, **constants)
    if launches is not None and made is not None:
        launches.setdefault(key, made)


def _known_by(kernel: Any, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Cache key of the kernel that is compiled for a launch."""
    varying = _varying(kernel)
    return kernel, device, *constants.values(), *(_kind(value, at in varying) for at, value in enumerate(args))


# --- compiling ahead ---------------------------------------------------------------------------------------------------

COMPILERS = 16
"""Most threads that compile at a time."""
_rehearsal: _Rehearsal | None = None


class _Rehearsal:
    """Compiles what would be launched, side by side: Triton does so outside of the interpreter's lock."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._device, self._seen = pool, torch.cuda.current_device(), set[Any]()

    def take(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        known = _known_by(kernel, self._device, args, constants)
        if known not in self._seen and known not in _COMPILED:
            self._seen.add(known)
            self._pool.submit(self._compile, kernel, grid, args, constants)

    def _compile(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with the first one
        kernel.warmup(*args, grid=grid, **constants)


def is_rehearsing() -> bool:
    """Whether launches compile and do not launch."""
    return _rehearsal is not None


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, `launch` launches nothing, it compiles; at the end all of it is compiled. What kernels would have written is not
    there: the caller throws away what is computed inside, and lets nothing be computed that is kept, in any thread. A kernel
    that cannot be compiled fails when it is launched.
    """
    global _rehearsal
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, COMPILERS))
    try:
        _rehearsal = _Rehearsal(pool)
        yield
        pool.shutdown(wait=True)
    finally:
        _rehearsal = None
        pool.shutdown(wait=True, cancel_futures=True)


# --- is it the same launch? --------------------------------------------------------------------------------------------


def is_quick() -> bool:
    """Whether launches are made again without Triton's door. In a graph that is being captured nothing is tried."""
    if not why_usual.cache_info().currsize and torch.cuda.is_current_stream_capturing():
        return False
    return why_usual() is None


@functools.cache
def why_usual() -> str | None:
    """Reason why every launch goes through Triton's own launcher; None where recorded launches are repeated.

    Tried once in a process, on the current GPU: what a cached launch passes to the function that launches must be what Triton
    passes to it for the same arguments, with other operands than those that it was made with.
    """
    if not isinstance(probe_kernel, JITFunction):
        return "kernels are interpreted"
    try:
        mapped = has_copy_engine(torch.device("cuda", torch.cuda.current_device()))
        differences = [_difference(MAPPED) for MAPPED in ((False, True) if mapped else (False,))]
    except Exception as error:  # internals of any release of Triton, which may fail in any way
        return f"triton {triton.__version__}: {type(error).__name__}: {error}"
    found = next((text for text in differences if text), None)
    return None if found is None else f"triton {triton.__version__}: {found}"


def _difference(mapped: bool) -> str | None:
    """Difference between a cached launch and Triton's own, in words; None where there is none."""
    BLOCK, device = 32, torch.cuda.current_device()
    where = torch.device("cuda", device)

    def drawn(rows: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        x, y = torch.zeros(rows, BLOCK, device=where), torch.zeros(rows, BLOCK, device=where)
        return (rows,), (Descriptor(x, [1, BLOCK]) if mapped else x, None, y, 48, 1, 7)

    constants = {"MAPPED": mapped, "HALF": 0.5, "BLOCK": BLOCK}
    options = {"num_warps": 1, "num_stages": 1}
    grid, args = drawn(2)
    compiled = probe_kernel[grid](*args, **constants, **options)
    passage = Passage.recorded(compiled, (*args, *constants.values()))
    if passage is None:
        return "its launcher passes arguments in a way that is not known here"
    cached = CachedLaunch(passage, grid, args, tuple(constants.values()), device)
    grid, args = drawn(3)
    cached.grid = (*grid, 1, 1)
    ours: list[tuple[Any, ...]] = []
    cached.launch = lambda *passed: ours.append(passed)
    cached(args)
    theirs = _passed(compiled.run, lambda: probe_kernel[grid](*args, **constants, **options))
    if (passed := _plain(ours)) != (wanted := _plain(theirs)):
        return f"where Triton passes {wanted}, a cached launch would pass {passed}"
    return None


def _passed(launcher: Any, launch: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Arguments that Triton would pass to the innermost launch function, without any launch hooks; nothing is launched."""
    calls: list[tuple[Any, ...]] = []
    usual, runtime = launcher.launch, triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    runtime.launch_enter_hook = runtime.launch_exit_hook = None
    inner, metas = _innermost(usual)
    cell = None
    if metas is not None:
        cell = usual.__closure__[usual.__code__.co_freevars.index("launcher")]
        cell.cell_contents = lambda *args: calls.append(args)
    else:
        launcher.launch = lambda *args: calls.append(args)
    try:
        launch()
    finally:
        if cell is not None:
            cell.cell_contents = inner
        launcher.launch = usual
        runtime.launch_enter_hook, runtime.launch_exit_hook = hooks
    return calls


def _plain(value: Any) -> Any:
    """Values in a form that can be compared: tensors by their address, sequences as tuples, objects without an equality of
    their own by their type."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if value is None or isinstance(value, int | float | str | bytes) else type(value).__name__
