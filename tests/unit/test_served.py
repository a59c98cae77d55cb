"""What really ran: calls are counted by layer and reason, the report's word is kept or a warning is given, replicas of a model
compute with their own tensors, and a model that was unloaded has nothing of ours left."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from torch import nn

import packlora
from packlora.live.forward import REPLICA

IDS = torch.randint(3, 320, (2, 9), generator=torch.Generator().manual_seed(0))


def adapted(base: Any = None, **changes: Any) -> Any:
    """A tiny float64 model with adapters that matter, in train mode."""
    settings = {"r": 3, "target_modules": "all-linear", **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny_model("llama", torch.float64) if base is None else base, LoraConfig(**settings))
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    return model.train()


def embedding_model() -> Any:
    """DoRA on an embedding, a Conv1D and a linear layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.turned = nn.Embedding(320, 8), transformers.pytorch_utils.Conv1D(6, 8)
            self.linear = nn.Linear(6, 4)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(self.turned(self.embed(input_ids)))
            return y

    return adapted(Model(), target_modules=["embed", "turned", "linear"], use_dora=True)


def step(model: Any, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """Output and gradients."""
    model.zero_grad()
    out = model(input_ids=ids)
    y = out if isinstance(out, torch.Tensor) else out.logits
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) > 1
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


# --- counts ------------------------------------------------------------------------------------------------------------


def test_calls_are_counted_by_module_and_none_before_the_first() -> None:
    model = adapted()
    report = packlora.accelerate(model, keep_outputs=True, recompute=True)
    served = report.served()
    assert list(served) == [module.path for module in report.modules]
    assert {(calls.served, *calls.left) for calls in served.values()} == {(0,)}
    for _ in range(3):
        step(model)
    assert {(calls.served, *calls.left) for calls in report.served().values()} == {(3,)}


def test_what_peft_computes_is_counted_by_reason() -> None:
    model = adapted()
    report = packlora.accelerate(model)
    path = next(iter(report.served()))
    step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the user asked for is not worth a warning
        with model.disable_adapter():
            model(input_ids=IDS)
            model(input_ids=IDS)
        model.merge_adapter()
        model(input_ids=IDS)
        model.unmerge_adapter()
        model.base_model.set_adapter([])
        model(input_ids=IDS)
        model.set_adapter("default")
    step(model)
    calls = report.served()[path]
    assert calls.served == 2
    assert calls.left == {
        "its adapters are disabled": 2,
        "its adapters are merged into the base weights": 1,
        "no active adapter targets it": 1,
    }


def test_one_warning_names_the_layer_and_the_reason_where_the_report_was_wrong() -> None:
    """As under FSDP with use_orig_params, whose views of frozen weights want gradients."""
    model = adapted()
    report = packlora.accelerate(model)
    assert report.accelerated == 14
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            parameter.requires_grad_(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model)
    ours = [str(one.message) for one in seen if str(one.message).startswith("packlora: ")]
    assert len(ours) == 1
    assert "layers.0.self_attn.q_proj runs PEFT's own forward now" in ours[0]
    assert "its base weight is trained too" in ours[0]
    assert "report.served()" in ours[0]
    assert all(calls.left == {"its base weight is trained too": 2} for calls in report.served().values())


# --- transforms of functions -------------------------------------------------------------------------------------------


def test_functional_call_with_other_parameters_is_computed_here() -> None:
    model = adapted()
    other = {name: tensor.detach() * 1.5 for name, tensor in model.named_parameters() if "lora_" in name}
    want = torch.func.functional_call(model, other, kwargs={"input_ids": IDS}).logits
    report = packlora.accelerate(model)
    got = torch.func.functional_call(model, other, kwargs={"input_ids": IDS}).logits
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)
    assert {calls.served for calls in report.served().values()} == {1}


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x).sin() * self.b(x)
        return y


