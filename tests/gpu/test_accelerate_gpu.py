"""packlora.accelerate on a GPU: the Triton kernels behind PEFT's layers, eager, compiled, checkpointed, in a CUDA graph.

make gpu
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from exactness import assert_as_exact
from peft import LoraConfig, get_peft_model
from torch import nn

import packlora
from packlora.ops.lora_linear.plan import ROUTED


class Pair(nn.Module):
    """Two linear layers that read the same x."""

    def __init__(self, K: int, N: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, N), nn.Linear(K, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((self.a(x), self.b(x)))


def pair(dtype: torch.dtype, adapters: torch.dtype, K: int = 515, N: int = 770, **changes: Any) -> Any:
    """On the GPU, in training mode, B filled. K, N and r are no multiples of a tile."""
    settings = {"r": 24, "lora_alpha": 24, "target_modules": ["a", "b"], **changes}
    model = get_peft_model(Pair(K, N), LoraConfig(**settings)).cuda().to(dtype).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, device="cuda") * 0.1).to(dtype).to(adapters)
    return model


def example(dtype: torch.dtype, K: int = 515) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, K, device="cuda", dtype=dtype)}


def run(model: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    y = model(x)
    return {
        "y": y.detach(),
        **dict(zip(["x", *trained], torch.autograd.grad(y, [x, *trained.values()], dy), strict=True)),
    }


@pytest.mark.parametrize("adapters", ["same", torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_twice_those_of_peft_in_the_same_dtype(dtype: torch.dtype, adapters: Any) -> None:
    """Against PEFT in float64 on the same rounded numbers."""

    def draw(_: int) -> tuple[dict[str, torch.Tensor], ...]:
        model = pair(dtype, dtype if adapters == "same" else adapters)
        x, dy = torch.randn(1003, 515, device="cuda").to(dtype), torch.randn(2, 1003, 770, device="cuda").to(dtype)
        exact = run(copy.deepcopy(model).double(), x.double(), dy.double())
        theirs = run(copy.deepcopy(model).to(dtype), x, dy)
        report = packlora.accelerate(model, plan=ROUTED, example=example(dtype))
        assert report.accelerated == 2
        assert len(report.groups) == 1
        assert all(module.plan == ROUTED.name for module in report.modules)
        return run(model, x, dy), theirs, exact

    assert_as_exact(draw, 4, torch.initial_seed())


@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_peft_s(autocast: bool) -> None:
    base = torch.float32 if autocast else torch.bfloat16
    model = pair(base, torch.float32)
    x, dy = (
        torch.randn(64, 515, device="cuda", dtype=base),
        torch.randn(2, 64, 770, device="cuda", dtype=torch.bfloat16),
    )

    def dtypes() -> dict[str, torch.dtype]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return {name: value.dtype for name, value in run(model, x, dy).items()}

    want = dtypes()
    packlora.accelerate(model, example=example(base))
    assert dtypes() == want
    assert want["y"] == torch.bfloat16


def test_dropout_follows_the_seed_and_its_gradients_use_the_mask_of_the_forward() -> None:
    """y - x W' is linear in x under a fixed mask, so x . dx of its sum is that sum."""
    model = pair(torch.float32, torch.float32, lora_dropout=0.3)
    packlora.accelerate(model, example=example(torch.float32))
    x = torch.randn(300, 515, device="cuda", requires_grad=True)
    dy = torch.randn(2, 300, 770, device="cuda")
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    (dx,) = torch.autograd.grad(outputs[0], x, dy)
    bias = torch.stack([layer.base_layer.bias for layer in (model.base_model.model.a, model.base_model.model.b)])
    product = ((outputs[0] - bias[:, None]).double() * dy.double()).sum()
    assert float((x.detach().double() * dx.double()).sum()) == pytest.approx(float(product.detach()), rel=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks_again(reentrant: bool) -> None:
    model = pair(torch.bfloat16, torch.float32, lora_dropout=0.3)
    packlora.accelerate(model, example=example(torch.bfloat16))
    x = torch.randn(300, 515, device="cuda", dtype=torch.bfloat16)

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        if checkpointed:
            y = torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=reentrant)
        else:
            y = model(leaf)
        y.float().square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiled_without_a_graph_break(p: float) -> None:
    model = pair(torch.bfloat16, torch.float32, lora_dropout=p)
    packlora.accelerate(model, example=example(torch.bfloat16))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for T in (300, 300, 421):
        x, dy = torch.randn(T, 515, device="cuda").bfloat16(), torch.randn(2, T, 770, device="cuda").bfloat16()
        torch.manual_seed(5)
        got = run(compiled, x, dy)
        if p == 0:
            for (name, one), other in zip(got.items(), run(model, x, dy).values(), strict=True):
                assert float((one.float() - other.float()).norm()) <= 0.01 * float(other.float().norm()), name
        else:
            torch.manual_seed(5)
            assert all(
                torch.equal(one, other) for one, other in zip(got.values(), run(compiled, x, dy).values(), strict=True)
            )


def test_a_training_step_in_a_cuda_graph_draws_new_masks_and_sees_new_parameters() -> None:
    model = pair(torch.bfloat16, torch.float32, K=256, N=256, lora_dropout=0.3)
    packlora.accelerate(model, example=example(torch.bfloat16, 256))
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        y: torch.Tensor = model(x)
        y.float().square().mean().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y), "another mask"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    graph.replay()
    layers = (model.base_model.model.a, model.base_model.model.b)
    base = torch.stack([nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias) for layer in layers])
    assert float((y - base).float().norm()) <= 0.01 * float(base.float().norm())


def test_a_kept_output_is_not_handed_to_another_stream() -> None:
    model = pair(torch.float32, torch.float32)
    packlora.accelerate(model, example=example(torch.float32))
    group = model.base_model.model.a._packlora.group
    x, side = torch.randn(4000, 515, device="cuda"), torch.cuda.Stream()
    want = model(x)
    group._opened(None, ())
    model.base_model.model.a(x)
    side.wait_stream(torch.cuda.current_stream())
    kept = group._pending.outputs[1][1]
    with torch.cuda.stream(side):
        b = model.base_model.model.b(x)
    torch.cuda.synchronize()
    group._closed(None, (), None)
    assert b.data_ptr() != kept.data_ptr()
    assert torch.equal(b, want[1])


def test_a_model_moved_to_the_gpu_after_it_was_accelerated() -> None:
    model = pair(torch.float32, torch.float32).cpu()
    x, dy = torch.randn(70, 515), torch.randn(2, 70, 770)
    packlora.accelerate(model, example={"x": x[:2]})
    want = run(model, x, dy)
    model.cuda()
    for (name, one), other in zip(run(model, x.cuda(), dy.cuda()).items(), want.values(), strict=True):
        assert float((one.cpu() - other).norm()) <= 1e-4 * float(other.norm()), name
    with pytest.raises(ValueError, match=r"a: x is on cpu, base weight on cuda:0; all must be on one device"):
        model(x)
