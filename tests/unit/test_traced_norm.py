"""DoRA's norm in a compiled layer on a GPU: what torch.compile gets, seen without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from seeds import SOAK

from packlora.ops.row_norm.reference import weight_norm

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("rank", [16, 384] if SOAK else [16])
def test_a_compiler_launches_the_norm_s_kernel_itself(rank: int) -> None:
    """One launch, which writes nothing but its sums, no operator that is closed to the compiler; and what is launched, here by
    Triton's interpreter, gives the norm."""
    from packlora.ops.row_norm.kernels import norm

    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compiled_layers.py"), str(rank)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["written"] == ["out"], "a kernel whose writes are unknown has its weight copied"
    assert [name for name in found["calls"] if "packlora" in name] == []
    assert sum("triton_kernel_wrapper" in name for name in found["calls"]) == 1

    own = found["launch"]
    seed = torch.Generator().manual_seed(1)
    W, A, B = (
        torch.randn(*shape, generator=seed).half()  # of 16 bits, as traced; Triton interprets no bfloat16
        for shape in ((own["N"], own["K"]), (rank, own["K"]), (own["N"], rank))
    )
    grid = tuple(own.pop("grid"))
    squares = torch.full((grid[1], own["N"]), torch.nan)
    norm.direct_kernel[grid](W, A, B, squares, **own)
    want = weight_norm(W.double(), A.double(), B.double(), own["s"])
    assert float((squares.double().sum(0).sqrt() / want - 1).abs().max()) < 1e-5
