"""The RMS norm with a frozen weight on a GPU: exactness, bits, graphs, rows of more than 2^31 elements in all.

make gpu
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exactness import assert_as_exact, poisoned
from waits import no_waiting

from packlora.ops.rms_norm import reference
from packlora.ops.rms_norm.reference import KINDS
from packlora.ops.rms_norm.rms_norm import rms_norm

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """New buffers of the kernels hold NaN."""
    for name in ("empty_like", "empty_permuted"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x, weight, dy."""
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    return x, (1 + torch.randn(shape[-1], device="cuda") / 4).to(dtype), dy


def outcome(norm: Any, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *kind: Any) -> dict[str, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = norm(leaf, weight, EPS, *(kind or KINDS[0]))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return {"y": y.detach(), "dx": dx}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 1024), (8191, 1024), (1, 4099, 8, 128), (300, 64), (77, 100), (1000, 33), (515, 3072), (130, 5120),
     (65, 8192), (33, 16384), (5, 9999)],
)  # fmt: skip
def test_as_exact_as_the_unfused_norm(shape: tuple[int, ...], kind: tuple[float, str], dtype: torch.dtype) -> None:
    """Rows of other scales, among them one as small as eps and one of zeros."""

    def drawn(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        torch.manual_seed(number)
        x, weight, dy = draw(*shape, dtype=dtype)
        rows, scales = x.view(-1, shape[-1]), torch.tensor([1.0, 1e-3, 30.0, 0.0], device="cuda", dtype=dtype)
        rows *= scales[torch.arange(len(rows), device="cuda") % 4, None]
        wide = (tensor.double() for tensor in (x, weight, dy))
        found = outcome(rms_norm, x, weight, dy, *kind), outcome(reference.rms_norm, x, weight, dy, *kind)
        return *found, outcome(reference.rms_norm, *wide, *kind)

    assert_as_exact(drawn, 3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_their_transposes_have_the_bits_of_a_copy(dtype: torch.dtype) -> None:
    x, weight, dy = draw(1, 501, 8, 128, dtype=dtype)
    want = outcome(rms_norm, x, weight, dy)
    for dims in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 3, 0)):
        for dy_like in (dy.permute(dims), dy.permute(dims).contiguous()):
            x_like = x.permute(dims)
            if dims[3] != 3:  # back to rows that lie apart
                x_like, dy_like = x_like.transpose(2, 3), dy_like.transpose(2, 3)
            got = outcome(rms_norm, x_like, weight, dy_like)
            for name, value in want.items():
                turned = value.permute(dims) if dims[3] == 3 else value.permute(dims).transpose(2, 3)
                assert torch.equal(got[name], turned), (dims, name)


