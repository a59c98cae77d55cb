"""Sizes that are tried for each kernel beside the usual ones: few, since each has to be compiled.

    down      S = s c (drop(x) A')      few_down: where there are fewer blocks of tokens than processors
    up        y0 = S B'
    grad      dS and dB                 several_grad: where no segment has all tokens; joint: DoRA's, with e and the sums
    inputs    dx and dA                 narrow: with no more than 16 ranks

What looks best on an H200 comes first: what has enough bytes on its way and keeps all processors busy. A candidate that a
device has too little memory for fails when it is tried, and is left out.
"""

from __future__ import annotations

from packlora.plans.kernel_sizes import Fields


def _each(names: tuple[str, ...], *values: tuple[int, ...]) -> tuple[Fields, ...]:
    return tuple(dict(zip(names, own, strict=True)) for own in values)


KERNELS: dict[str, tuple[Fields, ...]] = {
    "down": _each(
        ("down_m", "down_k", "down_warps", "down_stages"),
        (16, 128, 4, 4), (32, 128, 4, 5), (32, 128, 8, 4), (32, 256, 4, 3), (64, 128, 8, 4), (32, 64, 4, 5), (32, 128, 4, 3),
        (64, 128, 4, 3), (64, 128, 8, 3), (64, 64, 4, 4), (128, 64, 8, 4),
    ),
    "few_down": _each(("few_down_m", "few_down_k"), (16, 512), (32, 256), (16, 128), (32, 128), (16, 64), (32, 64)),
    "up": _each(
        ("up_m", "up_n", "up_loop", "up_warps", "up_stages"),
        (32, 128, 4, 4, 2), (32, 128, 8, 4, 2), (64, 64, 4, 4, 2), (64, 64, 16, 4, 2), (64, 64, 8, 4, 3),
        (64, 128, 4, 4, 2), (64, 128, 4, 8, 2), (128, 64, 4, 4, 2), (128, 64, 8, 8, 2), (128, 128, 4, 8, 2),
    ),
    "grad": _each(
        ("grad_m", "grad_n", "grad_warps", "grad_stages"),
        (128, 128, 4, 3), (128, 128, 8, 3), (64, 128, 4, 4), (64, 256, 8, 3), (128, 256, 8, 2), (64, 128, 4, 3),
        (32, 128, 4, 4), (32, 256, 4, 4), (64, 128, 4, 2), (64, 256, 4, 2), (32, 256, 4, 3),
    ),
    "several_grad": _each(
        ("several_grad_m", "several_grad_r", "several_grad_warps"), (32, 64, 8), (64, 32, 4), (64, 64, 8), (16, 32, 4),
    ),
    "joint": _each(
        ("joint_m", "joint_n", "joint_warps", "joint_stages"),
        (64, 128, 8, 3), (64, 64, 4, 3), (32, 128, 8, 4), (32, 256, 8, 3), (64, 128, 4, 2), (32, 64, 4, 4),
        (32, 128, 4, 3), (32, 128, 4, 2), (16, 128, 4, 4),
    ),
    "inputs": _each(("inputs_k", "inputs_stages"), (64, 3), (64, 4), (128, 2), (128, 4), (64, 2)),
    "narrow": _each(
        ("narrow_k", "narrow_stages"), (128, 4), (32, 6), (64, 3), (64, 5), (128, 3), (32, 4), (64, 2), (128, 2),
    ),
}  # fmt: skip
"""Candidate sizes by name, in the order in which they are measured. No two names share a field."""
