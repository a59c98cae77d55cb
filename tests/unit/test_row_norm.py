"""ops.row_norm against float64, in chunks and by the kernels (under Triton's interpreter, float16: it has no bfloat16)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from exact_norms import as_exact_as_float32, exact, in_float32, worst
from seeds import some
from stored_weights import Bytes
from torch.utils._python_dispatch import TorchDispatchMode

from packlora.ops.row_norm import row_norm as module
from packlora.ops.row_norm import tables
from packlora.ops.row_norm.row_norm import row_norm, row_norms, squared_row_norm
from packlora.ops.row_norm.types import NormProblem


@pytest.fixture(params=["chunks", "kernels", "kernels in a graph"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "chunks":
        pytest.importorskip("triton")
        monkeypatch.setattr(module, "KERNELS_ON_CPU", True)
    if request.param == "kernels in a graph":
        from packlora.ops.row_norm import triton_path

        own = module.row_norms
        monkeypatch.setattr(triton_path, "processors", lambda _: 8)  # so that K is cut in chunks
        monkeypatch.setattr(
            module, "row_norms", lambda problems, budget_bytes=None, _=True: own(problems, budget_bytes, True)
        )
    return str(request.param)


def draw(N: int, K: int, r: int, dtype: torch.dtype = torch.float16, low: float = 0.1) -> tuple[Any, Any, Any]:
    """W, A and B; s B A is about as large as `low` times sqrt(r) times W."""
    W = torch.randn(N, K).mul(0.05).to(dtype)
    return W, torch.randn(r, K) * 0.05, torch.randn(N, r) * low


SHAPES = [(1, 1, 1), (3, 5, 2), (70, 515, 24), (64, 128, 16), (129, 96, 33), (40, 2100, 7), (65, 40, 150), (5, 3, 140)]


@pytest.mark.sampled
@pytest.mark.parametrize(("N", "K", "r"), SHAPES)
@pytest.mark.parametrize("low", [1e-3, 1.0])
def test_as_exact_as_float32_at_any_shape(N: int, K: int, r: int, low: float, path: str) -> None:
    W, A, B = draw(N, K, r, low=low)
    as_exact_as_float32(W, A, B, 1.7, row_norm(W, A, B, 1.7))


@pytest.mark.parametrize(
    ("N", "K", "r", "a", "b", "strided"),
    some(
        [
            (*shape, a, b, strided)
            for shape in ((300, 416, 208), (70, 64, 80), (257, 1040, 96))
            for a, b in itertools.product(("float16", "float32"), repeat=2)
            for strided in (False, True)
        ],
        5,
    ),
)
def test_wide_ranks_by_tensor_descriptors(
    N: int, K: int, r: int, a: str, b: str, strided: bool, monkeypatch: Any
) -> None:
    """Everything a multiple of 16; several blocks of rows, of ranks and of K, and parts of them."""
    pytest.importorskip("triton")
    from packlora.ops.row_norm import triton_path

    launched: list[str] = []
    launch = triton_path.launch
    monkeypatch.setattr(
        triton_path,
        "launch",
        lambda kernel, *args, **kw: (launched.append(kernel.__name__), launch(kernel, *args, **kw)),
    )
    monkeypatch.setattr(module, "KERNELS_ON_CPU", True)
    W, A, B = draw(N, K, r)
    if strided:
        W = torch.cat([W, torch.full((N, 32), 9.0, dtype=W.dtype)], 1)[:, :K]
    A, B = A.to(getattr(torch, a)), B.to(getattr(torch, b))
    as_exact_as_float32(W, A, B, 0.7, row_norm(W, A, B, 0.7))
    assert "wide_cross_kernel" in launched and "wide_tail_kernel" in launched


@pytest.mark.parametrize(("a", "b"), [("float16", "float16"), ("float32", "float16"), ("float32", "bfloat16")])
def test_adapters_in_other_dtypes(a: str, b: str, path: str) -> None:
    W, A, B = draw(50, 130, 20)
    A, B = A.to(getattr(torch, a)), B.to(getattr(torch, b))
    as_exact_as_float32(W, A, B, 0.5, row_norm(W, A, B, 0.5))


def test_no_bit_of_float32_adapters_is_lost_where_rounding_them_would_show(path: str) -> None:
    """All of A is rounded down by float16, and W lies along B A: what is rounded off does not average out over K."""
    A, B = (1 + (0.3 + 0.6 * torch.rand(8, 512)) * 2**-11) * 2**-9, torch.rand(30, 8) + 0.5
    W = (B @ A).half()
    got, want = row_norm(W, A, B, 1.0), exact(W, A, B, 1.0)
    assert worst(row_norm(W, A.half().float(), B, 1.0), want) > 1e-5, "rounding A shows"
    assert worst(got, want) < 1e-6


def test_tiny_and_huge_rows_of_A_keep_their_bits_in_float16(path: str) -> None:
    W, A, B = draw(30, 200, 4)
    A *= torch.tensor([1e-12, 1e-3, 1e3, 1e8])[:, None]
    B *= torch.tensor([1e10, 1.0, 1e-4, 1e-9])
    as_exact_as_float32(W, A, B, 1.0, row_norm(W, A, B, 1.0))


@pytest.mark.parametrize("left", [1e-1, 1e-3, 1e-5])
def test_rows_that_cancel_are_as_exact_as_their_elements_in_float32(left: float, path: str) -> None:
    """W + s B A is `left` times W in every third row. The sum of the three terms alone would be off by float32's rounding of
    ||W||^2, so the norm by its root: 3e-4 of ||W||. Element by element the error is that of one rounding of W + s B A in
    float32, about 6e-8 of ||W||, which is 6e-8 / left of the norm."""
    A, C = torch.randint(-3, 4, (9, 256)).float(), torch.randint(-9, 10, (48, 9)).float()
    C[:, 0] = 7
    W, B = (C @ A).half(), C.clone()  # W = C A without rounding
    B[::3] *= -(1 - left)
    want, got = exact(W, A, B, 1.0), row_norm(W, A, B, 1.0)
    of_W = W.double().norm(dim=1)
    assert float((want / of_W)[::3].max()) < 1.01 * left
    assert worst(got[1::3], want[1::3]) < 1e-6
    error, plain = ((norm.double() - want).abs() / of_W for norm in (got, in_float32(W, A, B, 1.0)))
    assert float(error.max()) <= 2 * float(plain.max()) + 6e-8
    assert float((error[::3] * of_W[::3] / want[::3]).max()) <= 1.2e-7 / left


def test_rows_that_vanish_give_eps_and_not_nan(path: str) -> None:
    W, A, B = draw(40, 64, 3)
    W[7] = 0
    B[7] = 0
    W[9] = 0
    A[0] = A[0].half().float()
    W[11], B[11] = -A[0].half(), torch.tensor([1.0, 0.0, 0.0])
    got = row_norm(W, A, B, 1.0)
    assert torch.equal(got[[7, 11]], torch.full((2,), 1e-12))
    as_exact_as_float32(W[[8, 9, 10]], A, B[[8, 9, 10]], 1.0, got[[8, 9, 10]])


def test_nan_and_inf_stay_in_their_rows(path: str) -> None:
    W, A, B = draw(40, 64, 3)
    W[3, 5], B[20, 1] = float("nan"), float("inf")
    got = row_norm(W, A, B, 1.0)
    assert bool(got[3].isnan())
    assert not bool(got[20].isfinite())
    assert bool(got[[i for i in range(40) if i not in (3, 20)]].isfinite().all())


@pytest.mark.parametrize("s", [0.0, -2.0])
def test_scalings_of_zero_and_below(s: float, path: str) -> None:
    W, A, B = draw(33, 50, 4)
    as_exact_as_float32(W, A, B, s, row_norm(W, A, B, s))


def test_rank_zero(path: str) -> None:
    W, A, B = draw(8, 16, 0)
    assert worst(row_norm(W, A, B, 1.0), W.double().norm(dim=1)) < 1e-6


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_weights_that_are_not_contiguous(layout: str, path: str) -> None:
    _, A, B = draw(33, 50, 4)
    whole = torch.randn(120, 120).mul(0.05).half()
    W = {"transposed": whole[:50, :33].T, "strided": whole[::2][:33, 1:51], "offset": whole[3:36, 7:57]}[layout]
    as_exact_as_float32(W, A, B, 1.0, row_norm(W, A, B, 1.0))
    as_exact_as_float32(W, A.T.contiguous().T, B.T.contiguous().T, 1.0, row_norm(W, A.T.contiguous().T, B, 1.0))
    assert worst(squared_row_norm(W), W.double().square().sum(1)) < 1e-6


def test_float64_stays_float64() -> None:
    W, A, B = (t.double() for t in draw(33, 50, 4))
    assert row_norm(W, A, B, 1.0).dtype == squared_row_norm(W).dtype == torch.float64
    assert worst(row_norm(W, A, B, 1.0), exact(W, A, B, 1.0)) < 1e-14
    assert row_norm(W.half(), A, B, 1.0).dtype == torch.float64


def test_not_rounded_to_the_weight_s_dtype(path: str) -> None:
    W, A, B = draw(64, 64, 4)
    got = row_norm(W, A, B, 1.0)
    assert got.dtype == torch.float32
    assert not torch.equal(got, got.half().float())


def test_base_norm_that_the_caller_kept_is_used(path: str) -> None:
    W, A, B = draw(40, 70, 5)
    base = squared_row_norm(W)
    assert torch.equal(row_norm(W, A, B, 1.0, base), row_norm(W, A, B, 1.0))
    if path == "kernels":
        assert worst(row_norm(W, A, B, 1.0, 4 * base), exact(W, A, B, 1.0)) > 0.1


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes, and whether it is an identity matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.names = 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.__name__.split(".")[0])
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.given:
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out

    def watching(self, *given: torch.Tensor) -> Largest:
        self.given = {t.untyped_storage().data_ptr() for t in given}
        return self


def test_nothing_of_the_size_of_the_weight_is_made_and_no_identity_matrix(path: str) -> None:
    """Neither a float32 copy of W nor B A as a whole."""
    W, A, B = draw(512, 256, 4)
    with Largest().watching(W, A, B) as largest:
        row_norm(W, A, B, 1.0, budget_bytes=32 << 10)
    assert 0 < largest.elements <= W.numel() // 8
    assert "eye" not in largest.names


def test_no_gradient_no_autocast_and_usable_after_inference_mode(path: str) -> None:
    W, A, B = draw(20, 40, 4)
    A.requires_grad_()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        got = row_norm(W, A, B, 1.0)
    assert not got.requires_grad
    as_exact_as_float32(W, A.detach(), B, 1.0, got)
    m = torch.ones(20, requires_grad=True)
    (m / got).sum().backward()  # an inference tensor could not be saved


# --- batches -----------------------------------------------------------------------------------------------------------


def mixture() -> list[NormProblem]:
    shapes = ((70, 130, 3), (33, 64, 16), (20, 40, 40), (64, 515, 7), (48, 32, 150))
    out = []
    for N, K, r in shapes:
        W, A, B = draw(N, K, r)
        out.append(NormProblem((W + B @ A).half(), A, B, 0.8))  # W along B A: the sum over K matters to the last bit
    W, A, B = draw(12, 30, 4, torch.float32)
    return [*out, NormProblem(W, A, B, 1.0), NormProblem(W.half(), A.half(), B, 2.0), NormProblem(W.half(), A, B, 0.0)]


def test_a_batch_of_any_mixture_has_the_bits_of_each_alone(path: str) -> None:
    problems = mixture()
    for problem, got in zip(problems, module.row_norms(problems), strict=True):
        want = row_norm(problem.weight, problem.A, problem.B, problem.scaling)
        assert torch.equal(got, want)
        as_exact_as_float32(problem.weight, problem.A, problem.B, problem.scaling, got)


def test_how_a_module_s_sums_are_cut_is_its_own_affair() -> None:
    """Or bits would depend on what else is in the batch."""
    pytest.importorskip("triton")
    for block, ranks in ((16, (16, 16, 9)), (128, (384, 65, 200))):
        shapes = [(N, K, r) for (N, K), r in zip(((1024, 4096), (4096, 14336), (300, 2100)), ranks, strict=True)]
        together = tables.make_items(shapes, block, True, torch.device("cpu")).tables
        for index, shape in enumerate(shapes):
            alone = tables.make_items([shape], block, True, torch.device("cpu")).tables
            for name in ("gram", "fold", "cross", "tail", "finish"):
                own = together[name][together[name][:, 0] == index]
                assert torch.equal(own[:, 1:], alone[name][:, 1:]), name


@pytest.mark.sampled
@pytest.mark.parametrize("r", [65, 128, 150, 300])
@pytest.mark.parametrize("a", ["float32", "float16"])
def test_ranks_over_64_where_the_low_rank_part_is_nearly_all(r: int, a: str, path: str) -> None:
    """All of the norm is B A A' B': blocks of A A' off the diagonal, several chunks of K, halves of A and of B. A and B have
    one sign, and A's second halves too, so that what was left out would add up."""
    A = ((1 + (0.3 + 0.6 * torch.rand(r, 1100)) * 2**-11) * 2**-4).to(getattr(torch, a))
    B, W = (1 - 2**-9 * torch.rand(40, r)) * 2**-3, torch.randn(40, 1100).mul(0.01).half()
    as_exact_as_float32(W, A.float(), B, 1.5, row_norm(W, A, B, 1.5))


