"""Blocks that are compiled one by one, as a Trainer's compiled model has them behind graph breaks: those of one shape share a
graph, as PEFT's do. Else Dynamo's limit of 8 recompilations leaves the ninth and all later ones to Python."""

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
BLOCKS = 3


class Parent(nn.ModuleDict):
    """Of siblings."""

    def __init__(self, *names: str) -> None:
        super().__init__({name: nn.Linear(7, 7, bias=name == "q") for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) * (index + 1) for index, layer in enumerate(self.values()))  # type: ignore[return-value]


class Block(nn.Module):
    """Two parents of siblings, and a layer that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.down = Parent("q", "k", "v"), Parent("gate", "up"), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x).tanh()
        return x + self.down(self.mlp(x).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)  # type: ignore[assignment]
        return x


def outcome(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients, x's among them."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def peft_model(dora: bool) -> Any:
    torch.manual_seed(5)
    torch._dynamo.reset()
    settings = LoraConfig(r=3, lora_alpha=5, use_dora=dora, target_modules=["q", "k", "v", "gate", "up", "down"])
    model: Any = get_peft_model(Model(), settings).double().train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


KINDS = [(False, False), (True, True), (False, True), (True, False)]
"""Whether it is DoRA, and whether blocks are checkpointed."""


@pytest.mark.parametrize(("dora", "checkpointing"), KINDS if SOAK else KINDS[1:2])
def test_blocks_of_one_shape_share_a_graph_and_have_the_numbers_of_peft(dora: bool, checkpointing: bool) -> None:
    model = peft_model(dora)
    own, x = copy.deepcopy(model), torch.randn(4, 7, dtype=torch.float64)
    packlora.accelerate(own, example={"x": x})
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for one in (model, own):
        one.base_model.model.checkpointing = checkpointing
    for block in own.base_model.model.blocks:
        block.compile(backend=kept, fullgraph=True)
    want = outcome(model, x)
    for _ in range(2):
        got = outcome(own, x)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-10, msg=name)
    assert len(graphs) == 1


@pytest.mark.soak
@pytest.mark.parametrize("dora", [False, True])
def test_a_model_with_checkpointed_blocks_is_one_graph(dora: bool) -> None:
    model, x = peft_model(dora), torch.randn(4, 7, dtype=torch.float64)
    own = copy.deepcopy(model)
    packlora.accelerate(own, example={"x": x})
    for one in (model, own):
        one.base_model.model.checkpointing = True
    got = outcome(torch.compile(own, backend="aot_eager", fullgraph=True), x)
    for name, tensor in outcome(model, x).items():
        found = got.get(name, got.get(f"_orig_mod.{name}"))
        assert found is not None, name
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-10, msg=name)


class Checkpointed(nn.Module):
    """Two layers that read one x, in a checkpoint of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(7, 5), nn.Linear(7, 5)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.q(x) + self.k(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.read, x, use_reentrant=False)
        return y


def test_a_compiled_checkpoint_drops_again_what_its_forward_dropped() -> None:
    """y is linear in the factors B, so B times its gradient is what they add to y under the mask of the forward."""
    torch.manual_seed(5)
    torch._dynamo.reset()
    settings = LoraConfig(r=3, lora_dropout=0.4, target_modules=["q", "k"])
    model: Any = get_peft_model(Checkpointed().double(), settings, autocast_adapter_dtype=False)
    factors = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    for B in factors:
        nn.init.normal_(B)
    x, dy = torch.randn(11, 7, dtype=torch.float64, requires_grad=True), torch.randn(11, 5, dtype=torch.float64)
    packlora.accelerate(model, example={"x": x.detach()})
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    y.backward(dy)
    with model.disable_adapter():
        added = y.detach() - model(x).detach()
    assert float(added.abs().max()) > 0.01
    found = sum(float((B * B.grad).sum()) for B in factors)
    assert found == pytest.approx(float((added * dy).sum()), rel=1e-10)
