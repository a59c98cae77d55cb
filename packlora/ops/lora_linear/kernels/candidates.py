"""What the kernels' sizes can be on a device: few candidates for each kernel, which of them fit, and which look best.

    down      S = s c (drop(x) A')      few_down: where there are fewer blocks of tokens than processors
    up        y0 = S B'
    grad      dS and dB                 several_grad: where no segment has all tokens; joint: DoRA's, with e and the sums
    inputs    dx and dA                 narrow: with no more than 16 ranks

Nothing here is measured (tune/kernel_sizes.py). Estimates of memory are of operands in 16 bits and of the widest block of
ranks; a candidate that does not fit after all fails when it is tried, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from packlora.ops.gpu import has_copy_engine
from packlora.ops.lora_linear.kernels.config import BITS_16, Sizes
from packlora.ops.lora_linear.kernels.sizes import cdiv

Fields = dict[str, int]
"""Of Sizes, where they are not the usual ones."""
IN_FLIGHT = 48 * 1024
"""Bytes that a processor must have on their way to keep the memory busy: 4.8 TB/s for a microsecond, over 132 processors, and a
third more."""
MOST_REGISTERS = 224
"""Of a thread, for tiles; the compiler needs the others."""
NOMINAL = (8192, 4096, 4096)
"""T, K and N for which candidates are put in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a device. shared, shared_at_once: bytes of a program and of a processor. registers: of a processor. processors.
    copy_engine: see gpu.has_copy_engine."""

    shared: int
    shared_at_once: int
    registers: int
    processors: int
    copy_engine: bool

    @staticmethod
    def of(device: torch.device) -> Limits:
        found: Any = torch.cuda.get_device_properties(device)
        return Limits(
            int(found.shared_memory_per_block_optin), int(found.shared_memory_per_multiprocessor),
            int(found.regs_per_multiprocessor), int(found.multi_processor_count), has_copy_engine(device),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one program. ring: bytes of a stage; fixed: bytes of shared memory beside the ring; values: floats in registers;
    programs: in a launch of NOMINAL size."""

    stages: int
    ring: int
    fixed: int
    values: int
    warps: int
    programs: int

    def shared(self, limits: Limits) -> int:
        """Without the copy engine the last stage is in registers."""
        return self.fixed + self.ring * max(1, self.stages - (not limits.copy_engine))

    @property
    def registers(self) -> int:
        """Of a thread."""
        return cdiv(self.values, 32 * self.warps)

    def fits(self, limits: Limits) -> bool:
        return self.shared(limits) <= limits.shared and self.registers <= MOST_REGISTERS

    def score(self, limits: Limits) -> float:
        """From 0 to 1: the part of the memory's speed that the bytes on their way are enough for, times the part of the
        processors that the last turn keeps busy."""
        threads = 32 * self.warps
        at_once = min(
            limits.shared_at_once // max(1, self.shared(limits)),
            limits.registers // (threads * (self.registers + 32)),
            2048 // threads,
        )
        at_once = max(1, at_once)
        slots = at_once * limits.processors
        busy = self.programs / (cdiv(self.programs, slots) * slots)
        return min(1.0, at_once * self.stages * self.ring / IN_FLIGHT) * busy


@dataclass(frozen=True, slots=True)
class Kernel:
    """of: its footprint with given sizes. others: candidates beside the usual sizes."""

    of: Callable[[Sizes], Footprint]
    others: tuple[Fields, ...]

    @property
    def fields(self) -> frozenset[str]:
        """That are its own."""
        return frozenset(name for fields in self.others for name in fields)

    def candidates(self, limits: Limits, base: Sizes = BITS_16) -> list[Fields]:
        """The usual sizes, then those that fit the device, what looks best first.

        Args:
            base: what other kernels have, on which this one's footprint may depend.
        """
        made = [(fields, self.of(replace(base, **fields))) for fields in self.others]  # type: ignore[arg-type]
        fitting = [(fields, footprint) for fields, footprint in made if footprint.fits(limits)]
        return [{}, *(fields for fields, _ in sorted(fitting, key=lambda item: -item[1].score(limits)))]


