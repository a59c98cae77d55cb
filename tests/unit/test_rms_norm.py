"""The RMS norm with a frozen weight against its reference, in torch and by the kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_as_exact, poisoned
from seeds import SEED
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from packlora.ops.recompute import recompute_of, recomputed
from packlora.ops.recompute_hooks import add_recompute
from packlora.ops.rms_norm import reference
from packlora.ops.rms_norm import rms_norm as operator
from packlora.ops.rms_norm.reference import KINDS
from packlora.ops.rms_norm.rms_norm import WIDEST, rms_norm

EPS = 1e-6
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
PATHS = ["torch", pytest.param("kernels", marks=NEEDS_TRITON)]
Norm = Callable[..., torch.Tensor]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which path computes the operator on the CPU. New buffers of the kernels hold NaN."""
    path: str = request.param
    if path == "kernels":
        monkeypatch.setattr(operator, "_takes_kernels", lambda x: x.numel() > 0)
        for name in ("empty_like", "empty_permuted"):
            monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    return path


def case(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x, weight, dy."""
    generator = torch.Generator().manual_seed(SEED + seed)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, (1 + torch.randn(shape[-1], generator=generator, dtype=torch.float64) / 4).to(dtype), dy


def outcome(norm: Norm, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *kind: Any) -> dict[str, torch.Tensor]:
    """Of LlamaRMSNorm's kind, unless another is named."""
    leaf = x.detach().requires_grad_()
    y = norm(leaf, weight, EPS, *(kind or KINDS[0]))
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return {"y": y.detach(), "dx": dx}


@pytest.mark.parametrize(
    ("kind", "module"), zip(KINDS, (LlamaRMSNorm, Gemma3nRMSNorm, Gemma3RMSNorm), strict=True), ids=str
)
def test_the_reference_is_what_the_modules_of_transformers_compute(kind: tuple[float, str], module: Any) -> None:
    x, weight, dy = case(9, 40, dtype=torch.bfloat16)
    norm = module(40, eps=EPS).bfloat16()
    norm.weight.data.copy_(weight)

    def unfused(x: torch.Tensor, *_: Any) -> torch.Tensor:
        y: torch.Tensor = norm(x)
        return y

    got, want = outcome(reference.rms_norm, x, weight, dy, *kind), outcome(unfused, x, weight, dy)
    for name in want:
        assert torch.equal(got[name], want[name])


@pytest.mark.parametrize("shape", [(1, 7), (5, 1), (3, 2, 33), (17,), (2, 0), (0, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_in_float64_are_those_of_the_reference(
    shape: tuple[int, ...], kind: tuple[float, str]
) -> None:
    drawn = case(*shape, dtype=torch.float64)
    got, want = outcome(rms_norm, *drawn, *kind), outcome(reference.rms_norm, *drawn, *kind)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-13)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (130, 1), (5, 7, 128), (7, 100), (5, 1024), (3, 3000), (2, 16384)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_as_exact_as_the_unfused_norm_s(
    shape: tuple[int, ...], kind: tuple[float, str], dtype: torch.dtype, path: str
) -> None:
    """Rows of other scales, among them one as small as eps and one of zeros. The interpreter has no rounding to bfloat16."""
    if path == "kernels" and dtype == torch.bfloat16:
        pytest.skip("tests/gpu")

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        x, weight, dy = case(*shape, dtype=dtype, seed=number)
        rows, scales = x.view(-1, shape[-1]), (1.0, 1e-3, 30.0, 0.0)
        for row in range(len(rows)):
            rows[row] *= scales[row % 4]
        wide = (tensor.double() for tensor in (x, weight, dy))
        found = outcome(rms_norm, x, weight, dy, *kind), outcome(reference.rms_norm, x, weight, dy, *kind)
        assert found[0]["y"].dtype == found[0]["dx"].dtype == dtype
        return *found, outcome(reference.rms_norm, *wide, *kind)

    assert_as_exact(draw, 3, SEED)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_rounded_where_the_unfused_norm_rounds_them(kind: tuple[float, str], path: str) -> None:
    """But for the few that sums in another order tip over."""
    x, weight, dy = case(20, 128, dtype=torch.float16)
    got = outcome(rms_norm, x, weight, dy, *kind)["y"]
    equal = {other: float((got == reference.rms_norm(x, weight, EPS, *other)).double().mean()) for other in KINDS}
    assert equal[kind] > 0.99
    assert all(share < 0.9 for other, share in equal.items() if other != kind)


def test_a_row_with_nan_or_inf_reaches_no_other(path: str) -> None:
    x, weight, dy = case(40, 20)
    want = outcome(rms_norm, x, weight, dy)
    x[7, 3], x[8, 0], dy[20, 5] = math.nan, math.inf, math.nan
    got = outcome(rms_norm, x, weight, dy)
    plain = outcome(reference.rms_norm, x, weight, dy)
    for name, bad in (("y", [7, 8]), ("dx", [7, 8, 20])):
        rest = [row for row in range(40) if row not in bad]
        assert torch.equal(got[name][rest], want[name][rest])
        assert torch.equal(got[name].isnan(), plain[name].isnan())


def test_a_row_of_zeros_has_no_value_and_the_gradient_of_the_reference(path: str) -> None:
    x, weight, dy = case(3, 20)
    x[1] = 0
    got, want = outcome(rms_norm, x, weight, dy), outcome(reference.rms_norm, x, weight, dy)
    assert not got["y"][1].any()
    torch.testing.assert_close(got["dx"][1], want["dx"][1], rtol=1e-6, atol=0)


# --- layouts -----------------------------------------------------------------------------------------------------------

T, H, D = 6, 5, 24
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "[1, T, H, D]": lambda flat: flat.view(1, T, H, D),
    "[1, H, T, D]": lambda flat: flat.view(1, T, H, D).transpose(1, 2),
    "[T, H, 1, D]": lambda flat: flat.view(T, H, D).unsqueeze(2),
    "[H, T, D, 1] turned": lambda flat: flat.view(T, H, D).transpose(0, 1).unsqueeze(-1).transpose(-1, -2),
    "every second row": lambda flat: flat.view(-1, 2, D)[:, 0],
    "three dimensions turned": lambda flat: flat.view(2, 3, H, D).permute(2, 0, 1, 3),
    "columns of wider rows": lambda flat: flat.view(-1, 2 * D)[:, D:],
    "one row for all": lambda flat: flat[:D].expand(T, H, D),
}
COPIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads of wider rows": lambda flat: flat.view(T, H, D)[:, 1:3],
    "columns first": lambda flat: flat.view(D, T * H).T,
}


@pytest.mark.parametrize("dy_view", ["[1, T, H, D]", "as x", "columns first", "one number"])
@pytest.mark.parametrize("view", [*VIEWS, *COPIED])
@pytest.mark.parametrize("path", PATHS[1:], indirect=True)
def test_views_have_the_bits_of_a_copy(view: str, dy_view: str, path: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    flat, dy_flat, weight = (torch.randn(T * H * D if n < 2 else D, generator=generator) for n in range(3))
    x = (VIEWS | COPIED)[view](flat)
    dy = {
        "[1, T, H, D]": lambda: dy_flat[: x.numel()].view(x.shape),
        "as x": lambda: (VIEWS | COPIED)[view](dy_flat),
        "columns first": lambda: dy_flat[: x.numel()].view(D, -1).T.reshape(x.shape),
        "one number": lambda: dy_flat[0].expand(x.shape),
    }[dy_view]()
    got, want = outcome(rms_norm, x, weight, dy), outcome(rms_norm, x.contiguous(), weight, dy.contiguous())
    for name in want:
        assert torch.equal(got[name], want[name])


@NEEDS_TRITON
def test_whole_rows_at_one_stride_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And y lies as x does, so that the gradient which comes back in that layout is read in place too."""
    from packlora.ops.rms_norm import triton_path

    seen: list[tuple[int, ...]] = []

    def launch(kernel: Any, grid: Any, args: tuple[Any, ...], *rest: Any, **constants: Any) -> None:
        seen.append(tuple(value.data_ptr() for value in args if isinstance(value, torch.Tensor)))

    monkeypatch.setattr(triton_path.launcher, "launch", launch)
    for views, in_place in ((VIEWS, True), (COPIED, False)):
        for name, view in views.items():
            x, dy, weight = view(torch.randn(T * H * D)), view(torch.randn(T * H * D)), torch.randn(D)
            y = triton_path.forward(x, weight, EPS, 0.0, "llama")
            dx = triton_path.backward(x, weight, dy, EPS, 0.0)
            own = x.data_ptr(), weight.data_ptr(), dy.data_ptr()
            assert (seen[-2] == (*own[:2], y.data_ptr())) == in_place, name
            assert (seen[-1] == (*own, dx.data_ptr())) == in_place, name
            if in_place and x.numel() == T * H * D and 0 not in x.stride():
                for dim in range(x.ndim):
                    assert x.shape[dim] == 1 or y.stride(dim) == dx.stride(dim) == x.stride(dim), name


@NEEDS_TRITON
def test_rows_beyond_2_to_the_31_elements_are_found() -> None:
    """Two rows so far apart; what lies between is never touched."""
    from packlora.ops.rms_norm import triton_path

    weight, dy = torch.randn(16).half(), torch.randn(2, 16).half()
    apart = 2**31 + 16
    x = torch.empty(apart + 16, dtype=torch.float16).as_strided((2, 16), (apart, 1))
    x.copy_(torch.randn(2, 16))
    near = x.contiguous()
    assert torch.equal(
        triton_path.forward(x, weight, EPS, 0.0, "llama"), reference.rms_norm(near, weight, EPS, *KINDS[0])
    )
    want = triton_path.backward(near, weight, dy, EPS, 0.0)
    assert torch.equal(triton_path.backward(x, weight, dy, EPS, 0.0), want)


# --- autograd ----------------------------------------------------------------------------------------------------------


def test_nothing_but_x_and_the_weight_is_kept_for_the_backward(path: str) -> None:
    x, weight, _ = case(6, 20)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = rms_norm(x, weight, EPS)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), weight.data_ptr()]
    assert y.requires_grad


def test_x_that_is_written_into_before_the_backward_is_refused(path: str) -> None:
    x, weight, dy = case(6, 20)
    leaf = x.requires_grad_()
    x = leaf * 1
    y = rms_norm(x, weight, EPS)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaf, dy)


def test_second_derivatives_are_refused() -> None:
    x, weight, dy = case(6, 20)
    y = rms_norm(x.requires_grad_(), weight, EPS)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y, x, dy, create_graph=True)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, _ = case(6, 20)
    with pytest.raises(ValueError, match=r"no RMS norm of offset 1\.0 and rounding 'llama'"):
        rms_norm(x, weight, EPS, 1.0, "llama")
    with pytest.raises(ValueError, match=r"a weight \(19,\) of torch.float32 does not fit rows \(6, 20\)"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match="must be frozen"):
        rms_norm(x, weight.requires_grad_(), EPS)
    assert WIDEST == 16384


class FusedRMSNorm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, EPS)


def test_its_output_can_be_recomputed_to_the_bit(path: str) -> None:
    x, weight, _ = case(33, 20)
    norm = FusedRMSNorm(weight)
    said, left = add_recompute(norm)
    assert said.startswith("1 norms") and not left
    y = norm(x.requires_grad_())
    recompute = recompute_of(y)
    assert recompute is not None
    assert torch.equal(recomputed(recompute.function, recompute.operands), y)


@pytest.mark.parametrize("first", [0, 1, 13])
def test_bits_of_a_row_depend_on_no_other_row(first: int, path: str) -> None:
    x, weight, dy = case(40, 72)
    want = outcome(rms_norm, x, weight, dy)
    got = outcome(rms_norm, x[first:], weight, dy[first:])
    for name in want:
        assert torch.equal(got[name], want[name][first:])


@NEEDS_TRITON
def test_launches_of_ever_new_numbers_of_rows_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from packlora.ops import launcher

    monkeypatch.setattr(launcher, "KEPT", 3)
    few, many = dict.fromkeys(range(2)), dict.fromkeys(range(3))
    assert launcher.bounded(few) is few and len(few) == 2  # type: ignore[arg-type]
    assert launcher.bounded(many) is many and many == {}  # type: ignore[arg-type]
