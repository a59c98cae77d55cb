"""DoRA under packlora.accelerate on a GPU: norms in captured and compiled training steps, no waiting, outputs that are written
into.

make gpu
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from waits import no_waiting

import packlora


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)); `write` gets gate and up after the product."""

    def __init__(self, K: int, N: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)
        self.write: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        product = nn.functional.silu(gate.clone()) * up.clone()
        if self.write is not None:
            self.write(gate)
        y: torch.Tensor = self.down(product)
        return y * 2


def gated() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=24, lora_alpha=24, use_dora=True, target_modules=["gate", "up", "down"])
    model = get_peft_model(Gated(256, 384).bfloat16(), settings).cuda().train()
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model


def x_of(T: int) -> torch.Tensor:
    return torch.randn(T, 256, device="cuda", dtype=torch.bfloat16)


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_a_captured_training_step_uses_the_norms_of_the_values_that_the_last_replay_left() -> None:
    model = gated()
    packlora.accelerate(model, example={"x": x_of(40)})
    x = x_of(512)

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        y: torch.Tensor = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        return y

    def optimizer_of(model: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, capturable=True, fused=True)

    optimizer, side = optimizer_of(model), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    eager = copy.deepcopy(model)
    own = optimizer_of(eager)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(model, optimizer)
    norms = model.base_model.model.gate._packlora.norms
    assert norms._captured, "the check of the window is in the graph"
    for number in range(5):
        want = step(eager, own)
        graph.replay()
        assert worst(y, want) <= 0.02, number
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert worst(p, q) <= 0.02
    handle = model.base_model.model.gate._packlora
    A, B = handle.layer.lora_A["default"].weight, handle.layer.lora_B["default"].weight
    exact = (handle.layer.base_layer.weight.double() + B.double() @ A.double()).norm(dim=1)
    assert worst(handle.norm(handle.ready(), handle.layer.base_layer.weight)(), exact) <= 1e-5, (
        "eager after the replays"
    )


def test_forward_and_backward_wait_for_nothing() -> None:
    model = gated()
    packlora.accelerate(model, example={"x": x_of(40)})
    x = x_of(512)
    for _ in range(2):
        model(x).sum().backward()
    with no_waiting():
        for _ in range(2):
            for p in model.parameters():
                p.data.mul_(1.01)
            model(x).sum().backward()


@pytest.mark.parametrize("written", [False, True])
def test_magnitudes_gradients_where_an_output_is_written_into_and_where_not(
    written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written into by a forward that is taken for liger's."""
    model = gated()
    if written:
        model.base_model.model.write = lambda gate: gate.data.fill_(3.0)
        monkeypatch.setattr(Gated.forward, "__module__", "liger_kernel.transformers.swiglu")
    x = x_of(700)
    dy = torch.randn_like(x)
    magnitudes = [p for name, p in model.named_parameters() if "magnitude" in name]
    want = torch.autograd.grad(model(x), magnitudes, dy)
    report = packlora.accelerate(model, example={"x": x_of(40)}, keep_outputs=True)
    assert any(note.startswith(f"DoRA: {0 if written else 3} of 3 layers keep") for note in report.notes), str(report)
    got = torch.autograd.grad(model(x), magnitudes, dy)
    for one, other in zip(got, want, strict=True):
        assert worst(one, other) <= 0.02


def qwen3(dora: list[str], lora: list[str]) -> Any:
    """Two layers in bfloat16; DoRA on some modules, LoRA on others."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=320, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, use_cache=False,
    )  # fmt: skip
    own = LoraConfig(r=16, lora_alpha=16, use_dora=True, target_modules=dora, task_type="CAUSAL_LM")
    model = get_peft_model(Qwen3ForCausalLM(config).bfloat16(), own).cuda().train()
    if lora:
        model.add_adapter("other", LoraConfig(r=8, lora_alpha=16, target_modules=lora, task_type="CAUSAL_LM"))
        model.base_model.set_adapter(["default", "other"])
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.05)
    return model


ATTENTION, GATED = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("dora", "lora"), [(ATTENTION + GATED, []), (GATED, ATTENTION)], ids=["DoRA", "DoRA and LoRA"])
@pytest.mark.parametrize("eager_first", [False, True])
def test_compiled_into_cuda_graphs_before_and_after_optimizer_steps(
    dora: list[str], lora: list[str], eager_first: bool
) -> None:
    """As exact as PEFT's eager model in the same dtype, in the steps that warm up, that record and that replay."""
    model = qwen3(dora, lora)
    ids = torch.randint(3, 320, (2, 96), device="cuda")
    exact, plain = copy.deepcopy(model).float(), copy.deepcopy(model).bfloat16()
    packlora.accelerate(model, example={"input_ids": ids})

    def outcome(model: Any) -> dict[str, torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        grads = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": output.logits.detach().clone(), **{name: grad.clone() for name, grad in grads.items()}}

    if eager_first:
        outcome(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    twins = (model, exact, plain)
    trained = [[p for p in one.parameters() if p.requires_grad] for one in twins]
    for _ in range(2):
        want, theirs = outcome(exact), outcome(plain)
        for number in range(4):
            ours = outcome(compiled)
            assert ours.keys() == want.keys()
            of_ours, of_theirs = (sum(worst(one[name], want[name]) for name in want) for one in (ours, theirs))
            assert of_ours <= 2 * of_theirs, f"call {number}: {of_ours:.3g} against {of_theirs:.3g} of PEFT"
        for at, parameter in enumerate(trained[0]):  # the same step for all three, of a size that changes the norms
            parameter.grad = want[names_of(exact)[at]].to(parameter.dtype)
        torch.optim.AdamW(trained[0], lr=0.05).step()
        with torch.no_grad():
            for others in trained[1:]:
                for to, now in zip(others, trained[0], strict=True):
                    to.copy_(now)


def names_of(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_a_compiled_model_follows_a_scaling_that_is_set_again() -> None:
    """What was a constant of the first graph is a symbol of the second."""
    model = qwen3(GATED, [])
    ids = torch.randint(3, 320, (2, 96), device="cuda")
    exact, plain = copy.deepcopy(model).float(), copy.deepcopy(model).bfloat16()
    packlora.accelerate(model, example={"input_ids": ids})
    torch._dynamo.reset()
    compiled = torch.compile(model)
    for scaling in (2.0, 3.0, 0.5, 0.25):
        for one in (model, exact, plain):
            for module in one.modules():
                if isinstance(getattr(module, "scaling", None), dict):
                    module.scaling["default"] = scaling
        want, ours, theirs = (one(input_ids=ids).logits.detach() for one in (exact, compiled, plain))
        assert worst(ours, want) <= 2 * worst(theirs, want), f"scaling {scaling}"
