"""Siblings under torch.compile: whatever happens in a parent's forward between the calls of two siblings, each of them gives
what PEFT gives at that point, also across graph breaks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from seeds import SOAK
from torch import nn
from torch.utils.checkpoint import checkpoint

import packlora

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BETWEEN = (
    "nothing", "x is written", "a view of x is written", "no_grad", "no_grad around the first", "adapter is written",
    "scaling is set", "graph break", "graph break, x is written", "graph break, adapter is written", "another x", "autocast",
    "checkpoint", "checkpoint around the first", "twice", "other order", "left out",
)  # fmt: skip
TRAINS = (
    "nothing",
    "no_grad",
    "no_grad around the first",
    "scaling is set",
    "graph break",
    "checkpoint",
    "checkpoint around the first",
    "twice",
)


class Parent(nn.Module):
    """Three siblings, with something between the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 6), nn.Linear(8, 6, bias=False), nn.Linear(8, 5)
        self.between = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between, x = self.between, x * 1
        if between == "other order":
            return torch.cat([self.v(x), self.k(x), self.q(x)], -1)
        if between == "no_grad around the first":
            with torch.no_grad():
                q = self.q(x)
            return torch.cat([q, self.k(x), self.v(x)], -1)
        q = checkpoint(self.q, x, use_reentrant=False) if between == "checkpoint around the first" else self.q(x)
        if between.startswith("graph break"):
            torch._dynamo.graph_break()
        if between.endswith("view of x is written"):
            x.view(-1).mul_(2)
        elif between.endswith("x is written"):
            x.mul_(2)
        if between.endswith("adapter is written"):
            with torch.no_grad():
                self.k.lora_B["default"].weight.mul_(2)  # type: ignore[union-attr, index, operator]
        if between == "scaling is set":
            self.k.scaling["default"] = 7.0  # type: ignore[index]
        if between == "another x":
            x = x + 1
        if between == "left out":
            return torch.cat([q, self.v(x)], -1)
        if between == "no_grad":
            with torch.no_grad():
                k = self.k(x)
        elif between == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                k = self.k(x)
        elif between == "checkpoint":
            k = checkpoint(self.k, x, use_reentrant=False)
        else:
            k = self.k(x)
        if between == "twice":
            q = q + self.q(x) * 3
        return torch.cat([q, k, self.v(x)], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.parent = nn.Linear(8, 8), Parent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parent(self.first(x)).tanh()


def pair(between: str, dora: bool, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """The same model with PEFT's forward and with packlora's."""
    torch.manual_seed(3)
    config = LoraConfig(r=3, target_modules=["q", "k", "v"], use_dora=dora)
    model: Any = get_peft_model(Model(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model.to(dtype)
    own = copy.deepcopy(model)
    packlora.accelerate(own, example={"x": torch.randn(2, 8, dtype=dtype)})
    for one in (model, own):
        one.base_model.model.parent.between = between
    return model, own


def compiled(model: Any, between: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=not between.startswith("graph break"))


KINDS = [(between, (index + turn) % 2 == 1) for turn in range(2) for index, between in enumerate(BETWEEN)]
EVALUATED = [kind for kind in KINDS[: len(BETWEEN)] if kind[0] not in TRAINS or kind[0] == "nothing"]
"""The outputs of the others are those of the next test, too."""


@pytest.mark.sampled
@pytest.mark.parametrize(("between", "dora"), KINDS if SOAK else EVALUATED)
def test_outputs_are_peft_s_whatever_happens_between_two_siblings(between: str, dora: bool) -> None:
    dtype = torch.float32 if between == "autocast" else torch.float64  # float64 is not cast
    model, own = pair(between, dora, dtype)
    x = torch.randn(4, 8, dtype=dtype)
    own = compiled(own, between)
    for _ in range(2):
        with torch.no_grad():
            want, got = model(x), own(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0.02 if between == "autocast" else 1e-10)


@pytest.mark.parametrize(
    "between", [name if name == "graph break" else pytest.param(name, marks=pytest.mark.soak) for name in TRAINS]
)
def test_gradients_are_peft_s_whatever_happens_between_two_siblings(between: str) -> None:
    model, own = pair(between, dora=True)
    x = torch.randn(4, 8, dtype=torch.float64)
    forwards = {model: model, own: compiled(own, between)}
    for _ in range(2):
        outputs = {}
        for one, forward in forwards.items():
            one.zero_grad()
            outputs[one] = forward(x)
            outputs[one].square().sum().backward()
            torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.05).step()
        torch.testing.assert_close(outputs[own], outputs[model], rtol=0, atol=1e-10)
        for (name, want), got in zip(model.named_parameters(), own.parameters(), strict=True):
            zero = torch.zeros_like(want)
            torch.testing.assert_close(
                zero if got.grad is None else got.grad,
                zero if want.grad is None else want.grad,
                rtol=0,
                atol=1e-9,
                msg=name,
            )
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9, msg=name)


CHANGING = [
    ("nothing", True, None), ("nothing", False, True), ("graph break", True, None), ("graph break", False, True),
    ("twice", True, True), ("checkpoint", False, None),
]  # fmt: skip
"""What is between, whether it is DoRA, and `dynamic` of torch.compile."""


@pytest.mark.parametrize(("between", "dora", "dynamic"), CHANGING if SOAK else CHANGING[:1])
def test_outputs_and_gradients_are_peft_s_while_shapes_and_adapters_change(
    between: str, dora: bool, dynamic: bool | None
) -> None:
    """A single token is among the shapes, which is compiled for itself, and one that was there before."""
    model, own = pair(between, dora)
    torch._dynamo.reset()
    forwards = {model: model, own: torch.compile(own, backend="aot_eager", dynamic=dynamic)}
    for shape in ((4, 8), (7, 8), (1, 8), *(((2, 5, 8),) if SOAK else ()), (7, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        outputs = {}
        for one, forward in forwards.items():
            one.zero_grad()
            outputs[one] = forward(x)
            outputs[one].square().sum().backward()
        torch.testing.assert_close(outputs[own], outputs[model], rtol=0, atol=1e-10)
        for (name, want), got in zip(model.named_parameters(), own.parameters(), strict=True):
            assert (got.grad is None) == (want.grad is None), name
            if want.grad is not None:
                torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-9, msg=name)
        for one in forwards:
            torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=1e-3).step()
