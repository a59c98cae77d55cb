"""Siblings: which modules are found to read the same tensor, and that computing them together is never wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import FAMILIES, tiny_model

from packlora.adapters.siblings import SiblingGroup, sibling_groups

# --- finding -----------------------------------------------------------------------------------------------------------


def linears(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


ATTENTION = "self_attn", ("q_proj", "k_proj", "v_proj")
LINEAR_ATTENTION = "linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_projections_are_found_in_the_order_of_their_calls(family: str) -> None:
    model = tiny_model(family)
    attention = [LINEAR_ATTENTION if family == "qwen3_5" else ATTENTION, ATTENTION]
    example = {"input_ids": torch.tensor([[3, 5]])}
    found = sibling_groups(model, linears(model), example)
    assert found == [
        tuple(f"model.layers.{layer}.{parent}.{name}" for name in names)
        for layer in range(2)
        for parent, names in (attention[layer], ("mlp", ("gate_proj", "up_proj")))
    ]
    assert found == sibling_groups(model, linears(model), example)


def test_only_candidates_are_in_groups_and_one_alone_is_none() -> None:
    model = tiny_model("llama")
    names = [name for name in linears(model) if name.endswith(("q_proj", "v_proj", "up_proj"))]
    found = sibling_groups(model, names, {"input_ids": torch.tensor([[3, 5]])})
    assert [[path.rpartition(".")[2] for path in group] for group in found] == [["q_proj", "v_proj"]] * 2


class Parts(torch.nn.Module):
    """Calls its parts as `how` says."""

    def __init__(self, how: Callable[[Parts, torch.Tensor], torch.Tensor], **parts: torch.nn.Module) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def abc(how: Callable[[Parts, torch.Tensor], torch.Tensor], **more: torch.nn.Module) -> Parts:
    return Parts(how, a=torch.nn.Linear(4, 4), b=torch.nn.Linear(4, 4), c=torch.nn.Linear(4, 4), **more)


def changed_in_place(m: Parts, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    first = m.a(x)
    x.add_(1)
    return first + m.b(x) + m.c(x)


@pytest.mark.parametrize(
    ("how", "groups"),
    [
        (lambda m, x: m.a(x) + m.b(x) + m.c(x), [("a", "b", "c")]),
        (lambda m, x: m.c(x) + m.a(x), [("c", "a")]),
        (lambda m, x: m.a(x) + m.b(x.clone()) + m.c(x), [("a", "c")]),
        (lambda m, x: m.a(x) + m.b(x.view(-1, 4)) + m.c(x * 1), []),
        (lambda m, x: m.a(x) + m.a(x) + m.b(x) + m.c(x), [("b", "c")]),
        (lambda m, x: m.a(input=x) + m.b(x), [("a", "b")]),
        (changed_in_place, [("b", "c")]),
    ],
    ids=["all", "order", "clone", "views", "reused", "by keyword", "in place"],
)
def test_the_same_tensor_object_of_the_same_version_makes_siblings(how: Any, groups: list[tuple[str, ...]]) -> None:
    model = abc(how)
    assert sibling_groups(model, ["a", "b", "c"], {"x": torch.randn(2, 4)}) == groups


def test_the_same_tensor_under_two_parents_makes_no_siblings() -> None:
    model = Parts(lambda m, x: m.one(x) + m.own(x), one=abc(lambda m, x: m.a(x)), own=torch.nn.Linear(4, 4))
    assert sibling_groups(model, ["one.a", "own"], {"x": torch.randn(2, 4)}) == []


def test_a_module_at_two_paths_is_left_out() -> None:
    model = abc(lambda m, x: m.a(x) + m.b(x) + m.c(x))
    model.also_b = model.b
    assert sibling_groups(model, ["a", "b", "c"], {"x": torch.randn(2, 4)}) == [("a", "c")]


class Mixture(torch.nn.Module):
    """Four experts, each token goes to one; every expert that is used gets one tensor for two projections."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate, self.shared = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(abc(lambda m, x: m.a(x) * m.b(x)) for _ in range(4))
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = self.gate(x) + self.shared(x), self.choose(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                out[rows] += expert(x[rows])
        return out


@pytest.mark.parametrize("chosen", [[0, 0, 2, 2, 0], [0, 1, 2, 3, 3]], ids=["some unused", "unequal"])
def test_experts_are_left_out_and_the_layers_around_them_are_not(chosen: list[int]) -> None:
    layers = torch.nn.ModuleList(Mixture(lambda x: torch.tensor(chosen)) for _ in range(2))
    model = Parts(lambda m, x: m.layers[1](m.layers[0](x)), layers=layers)
    found = sibling_groups(model, linears(model), {"x": torch.randn(5, 4)})
    assert found == [("layers.0.gate", "layers.0.shared"), ("layers.1.gate", "layers.1.shared")]


@pytest.mark.parametrize("fails", [False, True])
def test_the_run_leaves_modes_gradients_random_states_and_hooks_as_they_were(fails: bool) -> None:
    def how(m: Parts, x: torch.Tensor) -> torch.Tensor:
        assert not m.training
        out = m.a(x) + m.b(x) + torch.rand(())
        if fails:
            raise ArithmeticError
        return out

    model = abc(how).train()
    model.b.eval()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    try:
        sibling_groups(model, ["a", "b"], {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))})
    except ArithmeticError:
        assert fails
    assert [m.training for m in (model, model.a, model.b, model.c)] == [True, True, False, True]
    assert torch.equal(torch.rand(3), expected)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


