"""A row's bits do not depend on the rows beside it, with any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
import packlora
torch.set_num_threads(2)
torch.manual_seed(0)
for inner, outer in ((1536, 576), (576, 1536)):
    rows, weight = torch.randn(256, inner), torch.randn(outer, inner)
    few = torch.nn.functional.linear(rows[:32], weight)
    for count in (64, 128, 256):
        print(torch.equal(few, torch.nn.functional.linear(rows[:count], weight)[:32]), end=" ")
"""


def test_rows_of_a_product_have_the_same_bits_however_many_there_are() -> None:
    """Products of SmolLM2's sizes: with two threads MKL divides the sums of 32 rows otherwise than those of 64."""
    own = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    out = subprocess.run([sys.executable, "-c", PROGRAM], env=own, text=True, capture_output=True, check=True)
    assert out.stdout == "True " * 6
