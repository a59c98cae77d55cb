"""An accelerated model through a life of random events beside a plain PEFT model, and in several threads."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model

import packlora

IDS = torch.randint(3, 320, (2, 7), generator=torch.Generator().manual_seed(0))


def fill(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def adapted(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    settings = {"r": 3, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny_model(family, torch.float64, num_hidden_layers=1), LoraConfig(**settings))
    return fill(model.double(), seed).train()


def outcome(model: Any, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    out = model(input_ids=ids, labels=ids, use_cache=False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not out.loss.requires_grad or not trained:
        return {"logits": out.logits.detach()}
    grads = torch.autograd.grad(out.loss, list(trained.values()), allow_unused=True)
    return {"logits": out.logits.detach(), **{n: g for n, g in zip(trained, grads, strict=True) if g is not None}}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: Any) -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        assert float((got[name] - value).abs().max()) <= 1e-9 * max(1.0, float(value.abs().max())), (what, name)


# --- events: what one does to a model, drawing from the generator that both models get alike ---------------------------


def another_adapter(model: Any, draw: random.Random) -> Any:
    name = f"a{draw.randrange(10**6)}"
    targets = draw.choice([["q_proj", "down_proj"], ["k_proj", "v_proj", "up_proj"]])
    dora = model.peft_config["default"].use_dora
    model.add_adapter(name, LoraConfig(r=draw.choice([1, 5]), target_modules=targets, use_dora=dora))
    model.set_adapter(name)
    return fill(model.double(), 1)


def the_first_adapter(model: Any, draw: random.Random) -> Any:
    for name in list(model.peft_config)[1:]:
        model.delete_adapter(name)
    model.set_adapter("default")
    return model


def merged_for_a_while(model: Any, draw: random.Random) -> Any:
    model.merge_adapter()
    outcome(model)
    model.unmerge_adapter()
    return model


def disabled_for_a_while(model: Any, draw: random.Random) -> Any:
    with model.disable_adapter():
        outcome(model)
    return model


def a_step(model: Any, draw: random.Random) -> Any:
    grads = outcome(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in grads:
                parameter.sub_(0.01 * grads[name])
    return model


def hooked_for_a_while(model: Any, draw: random.Random) -> Any:
    ends = ("gate_proj", "q_proj", "input_layernorm", "k_proj.base_layer", "mlp")
    modules = [module for name, module in model.named_modules() if name.endswith(ends)]
    handle = draw.choice(modules).register_forward_hook(lambda module, args, y: y * 1.1)
    outcome(model)
    handle.remove()
    return model


def other_mode(model: Any, draw: random.Random) -> Any:
    return model.train(not model.training)


def a_frozen_operand(model: Any, draw: random.Random) -> Any:
    draw.choice([p for name, p in model.named_parameters() if "lora_" in name]).requires_grad_(False)
    return model


def new_values(model: Any, draw: random.Random) -> Any:
    model.load_state_dict({name: 1.01 * value for name, value in model.state_dict().items()})
    return model


def new_tensors(model: Any, draw: random.Random) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01
    return model


def checkpointed_for_a_while(model: Any, draw: random.Random) -> Any:
    reentrant = draw.random() < 0.5
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outcome(model) if not reentrant else model(input_ids=IDS, labels=IDS).loss.backward()
    model.disable_input_require_grads()
    model.gradient_checkpointing_disable()
    return model


def without_gradients(model: Any, draw: random.Random) -> Any:
    with torch.no_grad():
        model(input_ids=IDS)
    return model


def a_copy(model: Any, draw: random.Random) -> Any:
    return copy.deepcopy(model)


EVENTS: list[Callable[[Any, random.Random], Any]] = [
    another_adapter, the_first_adapter, merged_for_a_while, disabled_for_a_while, a_step, hooked_for_a_while, other_mode,
    a_frozen_operand, new_values, new_tensors, checkpointed_for_a_while, without_gradients, a_copy,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:packlora", "ignore:Already unmerged")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_whatever_happens_to_it_it_gives_what_peft_gives(family: str, dora: bool) -> None:
    draw = random.Random(f"{family} {dora}")
    model = adapted(family, use_dora=dora, bias=draw.choice(["none", "lora_only"]))
    twin = copy.deepcopy(model)
    packlora.accelerate(model, recompute=True, keep_outputs=dora)
    happened: list[str] = []
    for event in draw.sample(EVENTS, len(EVENTS)):
        seed = draw.randrange(10**6)
        happened.append(event.__name__)
        model, twin = event(model, random.Random(seed)), event(twin, random.Random(seed))
        assert_same(outcome(model), outcome(twin), happened)
    packlora.restore(model)
    assert_same(outcome(model), outcome(twin), "restored")


# --- at the same time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_several_threads_may_run_forwards_and_backwards_of_one_model(dora: bool) -> None:
    model = adapted(use_dora=dora)
    batches = [torch.randint(3, 320, (2, 5 + index)) for index in range(3)]
    want = [outcome(model, batch) for batch in batches]
    packlora.accelerate(model, recompute=True, keep_outputs=True)
    failed: list[BaseException] = []

    def run(index: int) -> None:
        try:
            for _ in range(4):
                assert_same(outcome(model, batches[index]), want[index], index)
        except BaseException as error:  # raised in the test's own thread below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error
