"""DoRA's norms in a compiled model: computed at every call from what is there then, with nothing kept by the operator, since
memory that is allocated while a CUDA graph is recorded belongs to the graph."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import packlora
from packlora.ops.row_norm import row_norm as module

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Allocations(TorchDispatchMode):
    """The storages of what operations gave."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                self.made[ref.cdata] = ref
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(not ref.expired() for ref in self.made.values())


@pytest.fixture(params=["chunks", "kernels"])
def allocations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Of everything that the norms compute."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(module, "KERNELS_ON_CPU", True)
    found, own = Allocations(), module.row_norms

    def recorded(problems: Any, *args: Any, **kwargs: Any) -> Any:
        with found:
            norms = own(problems, *args, **kwargs)
        for operand in [t for problem in problems for t in (problem.weight, problem.A, problem.B)]:
            found.made.pop(operand.untyped_storage()._cdata, None)  # views of it
        return norms

    monkeypatch.setattr(module, "row_norms", recorded)
    torch._dynamo.reset()
    return found


class Parent(nn.Module):
    """Two siblings and a layer that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 20, bias=False), nn.Linear(24, 20), nn.Linear(20, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.gate(x)) * self.up(x))
        return y


def dora() -> Any:
    settings = LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["gate", "up", "down"])
    model = get_peft_model(Parent().half(), settings).train()
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def outcome(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients."""
    model.zero_grad(set_to_none=True)
    y = model(x)
    if y.requires_grad:  # not where the adapter is merged
        y.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"y": y.detach(), **{name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}}


def assert_close(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], error: float = 0.01, after: str = ""
) -> None:
    assert got.keys() == want.keys(), after
    for name, one in want.items():
        assert float((got[name].double() - one.double()).norm()) <= error * float(one.double().norm()), (after, name)


@pytest.mark.parametrize(
    "eager_first", [pytest.param(False, marks=pytest.mark.soak), True], ids=["compiled first", "after an eager call"]
)
def test_a_compiled_step_leaves_nothing_that_the_norm_allocated(allocations: Allocations, eager_first: bool) -> None:
    """Neither the first step nor a later one."""
    model, x = dora(), torch.randn(6, 24).half()
    packlora.accelerate(model, example={"x": x})
    if eager_first:
        outcome(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(3):
        allocations.made.clear()
        y = compiled(x)
        assert allocations.made
        y.sum().backward()
        del y
        assert allocations.alive() == 0, f"step {number}"


def merged_and_back(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def merged(model: Any) -> None:
    model.merge_adapter()


def frozen_in_place(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "base_layer.weight" in name:
            parameter.data.mul_(1.5)


def frozen_replaced(model: Any) -> None:
    for one in model.modules():
        if isinstance(one, nn.Linear) and one.in_features == 20 and one.out_features == 24:
            one.weight = nn.Parameter(one.weight.detach() * 2, requires_grad=False)


def trained_by_an_optimizer(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05).step()
    model.zero_grad(set_to_none=True)


CHANGES = (merged_and_back, frozen_in_place, frozen_replaced, trained_by_an_optimizer, merged)


def test_a_compiled_model_sees_changes_of_its_weights() -> None:
    """Where eager calls have kept norms before. A norm of other values would be off by per cents."""
    torch._dynamo.reset()
    model, x = dora().float(), torch.randn(6, 24)
    twin = copy.deepcopy(model)
    packlora.accelerate(model, example={"x": x})
    outcome(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(outcome(compiled, x), outcome(twin, x), 1e-5)
    for change in CHANGES:
        before = outcome(twin, x)["y"]
        change(model), change(twin)
        changed = outcome(twin, x)
        moves = change not in (merged_and_back, merged)
        assert float((changed["y"] - before).norm()) > 0.01 * float(before.norm()) or not moves, change.__name__
        for _ in range(2):
            assert_close(outcome(compiled, x), changed, 1e-5, change.__name__)
        assert_close(outcome(model, x), changed, 1e-5, change.__name__)


def test_the_norms_hooks_of_a_compiled_model_are_not_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs without an operation their guards would be checked at every call."""
    torch._dynamo.reset()
    frames: list[str] = []
    translator = torch._dynamo.symbolic_convert.InstructionTranslator
    run = translator.run
    monkeypatch.setattr(translator, "run", lambda self: (frames.append(self.f_code.co_name), run(self))[1])
    model, x = dora().float(), torch.randn(6, 24)
    packlora.accelerate(model, example={"x": x})
    outcome(torch.compile(model.base_model.model, backend="aot_eager"), x)
    assert "forward" in frames
    assert not {"_before", "_after", "open", "close"}.intersection(frames)
