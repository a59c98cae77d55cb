"""ops/lora_linear/traced.py: what torch.compile traces is what reference.py says, with gradients of every operand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from seeds import SEED
from torch._dynamo.backends.common import aot_autograd

from packlora.ops.dropout import dropout as keyed_dropout
from packlora.ops.lora_linear import traced
from packlora.ops.lora_linear.reference import ReferenceSegment, lora_linear
from packlora.ops.lora_linear.traced import TracedLayer, traced_group
from packlora.ops.row_norm.reference import weight_norm

T, K, SIZES, RANKS = 11, 14, (9, 6, 13), (3, 5, 1)


def randn(*shape: int, seed: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=seed, dtype=torch.float64).to(dtype)


def drawn(
    dora: bool, bias: bool, draw: int, alike: bool = False
) -> tuple[torch.Tensor, list[TracedLayer], torch.Tensor]:
    """x, layers and keys in float64; every second layer has DoRA where `dora`. alike: all have one scaling."""
    seed = torch.Generator().manual_seed(SEED + draw)
    layers = []
    for index, (N, r) in enumerate(zip(SIZES, RANKS, strict=True)):
        W, A, B = randn(N, K, seed=seed), randn(r, K, seed=seed) / K**0.5, randn(N, r, seed=seed) / 4
        magnitude = norm = None
        scaling = 0.7 if alike else 0.7 + index
        if dora and index != 1:
            norm = weight_norm(W, A, B, scaling)
            magnitude = norm * (1 + 0.1 * randn(N, seed=seed))
        layers.append(TracedLayer(W, randn(N, seed=seed) if bias else None, A, B, scaling, magnitude, norm))
    keys = torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32, generator=seed)
    return randn(T, K, seed=seed), layers, keys


def leaves_of(x: torch.Tensor, layers: list[TracedLayer]) -> dict[str, torch.Tensor]:
    named = {"x": x}
    for index, layer in enumerate(layers):
        for name in ("A", "B", "magnitude", "bias"):
            if (operand := getattr(layer, name)) is not None:
                named[f"{name}{index}"] = operand
    return named


def copied(x: torch.Tensor, layers: list[TracedLayer], dtype: torch.dtype) -> tuple[torch.Tensor, list[TracedLayer]]:
    """The same values as leaves: x, weights, A and B in a dtype; magnitudes and norms no narrower than float32."""
    wide = torch.promote_types(dtype, torch.float32)

    def leaf(t: torch.Tensor | None, dtype: torch.dtype, grad: bool = True) -> torch.Tensor | None:
        return None if t is None else t.detach().to(dtype, copy=True).requires_grad_(grad)

    own = [
        TracedLayer(
            leaf(one.weight, dtype, False), leaf(one.bias, dtype), leaf(one.A, dtype), leaf(one.B, dtype), one.scaling,
            leaf(one.magnitude, wide), leaf(one.norm, wide, False),
        )  # type: ignore[arg-type]
        for one in layers
    ]  # fmt: skip
    return leaf(x, dtype), own  # type: ignore[return-value]


def run(x: torch.Tensor, layers: list[TracedLayer], outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs and the gradients of all leaves."""
    named = leaves_of(x, layers)
    generator = torch.Generator().manual_seed(7)
    d = [randn(*y.shape, seed=generator, dtype=y.dtype) for y in outputs]
    grads = torch.autograd.grad(outputs, list(named.values()), d)
    return {**{f"y{n}": y.detach() for n, y in enumerate(outputs)}, **dict(zip(named, grads, strict=True))}


def reference(x: torch.Tensor, layers: list[TracedLayer], keys: torch.Tensor, p: float) -> dict[str, torch.Tensor]:
    outputs = []
    for one in layers:
        segment = ReferenceSegment(0, len(x), one.scaling, p, one.A, one.B, one.magnitude, one.norm)
        outputs.append(lora_linear(x, one.weight, one.bias, [segment], keys, 5))
    return run(x, layers, outputs)


@pytest.mark.parametrize("members", ["siblings", "alike", "one"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_siblings_and_their_gradients_are_the_reference_s(dora: bool, p: float, bias: bool, members: str) -> None:
    x, layers, keys = drawn(dora, bias, 0, members == "alike")
    layers = layers[:1] if members == "one" else layers
    want = reference(*copied(x, layers, torch.float64), keys, p)
    own_x, own = copied(x, layers, torch.float64)
    with mock.patch.object(traced, "dropout", lambda x, p: keyed_dropout(x, keys, 5, p)):
        got = run(own_x, own, traced_group(own_x, own, p))
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert torch.allclose(got[name], one, rtol=1e-11, atol=1e-11), name


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_traced_without_a_graph_break_they_are_the_same(dora: bool, p: float) -> None:
    x, layers, _ = drawn(dora, True, 1)
    torch._dynamo.reset()
    compiled = torch.compile(traced_group, backend="aot_eager", fullgraph=True)
    own_x, own = copied(x, layers, torch.float64)
    results = []
    for group in (compiled, traced_group):
        torch.manual_seed(SEED)
        results.append(run(own_x, own, group(own_x, own, p)))
    for name, one in results[1].items():
        assert torch.allclose(results[0][name], one, rtol=1e-12, atol=1e-12), name


def test_other_seeds_drop_other_elements_and_all_siblings_drop_the_same() -> None:
    x, _, _ = drawn(False, False, 2)
    eye = TracedLayer(
        torch.zeros(K, K, dtype=x.dtype), None, torch.eye(K, dtype=x.dtype), torch.eye(K, dtype=x.dtype), 1.0
    )
    torch.manual_seed(SEED)
    one, other = traced_group(x, [eye, eye], 0.5)
    assert torch.equal(one, other)
    assert 0 < int((one == 0).sum()) < one.numel()
    assert torch.allclose(one[one != 0], (2 * x)[one != 0], rtol=1e-12)
    assert not torch.equal(one, traced_group(x, [eye], 0.5)[0])
    torch.manual_seed(SEED)
    assert torch.equal(one, traced_group(x, [eye], 0.5)[0])


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_group_has_one_dropout_that_a_compiler_knows(dora: bool) -> None:
    """One operation of torch's for all siblings: what it cannot fuse, it would write to memory and read again."""
    x, layers, _ = drawn(dora, False, 4)
    counts: list[Counter[str]] = []

    def counting(graph: torch.fx.GraphModule, example: Any) -> Any:
        counts.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(traced_group, backend=aot_autograd(fw_compiler=counting), fullgraph=True)(x, layers, 0.3)
    (count,) = counts
    assert sum(number for name, number in count.items() if "dropout" in name or "rand" in name) == 1, count
    assert not {name for name in count if "bitwise" in name or ("dtype" in name and "view" in name)}, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(K,), (2, 3, K)], ids=["one token", "samples"])
def test_an_input_of_any_shape_gives_the_numbers_of_its_tokens(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, layers, _ = drawn(True, True, 3)
    x, layers = copied(x[: math.prod(shape[:-1])], layers, dtype)
    rows = traced_group(x, layers)
    for y, row in zip(traced_group(x.reshape(shape), layers), rows, strict=True):
        assert y.shape == (*shape[:-1], row.shape[-1])
        assert torch.allclose(y.reshape(row.shape), row, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
