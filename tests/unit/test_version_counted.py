"""Operands whose changes the host can see are prepared once per change: every such change is seen, and one adapter's does not
disturb another's backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.layer_scales import LayerScales, Unchanged
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment

T, K, N = 12, 16, 20


def low_rank(seed: int, rank: int, dora: bool = False, bias: bool = False) -> LowRank:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

    norm = draw(N).detach().abs() + 0.5 if dora else None
    return LowRank(draw(rank, K), draw(N, rank), 1.5, draw(N) if dora else None, norm, draw(N) if bias else None)


def layer_of(*adapters: LowRank) -> Layer:
    generator = torch.Generator().manual_seed(99)
    weight, bias = torch.randn(N, K, generator=generator).double(), torch.randn(N, generator=generator).double()
    return Layer(Dense(weight), bias, dict(enumerate(adapters)))


X = torch.randn(T, K, generator=torch.Generator().manual_seed(7)).double()
HALVES = (Segment(0, 0, T // 2), Segment(1, T // 2, T))


def exact(layer: Layer, runs: tuple[Segment, ...]) -> torch.Tensor:
    """y by the formula, with a history."""
    parts = []
    for run in runs:
        low, x = layer.adapters[run.adapter], X[run.rows]
        assert low.A is not None and low.B is not None and layer.bias is not None
        z = x @ layer.frozen.dense().T + low.scaling * (x @ low.A.T) @ low.B.T
        g = 1 if low.magnitude is None else low.magnitude / low.norm
        parts.append(g * z + (layer.bias if low.bias is None else low.bias))
    return torch.cat(parts)


def gradients(y: torch.Tensor, low: LowRank) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), list(low.operands().values()))


def same(got: Any, want: Any) -> bool:
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_another_adapter_may_step_between_a_forward_and_its_backward(dora: bool) -> None:
    """Of an adapter without a token in the forward nothing is kept; autograd goes on refusing steps of those that have one."""
    layer, state = layer_of(low_rank(0, 3, dora, dora), low_rank(1, 5, dora)), GroupState(version_counted=True)
    first, second = (Segment(0, 0, T),), (Segment(1, 0, T),)
    (y,) = lora_group(X, [layer], first, state=state)
    want = gradients(exact(layer, first), layer.adapters[0])
    with torch.no_grad():
        for p in layer.adapters[1].operands().values():
            p.mul_(1.1)
    (other,) = lora_group(X, [layer], second, state=state)
    assert same(gradients(other, layer.adapters[1]), gradients(exact(layer, second), layer.adapters[1]))
    assert same(gradients(y, layer.adapters[0]), want)

    (both,) = lora_group(X, [layer], HALVES, state=state)
    with torch.no_grad():
        layer.adapters[1].A.mul_(1.1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.sum().backward()


def in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.5)


def another_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 1.5


@pytest.mark.parametrize("change", [in_place, another_data])
@pytest.mark.parametrize("what", ["A", "B", "magnitude", "norm", "bias", "base bias"])
def test_every_change_of_an_operand_is_seen(what: str, change: Callable[[torch.Tensor], None]) -> None:
    layer, state = layer_of(low_rank(0, 3, True), low_rank(1, 5, True, True)), GroupState(version_counted=True)
    lora_group(X, [layer], HALVES, state=state)
    for low in layer.adapters.values():
        operand = layer.bias if what == "base bias" else getattr(low, what)
        if operand is not None:
            change(operand)
        (y,) = lora_group(X, [layer], HALVES, state=state)
        assert same([y], [exact(layer, HALVES)])
        assert same(gradients(y, low), gradients(exact(layer, HALVES), low))


def test_what_has_not_changed_is_not_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, state = layer_of(low_rank(0, 3, True), low_rank(1, 5, True, True)), GroupState(version_counted=True)
    lora_group(X, [layer], HALVES, state=state)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    monkeypatch.setattr(LayerScales, "divide", None)
    outputs = [lora_group(X, [layer], HALVES, state=state)[0] for _ in range(2)]
    (outputs[0] + outputs[1]).sum().backward()
    with torch.no_grad():
        layer.adapters[0].operands()["A"].mul_(2)
    with pytest.raises(TypeError, match="NoneType"):
        lora_group(X, [layer], HALVES, state=state)


def test_a_norm_that_lies_where_an_older_one_lay_is_another_norm() -> None:
    norms: list[torch.Tensor] = []
    low = replace(low_rank(0, 3, True), norm=lambda: norms[0])
    layer, run, state = layer_of(low), (Segment(0, 0, T),), GroupState(version_counted=True)
    for value in range(1, 30):
        norms[:] = []  # the next one may get its memory, and be the same object as far as addresses tell
        norms.append(torch.full((N,), float(value), dtype=torch.float64))
        (y,) = lora_group(X, [layer], run, state=state)
        fixed = layer_of(replace(low, norm=norms[0]))
        assert same([y], [exact(fixed, run)]), value


# --- the rule itself -----------------------------------------------------------------------------------------------------


def test_tensors_are_unchanged_while_they_are_the_same_objects_with_the_same_stamps() -> None:
    unchanged, tensors = Unchanged(), [torch.zeros(3), torch.zeros(2)]
    assert not unchanged(tensors)
    assert unchanged(list(tensors))
    for change in (in_place, another_data):
        change(tensors[1])
        assert not unchanged(list(tensors))
        assert unchanged(list(tensors))
    assert not unchanged([tensors[0], tensors[1].detach()])  # another object with the same memory and version
    assert not unchanged([tensors[0]])
    with torch.inference_mode():
        uncounted = [torch.zeros(3)]
    assert not unchanged(uncounted) and not unchanged(uncounted)


@pytest.mark.parametrize("what", ["A", "B", "magnitude", "norm", "bias", "base bias"])
def test_without_counted_versions_writes_that_leave_no_trace_are_seen(what: str) -> None:
    layer, state = layer_of(low_rank(0, 3, True), low_rank(1, 5, True, what == "bias")), GroupState()
    base_bias = torch.zeros(N, dtype=torch.float64) if layer.bias is None or what != "base bias" else layer.bias
    layer = replace(layer, bias=base_bias if what == "base bias" else None)  # one would have all scales made again
    lora_group(X, [layer], HALVES, state=state)
    for low in layer.adapters.values():
        operand = layer.bias if what == "base bias" else getattr(low, what)
        if operand is not None:
            version = operand._version
            operand.data.mul_(1.5)
            assert operand._version == version
        (y,) = lora_group(X, [layer], HALVES, state=state)
        assert same([y], [exact(replace(layer, bias=base_bias), HALVES)])
        assert same(gradients(y, low), gradients(exact(replace(layer, bias=base_bias), HALVES), low))


@pytest.mark.parametrize("counted", [False, True])
def test_what_inference_kept_serves_training_and_the_other_way_round(counted: bool) -> None:
    layer, run, state = layer_of(low_rank(0, 3, True)), (Segment(0, 0, T),), GroupState(counted)
    for _ in range(2):
        with torch.inference_mode():
            assert same(lora_group(X, [layer], run, state=state), [exact(layer, run)])
        (y,) = lora_group(X, [layer], run, state=state)
        low = layer.adapters[0]
        assert same(gradients(y, low), gradients(exact(layer, run), low))
        in_place(low.operands()["A"])


def test_a_node_saves_operands_of_the_adapters_that_own_tokens_alone() -> None:
    layer, state = layer_of(*(low_rank(seed, 2 + seed, True, True) for seed in range(3))), GroupState(True)
    for numbers in ([1], [0, 2]):
        segments = tuple(Segment(number, 4 * at, 4 * at + 4) for at, number in enumerate(numbers))
        (y,) = lora_group(X, [layer], segments, state=state)
        saved = {id(t) for t in y.grad_fn.saved_tensors if t is not None}  # type: ignore[union-attr]
        for number, low in layer.adapters.items():
            assert all((id(t) in saved) == (number in numbers) for t in low.operands().values()), number
