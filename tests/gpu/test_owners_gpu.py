"""Owners of tokens on a GPU, where autograd recomputes activations in a thread of its own.

make gpu
"""

from __future__ import annotations

import pytest
from test_owners import CHECKPOINTING, ORDERS, SEQUENTIAL, Trained, same_bits

from packlora.runtime.run import deterministic


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_any_order_of_forwards_backwards_and_steps_gives_the_bits_of_one_after_the_other(how: str, order: str) -> None:
    with deterministic():
        want = Trained(CHECKPOINTING[how], device="cuda").run(SEQUENTIAL)
        assert same_bits(Trained(CHECKPOINTING[how], device="cuda").run(ORDERS[order]), want)
