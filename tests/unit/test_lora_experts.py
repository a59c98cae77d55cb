"""The operator over experts' weights against the loop over experts and owners that is its specification."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from packlora.experts.part import ExpertPart
from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_experts import grouped, low_rank
from packlora.ops.lora_experts.autograd import lora_experts
from packlora.ops.lora_experts.norm import expert_norms
from packlora.ops.lora_experts.reference import lora_experts as reference
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight
from packlora.ops.lora_experts.weighted import weighted_sums

E, SALT = 5, 77


def an_adapter(
    generator: torch.Generator, frozen: ExpertWeight, r: int, kind: str, dropout: float, base_dropped: bool = True
) -> ExpertLowRank:
    E, N, K = frozen.shape
    dtype = frozen.weight.dtype

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    A, B = drawn(E * r, K).requires_grad_(), drawn(N, r * E).requires_grad_()
    scaling = 3 / r**0.5 if kind == "rslora" else 3 / r
    if kind != "dora":
        return ExpertLowRank(A, B, scaling, dropout)
    magnitude = (drawn(E, N).abs() + 0.5).requires_grad_()
    norm = expert_norms(frozen, A.detach(), B.detach(), scaling).to(dtype)
    return ExpertLowRank(A, B, scaling, dropout, magnitude, norm, base_dropped)


def a_case(dtype: torch.dtype, N: int, K: int, top_k: int, transposed: bool, bias: bool, E: int = E) -> Any:
    """Frozen weights, tokens, their experts (one of which has no token, another one a single one) and keys."""
    generator, T = torch.Generator().manual_seed(0), 24
    weight = torch.randn(E, N, K, generator=generator, dtype=dtype)
    frozen = ExpertWeight(
        weight.transpose(1, 2).contiguous() if transposed else weight,
        torch.randn(E, N, generator=generator, dtype=dtype) if bias else None,
        transposed,
    )
    crowd = torch.rand(T, E - 2, generator=generator).argsort(1)[:, :top_k]
    assert top_k <= E - 2
    crowd[7, 0] = E - 2  # a single token; expert E - 1 has none
    x = torch.randn(T, K, generator=generator, dtype=dtype)
    keys = torch.from_numpy(token_keys(5, 1, 2, T))
    return generator, frozen, x, crowd, keys


def differences(
    frozen: ExpertWeight, x: torch.Tensor, chosen: torch.Tensor, keys: torch.Tensor, owner: torch.Tensor | None,
    adapters: list[ExpertLowRank | None], repeated: bool, checkpointed: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Of y, dx and the gradients of all operands, relative, between the operator and the specification."""
    T, k = chosen.shape
    routing = Routing.of(chosen, frozen.shape[0], owner, len(adapters))
    token = torch.arange(T * k) // k
    source, generator = x, torch.Generator().manual_seed(9)
    if not repeated:
        source = torch.randn(T * k, x.shape[1], dtype=x.dtype, generator=generator)
    operands = [t for a in adapters if a is not None for t in (a.A, a.B, a.magnitude) if t is not None]
    d = torch.randn(T * k, frozen.shape[1], dtype=x.dtype, generator=torch.Generator().manual_seed(4))

    def ours(source: torch.Tensor) -> torch.Tensor:
        rows = source if repeated else source[routing.order]
        return lora_experts(rows, frozen, routing, adapters, keys, SALT, repeated)[routing.place]

    def theirs(source: torch.Tensor) -> torch.Tensor:
        whose = torch.zeros(T * k, dtype=torch.int64) if owner is None else owner[token]
        rows = source[token] if repeated else source
        return reference(rows, frozen, chosen.reshape(-1), whose, adapters, keys[token], SALT, not repeated)

    found = []
    for function in (ours, theirs):
        leaf = source.clone().requires_grad_()
        y = checkpoint(function, leaf, use_reentrant=False) if checkpointed and function is ours else function(leaf)
        grads = torch.autograd.grad((y * d).sum(), [leaf, *operands], allow_unused=True)
        found.append([y.detach(), *grads])
    names = ["y", "dx", *[f"operand {at}" for at in range(len(operands))]]
    return {
        name: float((a - b).norm() / b.norm().clamp(min=1e-30))
        if a is not None and b is not None
        else float(a is not b)
        for name, a, b in zip(names, *found, strict=True)
    }