def _product(m: int, k: int, r: int, stages: int, warps: int, programs: int) -> Footprint:
    """A block [m, r] that is summed over blocks of k: both operands are on their way."""
    return Footprint(stages, 2 * k * (m + r), 0, m * r + k * (m + r) // 2, warps, programs)


def _down(size: Sizes) -> Footprint:
    return _product(
        size.down_m, size.down_k, size.down_r, size.down_stages, size.down_warps, cdiv(NOMINAL[0], size.down_m)
    )


def _few_down(size: Sizes) -> Footprint:
    m, k = size.few_down_m, size.few_down_k
    return _product(m, k, 32, size.down_stages, size.down_warps, cdiv(NOMINAL[0] // 4, m))


def _up(size: Sizes) -> Footprint:
    m, n, r = size.up_m, size.up_n, 64
    programs = cdiv(NOMINAL[0], m) * cdiv(NOMINAL[2], n * size.up_loop)
    return Footprint(
        size.up_stages, 2 * n * (m + r), 2 * m * r, m * n * 3 // 2 + r * (m + n) // 2, size.up_warps, programs
    )


def _walk(
    m: int, n: int, r: int, ring: int, stages: int, warps: int, chunks: tuple[int, ...], width: int, values: int
) -> Footprint:
    """Blocks of m tokens and n columns, over the tokens of a chunk; a sum and an operand [n, r] stay. What was compiled for
    sm_90 has 6 m r bytes beside them, to transpose."""
    programs = cdiv(width, n) * cdiv(NOMINAL[0], chunks[-1])
    return Footprint(stages, ring, 2 * n * r + 6 * m * r, n * r * 3 // 2 + m * r + values, warps, programs)


def _outputs(size: Sizes, m: int, n: int, r: int, tensors: int, stages: int, warps: int) -> Footprint:
    ring, values = 2 * tensors * m * n, tensors * m * n // 2
    return _walk(m, n, r, ring, stages, warps, size.grad_chunks, NOMINAL[2], values)


def _of_inputs(size: Sizes, k: int, r: int, stages: int) -> Footprint:
    m = size.inputs_m
    return _walk(m, k, r, 2 * m * (k + r), stages, size.inputs_warps, size.inputs_chunks, NOMINAL[1], m * k // 2)


def _grad(size: Sizes) -> Footprint:
    return _outputs(size, size.grad_m, size.grad_n, size.grad_r, 1, size.grad_stages, size.grad_warps)


def _several_grad(size: Sizes) -> Footprint:
    m, r, warps = size.several_grad_m, size.several_grad_r, size.several_grad_warps
    return _outputs(size, m, size.grad_n, r, 1, size.grad_stages, warps)


def _joint(size: Sizes) -> Footprint:
    return _outputs(size, size.joint_m, size.joint_n, size.grad_r, 2, size.joint_stages, size.joint_warps)


def _inputs(size: Sizes) -> Footprint:
    return _of_inputs(size, size.inputs_k, size.inputs_r, size.inputs_stages)


def _narrow(size: Sizes) -> Footprint:
    return _of_inputs(size, size.narrow_k, 16, size.narrow_stages)


def _each(names: tuple[str, ...], *values: tuple[int, ...]) -> tuple[Fields, ...]:
    return tuple(dict(zip(names, own, strict=True)) for own in values)


KERNELS: dict[str, Kernel] = {
    "down": Kernel(
        _down,
        _each(
            ("down_m", "down_k", "down_warps", "down_stages"),
            (16, 128, 4, 4), (32, 64, 4, 5), (32, 128, 4, 3), (32, 128, 4, 5), (32, 128, 8, 4), (32, 256, 4, 3),
            (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (64, 128, 8, 4), (128, 64, 8, 4),
        ),
    ),
    "few_down": Kernel(
        _few_down,
        _each(("few_down_m", "few_down_k"), (16, 64), (16, 128), (16, 512), (32, 64), (32, 128), (32, 256)),
    ),
    "up": Kernel(
        _up,
        _each(
            ("up_m", "up_n", "up_loop", "up_warps", "up_stages"),
            (32, 128, 4, 4, 2), (32, 128, 8, 4, 2), (64, 64, 4, 4, 2), (64, 64, 16, 4, 2), (64, 64, 8, 4, 3),
            (64, 128, 4, 4, 2), (64, 128, 4, 8, 2), (128, 64, 4, 4, 2), (128, 64, 8, 8, 2), (128, 128, 4, 8, 2),
        ),
    ),
    "grad": Kernel(
        _grad,
        _each(
            ("grad_m", "grad_n", "grad_warps", "grad_stages"),
            (32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4),
            (64, 256, 4, 2), (64, 256, 8, 3), (128, 128, 4, 3), (128, 128, 8, 3), (128, 256, 8, 2),
        ),
    ),
    "several_grad": Kernel(
        _several_grad,
        _each(
            ("several_grad_m", "several_grad_r", "several_grad_warps"),
            (16, 32, 4), (32, 64, 8), (64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 64, 8),
        ),
    ),
    "joint": Kernel(
        _joint,
        _each(
            ("joint_m", "joint_n", "joint_warps", "joint_stages"),
            (16, 128, 4, 4), (32, 64, 4, 4), (32, 128, 4, 2), (32, 128, 4, 3), (32, 128, 8, 4), (32, 256, 8, 3),
            (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 8, 3),
        ),
    ),
    "inputs": Kernel(
        _inputs,
        _each(("inputs_k", "inputs_stages"), (64, 2), (64, 3), (64, 4), (128, 2), (128, 4), (256, 2)),
    ),
    "narrow": Kernel(
        _narrow,
        _each(("narrow_k", "narrow_stages"), (32, 4), (32, 6), (64, 2), (64, 3), (64, 5), (128, 2), (128, 3), (128, 4)),
    ),
}  # fmt: skip
"""By name, in the order in which they are measured. No two have a field in common."""


def combined(chosen: dict[str, Fields], usual: Sizes = BITS_16) -> Sizes:
    """The sizes of all kernels.

    Args:
        chosen: by name of the kernel; others have the usual sizes.
        usual: of the device (config.usual).

    Raises:
        ValueError: a kernel or a candidate that there is not.
    """
    out: Fields = {}
    for name, fields in chosen.items():
        if name not in KERNELS or (fields and fields not in KERNELS[name].others):
            raise ValueError(f"{name} {fields} is not among the candidates")
        out |= fields
    return replace(usual, **out)  # type: ignore[arg-type]


def described(fields: Fields) -> str:
    """For a report and as a name: `grad_m 64, grad_n 128`."""
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or "usual"
