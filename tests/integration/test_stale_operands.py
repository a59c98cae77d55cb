"""packlora.accelerate prepares copies of the parameters and keeps them from call to call: whoever changes the parameters, in
whatever way and at whatever time, gets what PEFT gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_accelerate import IDS, SEED, assert_same, lora, outcome
from torch import nn

import packlora

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "a single layer": {"target_modules": ["o_proj"]},
    "dora": {"use_dora": True},
    "dora with a base bias": {"family": "qwen2", "use_dora": True},
}
OTHERS = torch.randint(3, 320, (3, 6), generator=torch.Generator().manual_seed(SEED + 1))
"""Tokens of another forward."""


def twins(kind: str, **changes: Any) -> tuple[Any, Any]:
    """The same model twice: PEFT's, and accelerated."""
    plain = lora(**KINDS[kind], **changes)
    fast = copy.deepcopy(plain)
    packlora.accelerate(fast)
    return plain, fast


def changed(model: Any, seed: int, which: str = "lora_") -> dict[str, torch.Tensor]:
    """Other values for some parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() * (1 + 0.5 * torch.rand(p.shape, generator=generator, dtype=torch.float64))
        for name, p in model.named_parameters()
        if which in name
    }


def replace_data(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As p.data = other; what was there."""
    before = {}
    for name, p in model.named_parameters():
        if name in values:
            before[name], p.data = p.data, values[name]
    return before


