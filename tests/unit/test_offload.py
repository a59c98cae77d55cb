"""Checkpoints of layers in the memory of the host, with copies that are only counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import tiny_model

from packlora.base import offload
from packlora.base.offload import HostCheckpoints, Wait
from packlora.base.packing import prepare_model

LAYERS = 4


class Told:
    """Copies that say in which order they are launched and waited for; a tensor is none before it is waited for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.numbers: dict[int, int] = {}
        self.hosts: list[torch.Tensor] = []

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        host, number = x.clone(), len(self.hosts)
        self.hosts.append(host)
        self.log.append(("out", number))
        return host, lambda: self.log.append(("left", number))

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]:
        number = next(n for n, own in enumerate(self.hosts) if own is host)
        x = torch.full_like(host, torch.nan)
        self.log.append(("back", number))

        def wait() -> None:
            self.log.append(("there", number))
            x.copy_(host)

        return x, wait


def gradients(how: bool | HostCheckpoints) -> dict[str, torch.Tensor]:
    """Gradients of a model's norms."""
    model: Any = tiny_model("llama", num_hidden_layers=LAYERS)
    prepare_model(model, bool(how))
    for module in model.modules():
        if isinstance(how, HostCheckpoints) and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = how
    trained = {name: own.requires_grad_() for name, own in model.named_parameters() if "layernorm" in name}
    ids = torch.arange(40)[None] % 300
    model(input_ids=ids, position_ids=ids, use_cache=False, sample_lengths=(40,)).logits.square().mean().backward()
    return {name: own.grad for name, own in trained.items() if own.grad is not None}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


def test_the_backward_has_the_bits_that_the_forward_had() -> None:
    told = Told()
    want, got = gradients(True), gradients(HostCheckpoints(told))
    assert got.keys() == want.keys() and len(want) == 2 * LAYERS
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert sum(kind == "back" for kind, _ in told.log) == LAYERS - 1, "the last one never left"


def test_a_copy_is_launched_a_layer_ahead_of_its_use_and_a_layer_is_given_up_once_it_is_out() -> None:
    told = Told()
    gradients(HostCheckpoints(told))
    forward = [("out", 0), ("left", 0), ("out", 1), ("left", 1), ("out", 2), ("left", 2), ("out", 3)]
    backward = [("left", 3), ("back", 2), ("there", 2), ("back", 1), ("there", 1), ("back", 0), ("there", 0)]
    assert told.log == forward + backward


def test_what_a_forward_holds_goes_with_it_where_no_backward_comes() -> None:
    held = HostCheckpoints(told := Told())
    x = torch.randn(4, requires_grad=True)
    y = held(torch.sin, held(torch.cos, x))
    assert [kind for kind, _ in told.log].count("out") == 2
    last = held._last
    assert last is not None and last() is not None
    del y
    gc.collect()
    assert last() is None


def test_small_tensors_and_those_of_a_cpu_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, told = torch.randn(4, requires_grad=True), Told()
    monkeypatch.setattr(offload, "LEAST_BYTES", 17)
    for held in (HostCheckpoints(), HostCheckpoints(told)):
        held(torch.sin, x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, x.cos())
        x.grad = None
    assert not told.log
