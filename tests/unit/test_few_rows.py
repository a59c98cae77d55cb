"""The forward of few tokens without gradients, in Triton's interpreter: as exact as torch, whoever owns the tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from exactness import assert_as_exact
from few_row_cases import CASES, by_few_rows, drawn, outputs
from group_cases import GroupCase, cast, make_case
from seeds import SEED

from packlora.ops import gpu, launcher
from packlora.ops.lora_linear import few_rows
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.kernels import config
from packlora.ops.lora_linear.plan import PLANS
from packlora.ops.lora_linear.types import Segment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """The kernels run on a CPU too."""
    with mock.patch.object(few_rows, "_runs", return_value=True):
        yield


def by_chain(own: GroupCase) -> dict[str, torch.Tensor]:
    with mock.patch.object(few_rows, "_runs", return_value=False):
        return outputs(own)


@pytest.mark.parametrize(("kind", "moves"), [(kind, moves) for kind, all_ in CASES.items() for moves in all_])
def test_outputs_are_as_exact_as_torchs(kind: str, moves: bool) -> None:
    def draw(trial: int) -> Any:
        case = drawn(kind, trial, K=600 if trial % 3 == 2 else 72)
        own, exact = cast(case, torch.float16)[0], cast(case, torch.float64)[0]
        return by_few_rows(own, moves), by_chain(own), by_chain(exact)

    assert_as_exact(draw, draws=3, seed=SEED, name=lambda name: "y")


def test_a_small_low_rank_part_is_not_lost_beside_the_base_product() -> None:
    """A tenth of the last bit of the base product reaches the output on average, as it does by the chain."""
    case = make_case(64, 64, [96], [[16]], [0.0], False, SEED, torch.float16)
    (layer,) = case.layers
    low = layer.adapters[0]
    assert low.B is not None

    def exact(factor: float) -> GroupCase:
        own = replace(layer, adapters={0: replace(low, B=low.B * factor)})  # type: ignore[operator]
        return replace(case, segments=(Segment(0, 0, 64),), layers=(own,))

    rest, full = (by_chain(exact(factor))["y0"] for factor in (0.0, 1.0))
    factor = 0.1 * torch.finfo(torch.float16).eps * float(rest.norm() / (full - rest).norm())
    part, got = by_chain(exact(factor))["y0"] - rest, by_few_rows(cast(exact(factor), torch.float16)[0], False)["y0"]
    assert float(((got - rest) * part).sum() / part.square().sum()) == pytest.approx(1, abs=0.5)


def test_a_spoilt_adapter_reaches_its_own_tokens_alone() -> None:
    own, _ = cast(drawn("four adapters", 0), torch.float16)
    want = by_few_rows(own, False)["y0"]
    with torch.no_grad():
        own.layers[0].adapters[1].B[3] = torch.nan  # type: ignore[index]
    got = by_few_rows(own, False)["y0"]
    spoilt = torch.zeros(len(own.x), dtype=torch.bool)
    for segment in own.segments:
        spoilt[segment.rows] |= segment.adapter == 1
    assert got[spoilt, 3].isnan().all() and torch.equal(got[~spoilt], want[~spoilt])


def test_more_tokens_dropout_gradients_or_other_weights_go_the_usual_way() -> None:
    own, _ = cast(drawn("one adapter", 0), torch.float16)

    def is_few(own: GroupCase) -> bool:
        return few_rows.are_few(own.x, own.layers, own.segments)

    assert is_few(own)
    assert not is_few(replace(own, x=own.x[:1].expand(few_rows.MOST + 1, -1)))
    assert not is_few(replace(own, x=own.x[:0]))
    assert not is_few(replace(own, segments=(replace(own.segments[0], dropout=0.1),)))
    assert not is_few(replace(own, layers=(replace(own.layers[0], adapters={}),)))

    class Made(Dense):
        pass

    assert not is_few(replace(own, layers=(replace(own.layers[0], frozen=Made(own.layers[0].frozen.dense())),)))
    with mock.patch.object(few_rows, "outputs", side_effect=AssertionError):
        (y,) = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, PLANS[0].plan)
        assert y.requires_grad


@pytest.mark.parametrize(
    ("kind", "rows", "stages"),
    [("little", 16, 1), ("usual", 16, 2), ("usual", 32, 1), ("A100", 32, 2), ("copies", 32, 2)],
    ids=["AMD", "Ada", "Ada, tuned", "A100, tuned", "Hopper, tuned"],
)
def test_what_is_read_ahead_fits_into_the_memory_of_a_program(
    kind: str, rows: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 64 and eight parts of K: compiled for compute capability 8.0 to 9.0 and gfx942, two stages took 96 KiB with 16 rows
    and 160 with 32."""
    found = list[int]()

    def launch(kernel: Any, grid: Any, args: Any, *_: Any, **constants: Any) -> None:
        if kernel.__name__ == "few_up_kernel":
            found.append(constants["num_stages"])

    monkeypatch.setattr(config, "has_little_memory", lambda device: kind == "little")
    monkeypatch.setattr(config, "has_copy_engine", lambda device: kind == "copies")
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0) if kind == "A100" else (8, 9))
    monkeypatch.setattr(config, "usual", lambda device: replace(config.BITS_16, few_down_m=rows))
    monkeypatch.setattr(launcher, "launch", launch)
    own, _ = cast(make_case(64, 2048, [256], [[64]], [0.0], False, SEED, torch.float16), torch.float16)
    with torch.no_grad():
        lora_group(own.x, own.layers, own.segments)
    assert found == [stages]
