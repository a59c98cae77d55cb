"""DoRA's norms on a GPU: bfloat16 kernels against float64, batches, graphs, streams, and writes that only the data show.

make gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_norms import as_exact_as_float32, checked, exact, worst
from torch import nn
from waits import no_waiting

from packlora.adapters.norms import NormHandle, RowNorms
from packlora.ops.row_norm import triton_path
from packlora.ops.row_norm.row_norm import NARROW, row_norm, row_norms, squared_row_norm, takes_kernels
from packlora.ops.row_norm.types import NormProblem


def draw(N: int, K: int, r: int, dtype: torch.dtype = torch.bfloat16, low: float = 0.1) -> tuple[Any, Any, Any]:
    W = torch.randn(N, K, device="cuda").mul(0.05).to(dtype)
    return W, torch.randn(r, K, device="cuda") * 0.05, torch.randn(N, r, device="cuda") * low


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [1e-3, 0.02, 1.0])
@pytest.mark.parametrize(
    ("N", "K", "r"),
    [(1024, 4096, 16), (770, 515, 24), (129, 14336, 33), (4096, 4096, 64), (1000, 4096, 384), (65, 96, 150), (3, 5, 2),
     (200, 300, 500), (300, 2100, 65), (515, 4096, 128)],
)  # fmt: skip
def test_as_exact_as_float32(N: int, K: int, r: int, low: float, dtype: torch.dtype) -> None:
    W, A, B = draw(N, K, r, dtype, low)
    assert takes_kernels(NormProblem(W, A, B, 1.7)) == (K >= NARROW)
    as_exact_as_float32(W, A, B, 1.7, row_norm(W, A, B, 1.7))
    assert worst(squared_row_norm(W), W.double().square().sum(1)) <= 1e-6


@pytest.mark.parametrize(("a", "b"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_adapters_in_16_bits(a: str, b: str) -> None:
    W, A, B = draw(500, 1030, 48)
    A, B = A.to(getattr(torch, a)), B.to(getattr(torch, b))
    as_exact_as_float32(W, A, B, 0.5, row_norm(W, A, B, 0.5))


@pytest.mark.parametrize("r", [8, 200])
@pytest.mark.parametrize("K", [4096, 14336])
def test_long_sums_of_one_sign_are_not_cut_off(K: int, r: int) -> None:
    """Tensor cores truncate: sums of positive terms come out too small where one accumulator takes them all. And all of A is
    rounded the same way by bfloat16."""
    A = (1 + (0.3 + 0.6 * torch.rand(r, K, device="cuda")) * 2**-8) * 2**-9
    B = torch.rand(300, r, device="cuda") + 0.5
    W = (B @ A).bfloat16()
    as_exact_as_float32(W, A, B, 1.0, row_norm(W, A, B, 1.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("K", "r"), [(4096, 65), (4096, 384), (14336, 200), (1040, 768)])
def test_ranks_over_64_where_the_low_rank_part_is_nearly_all(K: int, r: int, dtype: str) -> None:
    """A and B have one sign: A A' and B A A' B' are long sums of one sign, and so are the products of A's second
    halves."""
    A = ((1 + (0.3 + 0.6 * torch.rand(r, K, device="cuda")) * 2**-8) * 2**-4).to(getattr(torch, dtype))
    B = (1 - 2**-7 * torch.rand(300, r, device="cuda")) * 2**-3
    W = torch.randn(300, K, device="cuda").mul(0.01).bfloat16()
    as_exact_as_float32(W, A.float(), B, 1.5, row_norm(W, A, B, 1.5))


@pytest.mark.parametrize("a", ["float32", "bfloat16"])
@pytest.mark.parametrize("b", ["float32", "bfloat16"])
@pytest.mark.parametrize(("N", "K", "r"), [(300, 416, 208), (4096, 4096, 384), (257, 14336, 96), (1024, 1040, 768)])
def test_ranks_over_64_in_all_dtypes(N: int, K: int, r: int, a: str, b: str) -> None:
    """Aligned, so by tensor descriptors."""
    W, A, B = draw(N, K, r, low=0.02)
    A, B = A.to(getattr(torch, a)), B.to(getattr(torch, b))
    as_exact_as_float32(W, A.float(), B.float(), 0.7, row_norm(W, A, B, 0.7))


def test_ranks_over_64_whose_operands_are_not_aligned() -> None:
    """B's address, a rank and a row of A that are no multiples of 16 bytes."""
    for K, r, skip in ((1024, 130, 0), (1024, 384, 1), (1030, 384, 0)):
        W, A, B = draw(200, K, r)
        B = torch.cat([B.new_zeros(skip), B.flatten()])[skip:].view(200, r)
        as_exact_as_float32(W, A, B, 0.7, row_norm(W, A, B, 0.7))


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("left", [1e-1, 1e-3, 1e-5])
def test_rows_that_cancel(left: float, in_graph: bool) -> None:
    A, C = torch.randint(-2, 3, (9, 512)).float().cuda(), torch.randint(-3, 4, (300, 9)).float().cuda()
    C[:, 0] = 3
    W, B = (C @ A).bfloat16(), C.clone()  # integers below 256: exact
    B[::3] *= -(1 - left)
    (got,) = row_norms([NormProblem(W, A, B, 1.0)], in_graph=in_graph)
    want, of_W = exact(W, A, B, 1.0), W.double().norm(dim=1)
    assert float((want / of_W)[::3].max()) < 1.01 * left
    assert float(((got.double() - want).abs() / of_W).max()) <= 2e-7


