"""Random groups of layers with adapters, run by the operator and by the specification. Used on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from exactness import assert_as_exact

from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.reference import ReferenceSegment
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.row_norm.reference import weight_norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of norms, whatever the dtype of the rest."""
    return dtype if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class GroupCase:
    """Operands in float64, rounded to a narrower dtype where one was asked for. dy: upstream gradient of each layer."""

    x: torch.Tensor
    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    keys: torch.Tensor
    salt: int
    dy: list[torch.Tensor]


KINDS: dict[str, dict[str, Any]] = {
    "one adapter": {"ranks": [[4]], "dropouts": [0.0]},
    "dropout": {"ranks": [[5]], "dropouts": [0.3]},
    "rank 1": {"ranks": [[1]], "dropouts": [0.1]},
    "rank 24": {"ranks": [[24]], "dropouts": [0.0]},
    "rank over K": {"ranks": [[96]], "dropouts": [0.5]},
    "siblings": {"ranks": [[4, 3, 7]], "dropouts": [0.2]},
    "four adapters": {"ranks": [[8], [16], [3], [33]], "dropouts": [0.0, 0.05, 0.1, 0.5]},
    "six adapters, siblings, some absent": {
        "ranks": [[8, 0, 2], [0, 0, 5], [1, 2, 3], [0, 0, 0], [17, 1, 0], [4, 4, 4]],
        "dropouts": [0.0, 0.3, 0.1, 0.2, 0.4, 0.0],
    },
    "an adapter on none": {"ranks": [[0], [4]], "dropouts": [0.1, 0.1]},
    "no adapters": {"ranks": [], "dropouts": []},
    "all tokens": {"ranks": [[5]], "dropouts": [0.0], "whole": 0},
    "all tokens, dropout, siblings, beside idle adapters": {
        "ranks": [[7, 2, 16], [4, 1, 40], [3, 0, 50]], "dropouts": [0.1, 0.25, 0.0], "whole": 1,
    },
    "all tokens, DoRA": {"ranks": [[3], [20]], "dropouts": [0.2, 0.2], "dora": [True, True], "base_dropped": False, "whole": 1},
    "DoRA": {"ranks": [[5]], "dropouts": [0.0], "dora": [True]},
    "DoRA, rank 40": {"ranks": [[40]], "dropouts": [0.0], "dora": [True]},
    "DoRA, dropout on the low-rank branch": {"ranks": [[5, 7]], "dropouts": [0.3], "dora": [True], "base_dropped": False},
    "DoRA, dropout": {"ranks": [[5, 7]], "dropouts": [0.3], "dora": [True]},
    "all tokens, DoRA, dropout, siblings": {"ranks": [[5, 7, 3]], "dropouts": [0.3], "dora": [True], "whole": 0},
    "DoRA with a trained bias": {"ranks": [[6]], "dropouts": [0.0], "dora": [True], "biases": [True]},
    "trained bias": {"ranks": [[3]], "dropouts": [0.2], "biases": [True]},
    "bias alone": {"ranks": [[0], [4]], "dropouts": [0.0, 0.0], "biases": [True, False]},
    "DoRA and LoRA, siblings, some absent, biases": {
        "ranks": [[8, 0, 2], [1, 20, 3], [0, 0, 0], [17, 1, 0]], "dropouts": [0.0, 0.0, 0.2, 0.4],
        "dora": [True, False, False, False], "biases": [False, True, False, True],
    },
    "DoRA with dropout and LoRA": {
        "ranks": [[8, 1], [4, 20]], "dropouts": [0.25, 0.1], "dora": [True, False], "biases": [True, False],
    },
}  # fmt: skip
"""Groups by what is in them: arguments of make_case."""


