"""What is recomputed in the backward is what the forward that is running made: for every layer by itself, in train mode,
whatever happens to the model after accelerate()."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn

import packlora
from packlora.base import liger
from packlora.ops.recompute import recompute_of
from packlora.ops.recompute_hooks import add_recompute

IDS = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(0))


def with_lora(base: Any, **changes: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(**{"r": 3, "target_modules": "all-linear", **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model.train()


def gradients(model: Any, seed: int = 7, **inputs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) > 0
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def assert_recompute_changes_no_gradient(model: Any) -> str:
    """The report of accelerate(recompute=True)."""
    packlora.accelerate(model)
    want = gradients(model)
    report = str(packlora.accelerate(model, recompute=True))
    assert_same_bits(gradients(model), want)
    return report


def products(model: Any) -> list[bool]:
    """In a forward, whether each gated feed-forward's down_proj got an x that can be recomputed."""
    found: list[bool] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: found.append(recompute_of(args[0]) is not None))
        for name, module in model.named_modules() if name.endswith("down_proj")
    ]  # fmt: skip
    model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    return found


def gemma3n(pattern: list[float]) -> Any:
    config = transformers.Gemma3nTextConfig(
        **{**TINY, "intermediate_size": [96] * len(pattern), "num_hidden_layers": len(pattern)}, head_dim=16,
        activation_sparsity_pattern=pattern, num_kv_shared_layers=0, laurel_rank=4, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=320, layer_types=["full_attention"] * len(pattern),
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("pattern", [[0.0, 0.9], [0.9, 0.0]], ids=str)
def test_layers_of_one_class_that_compute_differently_do_not_share_a_verdict(pattern: list[float]) -> None:
    model = with_lora(gemma3n(pattern), target_modules=["gate_proj", "up_proj", "down_proj"])
    report = assert_recompute_changes_no_gradient(model)
    assert products(model) == [sparsity == 0 for sparsity in pattern]
    left = pattern.index(0.9)
    assert "1 gated products" in report
    assert f"layers.{left}.mlp: down_proj reads something else than act(gate_proj) * up_proj" in report


def test_liger_takes_over_those_layers_of_a_class_that_compute_what_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for its kernels, of which only the activation's is right."""

    def activation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(a, approximate="tanh") * b

    def wrong(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x + 1

    ops = types.ModuleType("liger_kernel.ops")
    for name in ("LigerSiLUMulFunction", "LigerGELUMulFunction", "LigerRopeFunction"):
        setattr(ops, name, SimpleNamespace(apply=activation if "GELU" in name else wrong))
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(liger, "check_liger", lambda setting, device, dtype: True)
    for pattern in ([0.0, 0.9], [0.9, 0.0]):
        model = gemma3n(pattern).eval()
        with torch.no_grad():
            want = model(input_ids=IDS).logits
            assert liger.use_liger(model, True) == ["1 Gemma3nTextMLP"]
            assert "forward" in vars(model.model.layers[pattern.index(0.0)].mlp)
            torch.testing.assert_close(model(input_ids=IDS).logits, want, rtol=1e-4, atol=1e-4)


class Other(nn.Module):
    """A gated feed-forward with something between the product and down_proj."""

    def __init__(self, like: Any, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = like.gate_proj, like.up_proj, like.down_proj
        self.act_fn, self.drop, self.between = nn.SiLU(), nn.Dropout(0.0), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.between(self, self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
        return y


def other(between: Callable[[Any, torch.Tensor], torch.Tensor], p: float = 0.0, **changes: Any) -> Any:
    base = tiny_model("llama")
    for layer in base.model.layers:
        layer.mlp = Other(layer.mlp, between)
        layer.mlp.drop.p = p
    return with_lora(base, **changes)


BETWEEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda m, z: m.drop(z),
    "dropout in train mode alone, written by hand": lambda m, z: z * (torch.rand_like(z) > 0.3) if m.training else z,
    "a factor in train mode": lambda m, z: 1.5 * z if m.training else z,
    "noise in place": lambda m, z: z.add_(torch.randn_like(z)) if m.training else z,
    "long samples alone": lambda m, z: z.relu() if z.shape[1] > 4 else z,
    "a detached copy": lambda m, z: (2 * z).detach(),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_a_feed_forward_that_does_more_in_train_mode_is_not_recomputed_without_it(between: Any) -> None:
    model = other(between, p=0.5)
    assert_recompute_changes_no_gradient(model)
    assert not any(products(model))


def test_dropout_that_is_switched_on_later_is_seen() -> None:
    model = other(BETWEEN["dropout"])
    packlora.accelerate(model)
    packlora_model = copy.deepcopy(model)
    assert "2 gated products" in str(packlora.accelerate(packlora_model, recompute=True))
    assert all(products(packlora_model))
    for one in (model, packlora_model):
        for module in one.modules():
            if isinstance(module, Other):
                module.drop.p = 0.4
    assert_same_bits(gradients(packlora_model), gradients(model))
    assert not any(products(packlora_model))


@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_a_hook_that_changes_a_projection_s_output_later_is_seen(part: str) -> None:
    model = with_lora(tiny_model("llama"))
    packlora.accelerate(model)
    twin = copy.deepcopy(model)
    packlora.accelerate(model, recompute=True)
    for one in (model, twin):
        getattr(one.base_model.model.model.layers[0].mlp, part).register_forward_hook(lambda _, args, y: y * 1.5)
    assert_same_bits(gradients(model), gradients(twin))
    assert products(model) == [False, True]


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_that_are_one_operation_are_recomputed(act: str) -> None:
    model = with_lora(tiny_model("llama", hidden_act=act))
    assert_recompute_changes_no_gradient(model)
    assert all(products(model))


@pytest.mark.parametrize("act", ["gelu_new", "quick_gelu", "mish", "tanh"])
def test_other_activations_are_left_alone(act: str) -> None:
    model = with_lora(tiny_model("llama", hidden_act=act))
    assert "0 gated products" in assert_recompute_changes_no_gradient(model)


def test_the_product_the_other_way_round_is_the_same_product() -> None:
    model = with_lora(tiny_model("llama"))
    for layer in model.base_model.model.model.layers:
        layer.mlp.forward = lambda x, m=layer.mlp: m.down_proj(m.up_proj(x) * m.act_fn(m.gate_proj(x)))
    assert_recompute_changes_no_gradient(model)
    assert all(products(model))


class LigerSiLUMulFunction(torch.autograd.Function):
    """By liger's name, and as liger does it, writing over gate and up in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (d,), (gate, up) = grads, ctx.saved_tensors
        share = gate.sigmoid()
        d_up = d * gate * share
        gate.detach().copy_(d * up * share * (1 + gate * (1 - share)))
        up.detach().copy_(d_up)
        return gate.detach(), up.detach()


def test_liger_s_product_is_recomputed_by_liger_s_function_before_its_backward_overwrites_what_it_needs() -> None:
    model = with_lora(tiny_model("llama"))
    for layer in model.base_model.model.model.layers:
        layer.mlp.forward = lambda x, m=layer.mlp: m.down_proj(LigerSiLUMulFunction.apply(m.gate_proj(x), m.up_proj(x)))
    assert_recompute_changes_no_gradient(model)
    assert all(products(model))


def test_looking_for_products_leaves_no_trace() -> None:
    class Counting(Other):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = other(lambda m, z: z)
    for module in model.modules():
        if type(module) is Other:
            module.__class__ = Counting
            module.register_buffer("calls", torch.zeros(()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = [sorted(module.__dict__) for module in model.modules()]
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    model.eval()
    add_recompute(model)
    assert torch.equal(torch.rand(4), want)
    assert not any(module.training for module in model.modules())
    assert [sorted(module.__dict__) for module in model.modules()] == own
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- norms -------------------------------------------------------------------------------------------------------------


class NoisyRMSNorm(nn.RMSNorm):
    """Random in train mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + 0.1 * torch.randn_like(y) if self.training else y


class ShiftedRMSNorm(nn.RMSNorm):
    """Takes an argument by keyword."""

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return super().forward(x) + shift


class RotatedRMSNorm(nn.RMSNorm):
    """Computes in another dtype under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(super().forward(x), torch.eye(8).roll(1, 0))


class Block(nn.Module):
    """A norm that a linear layer reads."""

    def __init__(self, norm: nn.Module, **arguments: float) -> None:
        super().__init__()
        self.first, self.norm, self.linear, self.arguments = nn.Linear(8, 8), norm, nn.Linear(8, 6), arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.norm(self.first(x), **self.arguments))
        return y


def block(norm: nn.Module, **arguments: float) -> Any:
    return with_lora(Block(norm, **arguments), target_modules=["first", "linear"])


def block_gradients(model: Any, x: torch.Tensor, autocast: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()  # outside of autocast, as torch asks for
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


NORMS: dict[str, Callable[[], Any]] = {
    "plain": lambda: block(nn.RMSNorm(8)),
    "random in train mode": lambda: block(NoisyRMSNorm(8)),
    "a product inside": lambda: block(RotatedRMSNorm(8)),
    "an argument by keyword": lambda: block(ShiftedRMSNorm(8), shift=3.0),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
def test_norms_that_are_recomputed_give_the_same_gradients(make: Callable[[], Any], autocast: bool) -> None:
    model, x = make(), torch.randn(5, 8)
    packlora.accelerate(model, example={"x": x})
    want = block_gradients(model, x, autocast)
    packlora.accelerate(model, example={"x": x}, recompute=True)
    assert_same_bits(block_gradients(model, x, autocast), want)


def test_a_norm_that_is_trained_may_change_between_forward_and_backward() -> None:
    """As through `.data`, which moves no version counter."""
    model, x = block(nn.RMSNorm(8)), torch.randn(5, 8)
    norm = model.base_model.model.norm
    norm.weight.requires_grad_(True)
    grads = []
    for recompute in (False, True):
        packlora.accelerate(model, example={"x": x}, recompute=recompute)
        y = model(x)
        kept, norm.weight.data = norm.weight.data, torch.full((8,), 3.0)
        model.zero_grad()
        y.square().sum().backward()
        norm.weight.data = kept
        grads.append([p.grad.clone() for name, p in model.named_parameters() if "linear.lora" in name])
    assert_same_bits(*grads)


# --- the life of a model -----------------------------------------------------------------------------------------------


def test_compiled_without_a_graph_break() -> None:
    parts = {"gate_proj": nn.Linear(8, 12), "up_proj": nn.Linear(8, 12), "down_proj": nn.Linear(12, 8)}
    base = nn.Sequential(nn.RMSNorm(8), Other(SimpleNamespace(**parts), lambda m, z: z))
    model, x = with_lora(base, target_modules=list(parts)), torch.randn(5, 8)
    packlora.accelerate(model, example={"input": x})
    want = block_gradients(model, x)
    report = str(packlora.accelerate(model, example={"input": x}, recompute=True))
    assert "1 norms and 1 gated products" in report
    torch._dynamo.reset()
    got = block_gradients(torch.compile(model, backend="eager", fullgraph=True), x)
    assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(got, want, strict=True))
