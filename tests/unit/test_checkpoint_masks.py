"""Dropout under gradient checkpointing: a recomputation drops what its forward dropped, whatever is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import packlora

Wrap = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    return function(*args)


REENTRANT: Wrap = partial(checkpoint, use_reentrant=True)
OTHER: Wrap = partial(checkpoint, use_reentrant=False)


class Attention(nn.Module):
    """Three layers that read one x; `inner` wraps some of them, `how` says which."""

    def __init__(self, how: Callable[[Attention, torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.inner: Wrap = plainly
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.how(self, x)
        y: torch.Tensor = self.o_proj(q * k.sigmoid() + v)
        return y


class Layer(nn.Module):
    """`outer` wraps the attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(16, 16), attention
        self.outer: Wrap = plainly

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outer(self.attention, self.first(x).tanh())
        return y


class Stack(nn.Module):
    """`whole` wraps every layer."""

    def __init__(self, how: Callable[[Attention, torch.Tensor], list[torch.Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(Attention(how)) for _ in range(2))
        self.whole: Wrap = plainly

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.whole(layer, x)
        return x


def all_three(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return list(m.inner(lambda x: (m.q_proj(x), m.k_proj(x), m.v_proj(x)), x))


def first_two(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [*m.inner(lambda x: (m.q_proj(x), m.k_proj(x)), x), m.v_proj(x)]


def last_two(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.q_proj(x), *m.inner(lambda x: (m.k_proj(x), m.v_proj(x)), x)]


def one_by_one(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.inner(part, x) for part in (m.q_proj, m.k_proj, m.v_proj)]


def the_middle_one(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [m.q_proj(x), m.inner(m.k_proj, x), m.v_proj(x)]


def noise_inside(m: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    return [*m.inner(lambda x: (m.q_proj(x), nn.functional.dropout(m.k_proj(x), 0.3)), x), m.v_proj(x)]


HOWS = [all_three, first_two, last_two, one_by_one, the_middle_one, noise_inside]


def stack(how: Callable[[Attention, torch.Tensor], list[torch.Tensor]]) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_dropout=0.4, target_modules=r".*_proj")
    model = get_peft_model(Stack(how), config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    packlora.accelerate(model, example={"x": torch.randn(2, 16, dtype=torch.float64)})
    return model


def wrapped(model: Any, **wraps: Wrap) -> Any:
    for module in model.modules():
        for name, wrap in wraps.items():
            if name in vars(module):
                setattr(module, name, wrap)
    return model


def slopes(model: Any) -> dict[str, torch.Tensor]:
    """The derivative of the loss along every trainable parameter, as torch computes it."""
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


X = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(model: Any) -> torch.Tensor:
    torch.manual_seed(3)
    y: torch.Tensor = model(X.clone().requires_grad_()).sin().sum()
    return y


def assert_gradients_are_those_of_the_loss(model: Any) -> None:
    """Along a random direction, against differences of the loss: what the backward dropped is what the forward dropped."""
    h, got = 1e-6, slopes(model)
    generator = torch.Generator().manual_seed(2)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    direction = {
        name: torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for name, parameter in trained.items()
    }
    values = []
    for step in (h, -2 * h):
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.add_(step * direction[name])
        values.append(float(loss(model).detach()))
    slope = sum(float((got[name] * direction[name]).sum()) for name in trained)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-5, abs=1e-5)


WRAPS: dict[str, dict[str, Wrap]] = {
    "inside": {"inner": REENTRANT},
    "inside, not reentrant": {"inner": OTHER},
    "the parent": {"outer": REENTRANT},
    "the layer": {"whole": REENTRANT},
    "the layer and inside": {"whole": REENTRANT, "inner": REENTRANT},
    "the layer, and inside not reentrant": {"whole": REENTRANT, "inner": OTHER},
    "the layer not reentrant, and inside": {"whole": OTHER, "inner": REENTRANT},
    "everything": {"whole": REENTRANT, "outer": REENTRANT, "inner": REENTRANT},
    "everything, not reentrant": {"whole": OTHER, "outer": OTHER, "inner": OTHER},
}


@pytest.mark.sampled
@pytest.mark.parametrize("wraps", WRAPS.values(), ids=WRAPS.keys())
@pytest.mark.parametrize("how", HOWS, ids=lambda how: how.__name__)
def test_gradients_are_those_of_the_forward_s_own_masks(how: Any, wraps: dict[str, Wrap]) -> None:
    assert_gradients_are_those_of_the_loss(wrapped(stack(how), **wraps))