def make_case(
    T: int, K: int, sizes: Sequence[int], ranks: Sequence[Sequence[int]], dropouts: Sequence[float], with_bias: bool,
    seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu", dora: Sequence[bool] = (), biases: Sequence[bool] = (),
    base_dropped: bool = True, keep_output: bool = False, whole: int | None = None,
) -> GroupCase:  # fmt: skip
    """ranks: per adapter, per layer (0: absent). Adapters own ragged segments in a random order, with gaps between some.

    dora, biases: per adapter, whether it has a magnitude and whether it trains the bias (where it has no rank as well).
    whole: the adapter that has all tokens, where one has.
    """
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double().to(device)

    def scaled(*shape: int) -> torch.Tensor:
        return (randn(*shape) / shape[-1] ** 0.5).to(dtype).double()

    n = len(ranks)
    cuts = [0, *np.sort(rng.choice(np.arange(1, T), size=2 * n - 1, replace=False)).tolist(), T] if n else []
    segments = tuple(
        Segment(int(adapter), cuts[2 * i], cuts[2 * i + 1], dropouts[adapter], base_dropped)
        for i, adapter in enumerate(rng.permutation(n))
    )
    if whole is not None:
        segments = (Segment(whole, 0, T, dropouts[whole], base_dropped),)
    layers = []
    for index, N in enumerate(sizes):
        weight, adapters = scaled(N, K), {}
        for a, own in enumerate(ranks):
            magnitude = norm = A = B = None
            scaling = float(rng.uniform(0.3, 2.0))
            bias = randn(N) if biases and biases[a] else None
            if own[index]:
                A, B = scaled(own[index], K), scaled(N, own[index])
                if dora and dora[a]:
                    norm = weight_norm(weight, A, B, scaling).to(_wide(dtype)).double()
                    magnitude = (norm * (1 + 0.3 * randn(N))).to(dtype).double()
            if A is not None or bias is not None:
                adapters[a] = LowRank(A, B, scaling, magnitude, norm, bias)
        layers.append(Layer(Dense(weight), randn(N) if with_bias else None, adapters, keep_output))
    keys = torch.from_numpy(np.concatenate([token_keys(seed, 3, s, 5) for s in range(-(-T // 5))])[:T].copy()).to(
        device
    )
    return GroupCase(randn(T, K), tuple(layers), segments, keys, int(rng.integers(2**32)), [randn(T, N) for N in sizes])


def cast(
    case: GroupCase, dtype: torch.dtype, operands: torch.dtype | None = None
) -> tuple[GroupCase, dict[str, torch.Tensor]]:
    """The case in a dtype, and the leaves by name. operands: dtype of A and B where it is another."""
    leaves = {"x": case.x.to(dtype, copy=True).requires_grad_()}
    layers = []
    for index, layer in enumerate(case.layers):
        adapters = {}
        for a, low in layer.adapters.items():
            own = {name: t.to(operands or dtype, copy=True).requires_grad_() for name, t in low.operands().items()}
            leaves |= {f"{name}{a}.{index}": t for name, t in own.items()}
            norm = low.norm.to(_wide(dtype)) if isinstance(low.norm, torch.Tensor) else None
            adapters[a] = replace(low, **{name: own.get(name) for name in ("A", "B", "magnitude", "bias")}, norm=norm)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        layers.append(replace(layer, frozen=Dense(layer.frozen.dense().to(dtype)), bias=bias, adapters=adapters))
    return replace(case, x=leaves["x"], layers=tuple(layers), dy=[d.to(dtype) for d in case.dy]), leaves


def _results(
    outputs: Sequence[torch.Tensor], leaves: dict[str, torch.Tensor], dy: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(outputs, list(leaves.values()), dy, allow_unused=True)
    named = {f"y{index}": y.detach().double() for index, y in enumerate(outputs)}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        named[f"d{name}"] = (torch.zeros_like(leaf) if grad is None else grad).double()
    return named


def renumbered(case: GroupCase) -> GroupCase:
    """The case as it is, or with adapters of large numbers in the same order or the reverse one, as where many have left."""
    number: Callable[[int], int] = (lambda a: a, lambda a: 5 + 7 * a, lambda a: 900 - 11 * a)[case.salt % 3]
    layers = [replace(own, adapters={number(a): low for a, low in own.adapters.items()}) for own in case.layers]
    segments = [replace(segment, adapter=number(segment.adapter)) for segment in case.segments]
    return replace(case, layers=tuple(layers), segments=tuple(segments))


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
    own = renumbered(own)
    with poisoned() if poison else mock.MagicMock():
        outputs = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, plan, **kwargs)
        return _results(outputs, leaves, own.dy)


def run_moving(case: GroupCase, dtype: torch.dtype, plan: Plan, poison: bool = False) -> dict[str, torch.Tensor]:
    """The same by a call whose segments are on the device: it has run for others before."""
    own, leaves = cast(case, dtype)
    own = renumbered(own)
    T, of = len(own.x), {segment.adapter: segment for segment in own.segments}
    moving = MovingSegments(T, [*sorted(of), max(of) + 1])  # the last one is on none of the layers
    nominal = [
        replace(of.get(number, own.segments[0]), adapter=number, start=start, stop=stop)
        for number, start, stop in moving.nominal
    ]
    state = GroupState(version_counted=True)
    with poisoned() if poison else mock.MagicMock():
        for boundaries in ([(number, at, at + 1) for at, number in enumerate(of)], own.segments):
            moving.write([(s.adapter, s.start, s.stop) if isinstance(s, Segment) else s for s in boundaries])
            outputs = lora_group(own.x, own.layers, nominal, own.keys, own.salt, plan, state, boundaries=moving)
            found = _results(outputs, leaves, own.dy)
    return found


def run_reference(case: GroupCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same by reference.py, layer by layer."""
    own, leaves = cast(case, dtype)
    outputs = []
    for layer in own.layers:
        segments = [
            ReferenceSegment(
                segment.start, segment.stop, low.scaling, segment.dropout, low.A, low.B, low.magnitude, low.norm, low.bias,
                segment.base_dropped,
            )
            for segment in own.segments
            if (low := layer.adapters.get(segment.adapter)) is not None
        ]  # fmt: skip
        outputs.append(reference.lora_linear(own.x, layer.frozen.dense(), layer.bias, segments, own.keys, own.salt))
    return _results(outputs, leaves, own.dy)


def by_group(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, segments: Sequence[ReferenceSegment],
    keys: torch.Tensor | None = None, salt: int = 0,
) -> torch.Tensor:  # fmt: skip
    """reference.lora_linear by the operator: every segment is an adapter of its own."""
    adapters = {
        n: LowRank(seg.A, seg.B, seg.scaling, seg.magnitude, seg.norm, seg.bias) for n, seg in enumerate(segments)
    }
    owned = [Segment(n, seg.start, seg.stop, seg.dropout, seg.base_dropped) for n, seg in enumerate(segments)]
    return lora_group(x, [Layer(Dense(weight), bias, adapters)], owned, keys, salt, CHAIN)[0]


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


def group_is_as_exact(
    case: Callable[[int], GroupCase], draws: int, dtype: torch.dtype, plan: Plan, seed: int,
    run: Callable[..., dict[str, torch.Tensor]] = run_group,
) -> None:  # fmt: skip
    """Errors by kind of result (y, dx, dA, dB), over adapters and layers; with poisoned buffers."""

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        own = case(number)
        got = run(own, dtype, plan, poison=True)
        return got, run_reference(own, dtype), run_reference(own, torch.float64)

    assert_as_exact(draw, draws, seed, lambda name: name.rstrip("0123456789."))


def share_of_small(
    dtype: torch.dtype, plan: Plan, device: str = "cpu", dora: bool = False, seed: int = 0, bias: float = 0.0
) -> dict[str, float]:
    """How much of a low-rank part that is a tenth of the last bit of the rest reaches y and dx, on average: 1 where nothing of
    it is lost but by chance (projection of what is there beyond the float64 rest onto the float64 part)."""
    case = make_case(600, 64, [96], [[16]], [0.0], bool(bias), seed, dtype, device, dora=[dora], base_dropped=False)
    (layer,) = case.layers
    if layer.bias is not None:
        layer = replace(layer, bias=(layer.bias * bias).to(dtype).double())
    low = layer.adapters[0]
    assert low.B is not None

    def with_B(factor: float) -> GroupCase:
        own = replace(layer, adapters={0: replace(low, B=low.B * factor)})
        return replace(case, segments=(Segment(0, 0, 600),), layers=(own,))

    rest, full = (run_reference(with_B(factor), torch.float64) for factor in (0.0, 1.0))
    factor = 0.1 * torch.finfo(dtype).eps * float(rest["y0"].norm() / (full["y0"] - rest["y0"]).norm())
    got, want = run_group(with_B(factor), dtype, plan), run_reference(with_B(factor), torch.float64)
    out = {}
    for name in ("y0", "dx"):
        part = want[name] - rest[name]
        out[name] = float(((got[name] - rest[name]) * part).sum() / part.square().sum())
    return out


def others_keep_their_bits(
    case: GroupCase, dtype: torch.dtype, bad: int, factor: str, value: float, plan: Plan
) -> None:
    """A or B of one adapter holds a value that is not finite: its own tokens are not finite, those of others what they were."""
    (own, _), (segment,) = cast(case, dtype), [segment for segment in case.segments if segment.adapter == bad]
    spoilt = []
    for layer in own.layers:
        operand = layer.adapters[bad].operands()[factor].detach().clone()
        operand[1, 2] = value
        low = replace(layer.adapters[bad], **{factor: operand.requires_grad_()})
        spoilt.append(replace(layer, adapters={**layer.adapters, bad: low}))

    def results(layers: Sequence[Layer]) -> list[torch.Tensor]:
        x = own.x.detach().clone().requires_grad_()
        outputs = lora_group(x, layers, own.segments, own.keys, own.salt, plan)
        return [*outputs, *torch.autograd.grad(outputs, [x], own.dy)]

    others = torch.ones(len(own.x), dtype=torch.bool, device=own.x.device)
    others[segment.rows] = False
    for got, want in zip(results(spoilt), results(own.layers), strict=True):
        assert not got[segment.rows].isfinite().all()
        assert torch.equal(got[others], want[others])


def outcome(case: GroupCase, plan: Plan) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name. Leaves are those of the dense case with its operands."""
    named = {"x": case.x.clone().requires_grad_()}
    layers: list[Layer] = []
    for index, layer in enumerate(case.layers):
        adapters = {}
        for number, low in layer.adapters.items():
            own = {name: t.clone().requires_grad_() for name, t in low.operands().items()}
            named |= {f"{name}{number}.{index}": t for name, t in own.items()}
            adapters[number] = replace(low, **own)
        layers.append(replace(layer, adapters=adapters))
    outputs = lora_group(named["x"], layers, case.segments, case.keys, case.salt, plan)
    grads = torch.autograd.grad(outputs, list(named.values()), case.dy, allow_unused=True)
    found = {f"y{index}": y.detach() for index, y in enumerate(outputs)}
    for (name, leaf), grad in zip(named.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found