@pytest.mark.parametrize(("a", "b"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize(
    ("N", "K", "r"),
    [(1024, 4096, 16), (770, 515, 24), (129, 14336, 33), (4096, 4096, 64), (1000, 4096, 384), (65, 200, 150)],
)
def test_in_a_graph_as_exact_as_float32(N: int, K: int, r: int, a: str, b: str) -> None:
    """Also where the low-rank part is nearly all, and a long sum of one sign."""
    W, A, B = draw(N, K, r)
    for scale, one_sign in ((0.1, False), (30.0, True)):
        own_A, own_B = (scale**0.5 * (t.abs() if one_sign else t) for t in (A, B))
        own_A, own_B = own_A.to(getattr(torch, a)), own_B.to(getattr(torch, b))
        (got,) = row_norms([NormProblem(W, own_A, own_B, 1.7)], in_graph=True)
        as_exact_as_float32(W, own_A.float(), own_B.float(), 1.7, got)


def test_in_a_graph_each_replay_computes_what_is_there_then() -> None:
    W, A, B = draw(300, 1030, 20)
    problem = NormProblem(W, A, B, 0.5)
    row_norms([problem], in_graph=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (norm,) = row_norms([problem], in_graph=True)
    for _ in range(2):
        for operand in (W, A, B):
            operand.mul_(1.3)
        graph.replay()
        as_exact_as_float32(W, A, B, 0.5, norm)


def test_zero_rows_nan_and_inf() -> None:
    W, A, B = draw(100, 256, 20)
    W[7], B[7] = 0, 0
    W[3, 5], B[50, 1] = float("nan"), float("inf")
    got = row_norm(W, A, B, 1.0)
    assert float(got[7]) == float(torch.tensor(1e-12))
    assert bool(got[3].isnan())
    assert not bool(got[50].isfinite())
    rest = [i for i in range(100) if i not in (3, 7, 50)]
    as_exact_as_float32(W[rest], A, B[rest], 1.0, got[rest])


def test_float32_and_transposed_weights_go_without_kernels() -> None:
    W, A, B = draw(300, 512, 20, torch.float32)
    assert not takes_kernels(NormProblem(W, A, B, 1.0))
    as_exact_as_float32(W, A, B, 1.0, row_norm(W, A, B, 1.0))
    W = W.bfloat16().T.contiguous().T
    as_exact_as_float32(W, A, B, 1.0, row_norm(W, A, B, 1.0))


def test_batches_have_the_bits_of_each_alone_and_every_time() -> None:
    shapes = [
        (770, 515, 24),
        (1024, 4096, 16),
        (2048, 512, 16),
        (512, 1024, 300),
        (512, 2048, 300),
        (64, 64, 16),
        (700, 4096, 130),
    ]
    problems = [NormProblem(*draw(*shape), 0.7) for shape in shapes]
    first = row_norms(problems)
    for problem, got, again in zip(problems, first, row_norms(problems), strict=True):
        assert torch.equal(got, again)
        assert torch.equal(got, row_norm(problem.weight, problem.A, problem.B, 0.7))
        as_exact_as_float32(problem.weight, problem.A, problem.B, 0.7, got)


def test_memory_beside_the_operands_is_far_below_that_of_the_weight() -> None:
    """4096 x 4096, r 384: A in two halves, G and the parts; no float32 copy of W (64 MiB) and no B A."""
    W, A, B = draw(4096, 4096, 384)
    base = squared_row_norm(W)
    row_norm(W, A, B, 1.0, base)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    row_norm(W, A, B, 1.0, base)
    assert torch.cuda.max_memory_allocated() - before <= 16 << 20


def test_nothing_waits_for_the_device() -> None:
    problems = [NormProblem(*draw(256, 512, r), 1.0) for r in (8, 40, 200)] + [
        NormProblem(*draw(256, 512, 8, torch.float32), 1.0)
    ]
    row_norms(problems)
    norms = RowNorms()
    handles = [NormHandle(norms, p.weight, p.A, p.B, 1.0) for p in problems]
    with no_waiting():
        row_norms(problems)
        for _ in range(2):
            problems[0].A.data.mul_(2)
            with checked(norms):
                [handle.get() for handle in handles]
            [handle.get() for handle in handles]


# --- kept norms ----------------------------------------------------------------------------------------------------------


class Layer:
    def __init__(
        self, norms: RowNorms, version_counted: bool, dtype: torch.dtype = torch.bfloat16, r: int = 16
    ) -> None:
        W, A, B = draw(520, 768, r, dtype)
        self.W, self.A, self.B = W, nn.Parameter(A), nn.Parameter(B)
        self.handle: NormHandle = NormHandle(norms, self.W, self.A, self.B, 1.5, version_counted)

    def right(self, norm_N: torch.Tensor | None = None) -> bool:
        got = self.handle.get() if norm_N is None else norm_N
        return worst(got, exact(self.W, self.A.detach(), self.B.detach(), 1.5)) <= 2e-6


def change_data(layer: Layer) -> None:
    layer.A.data.copy_(torch.randn_like(layer.A) * 0.05)


def change_one(layer: Layer) -> None:
    layer.B.data[11, 2] += 3.0


def change_order(layer: Layer) -> None:
    layer.B.data.copy_(layer.B.data.flip(0))


def change_weight(layer: Layer) -> None:
    layer.W.data.mul_(1.5)


def change_row(layer: Layer) -> None:
    layer.W.data[77].mul_(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("change", [change_data, change_one, change_order, change_weight, change_row])
def test_writes_that_only_the_data_show(change: Any, dtype: torch.dtype) -> None:
    norms = RowNorms()
    layers = [Layer(norms, False, dtype, r) for r in (16, 16, 40)]
    assert all(layer.right() for layer in layers)
    for layer in layers:
        change(layer)
        assert layer.right()
        with checked(norms):
            assert all(other.right() for other in layers)
        change(layer)
        with checked(norms):
            assert all(other.right() for other in layers)


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("version_counted", [False, True])
def test_optimizers(version_counted: bool, settings: dict[str, bool]) -> None:
    norms = RowNorms()
    layers = [Layer(norms, version_counted) for _ in range(3)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in (layer.A, layer.B)], lr=0.05, **settings)
    for _ in range(3):
        assert all(layer.right() for layer in layers)
        for layer in layers:
            layer.A.grad, layer.B.grad = torch.randn_like(layer.A), torch.randn_like(layer.B)
        optimizer.step()
    assert all(layer.right() for layer in layers)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("version_counted", [False, True])
def test_a_captured_graph_sees_new_parameters_at_every_replay(version_counted: bool, window: bool) -> None:
    norms = RowNorms()
    layers = [Layer(norms, version_counted) for _ in range(2)]

    def norms_of_all() -> list[torch.Tensor]:
        if window:
            norms.open()
        got = [layer.handle.get() * 1 for layer in layers]
        norms.close()
        return got

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        [norms_of_all() for _ in range(2)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = norms_of_all()
    assert bool(norms._captured) == (window and not version_counted)
    for change in (None, change_data, change_one, change_weight, None):
        if change is not None:
            change(layers[1])
        graph.replay()
        assert all(layer.right(norm_N) for layer, norm_N in zip(layers, got, strict=True))
    if not version_counted:
        assert all(layer.right() for layer in layers)
    norms._together = None  # the graph keeps the tables that it has captured
    filler = [torch.full((64,), 77, device="cuda", dtype=torch.int64) for _ in range(200)]
    change_data(layers[0])
    graph.replay()
    assert layers[0].right(got[0])
    del filler


def test_a_norm_computed_on_one_stream_is_waited_for_on_another() -> None:
    norms = RowNorms()
    layer, side = Layer(norms, True), torch.cuda.Stream()
    for _ in range(5):
        layer.handle.invalidate()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        layer.handle.get()
        with torch.cuda.stream(side):
            seen = layer.handle.get() * 1
        torch.cuda.synchronize()
        assert layer.right(seen)


def test_tables_are_made_once() -> None:
    norms = RowNorms()
    layers = [Layer(norms, False) for _ in range(3)]
    with checked(norms):
        first = [layer.handle.get() for layer in layers]
    made = norms._together
    assert made is not None
    for layer in layers:
        change_data(layer)
    with checked(norms):
        assert all(layer.right() for layer in layers)
    assert norms._together is made
    assert not any(torch.equal(layer.handle.get(), old) for layer, old in zip(layers, first, strict=True))
    assert len(triton_path._BATCHES._values) < 65
