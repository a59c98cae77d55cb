"""What a layer keeps from call to call is made once, also where two threads use it first at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from group_cases import make_case
from seeds import SEED

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.plan import CHAIN
from packlora.ops.lora_linear.prepared import GroupState


def test_two_threads_that_first_use_siblings_both_get_their_outputs_then_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(12, 24, [16, 20], [[3, 5]], [0.0], False, SEED, whole=0)
    want = lora_group(case.x, case.layers, case.segments)
    state, barrier, zeros = GroupState(), threading.Barrier(2), torch.zeros
    found: list[tuple[torch.Tensor, ...]] = []

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = zeros(*args, **kwargs)
        time.sleep(0.02)  # lets the other thread come to the same line
        return made

    def run() -> None:
        barrier.wait()
        found.append(lora_group(case.x, case.layers, case.segments, state=state))

    state.prepared(case.x, case.layers, CHAIN)  # is there, but its buffers are not
    monkeypatch.setattr(torch, "zeros", slow)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(lora_group(case.x, case.layers, case.segments, state=state))
    assert len(found) == 3
    for outputs in found:
        for got, expected in zip(outputs, want, strict=True):
            assert torch.equal(got, expected)