JOBS = {
    "one": ([("lora", 3, 0.0)], False),
    "one-dropped": ([("rslora", 3, 0.3)], False),
    "one-dora": ([("dora", 4, 0.0)], False),
    "one-dora-dropped": ([("dora", 4, 0.3)], False),
    "three": ([("lora", 3, 0.0), ("rslora", 8, 0.0), ("dora", 5, 0.0)], False),
    "three-dropped": ([("lora", 3, 0.2), ("rslora", 8, 0.0), ("dora", 5, 0.4)], False),
    "two-dropped-alike": ([("lora", 3, 0.2), ("dora", 5, 0.2)], False),
    "some-nobody-s": ([("lora", 3, 0.2), ("dora", 8, 0.0)], True),
}  # fmt: skip


@pytest.mark.parametrize("jobs", JOBS)
def test_the_operator_is_the_loop_over_experts(jobs: str) -> None:
    """y, dx, dA, dB, dm in float64, with an expert without tokens and one with a single token."""
    kinds, nobody = JOBS[jobs]
    bases = (False, True) if any(kind == "dora" and p for kind, _, p in kinds) else (True,)
    ways = itertools.product((1, 2, 8), (True, False), (False, True), bases)
    for top_k, repeated, transposed, base_dropped in ways:
        generator, frozen, x, chosen, keys = a_case(torch.float64, 6, 7, top_k, transposed, bias=transposed, E=10)
        adapters: list[ExpertLowRank | None] = [
            an_adapter(generator, frozen, r, kind, p, base_dropped) for kind, r, p in kinds
        ]
        adapters += [None] * nobody
        owner = torch.arange(len(x)) * len(adapters) // len(x) if len(adapters) > 1 else None
        found = differences(frozen, x, chosen, keys, owner, adapters, repeated, checkpointed=transposed)
        assert max(found.values()) < 1e-12, (top_k, repeated, transposed, found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("repeated", [True, False])
def test_experts_in_parts_give_together_what_all_give(
    dtype: torch.dtype, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, the last of them without a token: sums by token, gradients of tokens and operands, but for the rounding of
    one sum. LoRA and DoRA, dropout; in 16 bits by the kernels."""
    monkeypatch.setattr(low_rank, "KERNELS_ON_CPU", True)
    generator, frozen, x, chosen, keys = a_case(dtype, 8, 16, 2, False, bias=True)
    adapters = [an_adapter(generator, frozen, 4, "lora", 0.2), an_adapter(generator, frozen, 8, "dora", 0.1)]
    owner, T = torch.arange(len(x)) * 2 // len(x), len(x)
    rows = x if repeated else torch.randn(2 * T, 16, dtype=dtype, generator=generator)
    d = torch.randn(T, 8, dtype=dtype, generator=generator)

    def computed(part: ExpertPart | None, count: int) -> list[torch.Tensor]:
        """y by token, its gradients: of what tokens bring, of the operands."""
        first = None if part is None else part.first
        routing, leaf = Routing.of(chosen, count, owner, 2, first), rows.clone().requires_grad_()
        W, b = (t if part is None else t[part.first : part.first + count] for t in (frozen.weight, frozen.bias))
        own = [a if part is None else sliced(a, part) for a in adapters]
        came = leaf if repeated else leaf[routing.order]
        y = routing.sum_to_tokens(lora_experts(came, ExpertWeight(W, b), routing, own, keys, SALT, repeated))
        operands = [t for a in own for t in (a.A, a.B, a.magnitude) if t is not None]
        return [y.detach(), *torch.autograd.grad((y * d).sum(), [leaf, *operands])]

    def sliced(a: ExpertLowRank, part: ExpertPart) -> ExpertLowRank:
        A, B = (part.own(name, t).detach().requires_grad_() for name, t in (("A", a.A), ("B", a.B)))
        if a.magnitude is None or a.norm is None:
            return replace(a, A=A, B=B)
        magnitude, norm = part.own("magnitude", a.magnitude), part.own("magnitude", a.norm)
        return replace(a, A=A, B=B, magnitude=magnitude.detach().requires_grad_(), norm=norm)

    parts = [ExpertPart(index, E, 1, torch.clone, torch.clone) for index in range(E)]
    found, want = [computed(part, 1) for part in parts], computed(None, E)
    names = ["A", "B", "A", "B", "magnitude"]
    together = [sum(own[at] for own in found) for at in range(2)]
    together += [parts[0].joined(name, [own[2 + at] for own in found]) for at, name in enumerate(names)]
    for got, exact in zip(together, want, strict=True):
        assert float((got.double() - exact.double()).norm() / exact.double().norm()) < torch.finfo(dtype).eps
    assert len(Routing.of(chosen, 1, owner, 2, E - 1).order) == 0


@pytest.mark.skipif(grouped._grouped_mm is None, reason="this torch has no grouped product on a CPU")
def test_torch_s_grouped_product_computes_sizes_of_whole_16_bytes_without_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also ranks that are not, as they are rounded up; in float32."""
    monkeypatch.setattr(grouped.Groups, "bounds", None)
    for jobs, (kinds, nobody) in JOBS.items():
        generator, frozen, x, chosen, keys = a_case(torch.float32, 8, 12, 2, False, bias=True)
        adapters: list[ExpertLowRank | None] = [an_adapter(generator, frozen, r, kind, p) for kind, r, p in kinds]
        adapters += [None] * nobody
        owner = torch.arange(len(x)) * len(adapters) // len(x) if len(adapters) > 1 else None
        found = differences(frozen, x, chosen, keys, owner, adapters, repeated=True)
        assert max(found.values()) < 2e-6, (jobs, found)


def test_norms_are_those_of_the_sum_by_row_of_every_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.ops.lora_experts.norm.CHUNK_BYTES", {"cpu": 700})  # two experts at a time
    for transposed in (False, True):
        generator, frozen, *_ = a_case(torch.float64, 6, 7, 1, transposed, bias=False)
        adapter = an_adapter(generator, frozen, 3, "lora", 0.0)
        A, B = adapter.A.view(E, 3, 7), adapter.B.view(6, 3, E).permute(2, 0, 1)
        want = (frozen.from_outputs() + adapter.scaling * B @ A).norm(dim=2)
        torch.testing.assert_close(
            expert_norms(frozen, adapter.A, adapter.B, adapter.scaling), want, rtol=1e-12, atol=0
        )


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    generator, frozen, x, chosen, keys = a_case(torch.float64, 6, 7, 2, False, bias=False)
    routing = Routing.of(chosen, E)
    adapter = an_adapter(generator, frozen, 3, "lora", 0.1)
    with pytest.raises(ValueError, match="x is"):
        lora_experts(x[:-1], frozen, routing, [adapter], keys)
    with pytest.raises(ValueError, match="2 adapters for 1 owners"):
        lora_experts(x, frozen, routing, [adapter, None], keys)
    with pytest.raises(ValueError, match=r"A is \[.*\], B \["):
        lora_experts(x, frozen, routing, [replace(adapter, B=adapter.B[:-1])], keys)
    with pytest.raises(ValueError, match="needs keys_T2"):
        lora_experts(x, frozen, routing, [adapter])


@pytest.mark.parametrize("here", [None, (1, 3)])
def test_weighted_sums_and_their_gradients_are_those_of_autograd(here: tuple[int, int] | None) -> None:
    """Of all experts' rows, and of those of some experts; with weights in a wider type than the rows."""
    generator, T, k, D = torch.Generator().manual_seed(6), 11, 3, 7
    chosen = torch.rand(T, E, generator=generator).argsort(1)[:, :k]
    first, count = here or (None, E)
    routing = Routing.of(chosen, count, first=first)
    for dtype in (torch.float64, torch.float32):
        z = torch.randn(len(routing.order), D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        w = torch.rand(T, k, generator=generator, dtype=torch.float64).requires_grad_()
        d = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
        rows = z * w.reshape(-1, 1)[routing.order]
        want = torch.zeros(T, D, dtype=torch.float64).index_add(0, routing.order // k, rows).to(dtype)
        got = weighted_sums(z, w, routing, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want)
        for ours, theirs in zip(torch.autograd.grad(got, [z, w], d), torch.autograd.grad(want, [z, w], d), strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)


def test_no_tokens_have_no_sums_and_a_process_may_send_none_of_a_token() -> None:
    assert Routing.of(torch.zeros(0, 2, dtype=torch.int64), E).sum_to_tokens(torch.zeros(0, 7)).shape == (0, 7)

    class Alone:
        def numbers(self, own: torch.Tensor) -> torch.Tensor:
            return own

        def rows(self, own: torch.Tensor, sent: Any, got: Any) -> torch.Tensor:
            return own

    part = ExpertPart(0, 1, E, lambda x: x, lambda x: x, Alone(), share=(0, 2))
    owned = SimpleNamespace(owner=torch.zeros(1, dtype=torch.int64), count=1, keys=None)
    found = part.sums(torch.ones(1, 7), torch.tensor([[0, 1]]), torch.ones(1, 2), owned, lambda x, *_: x)
    assert torch.equal(found, torch.zeros(1, 7))


def test_a_magnitudes_gradient_is_made_of_products_that_float16_has_no_numbers_for() -> None:
    """Of gradients as small as a loss over many labels gives."""
    found = {}
    for dtype in (torch.float16, torch.float64):
        generator, frozen, x, chosen, _ = a_case(torch.float64, 8, 16, 2, False, False)
        adapter = an_adapter(generator, frozen, 4, "dora", 0.0)
        wide = torch.promote_types(dtype, torch.float32)
        magnitude, norm = (own.detach().to(wide).requires_grad_() for own in (adapter.magnitude, adapter.norm))
        own = replace(adapter, A=adapter.A / 64, B=adapter.B / 64, magnitude=magnitude, norm=norm.detach())
        routing = Routing.of(chosen, len(frozen.weight))
        y = lora_experts((x / 64).to(dtype), ExpertWeight((frozen.weight / 4).to(dtype)), routing, [own])
        found[dtype] = torch.autograd.grad(y, magnitude, torch.full_like(y, 1e-6))[0].double()
    got, want = found.values()
    assert (got - want).norm() < 0.1 * want.norm()


# --- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "owners"), [(5, 1), (24, 3)])
def test_kernels_compute_the_products_by_group(rank: int, owners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows in a group, groups without rows, sizes that fill no block; float32 sums of 16-bit numbers."""
    monkeypatch.setattr("packlora.ops.lora_experts.triton_path.BLOCK_ROWS", 16)
    generator, T, K, N = torch.Generator().manual_seed(2), 61, 72, 136
    chosen = torch.rand(T, 4, generator=generator).argsort(1)[:, :2]  # expert 4 has no token
    owner = torch.arange(T) * owners // T if owners > 1 else None
    routing, G = Routing.of(chosen, E, owner, owners), E * owners
    S = len(routing.order)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float16)

    x_TK, A, B, s, y = drawn(T, K), drawn(G, rank, K), drawn(G, rank, N), drawn(S, rank), drawn(S, N)
    more = torch.randn(G, N, generator=generator)
    for repeated in (True, False):
        x = x_TK if repeated else x_TK[routing.token_of_row()]
        found = []
        for kernels in (True, False):
            monkeypatch.setattr(low_rank, "KERNELS_ON_CPU", kernels)
            wide = (lambda t: t) if kernels else torch.Tensor.double
            found.append([
                low_rank.down(wide(x), wide(A), routing, repeated), low_rank.add_(wide(y).clone(), wide(s), wide(B), routing),
                low_rank.sums(wide(s), wide(x), routing, repeated),
            ])  # fmt: skip
            for base in (None, wide(drawn(S, N)) if not found[1:] else found[0][5]):  # y itself, another
                out, z = wide(y).clone(), torch.full_like(wide(y), float("nan"))
                low_rank.add_scaled_(out, out if base is None else wide(base), wide(s), wide(B), more, routing, z)
                found[-1] += [out, z] if base is None else [base, out, z]
        assert found[0][2].dtype == torch.float32
        for got, want, bound in zip(*found, (5e-4, 5e-4, 1e-6, *[5e-4] * 5), strict=True):
            assert float((got - want).norm() / want.norm()) < bound
        assert not found[0][2].view(E, owners, rank, K)[4].any()


def test_the_operator_by_kernels_is_the_loop_over_experts_within_the_rounding_of_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_rank, "KERNELS_ON_CPU", True)
    launched: list[str] = []
    for name in ("down", "add_", "add_scaled_", "sums"):
        function = getattr(low_rank.triton_path, name)
        monkeypatch.setattr(
            low_rank.triton_path, name, lambda *a, name=name, function=function: launched.append(name) or function(*a)
        )
    for jobs in ("three-dropped", "some-nobody-s"):
        kinds, nobody = JOBS[jobs]
        generator, frozen, x, chosen, keys = a_case(torch.float16, 8, 16, 2, False, bias=True)
        adapters: list[ExpertLowRank | None] = [an_adapter(generator, frozen, r, kind, p) for kind, r, p in kinds]
        adapters += [None] * nobody
        owner = torch.arange(len(x)) * len(adapters) // len(x) if len(adapters) > 1 else None
        found = differences(frozen, x, chosen, keys, owner, adapters, repeated=True)
        assert max(found.values()) < 0.02, (jobs, found)
    assert set(launched) == {"down", "add_", "add_scaled_", "sums"}


@pytest.mark.parametrize(("kernels", "narrow", "g"), [(True, torch.float16, 1.0001), (False, torch.bfloat16, 1.001)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_magnitude_that_moved_by_less_than_16_bits_hold_of_g_is_in_y(
    p: float, kernels: bool, narrow: torch.dtype, g: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the true change, by projection, that 16 bits show on average: of tokens' sums roundings are chance."""
    monkeypatch.setattr(low_rank, "KERNELS_ON_CPU", kernels)
    changes = {}
    for dtype in (torch.float64, narrow):
        generator, frozen, x, chosen, keys = a_case(torch.float64, 48, 64, 2, False, False)
        adapter, wide = an_adapter(generator, frozen, 4, "dora", p), torch.promote_types(dtype, torch.float32)
        frozen = ExpertWeight(frozen.weight.to(dtype), None, False)
        routing, found = Routing.of(chosen, frozen.shape[0]), []
        for factor in (1.0, g):
            own = replace(
                adapter, A=adapter.A.to(dtype) / 16, B=adapter.B.to(dtype), norm=adapter.norm.to(wide),
                magnitude=adapter.norm.to(wide) * factor,
            )  # fmt: skip
            found.append(lora_experts(x.to(dtype), frozen, routing, [own], keys, SALT, True).detach().double())
        changes[dtype] = found[1] - found[0]
    got, want = changes[narrow], changes[torch.float64]
    assert 0.7 < float((got * want).sum() / want.square().sum()) < 1.3


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_kernels_add_to_products_whose_rows_torch_pads(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that are no multiples of 16 bytes, forward and backward."""
    monkeypatch.setattr(low_rank, "KERNELS_ON_CPU", True)
    for N, K, transposed in ((10, 16, False), (16, 10, True)):
        generator, frozen, x, chosen, keys = a_case(torch.float16, N, K, 2, transposed, False)
        adapter = an_adapter(generator, frozen, 4, "dora" if dora else "lora", 0.0)
        found = differences(frozen, x, chosen, keys, None, [adapter], repeated=True)
        assert max(found.values()) < 0.02, (N, K, found)