def test_a_small_budget_makes_more_batches_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from packlora.ops.row_norm.triton_path import prepared

    monkeypatch.setattr(module, "KERNELS_ON_CPU", True)
    problems = [NormProblem(*draw(20, 64, 4), 1.0) for _ in range(5)]
    assert [len(indices) for indices in tables.batches([prepared(p) for p in problems])] == [5]
    assert len(tables.batches([prepared(p) for p in problems], 2000)) == 5
    for one, two in zip(row_norms(problems), row_norms(problems, 2000), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_quantised_weights_are_read_in_chunks_of_rows(dtype: torch.dtype, path: str) -> None:
    _, A, B = draw(70, 64, 4)
    weight = Bytes((torch.randn(70, 64) * 0.1).to(dtype))
    whole = weight.rows(0, 70)
    base = squared_row_norm(weight, chunk_bytes=16 << 10)
    weight.asked.clear()
    got = row_norm(weight, A, B, 1.0, base, budget_bytes=16 << 10)
    assert [start for start, _ in weight.asked] == [stop for _, stop in [(0, 0), *weight.asked[:-1]]]
    assert len(weight.asked) > 1
    assert weight.asked[-1][1] == 70
    assert worst(got, exact(whole, A, B, 1.0)) < 1e-6


def test_weights_whose_rows_have_the_wrong_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    W, A, B = draw(70, 64, 4)
    monkeypatch.setattr(Bytes, "rows", lambda self, start, stop: torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"FrozenWeight.rows\(0, 70\) gave \[1, 64\]; expected is \[70, 64\]"):
        row_norm(Bytes(W.float()), A, B, 1.0)


def test_operands_that_do_not_fit_are_named() -> None:
    W, A, B = draw(8, 16, 2)
    good = NormProblem(W, A, B, 1.0)
    with pytest.raises(
        ValueError, match=r"problem 1: A must be \[r, 16\] and B \[8, r\] .* got \[2, 15\] and \[8, 2\]"
    ):
        row_norms([good, NormProblem(W, A[:, 1:], B, 1.0)])
    with pytest.raises(ValueError, match=r"problem 0: .* A on meta"):
        row_norms([NormProblem(W, A.to("meta"), B, 1.0)])
    with pytest.raises(ValueError, match=r"problem 0: base_N must be \[8\] on cpu, got \[7\]"):
        row_norm(W, A, B, 1.0, torch.ones(7))
