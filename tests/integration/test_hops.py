"""How far a hidden state goes: the calls from a layer's forward to a kernel that makes its output, for layers of a run and of
PEFT models alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from test_owners import Fixed
from torch.utils._python_dispatch import TorchDispatchMode

import packlora
from packlora.adapters.attach import attach
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.live.layers import LayerForward
from packlora.ops import launcher
from packlora.ops.lora_linear.plan import ROUTED, Plan

MOST_CALLS, MOST_FILES = 8, 5
T = 24
PACKAGE = str(Path(packlora.__file__).parent)
KERNELS = {"up_kernel", "compose_kernel", "fused_kernel"}
PLANS = [ROUTED, Plan("routed", "epilogue", "one-pass", "routed"), Plan("routed", "fused", "one-pass", "fused")]
"""Of each way to make y by a kernel."""


def run(model: Any) -> None:
    model(input_ids=torch.arange(3, 3 + T)[None])


def by_run(config: LoraConfig, plan: Plan) -> None:
    model = tiny_model("llama", torch.bfloat16)
    attached, _ = attach(model, {"job": resolve(config, model, "job")}, 0, Fixed(plan))
    with attached.active(TokenOwners(T, ((0, 0, T),))):
        run(model)


def by_accelerate(config: LoraConfig, plan: Plan) -> None:
    model = get_peft_model(tiny_model("llama", torch.bfloat16), config)
    packlora.accelerate(model, plan=plan)
    run(model)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize(
    ("through", "door"),
    [(by_run, AdaptedLinear.forward), (by_accelerate, LayerForward.__call__)],
    ids=["a run", "accelerate"],
)
def test_from_a_layer_to_a_kernel_that_makes_y_there_are_at_most_eight_calls_in_five_files(
    through: Callable[[LoraConfig, Plan], None], door: Any, plan: Plan, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[tuple[tuple[str, str], ...]] = set()

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Launches nothing."""
        if kernel.fn.__name__ in KERNELS:
            found.add(hops(door))

    monkeypatch.setattr(launcher, "launch", launch)
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    through(config, plan)
    assert found
    for calls in found:
        way = " -> ".join(name for _, name in calls)
        assert len(calls) <= MOST_CALLS, way
        assert len({door.__code__.co_filename, *(file for file, _ in calls)}) <= MOST_FILES, way


class Counted(TorchDispatchMode):
    """How many operations of torch there are."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dora", "forward", "step"), [(False, 3, 17), (True, 3, 20)], ids=["LoRA", "DoRA"])
def test_a_layer_takes_few_operations_of_torch(
    dora: bool, forward: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside launches of kernels, once all is settled; the host decides how fast short batches are. x [1, T, K]: one view of
    x, S and y. For other numbers of tokens, too, what was made of the operands stands."""
    monkeypatch.setattr(launcher, "launch", lambda *args, **kwargs: None)
    config = LoraConfig(r=16, target_modules=["o_proj"], task_type="CAUSAL_LM", use_dora=dora)
    model = get_peft_model(tiny_model("llama", torch.bfloat16), config, autocast_adapter_dtype=False)
    model.to(torch.bfloat16)
    packlora.accelerate(model, plan=Plan("mm", "fused", "mm", "before"))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    layer._packlora.norms.open()  # a window, as in the model's forward: norms are checked once in it
    counts: dict[bool, list[int]] = {False: [], True: []}
    for tokens in (T, T, T + 8, T + 8, T):
        for grad in counts:
            x = torch.zeros(1, tokens, layer.in_features, dtype=torch.bfloat16, requires_grad=grad)
            with Counted() as counted, torch.set_grad_enabled(grad):
                y = layer(x)
                if grad:
                    y.backward(y.detach())
            counts[grad].append(counted.number)
    assert counts[False][-1] == counts[False][1] <= forward, counts
    assert counts[True][-1] == counts[True][1] <= step, counts


def hops(door: Any) -> tuple[tuple[str, str], ...]:
    """File and name of the package's functions that are running below the nearest call of `door`, outermost first."""
    calls: list[tuple[str, str]] = []
    frame: Any = sys._getframe(2)
    while frame.f_code is not door.__code__:
        if frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(calls))