def copy_into_data(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As p.data.copy_(other), which leaves no trace; what was there."""
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in values}
    for name, p in model.named_parameters():
        if name in values:
            p.data.copy_(values[name])
    return before


SWAPS = {"replaced": replace_data, "copied into": copy_into_data}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- weights swapped through .data between a forward and its backward -----------------------------------------------------


def after_a_teacher(
    model: Any, swap: Callable[..., Any], which: str, back: bool = True, teach: bool = True
) -> dict[str, torch.Tensor]:
    """Logits and gradients of a student, between whose forward and backward a teacher ran on the same parameters."""
    values = changed(model, SEED + 2, which)
    model.zero_grad()
    torch.manual_seed(SEED)
    out = model(input_ids=IDS, labels=IDS)
    before = swap(model, values)
    target = None
    if teach:
        with torch.no_grad():
            target = model(input_ids=IDS).logits
            model(input_ids=OTHERS)
    if back:
        swap(model, before)
    loss = out.loss if target is None else out.loss + (out.logits - target).square().mean()
    loss.backward()
    if not back:
        swap(model, before)
    return {"logits": out.logits.detach(), **gradients(model)}


@pytest.mark.sampled
@pytest.mark.parametrize("which", ["lora_", "base_layer", ""], ids=["adapter", "base", "all"])
@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_on_swapped_weights_does_not_reach_the_student_s_backward(kind: str, swap: Any, which: str) -> None:
    plain, fast = twins(kind)
    want = after_a_teacher(plain, swap, which)
    assert_same(after_a_teacher(fast, swap, which), want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_teacher_beside_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    plain, fast = twins(kind)
    got = []
    for model in (plain, fast):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        got.append(after_a_teacher(model, replace_data, ""))
    assert_same(got[1], got[0])


def test_checkpointing_packs_nothing_once_more_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    original = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: copies.append(len(args[0])) or original(*args))
    model = lora()
    packlora.accelerate(model)
    outcome(model)
    plain, copies[:] = len(copies), []
    model.gradient_checkpointing_enable({"use_reentrant": False})
    outcome(model)
    assert plain == 4, "q, k, v and gate, up of both blocks"
    assert len(copies) == 2 * plain, "in the forward, and in what is recomputed"


# --- inference mode ----------------------------------------------------------------------------------------------------


def evaluated(model: Any) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {"evaluated": model(input_ids=OTHERS).logits.clone()}


def generated(model: Any) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {
            "generated": model.generate(input_ids=IDS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).clone()
        }


def without_gradients(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"without": model(input_ids=OTHERS).logits}


def embedded_in_inference_mode(model: Any) -> dict[str, torch.Tensor]:
    """Tokens' vectors made in inference mode, used outside of it."""
    with torch.inference_mode():
        vectors = model.get_input_embeddings()(OTHERS)
    with torch.no_grad():
        return {"embedded": model(inputs_embeds=vectors).logits}


def step(model: Any) -> dict[str, torch.Tensor]:
    got = outcome(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.02 * p.grad)
    return got


ORDERS: dict[str, list[Callable[[Any], dict[str, torch.Tensor]]]] = {
    "evaluate, train": [evaluated, step, step],
    "generate, train": [generated, step, step],
    "train, evaluate, train, generate, train": [step, evaluated, step, generated, step],
    "vectors of inference mode, train": [embedded_in_inference_mode, step, evaluated, step],
    "no_grad, inference, train, no_grad": [without_gradients, evaluated, step, without_gradients, evaluated],
}


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_before_and_between_steps_is_as_in_peft(kind: str, order: list[Any]) -> None:
    plain, fast = twins(kind)
    for number, do in enumerate(order):
        got, want = do(fast), do(plain)
        assert got.keys() == want.keys()
        assert_same(got, want, 1e-9), number


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_inference_mode_between_a_forward_and_its_backward(kind: str) -> None:
    got = []
    for model in twins(kind):
        out = model(input_ids=IDS, labels=IDS)
        evaluated(model)
        out.loss.backward()
        got.append(gradients(model))
    assert_same(got[1], got[0])


def test_a_model_made_in_inference_mode_answers_outside_of_it() -> None:
    with torch.inference_mode():
        plain, fast = twins("dora")
    assert_same(without_gradients(fast), without_gradients(plain))


# --- a base bias beside DoRA ---------------------------------------------------------------------------------------------


def loaded(assign: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        state = {name: value * 1.5 if "bias" in name else value for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


def biases(model: Any) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("base_layer.bias")]


def copied(model: Any) -> None:
    with torch.no_grad():
        for p in biases(model):
            p.copy_(p * 2 + 1)


def trained_for_a_step(model: Any, **settings: Any) -> None:
    for p in biases(model):
        p.requires_grad_()
    optimizer = torch.optim.AdamW(biases(model), lr=0.3, **settings)
    outcome(model)
    optimizer.step()
    optimizer.zero_grad()
    for p in biases(model):
        p.requires_grad_(False)


def written_through_data(model: Any) -> None:
    for p in biases(model):
        p.data.mul_(2).add_(1)


def data_of_another(model: Any) -> None:
    for p in biases(model):
        p.data = p.data * 2 + 1


def replaced(model: Any) -> None:
    for module in model.modules():
        if getattr(module, "base_layer", None) is not None and module.base_layer.bias is not None:
            module.base_layer.bias = nn.Parameter(module.base_layer.bias.detach() * 2 + 1, requires_grad=False)


def removed(model: Any) -> None:
    for module in model.modules():
        if getattr(module, "base_layer", None) is not None:
            module.base_layer.bias = None


CHANGES: dict[str, Callable[[Any], None]] = {
    "load_state_dict": loaded(False),
    "load_state_dict, assign": loaded(True),
    "copy_": copied,
    "a step while unfrozen": trained_for_a_step,
    "a fused step while unfrozen": lambda model: trained_for_a_step(model, fused=True),
    "through .data": written_through_data,
    "another .data": data_of_another,
    "another parameter": replaced,
    "none any more": removed,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_frozen_bias_may_change_beside_dora(change: Callable[[Any], None]) -> None:
    plain, fast = twins("dora with a base bias")
    for model in (plain, fast):
        outcome(model)
        change(model)
    assert_same(outcome(fast), outcome(plain), 1e-10)


def test_vectors_of_inference_mode_train_beside_recomputed_norms() -> None:
    plain, fast = twins("lora")
    packlora.accelerate(fast, recompute=True)
    for model in (plain, fast):
        with torch.inference_mode():
            vectors = model.get_input_embeddings()(IDS)
        model.zero_grad()
        model(inputs_embeds=vectors).logits.square().mean().backward()
    assert_same(gradients(fast), gradients(plain), 1e-9)
