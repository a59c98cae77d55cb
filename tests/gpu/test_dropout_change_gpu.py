"""What dropout changes of DoRA's base product, in FP8, on a GPU that has it: rows, products, groups, graphs, a run.

make gpu
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from change_cases import specified
from conftest import tiny_model
from group_cases import KINDS, GroupCase, cast, make_case, outcome, run_reference
from seeds import SEED

import packlora
from packlora.fp8.change import CodedBeside
from packlora.fp8.change_launches import add_change, add_change_t
from packlora.fp8.change_rows import LEFT_OUT, changed_rows_of, factors_of, odds, scaled_rows_of
from packlora.fp8.rows import CODE, Rows, coded, plain_rows_of
from packlora.fp8.weight import TwiceCoded, why_not_on
from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.changes import Mask
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState

DEVICE, HALF = "cuda", torch.bfloat16
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_not_on(torch.device("cuda", 0)) is not None, reason="no FP8"
)
FUSED = Plan("routed", "fused", "one-pass", "fused")
WIDE = Plan("mm", "fused", "mm", "fused")
ERROR = 3e-3
"""Root mean square of what rounding to bfloat16 and sums of some 14 bits add."""
SEVERAL = {
    "ranks": [[16, 0, 3], [4, 20, 0], [0, 0, 0], [16, 2, 5]], "dropouts": [0.25, 0.1, 0.1, 0.05],
    "dora": [True, False, False, True], "biases": [False, True, False, False],
}  # fmt: skip


def mask_of(T: int, rate: float) -> Mask:
    return Mask(torch.from_numpy(token_keys(3, 1, 2, T)).to(DEVICE), 12345, rate)


@pytest.mark.parametrize("shape", [(33, 64), (1, 4096), (70, 12288), (5, 1040)], ids=str)
def test_rows_have_torch_s_codes(shape: tuple[int, int]) -> None:
    T, K = shape
    x, mask = torch.randn(shape, device=DEVICE, dtype=HALF), mask_of(T, 0.1)
    got, want = changed_rows_of(x, mask), plain_rows_of(x.float() * factors_of(mask, K))
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    g, sizes = 1 + 0.05 * torch.randn(K, device=DEVICE), torch.exp2(torch.randint(-9, 3, (K,), device=DEVICE).float())
    got, want = scaled_rows_of(x, g, sizes, mask), plain_rows_of(x.float() * sizes * (g - 1))
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    edge = LEFT_OUT / odds(0.1) ** 0.5
    for factor, kept in ((0.9, False), (1.1, True)):
        found = scaled_rows_of(x, torch.full((K,), 1 + factor * edge, device=DEVICE), sizes, mask)
        assert ((found.scales > 0) == kept).all()


@pytest.mark.parametrize("shape", [(1, 64, 32), (7, 64, 48), (300, 1024, 784), (4096, 4096, 1024)], ids=str)
def test_products_are_those_of_the_codes_and_stay_in_their_rows(shape: tuple[int, int, int]) -> None:
    T, K, N = shape
    codes, mask = TwiceCoded.of(coded(torch.randn(N, K, device=DEVICE) / K**0.5)), mask_of(T, 0.1)
    x, d = torch.randn(T, K, device=DEVICE, dtype=HALF), torch.randn(T, N, device=DEVICE, dtype=HALF)
    g, W = 1 + 0.3 * torch.randn(N, device=DEVICE), codes.values(torch.float64)
    whole_y, whole_z = torch.randn(2, T + 5, N, device=DEVICE, dtype=HALF)
    whole_dx = torch.randn(T + 5, K, device=DEVICE, dtype=HALF)
    before = [whole.clone() for whole in (whole_y, whole_z, whole_dx)]
    y, z, dx = (whole[2 : 2 + T] for whole in (whole_y, whole_z, whole_dx))
    want_y, want_z, want_dx = y.double(), z.double(), dx.double()
    rows = changed_rows_of(x, mask)
    u = rows.values(torch.float64) @ W.T
    add_change(rows, codes.stored.view(torch.float8_e4m3fn), codes.scales_N, g, y, z)
    assert (y.double() - want_y - (g.double() - 1) * u).norm() < ERROR * want_y.norm()
    assert (z.double() - want_z - u).norm() < ERROR * want_z.norm()
    rows = scaled_rows_of(d, g, codes.scales_N, mask)
    u = rows.values(torch.float64) @ (W / codes.scales_N.double()[:, None])
    add_change_t(rows, codes.turned.view(torch.float8_e4m3fn), mask, dx)
    assert (dx.double() - want_dx - factors_of(mask, K) * u).norm() < ERROR * want_dx.norm()
    for whole, first in zip((whole_y, whole_z, whole_dx), before, strict=True):
        assert torch.equal(whole[:2], first[:2]) and torch.equal(whole[2 + T :], first[2 + T :])


def test_codes_of_rows_that_are_left_out_are_not_read() -> None:
    nan = torch.full((130, 128), 0x7F, dtype=torch.uint8, device=DEVICE).view(CODE)
    rows, dx = Rows(nan, torch.zeros(130, device=DEVICE)), torch.randn(130, 256, device=DEVICE, dtype=HALF)
    rows.codes.view(torch.uint8)[129], rows.scales[129] = 0x38, 1.0  # the code of 1
    got = dx.clone()
    add_change_t(rows, torch.ones(256, 128, device=DEVICE).to(CODE), mask_of(130, 0.5), got)
    assert torch.equal(got[:129], dx[:129]) and not torch.equal(got[129], dx[129])


def on_device(case: GroupCase) -> GroupCase:
    """The case in bfloat16, with codes beside its weights, on the GPU."""

    def moved(value: Any) -> Any:
        return value.detach().to(DEVICE) if isinstance(value, torch.Tensor) else value

    own, layers = cast(case, HALF)[0], []
    for layer in own.layers:
        adapters = {
            number: replace(
                low, **{name: moved(getattr(low, name)) for name in ("A", "B", "magnitude", "norm", "bias")}
            )
            for number, low in layer.adapters.items()
        }
        frozen = CodedBeside(moved(layer.frozen.dense()))
        layers.append(replace(layer, frozen=frozen, bias=moved(layer.bias), adapters=adapters))
    return replace(own, x=moved(own.x), keys=own.keys.to(DEVICE), dy=[moved(d) for d in own.dy], layers=tuple(layers))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(KINDS["DoRA, dropout"], CHAIN), (KINDS["DoRA, dropout"], FUSED), (SEVERAL, FUSED), (SEVERAL, CHAIN),
     (KINDS["all tokens, DoRA, dropout, siblings"], FUSED), (KINDS["all tokens, DoRA, dropout, siblings"], WIDE)],
)  # fmt: skip
def test_a_group_is_as_exact_as_its_codes(kind: dict[str, Any], plan: Plan) -> None:
    case = make_case(700, 512, (256, 272, 1040)[: len(kind["ranks"][0])], with_bias=True, seed=SEED, dtype=HALF, **kind)
    exact, got = specified(case), outcome(on_device(case), plan)
    for name, want in exact.items():
        assert (got[name].double().cpu() - want).norm() <= 3 * ERROR * want.norm(), name


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1])
def test_errors_are_those_of_two_products_but_for_the_magnitude_s(size: float) -> None:
    """Against float64: outputs and gradients at most 1.3 times, of the magnitude as FP8 has it."""
    case = make_case(1024, 1024, [1024], [[16]], [0.05], False, SEED, HALF, dora=[True], whole=0)
    (layer,) = case.layers
    low = layer.adapters[0]
    magnitude = (low.norm * (1 + size * torch.randn(1024, dtype=torch.float64))).to(HALF).double()
    case = replace(case, layers=(replace(layer, adapters={0: replace(low, magnitude=magnitude)}),))
    exact, own = run_reference(case, torch.float64), on_device(case)
    plain = replace(
        own, layers=tuple(replace(one, frozen=type(case.layers[0].frozen)(one.frozen.dense())) for one in own.layers)
    )
    ours, theirs = outcome(own, FUSED), outcome(plain, CHAIN)
    for name, want in exact.items():
        error, other = ((found[name].double().cpu() - want).norm() / want.norm() for found in (ours, theirs))
        assert error <= (1.2e-2 if "magnitude" in name else 1.3 * other), (name, error, other)


def test_a_graph_decides_anew_what_is_left_out() -> None:
    """Scales that are written between replays."""
    case = make_case(256, 512, [256, 1024], [[16, 16]], [0.1], False, SEED, HALF, DEVICE, dora=[True], whole=0)
    own = on_device(case)
    state, x = GroupState(), own.x.detach().requires_grad_()
    magnitudes = [layer.adapters[0].magnitude for layer in own.layers]
    norms = [layer.adapters[0].norm for layer in own.layers]

    def write(size: float) -> None:
        for magnitude, norm in zip(magnitudes, norms, strict=True):
            magnitude.data.copy_(norm * (1 + size))

    def step() -> list[torch.Tensor]:
        outputs = lora_group(x, own.layers, own.segments, own.keys, own.salt, FUSED, state)
        return [*outputs, *torch.autograd.grad(outputs, [x], own.dy)]

    wants = {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for size in (0.0, 0.125):
            write(size)
            wants[size] = [one.clone() for one in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for size in (0.0, 0.125, 0.0):
        write(size)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(got, wants[size], strict=True)), size


def test_a_run_by_graphs_has_the_losses_of_one_without_and_nearly_those_of_two_products(
    write_rows: Callable[..., str], tmp_path: Path, tokenizer: Any
) -> None:
    base = str(tmp_path / "base")
    tiny_model("qwen2", hidden_size=128, intermediate_size=256).save_pretrained(base)
    tokenizer.save_pretrained(base)
    job = {
        "name": "dora", "data": {"path": write_rows("dora", 12)},
        "adapter": {"r": 8, "use_dora": True, "lora_dropout": 0.1}, "train": {"global_batch_size": 4, "max_steps": 3},
    }  # fmt: skip
    losses = {}
    ways = {"graphs": {"cuda_graphs": True}, "none": {"cuda_graphs": False}, "dtype": {"compute": "dtype"}}
    for name, keys in ways.items():
        tree = {
            "base_model": base,
            "output_dir": str(tmp_path / name),
            "compute": "dora_fp8",
            "device": "cuda",
            "jobs": [job],
        }
        assert packlora.train({**tree, **keys}).status == "done"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert losses["graphs"] == pytest.approx(losses["none"], rel=1e-2)
    assert losses["graphs"] == pytest.approx(losses["dtype"], rel=1e-2)
