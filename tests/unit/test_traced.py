"""ops/lora_linear/traced.py: what torch.compile traces is what reference.py says, with gradients of every operand."""

from __future__ import annotations

import pytest
import torch
from exactness import assert_as_exact
from seeds import SEED

from packlora.ops.lora_linear.reference import ReferenceSegment, lora_linear
from packlora.ops.lora_linear.traced import TracedLayer, traced_group
from packlora.ops.row_norm.reference import weight_norm

T, K, SIZES, RANKS = 11, 14, (9, 6, 13), (3, 5, 1)


def randn(*shape: int, seed: torch.Generator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=seed, dtype=torch.float64).to(dtype)


def drawn(dora: bool, bias: bool, draw: int) -> tuple[torch.Tensor, list[TracedLayer], torch.Tensor]:
    """x, layers and keys in float64; every second layer has DoRA where `dora`."""
    seed = torch.Generator().manual_seed(SEED + draw)
    layers = []
    for index, (N, r) in enumerate(zip(SIZES, RANKS, strict=True)):
        W, A, B = randn(N, K, seed=seed), randn(r, K, seed=seed) / K**0.5, randn(N, r, seed=seed) / 4
        magnitude = norm = None
        if dora and index != 1:
            norm = weight_norm(W, A, B, 0.7 + index)
            magnitude = norm * (1 + 0.1 * randn(N, seed=seed))
        layers.append(TracedLayer(W, randn(N, seed=seed) if bias else None, A, B, 0.7 + index, magnitude, norm))
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


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_siblings_and_their_gradients_are_the_reference_s(dora: bool, p: float, bias: bool) -> None:
    x, layers, keys = drawn(dora, bias, 0)
    want = reference(*copied(x, layers, torch.float64), keys, p)
    own_x, own = copied(x, layers, torch.float64)
    got = run(own_x, own, traced_group(own_x, own, keys, 5, p))
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert torch.allclose(got[name], one, rtol=1e-11, atol=1e-11), name


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_traced_without_a_graph_break_they_are_the_same(dora: bool, p: float) -> None:
    x, layers, keys = drawn(dora, True, 1)
    torch._dynamo.reset()
    compiled = torch.compile(traced_group, backend="aot_eager", fullgraph=True)
    own_x, own = copied(x, layers, torch.float64)
    got = run(own_x, own, compiled(own_x, own, keys, 5, p))
    for name, one in run(own_x, own, traced_group(own_x, own, keys, 5, p)).items():
        assert torch.allclose(got[name], one, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_they_are_as_exact_as_torch_in_the_same_dtype(dora: bool, dtype: torch.dtype) -> None:
    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        x, layers, keys = drawn(dora, True, number)
        x, layers = copied(*copied(x, layers, dtype), torch.float64)  # what the narrow operands say
        exact = reference(x, layers, keys, 0.0)
        theirs = reference(*copied(x, layers, dtype), keys, 0.0)
        own_x, own = copied(x, layers, dtype)
        return run(own_x, own, traced_group(own_x, own)), theirs, exact

    assert_as_exact(draw, 12, SEED, lambda name: name.rstrip("0123456789"))


def test_other_keys_drop_other_elements_and_all_siblings_drop_the_same() -> None:
    x, _, keys = drawn(False, False, 2)
    eye = TracedLayer(
        torch.zeros(K, K, dtype=x.dtype), None, torch.eye(K, dtype=x.dtype), torch.eye(K, dtype=x.dtype), 1.0
    )
    one, other = traced_group(x, [eye, eye], keys, 5, 0.5)
    assert torch.equal(one, other)
    assert 0 < int((one == 0).sum()) < one.numel()
    assert torch.allclose(one[one != 0], (2 * x)[one != 0], rtol=1e-4)
    assert not torch.equal(one, traced_group(x, [eye], keys.flip(0), 5, 0.5)[0])
