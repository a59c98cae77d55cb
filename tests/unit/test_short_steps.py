"""Memory that runs out at any place of a step, or of the sums of gradients before it: nothing is half done, and the same call
again gives the bits of a step that was not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from short_memory import Short

from packlora.adapters.attach import attach
from packlora.adapters.spec import resolve
from packlora.config import TrainConfig
from packlora.config.train import LACKED
from packlora.engine.adapters import AdapterState
from packlora.engine.loss_scale import LossScale

WHOLE = ["adamw_torch_fused", "adamw_8bit", "lion_8bit"]
"""Optimizers that make no tensor once they have begun to change some. On a GPU adamw_torch is the first."""
SETTINGS = {"weight_decay": 0.1, "learning_rate": 0.01, "max_grad_norm": 0.5}
STEPS = 3


class Trained:
    """The state of an adapter with elements that are held. In every other step half of its parameters have no gradient."""

    def __init__(self, optim: str, scaled: bool) -> None:
        torch.manual_seed(0)
        lora = LoraConfig(r=70, use_dora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = tiny_model("qwen2", num_hidden_layers=1)
        _, (adapter,) = attach(model, {"job": resolve(lora, model, "job")}, 0)
        known = {key: value for key, value in SETTINGS.items() if key not in LACKED.get(optim, ())}
        config = TrainConfig.model_validate(known | {"optim": optim})
        self.state = AdapterState(adapter, config, 2, LossScale(8.0) if scaled else None)
        self.state._held._mask = torch.zeros_like(adapter.flat, dtype=torch.bool)
        self.state._held._mask[::7] = True
        self.names = list(self.state.parameters)
        self.told: list[list[float]] = []
        self.short, self.made = Short(0), 0

    def batch(self, number: int) -> None:
        """Two microbatches of the global batch of a step."""
        for seed in (number, number + 10):
            generator = torch.Generator().manual_seed(seed)
            for name in self.names[:: 1 + number % 2]:
                parameter = self.state.parameters[name]
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.again(partial(self.state.collect, torch.rand(2, dtype=torch.float64, generator=generator)))

    def step(self, number: int) -> None:
        self.batch(number)
        self.told.append(self.again(lambda: self.state.step(0.01 / (1 + number))).tolist())
        self.state.accept()
        self.state.count()
        self.state.discard()

    def again(self, compute: Callable[[], Any]) -> Any:
        """As insist tries it."""
        with self.short:
            try:
                return compute()
            except torch.OutOfMemoryError:
                return compute()

    @property
    def values(self) -> list[Any]:
        """Everything that steps change."""
        scale = None if self.state.scale is None else self.state.scale.state()
        moments = {
            f"{name}/{leaf}": value for name, own in self.state.optimizer.state().items() for leaf, value in own.items()
        }
        good = self.state.last_good
        return [
            self.told,
            scale,
            sorted(self.state.untrained),
            {"flat": self.state.adapter.flat, "good": good, **moments},
        ]


def trained(optim: str, scaled: bool, which: int, at: int, lasts: bool = False) -> tuple[Trained, bool]:
    """A job after STEPS steps, in one of which memory runs out; and whether it came through. Else it is as that has left it."""
    one = Trained(optim, scaled)
    for number in range(STEPS):
        one.short = Short(at, lasts) if number == which else Short(0)
        try:
            one.step(number)
        except torch.OutOfMemoryError:
            return one, False
        if number == which:
            one.made = one.short.made
    return one, True


def same(one: list[Any], other: list[Any]) -> bool:
    tensors, others = one[-1], other[-1]
    return (
        one[:-1] == other[:-1]
        and tensors.keys() == others.keys()
        and all(value is others[key] or torch.equal(value, others[key]) for key, value in tensors.items())
    )


@pytest.mark.parametrize(
    ("optim", "scaled"),
    [("adamw_torch_fused", True), *((own, False) for own in [*WHOLE, "adamw_torch", "adafactor", "sgd"])],
)
def test_memory_may_run_out_where_any_tensor_of_a_step_is_made(optim: str, scaled: bool) -> None:
    if "8bit" in optim:
        pytest.importorskip("bitsandbytes")
    for which in (0, STEPS - 1):
        whole, _ = trained(optim, scaled, which, 0)
        torn = 0
        for at in range(1, whole.made + 1, 7 if optim == "adafactor" else 1):
            one, came_through = trained(optim, scaled, which, at)
            if came_through:
                assert one.made > whole.made - 8 and same(one.values, whole.values), (at, which)
                continue
            torn += 1
            assert one.state.is_stepping, "nothing of it is saved"
        assert whole.made > 8 and (torn > 0) == (optim not in WHOLE), torn


@pytest.mark.parametrize("which", [0, STEPS - 1])
def test_a_step_that_is_given_up_leaves_the_job_as_it_was(which: int) -> None:
    """Where memory runs out for good before anything is changed; else the job is not saved."""
    whole, _ = trained("adamw_torch_fused", True, which, 0)
    fresh = Trained("adamw_torch_fused", True)
    for number in range(which):
        fresh.step(number)
    given_up = 0
    for at in range(1, whole.made + 1):
        one, came_through = trained("adamw_torch_fused", True, which, at, lasts=True)
        assert not came_through
        if not one.state.is_stepping:
            given_up += 1
            one.short = Short(0)
            one.state.discard()
            assert same(one.values, fresh.values), at
            for number in range(which, STEPS):
                one.step(number)
            assert same(one.values, whole.values), at
    assert given_up > 8


def test_gradients_that_were_added_up_elsewhere_count_once_they_are_collected_and_nothing_of_others_stays() -> None:
    """As microbatches by graphs add them up, and one without a graph among them."""
    state = Trained("adamw_torch_fused", False).state
    first, second = list(state.parameters)[:2]
    nothing, sums = dict.fromkeys(state.parameters, False), torch.zeros(2, dtype=torch.float64)

    def add() -> None:
        state.gradient_buffers()[first].add_(1)
        state.added = frozenset({first})

    add()
    assert state.found() == nothing and state.found(with_new=True) == nothing | {first: True}
    state.drop_gradients()
    assert state.found(with_new=True) == nothing and not state.has_gradient
    state.discard()
    assert state.gradient is not None and not state.gradient.any(), "which was not collected"
    for _ in range(2):
        add()
        state.collect(sums)
    state.parameters[second].grad = torch.ones_like(state.parameters[second])
    state.collect(sums)
    assert state.found() == nothing | {first: True, second: True}
    assert bool((state.gradients[first] == 2).all()) and bool((state.gradients[second] == 1).all())
    state.close()
    assert not state.gradient.any() and state.found(with_new=True) == nothing
