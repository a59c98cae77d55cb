"""How often kernels are compiled for lengths that go from microbatch to microbatch: once, whatever 16 divides."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from group_cases import KINDS, make_case, run_group, run_moving

from packlora.ops import gpu, launcher
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.plan import ROUTED, Plan

LENGTHS = (33, 700, 511, 1500, 4097, 3000, 8192, 256)
"""Some make 16 blocks or chunks, or 32."""
PLANS = (ROUTED, Plan("routed", "fused", "one-pass", "fused"))
KIND = "DoRA and LoRA, siblings, some absent, biases"
TILES = 2
"""Of the fused product, which is compiled for one forward and one backward at each."""


def specialised(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles for, of arguments that are integers."""
    free = kernel.kwargs["do_not_specialize"] or ()
    named = zip(kernel.arg_names, args, strict=False)
    return tuple(
        (name, value == 1, value % 16 == 0) for name, value in named if type(value) is int and name not in free
    )


def test_lengths_of_microbatches_compile_no_kernel_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200's 132 processors, for segments that the host knows and for those that move."""
    found: defaultdict[Any, set[Any]] = defaultdict(set)
    plan = ROUTED

    def take(kernel: Any, grid: Any, args: Any, launches: Any = None, key: Any = None, **constants: Any) -> None:
        if 0 not in grid:
            kinds = tuple(t.dtype if isinstance(t, torch.Tensor) else type(t) for t in args)
            found[kernel.__name__, plan.name, kinds, *constants.values()].add(specialised(kernel, args))

    monkeypatch.setattr(launcher, "launch", take)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    monkeypatch.setattr(sizes, "processors", lambda device: 132)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    for (number, T), plan in itertools.product(enumerate(LENGTHS), PLANS):
        drawn = make_case(T, 64, [64, 128, 64], with_bias=False, seed=T, dtype=torch.bfloat16, **KINDS[KIND])
        if number % 2:
            run_moving(drawn, torch.bfloat16, plan)
        else:
            run_group(drawn, torch.bfloat16, plan)
    names = {name for name, *_ in found}
    assert names >= {
        "fused_kernel",
        "down_kernel",
        "grad_kernel",
        "inputs_kernel",
        "sum_grads_kernel",
        "sum_rows_kernel",
    }
    for known, kinds in found.items():
        assert len(kinds) == 1, (known, kinds)
    forwards = {known for known in found if known[0] == "fused_kernel" and known[3]}
    backwards = {known for known in found if known[0] == "fused_kernel" and not known[3]}
    assert 0 < len(backwards) <= TILES and 0 < len(forwards) <= 3 * TILES  # with g, kept or not, and without