# --- running -----------------------------------------------------------------------------------------------------------


class ToyCall:
    def __init__(self, layer: Toy) -> None:
        self.weight, self.together = layer.weight, layer.kind

    def stamp(self) -> Any:
        return (id(self.weight), self.weight._version)


class Toy(torch.nn.Module):
    """x @ weight through its group. `kind` is what must be equal to be computed together; None means not ready."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.kind: Any = 0
        self.group: SiblingGroup | None = None
        self.index = 0

    def ready(self) -> Any:
        return "not ready" if self.kind is None else ToyCall(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = self.ready()
        if isinstance(call, str):
            return x @ self.weight
        assert self.group is not None
        return self.group.serve(self.index, x, call)


COMPUTED: list[int] = []
"""How many layers each call of toy_compute was for."""


def toy_compute(x: torch.Tensor, calls: Sequence[ToyCall]) -> list[torch.Tensor]:
    COMPUTED.append(len(calls))
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float64
    return [(x @ call.weight).to(dtype) for call in calls]


def toys(how: Callable[..., Any]) -> Parts:
    """A parent of q, k, v in one group."""
    parts = Parts(how, q=Toy(0), k=Toy(1), v=Toy(2))
    members = [parts.q, parts.k, parts.v]
    group = SiblingGroup(members, toy_compute, ToyCall)
    for index, member in enumerate(members):
        member.group, member.index = group, index
    group.attach(parts)
    parts.group = group
    COMPUTED.clear()
    return parts


def apart(model: Parts, x: torch.Tensor) -> Any:
    """What the model gives when every layer computes for itself."""
    alone = copy.deepcopy(model)
    SiblingGroup.detach(alone)
    result = alone(x)
    COMPUTED.clear()
    return result


def qkv(m: Parts, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([m.q(x), m.k(x) * 2, m.v(x) * 3])


def some_x() -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64)


def no_grad_between(m: Parts, x: torch.Tensor) -> Any:
    with torch.no_grad():
        q = m.q(x)
    k = m.k(x)
    assert k.requires_grad
    assert not q.requires_grad
    return torch.stack([q, k])


def grad_between(m: Parts, x: torch.Tensor) -> Any:
    q = m.q(x)
    with torch.no_grad():
        k = m.k(x)
    assert q.requires_grad
    assert not k.requires_grad
    return torch.stack([q, k, m.v(x)])


def autocast_between(m: Parts, x: torch.Tensor) -> Any:
    q = m.q(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k = m.k(x)
    assert (q.dtype, k.dtype) == (torch.float64, torch.bfloat16)
    return torch.stack([q, k.double(), m.v(x)])


def weight_between(m: Parts, x: torch.Tensor) -> Any:
    q = m.q(x)
    with torch.no_grad():
        m.k.weight.mul_(2)
    return torch.stack([q, m.k(x), m.v(x)])


def replaced_between(m: Parts, x: torch.Tensor) -> Any:
    q = m.q(x)
    m.v.weight = torch.nn.Parameter(m.v.weight.detach() * 5)
    return torch.stack([q, m.k(x), m.v(x)])


def unready_between(m: Parts, x: torch.Tensor) -> Any:
    q = m.q(x)
    m.k.kind = None
    k, m.k.kind = m.k(x), 0
    return torch.stack([q, k, m.v(x)])


def in_place_between(m: Parts, x: torch.Tensor) -> Any:
    x = x.clone()
    q = m.q(x)
    x.mul_(2)
    return torch.stack([q, m.k(x), m.v(x)])


def wanted_between(m: Parts, x: torch.Tensor) -> Any:
    x = x.detach().clone()
    m.q.weight.requires_grad_(False)
    m.k.weight.requires_grad_(False)
    q = m.q(x)
    x.requires_grad_()
    k = m.k(x)
    assert k.requires_grad
    return torch.stack([q, k])


ODD: dict[str, Callable[..., Any]] = {
    "other tensor": lambda m, x: torch.stack([m.q(x), m.k(x + 1), m.v(x)]),
    "equal tensor": lambda m, x: torch.stack([m.q(x), m.k(x.clone()), m.v(x)]),
    "never called": lambda m, x: torch.stack([m.q(x), m.v(x)]),
    "called twice": lambda m, x: torch.stack([m.q(x), m.q(x), m.k(x), m.k(x), m.v(x)]),
    "other order": lambda m, x: torch.stack([m.v(x), m.q(x), m.k(x)]),
    "two tensors in turn": lambda m, x: torch.stack([f(y) for y in (x, x + 1, x) for f in (m.q, m.k, m.v)]),
    "view": lambda m, x: torch.stack([m.q(x), m.k(x.view(3, 4)), m.v(x[:])]),
    "in place": in_place_between, "no grad first": no_grad_between, "no grad second": grad_between,
    "autocast": autocast_between, "weight changed": weight_between, "weight replaced": replaced_between,
    "not ready for a call": unready_between, "x wants a gradient": wanted_between,
}  # fmt: skip


@pytest.mark.parametrize("how", ODD.values(), ids=ODD.keys())
def test_whatever_the_parent_does_gives_what_single_layers_give_and_leaves_nothing(how: Callable[..., Any]) -> None:
    model, x = toys(how), some_x()
    expected = apart(model, x)
    assert torch.equal(model(x), expected)
    assert model.group._pending is None
    expected = apart(model, x)
    assert torch.equal(model(x), expected)  # and again, from the state that is left


@pytest.mark.parametrize("raises", [False, True])
def test_outputs_that_nobody_called_for_are_freed_when_the_parents_forward_ends(raises: bool) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def watching(x: torch.Tensor, calls: Sequence[ToyCall]) -> list[torch.Tensor]:
        outputs = toy_compute(x, calls)
        alive.extend(weakref.ref(output) for output in outputs[1:])
        return outputs

    def how(m: Parts, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m.q(x)
        assert all(ref() is not None for ref in alive)
        if raises:
            raise ArithmeticError
        return out

    model = toys(how)
    model.group.compute = watching
    try:
        out = model(some_x())
        out.sum().backward()
    except ArithmeticError:
        assert raises
    gc.collect()
    assert len(alive) == 2
    assert all(ref() is None for ref in alive)


def test_detach_removes_all_hooks() -> None:
    model = toys(qkv)
    SiblingGroup.detach(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks_always_called
    model(some_x())
    assert COMPUTED == [1, 1, 1]


class Replacing(torch.nn.Module):
    """Replaces a part of itself in a forward, as BigBird does for short inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part = torch.nn.Sequential(torch.nn.Dropout(0.5)).train(self.training)
        y: torch.Tensor = self.part(x)
        return y


@pytest.mark.parametrize("training", [True, False])
def test_modules_that_come_into_the_model_while_it_is_looked_at_are_in_its_mode_afterwards(training: bool) -> None:
    model = torch.nn.Sequential(Replacing()).train(training)
    before = model[0].part
    sibling_groups(model, [], {"input": torch.ones(1, 2)})
    assert model[0].part is not before
    assert all(module.training == training for module in model.modules())
