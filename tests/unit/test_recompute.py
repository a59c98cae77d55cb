"""Inputs of adapted layers that are recomputed in the backward: the same gradients to the bit, and less kept."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef

import packlora
from packlora.ops.recompute import recomputable, recompute_of


def adapted(family: str, dora: bool = False) -> Any:
    torch.manual_seed(torch.seed() % 2**31)
    model = get_peft_model(
        tiny_model(family, torch.float32), LoraConfig(r=3, target_modules="all-linear", use_dora=dora)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()


def step(model: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients of all trainable parameters, and the bytes that autograd kept for them."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, **kwargs).loss
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad], sum(kept.values())


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_gradients_are_the_same_bits_and_less_is_kept(family: str, dora: bool) -> None:
    model, ids = adapted(family, dora), torch.randint(3, 320, (2, 40))
    packlora.accelerate(model)
    want, kept = step(model, ids)
    report = packlora.accelerate(model, recompute=True)
    assert "2 gated products" in str(report)
    got, kept_now = step(model, ids)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    # the gated products alone are 2 layers x 80 tokens x 96 floats
    assert kept - kept_now >= 2 * 80 * 96 * 4
    packlora.restore(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_how_a_tensor_is_recomputed_does_not_outlive_a_write_into_its_tensor() -> None:
    h = torch.randn(3, requires_grad=True)
    x = recomputable(h.exp(), torch.exp, h)
    assert recompute_of(x) is not None and recompute_of(x.view(3)) is None
    x.mul_(2)
    assert recompute_of(x) is None
    with torch.no_grad():
        assert recompute_of(recomputable(h.exp(), torch.exp, h)) is None


def test_a_changed_operand_is_an_error_not_another_gradient() -> None:
    model, ids = adapted("llama"), torch.randint(3, 320, (1, 12))
    packlora.accelerate(model, recompute=True)
    grown: list[torch.Tensor] = []
    handle = model.base_model.model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, args, output: grown.append(output)
    )
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    with torch.no_grad():
        grown[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("path", ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj"])
def test_a_forward_that_fails_keeps_nothing_of_the_layers_before(path: str) -> None:
    """What is tried next, smaller or checkpointed, needs their memory."""
    model, ids = adapted("llama"), torch.randint(3, 320, (1, 12))
    packlora.accelerate(model, recompute=True)
    layers, kept = model.base_model.model.model.layers, list[StorageWeakRef]()

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        kept.append(StorageWeakRef(output.untyped_storage()))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("for this test")

    layers[0].mlp.gate_proj.register_forward_hook(keep)
    layers[-1].get_submodule(path).register_forward_hook(fail)
    with contextlib.suppress(torch.OutOfMemoryError):
        model(input_ids=ids, labels=ids)
    gc.collect()
    assert [own.expired() for own in kept] == [True]


@pytest.mark.parametrize("first", [True, False], ids=["hook first", "accelerate first"])
def test_a_norm_whose_output_a_users_hook_replaces_is_not_taken_for_it(first: bool) -> None:
    """Calling the norm again gives what the layers would read without the hook."""
    model, ids = adapted("llama"), torch.randint(3, 320, (1, 12))
    norm = model.base_model.model.model.layers[0].input_layernorm
    if first:
        handle = norm.register_forward_hook(lambda module, args, output: output * 2)
        want, _ = step(model, ids)
        packlora.accelerate(model, recompute=True)
    else:
        packlora.accelerate(model, recompute=True)
        handle = norm.register_forward_hook(lambda module, args, output: output * 2)
    got, _ = step(model, ids)
    if not first:
        packlora.restore(model)
        want, _ = step(model, ids)
    handle.remove()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