@pytest.mark.parametrize("shape", [(8192, 1024), (1, 4096, 16, 128), (100, 1001)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_same_every_time_and_for_any_number_of_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, dy = draw(*shape, dtype=dtype)
    want = outcome(rms_norm, x, weight, dy)
    for _ in range(5):
        got = outcome(rms_norm, x, weight, dy)
        assert all(torch.equal(got[name], want[name]) for name in want)
    part = outcome(rms_norm, x[:1, :37], weight, dy[:1, :37]) if len(shape) > 2 else None
    if part is None:
        part = outcome(rms_norm, x[:37], weight, dy[:37])
    for name, value in part.items():
        assert torch.equal(value.flatten(), want[name].flatten()[: value.numel()])


def test_a_row_with_nan_or_inf_reaches_no_other() -> None:
    x, weight, dy = draw(4000, 128)
    want = outcome(rms_norm, x, weight, dy)
    x[7, 3], x[80, 0], dy[2000, 5] = math.nan, math.inf, math.nan
    got, plain = outcome(rms_norm, x, weight, dy), outcome(reference.rms_norm, x, weight, dy)
    rest = torch.ones(4000, dtype=torch.bool, device="cuda")
    rest[[7, 80, 2000]] = False
    for name in want:
        assert torch.equal(got[name][rest], want[name][rest])
        assert torch.equal(got[name].isnan(), plain[name].isnan())


@pytest.mark.parametrize("skip", [1, 2, 8])
@pytest.mark.parametrize("first", ["aligned", "not aligned"])
def test_operands_that_are_not_aligned(skip: int, first: str) -> None:
    """In either order: launches are remembered."""
    x, weight, dy = draw(200, 384 + 32 * skip + 16 * (first == "aligned"))  # of its own launches
    want = outcome(reference.rms_norm, x.double(), weight.double(), dy.double())

    def loose(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(skip), tensor.flatten()])[skip:].view(tensor.shape)

    pairs = [(x, weight, dy), (loose(x), loose(weight), loose(dy)), (x, weight, loose(dy))]
    for operands in pairs if first == "aligned" else pairs[::-1]:
        got = outcome(rms_norm, *operands)
        for name in want:
            torch.testing.assert_close(got[name].double(), want[name], rtol=2**-7, atol=2**-7)


def test_more_than_2_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2**31 // 1024 + 5
    if torch.cuda.mem_get_info()[0] < 5 * rows * 1024 * 2:
        pytest.skip("too little memory")
    monkeypatch.undo()  # buffers of this size are filled by whoever runs short of time
    x, weight, dy = draw(64, 1024)
    want = outcome(rms_norm, x, weight, dy)
    many = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
    many[:32], many[-32:] = x[:32], x[32:]
    d_many = torch.zeros_like(many)
    d_many[:32], d_many[-32:] = dy[:32], dy[32:]
    got = outcome(rms_norm, many, weight, d_many)
    for name in want:
        assert torch.equal(torch.cat([got[name][:32], got[name][-32:]]), want[name])
        assert not got[name][32:-32].any()


def test_nothing_waits_for_the_device() -> None:
    cases = [(draw(1, 300, 16, 128), KINDS[0]), (draw(500, 1024, dtype=torch.float32), KINDS[2])]
    for drawn, kind in cases:
        outcome(rms_norm, *drawn, *kind)
    new = draw(77, 1024, dtype=torch.float32), KINDS[2]
    with no_waiting():
        for drawn, kind in [*cases, new]:
            outcome(rms_norm, *drawn, *kind)


def test_a_captured_graph_has_the_bits_of_the_calls() -> None:
    x, weight, dy = draw(1, 700, 8, 128)
    x = x.transpose(1, 2)
    dy = dy.transpose(1, 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outcome(rms_norm, x, weight, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = outcome(rms_norm, x, weight, dy)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
        graph.replay()
        want = outcome(rms_norm, x, weight, dy)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_memory_of_a_call_is_that_of_its_result() -> None:
    x, weight, dy = draw(8192, 1024)
    outcome(rms_norm, x, weight, dy)
    leaf = x.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = rms_norm(leaf, weight, EPS)
    assert torch.cuda.memory_allocated() - before <= x.nbytes + 2**21
    torch.autograd.grad(y, leaf, dy)
    assert torch.cuda.max_memory_allocated() - before <= 2 * x.nbytes + 2**22


def test_how_long_it_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, beside a sum of two tensors, which reads and writes what the backward does; nothing is claimed."""
    from packlora.ops.rms_norm import triton_path

    monkeypatch.undo()
    calls: dict[str, Any] = {
        "forward": lambda x, weight, dy: triton_path.forward(x, weight, EPS, *KINDS[0]),
        "backward": lambda x, weight, dy: triton_path.backward(x, weight, dy, EPS, 0.0),
        "sum of two": lambda x, weight, dy: x + dy,
    }
    lines = []
    for shape in ((8192, 1024), (8192 * 16, 128), (8192 * 8, 128), (8192, 4096)):
        # more operands than the cache of the GPU holds, each used in turn
        sets = [draw(*shape) for _ in range(max(2, 2**28 // (4 * math.prod(shape))))]
        times = {}
        for name, call in calls.items():
            call(*sets[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for drawn in sets:
                    call(*drawn)
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name] = begin.elapsed_time(end) / 10 / len(sets) * 1e3
        lines.append(f"{list(shape)}: " + ", ".join(f"{name} {time:.1f} us" for name, time in times.items()))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