@pytest.mark.parametrize("what", ["grad", "vmap of grad", "jvp", "hessian", "forward differentiation"])
@pytest.mark.filterwarnings("ignore:packlora")
def test_transforms_of_functions_are_left_to_peft(what: str) -> None:
    model = adapted(Linears(), target_modules=["a", "b"])
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(5, 8, dtype=torch.float64)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, parameters, (x,)).square().sum()
        return y

    def run() -> list[torch.Tensor]:
        if what == "grad":
            return list(torch.func.grad(loss)(trained, x).values())
        if what == "vmap of grad":
            return list(torch.func.vmap(torch.func.grad(loss), (None, 0))(trained, x[:, None]).values())
        if what == "jvp":
            return list(torch.func.jvp(lambda x: loss(trained, x), (x,), (torch.ones_like(x),)))
        if what == "hessian":
            return [torch.func.hessian(lambda x: loss(trained, x))(x[:1])]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return list(torch.autograd.forward_ad.unpack_dual(model(dual)))

    want = run()
    packlora.accelerate(model, example={"x": x})
    got = run()
    assert all(torch.allclose(one, two, rtol=1e-10) for one, two in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:packlora", "ignore::DeprecationWarning")
def test_a_trace_of_torchscript_is_of_peft_s_layers() -> None:
    model = adapted(Linears(), target_modules=["a", "b"])
    packlora.accelerate(model, example={"x": torch.randn(5, 8, dtype=torch.float64)})
    traced = torch.jit.trace(model, (torch.randn(5, 8, dtype=torch.float64),), check_trace=False)
    x = torch.randn(7, 8, dtype=torch.float64)
    assert torch.allclose(traced(x), model(x), rtol=1e-10)


# --- replicas ----------------------------------------------------------------------------------------------------------


def replicate(model: nn.Module) -> nn.Module:
    """What torch.nn.parallel.replicate makes for one device: copies of the modules with parameters of their own."""
    modules = list(model.modules())
    number = {id(module): index for index, module in enumerate(modules)}
    replicas: list[Any] = [module._replicate_for_data_parallel() for module in modules]
    copies: dict[int, torch.Tensor] = {}
    for module, replica in zip(modules, replicas, strict=True):
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[number[id(child)]]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                copies.setdefault(id(parameter), parameter * 1)  # a broadcast keeps the graph
                setattr(replica, name, copies[id(parameter)])
    first: nn.Module = replicas[0]
    return first


@pytest.mark.filterwarnings("ignore:packlora")
@pytest.mark.parametrize(
    "make", [adapted, lambda: adapted(use_dora=True), embedding_model], ids=["LoRA", "DoRA", "others"]
)
def test_replicas_compute_with_their_own_tensors(make: Any) -> None:
    model = make()
    want = step(model)
    report = packlora.accelerate(model, recompute=True, example={"input_ids": IDS})
    model.zero_grad()
    replica = replicate(model)
    with torch.no_grad():
        kept = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, float("nan"))  # as on another device: of no use to the replica
    out: Any = replica(input_ids=IDS)
    y = out if isinstance(out, torch.Tensor) else out.logits
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data = value
    y.square().sum().backward()
    assert_close([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], want)
    assert all(calls.left == {REPLICA: 1} and calls.served == 0 for calls in report.served().values())
    assert_close(step(model), want)
    assert {calls.served for calls in report.served().values()} == {1}, "the model itself is still accelerated"


def test_a_model_that_is_replicated_says_so_once() -> None:
    model = adapted()
    packlora.accelerate(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        replicate(model)
        replicate(model)
    assert ["a replica of nn.DataParallel computes with tensors of its own" in str(one.message) for one in seen] == [
        True
    ]


# --- unloading ---------------------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> list[str]:
    """Hooks, and attributes of ours, that a model has."""
    found = []
    for path, module in model.named_modules():
        for kind in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_always_called",
            "_forward_hooks_with_kwargs",
        ):
            found += [f"{path}: {kind}"] * len(getattr(module, kind))
        found += [f"{path}: {name}" for name in vars(module) if "packlora" in name or name in ("forward", "unload")]
    return found


@pytest.mark.parametrize(
    "how", ["merge_and_unload", "unload", "merge_and_unload of the tuner", "of a copy", "of a pickle"]
)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_model_that_was_unloaded_has_no_hooks_and_computes_what_peft_s_does(how: str, dora: bool) -> None:
    model = adapted(use_dora=dora)
    twin = copy.deepcopy(model)
    before = Counter(traces(model))
    packlora.accelerate(model, recompute=True, keep_outputs=True)
    if how == "of a copy":
        model = copy.deepcopy(model)
    elif how == "of a pickle":
        model = pickle.loads(pickle.dumps(model))
    assert Counter(traces(model)) != before
    name = "unload" if how == "unload" else "merge_and_unload"
    plain = getattr(model.base_model if how.endswith("tuner") else model, name)()
    expected = getattr(twin, name)()
    assert traces(plain) == []
    assert traces(model) == []
    assert type(plain) is type(expected)
    assert torch.equal(plain(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    again = adapted(plain)
    assert packlora.accelerate(again).accelerated == 14


def test_arguments_of_merge_and_unload_reach_peft() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    twin = copy.deepcopy(model)
    packlora.accelerate(model)
    got, want = (one.merge_and_unload(safe_merge=True, adapter_names=["other"]) for one in (model, twin))
    assert torch.equal(got(input_ids=IDS).logits, want(input_ids=IDS).logits)
