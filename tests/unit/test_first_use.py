"""What is kept from call to call serves several threads: made once where two use it first, and there while one looks it up."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from group_cases import make_case
from seeds import SEED

from packlora.adapters.norms import NormHandle, RowNorms
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.plan import CHAIN
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.recent import Recent
from packlora.plans.case import Case
from packlora.plans.select import PlanChooser


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


class Interrupted(OrderedDict[Any, Any]):
    """Lets another thread run after each look, for as long as that thread can go on."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        between, self.between = self.between, None
        if between is not None:
            thread = threading.Thread(target=between)
            thread.start()
            thread.join(0.05)  # it waits for its turn, if this look is not over
        return found


@pytest.mark.parametrize("known", [True, False])
def test_a_value_that_another_thread_drops_or_makes_during_a_look_is_given_all_the_same(known: bool) -> None:
    cache: Recent[str] = Recent(1)

    def other() -> None:
        cache.get("other", lambda: "from the other thread")
        cache.get("key", lambda: "from the other thread")
        cache.get("other", lambda: "from the other thread")

    if known:
        cache.get("key", lambda: "value")
    cache._values = Interrupted(other)
    if known:
        cache._values["key"] = "value"
    assert cache.get("key", lambda: "value") == "value"
    assert len(cache._values) == 1


def test_norms_are_renewed_while_another_thread_adds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(SEED)
    W, A, B = torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2)
    norms, missing, late = RowNorms(), NormHandle._missing, list[NormHandle]()
    handles = [NormHandle(norms, W, A.clone(), B, 0.5, version_counted=True) for _ in range(3)]

    def another(handle: NormHandle) -> str | None:
        late.append(NormHandle(norms, W, A.clone(), B, 0.5))
        return missing(handle)

    monkeypatch.setattr(NormHandle, "_missing", another)
    torch.testing.assert_close(handles[0].get(), (W + 0.5 * B @ A).norm(dim=1))
    assert len(late) > 1


def test_a_plan_that_a_thread_is_given_is_on_record() -> None:
    """plan_for serves a thread from what another one has just chosen; a report then asks why."""
    chooser = PlanChooser(torch.device("cpu"))

    class Looked(dict[Any, Any]):
        def __setitem__(self, case: Any, plan: Any) -> None:
            assert case in chooser.choices
            super().__setitem__(case, plan)

    chooser._plans = Looked()
    case = Case.of(torch.device("cpu"), torch.float32, 64, 32, (32,), [(4,)], [False], [False])
    assert chooser.plan_for(case) == chooser.choices[case].plan
