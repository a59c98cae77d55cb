"""Random groups of layers with adapters, run by the operator and by the specification. Used on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from packlora.ops.dropout import token_keys
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.group import Layer, LowRank, Run, lora_group
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.reference import Segment


@dataclass(frozen=True)
class GroupCase:
    """Operands in float64, rounded to a narrower dtype where one was asked for. dy: upstream gradient of each layer."""

    x: torch.Tensor
    layers: tuple[Layer, ...]
    runs: tuple[Run, ...]
    keys: torch.Tensor
    salt: int
    dy: list[torch.Tensor]


def make_case(
    T: int, K: int, sizes: Sequence[int], ranks: Sequence[Sequence[int]], dropouts: Sequence[float], with_bias: bool,
    seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu",
) -> GroupCase:  # fmt: skip
    """ranks: per adapter, per layer (0: absent). Adapters own ragged runs in a random order, with gaps between some."""
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double().to(device)

    def scaled(*shape: int) -> torch.Tensor:
        return (randn(*shape) / shape[-1] ** 0.5).to(dtype).double()

    n = len(ranks)
    cuts = [0, *np.sort(rng.choice(np.arange(1, T), size=2 * n - 1, replace=False)).tolist(), T] if n else []
    runs = tuple(
        Run(int(adapter), cuts[2 * i], cuts[2 * i + 1], dropouts[adapter])
        for i, adapter in enumerate(rng.permutation(n))
    )
    layers = []
    for index, N in enumerate(sizes):
        adapters = {
            a: LowRank(scaled(own[index], K), scaled(N, own[index]), float(rng.uniform(0.3, 2.0)))
            for a, own in enumerate(ranks)
            if own[index]
        }
        layers.append(Layer(scaled(N, K), randn(N) if with_bias else None, adapters))
    keys = torch.from_numpy(np.concatenate([token_keys(seed, 3, s, 5) for s in range(-(-T // 5))])[:T].copy()).to(
        device
    )
    return GroupCase(randn(T, K), tuple(layers), runs, keys, int(rng.integers(2**32)), [randn(T, N) for N in sizes])


def cast(
    case: GroupCase, dtype: torch.dtype, operands: torch.dtype | None = None
) -> tuple[GroupCase, dict[str, torch.Tensor]]:
    """The case in a dtype, and the leaves by name. operands: dtype of A and B where it is another."""
    leaves = {"x": case.x.to(dtype, copy=True).requires_grad_()}
    layers = []
    for index, layer in enumerate(case.layers):
        adapters = {}
        for a, low in layer.adapters.items():
            A, B = (t.to(operands or dtype, copy=True).requires_grad_() for t in (low.A, low.B))
            leaves |= {f"A{a}.{index}": A, f"B{a}.{index}": B}
            adapters[a] = LowRank(A, B, low.scaling)
        layers.append(Layer(layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype), adapters))
    return replace(case, x=leaves["x"], layers=tuple(layers), dy=[d.to(dtype) for d in case.dy]), leaves


def _results(
    outputs: Sequence[torch.Tensor], leaves: dict[str, torch.Tensor], dy: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(outputs, list(leaves.values()), dy, allow_unused=True)
    named = {f"y{index}": y.detach().double() for index, y in enumerate(outputs)}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        named[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).double()
    return named


def run_group(
    case: GroupCase,
    dtype: torch.dtype,
    plan: Plan,
    operands: torch.dtype | None = None,
    poison: bool = False,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name in float64. poison: every buffer is NaN before it is written."""
    own, leaves = cast(case, dtype, operands)
    with poisoned() if poison else mock.MagicMock():
        outputs = lora_group(own.x, own.layers, own.runs, own.keys, own.salt, plan, **kwargs)
        return _results(outputs, leaves, own.dy)


def run_reference(case: GroupCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same by reference.py, layer by layer."""
    own, leaves = cast(case, dtype)
    outputs = []
    for layer in own.layers:
        segments = [
            Segment(run.start, run.stop, low.scaling, run.dropout, low.A, low.B)
            for run in own.runs
            if (low := layer.adapters.get(run.adapter)) is not None
        ]
        outputs.append(reference.lora_linear(own.x, layer.weight, layer.bias, segments, own.keys, own.salt))
    return _results(outputs, leaves, own.dy)


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel does not write shows."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    with mock.patch.object(torch, "empty", nan):
        yield


def compare(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def largest_errors(errors: dict[str, float], got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """By kind of result (y, dx, dA, dB), over adapters and layers. NaN counts as infinite."""
    for full, value in want.items():
        name = full.rstrip("0123456789.")
        error = float((got[full] - value).abs().max().nan_to_num(nan=float("inf")))
        errors[name] = max(errors.get(name, 0.0), error)
