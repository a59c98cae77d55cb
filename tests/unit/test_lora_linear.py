"""The operator against the specification in float64: outputs and the gradient of every input, with fresh random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_as_exact
from group_cases import by_group
from seeds import SEED

from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.reference import ReferenceSegment
from packlora.ops.row_norm.reference import weight_norm

OPERANDS = ("A", "B", "magnitude", "bias")


def case(T: int, K: int, N: int, kinds: Sequence[dict[str, Any]], with_bias: bool, seed: int) -> dict[str, Any]:
    """Random operands in float64: ragged segments with gaps between some of them; B and m far from their initial values."""
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    weight = randn(N, K) / K**0.5
    cuts = np.sort(rng.choice(np.arange(1, T), size=2 * len(kinds) - 1, replace=False)).tolist() if kinds else []
    bounds = [0, *cuts, T]
    segments = []
    for index, kind in enumerate(kinds):
        start, stop = bounds[2 * index], bounds[2 * index + 1]
        rank = kind.get("rank", 4)
        seg = ReferenceSegment(start, stop, kind.get("scaling", 1.7), kind.get("dropout", 0.0))
        if rank:
            A, B = randn(rank, K) / K**0.5, randn(N, rank) / rank**0.5
            seg = dataclasses.replace(seg, A=A, B=B)
            if kind.get("dora"):
                norm = weight_norm(weight, A, B, seg.scaling)
                seg = dataclasses.replace(seg, norm=norm, magnitude=norm * (1 + 0.3 * randn(N)))
        if kind.get("bias"):
            seg = dataclasses.replace(seg, bias=randn(N))
        segments.append(seg)
    keys = torch.from_numpy(np.concatenate([token_keys(seed, 3, n, 5) for n in range(-(-T // 5))])[:T].copy())
    return {
        "x": randn(T, K), "weight": weight, "bias": randn(N) if with_bias else None, "segments": segments, "keys": keys,
        "dy": randn(T, N), "salt": int(rng.integers(2**32)),
    }  # fmt: skip


def run(
    function: Any, c: dict[str, Any], dtype: torch.dtype, operand_dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Outputs and gradients by name, in float64. Operands are rounded to the dtype first."""
    x = c["x"].to(dtype, copy=True).requires_grad_()
    segments, leaves = [], {"x": x}
    for index, seg in enumerate(c["segments"]):
        new = {}
        for name in OPERANDS:
            if (value := getattr(seg, name)) is not None:
                new[name] = value.to(operand_dtype or dtype, copy=True).requires_grad_()
                leaves[f"{index}.{name}"] = new[name]
        norm = None if seg.norm is None else seg.norm.to(operand_dtype or dtype)
        segments.append(dataclasses.replace(seg, norm=norm, **new))
    bias = None if c["bias"] is None else c["bias"].to(dtype)
    y = function(x, c["weight"].to(dtype), bias, segments, c["keys"], c["salt"])
    grads = torch.autograd.grad(y, list(leaves.values()), c["dy"].to(dtype))
    return {"y": y.detach().double()} | {f"d{k}": v.double() for k, v in zip(leaves, grads, strict=True)}


LORA, DROP = {"rank": 4}, {"rank": 5, "dropout": 0.3}
DORA, DORA_DROP = {"rank": 3, "dora": True}, {"rank": 7, "dora": True, "dropout": 0.25}
BIAS, BIAS_ONLY = {"rank": 2, "bias": True, "scaling": 0.5}, {"rank": 0, "bias": True}
CASES = {
    "lora": [LORA], "dropout": [DROP], "dora": [DORA], "dora with dropout": [DORA_DROP], "bias": [BIAS],
    "bias only": [BIAS_ONLY], "rank 1": [{"rank": 1}], "rank over K": [{"rank": 96}], "rank 24": [{"rank": 24}],
    "no segments": [], "all kinds in one batch": [LORA, DORA_DROP, BIAS_ONLY, DROP, DORA, BIAS],
    "dora and lora": [DORA, LORA], "dora with bias": [{**DORA, "bias": True}, {**DORA_DROP, "bias": True}],
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", CASES.values(), ids=CASES.keys())
def test_products_is_as_exact_as_plain_torch_in_the_same_dtype(kinds: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """All three see inputs rounded to the dtype."""

    def draw(trial: int) -> tuple[dict[str, Any], ...]:
        c = rounded(case(160, 96, 120, kinds, True, SEED + trial), dtype)
        want = run(reference.lora_linear, c, torch.float64)
        return run(by_group, c, dtype), run(reference.lora_linear, c, dtype), want

    assert_as_exact(draw, 10, SEED)


def rounded(c: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The case with its numbers rounded to the dtype, in float64 again."""

    def to(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).double()

    segments = [
        dataclasses.replace(seg, **{n: to(v) for n in (*OPERANDS, "norm") if (v := getattr(seg, n)) is not None})
        for seg in c["segments"]
    ]
    return {k: to(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in c.items()} | {
        "segments": segments
    }


def test_a_row_of_zeros_in_dora_gives_the_bias_and_never_nan() -> None:
    c = case(20, 16, 12, [DORA], True, SEED)
    seg = c["segments"][0]
    weight, B = c["weight"].clone(), seg.B.clone()
    weight[3], B[3] = 0, 0
    norm = weight_norm(weight, seg.A, B, seg.scaling)
    seg = dataclasses.replace(seg, B=B, norm=norm, magnitude=norm.clone())
    y = by_group(c["x"], weight, c["bias"], [seg], c["keys"], 0)
    assert torch.equal(y[seg.start : seg.stop, 3], c["bias"][3].expand(seg.stop - seg.start))
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.zeros(4, 31)}, "A of .* must be"), ({"B": torch.zeros(29, 5)}, "B of .* must be"),
        ({"stop": 99}, "leaves"),
        ({"start": 5, "stop": 5}, "empty"), ({"bias": torch.zeros(3)}, "bias of .* must be"), ({"B": None}, "come together"),
        ({"magnitude": torch.zeros(29)}, "needs A, B and the norm"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    seg = dataclasses.replace(ReferenceSegment(0, 5, 1.0, 0.0, torch.zeros(4, 33), torch.zeros(29, 4)), **change)
    with pytest.raises(ValueError, match=message):
        by_group(torch.zeros(20, 33), torch.zeros(29, 33), None, [seg])


def test_overlapping_segments_and_missing_dropout_keys_are_refused() -> None:
    x, W, A, B = torch.zeros(20, 33), torch.zeros(29, 33), torch.zeros(4, 33), torch.zeros(29, 4)
    with pytest.raises(ValueError, match="overlaps"):
        by_group(x, W, None, [ReferenceSegment(0, 6, 1, 0, A, B), ReferenceSegment(5, 9, 1, 0, A, B)])
    with pytest.raises(ValueError, match="dropout needs keys"):
        by_group(x, W, None, [ReferenceSegment(0, 6, 1, 0.1, A, B)])
