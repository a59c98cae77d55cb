"""Adapters of experts on a GPU: exactness, empty groups, bits, and nothing waits for the device.

make gpu
"""

from __future__ import annotations

import pytest
import torch
from waits import no_waiting

from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_experts import low_rank
from packlora.ops.lora_experts.autograd import lora_experts
from packlora.ops.lora_experts.norm import expert_norms
from packlora.ops.lora_experts.reference import lora_experts as reference
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight

E, TOP_K, T, N, K, SALT = 12, 4, 700, 384, 256, 7


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_operator_is_the_loop_over_experts_and_waits_for_nothing(
    jobs: int, dora: bool, kernels: bool, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 against the specification in float64 of the same numbers; expert 11 has no token."""
    monkeypatch.setattr(low_rank, "KERNELS", kernels)
    torch.manual_seed(0)
    frozen = ExpertWeight(torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16) / 16)
    chosen = torch.rand(T, E - 1, device="cuda").argsort(1)[:, :TOP_K]
    owner = torch.arange(T, device="cuda") * jobs // T if jobs > 1 else None
    token = torch.arange(T * TOP_K, device="cuda") // TOP_K
    routing = Routing.of(chosen, E, owner, jobs)
    tokens = torch.randn(T, K, device="cuda", dtype=torch.bfloat16)
    x = tokens if repeated else tokens[routing.token_of_row()].contiguous()
    keys = torch.from_numpy(token_keys(5, 1, 2, T)).cuda()
    adapters: list[ExpertLowRank] = []
    for job in range(jobs):
        r = (16, 8, 40)[job]
        A, B = torch.randn(E * r, K, device="cuda") / 16, torch.randn(N, r * E, device="cuda") / 16
        magnitude = norm = None
        if dora and job != 1:
            norm = expert_norms(frozen, A, B, 2.0)
            magnitude = (norm * 1.1).requires_grad_()
        adapters.append(
            ExpertLowRank(A.requires_grad_(), B.requires_grad_(), 2.0, (0.1, 0.0, 0.3)[job], magnitude, norm)
        )
    d = torch.randn(T * TOP_K, N, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), *[t for a in adapters for t in (a.A, a.B, a.magnitude) if t is not None]]

    def once() -> list[torch.Tensor]:
        y = lora_experts(x, frozen, routing, adapters, keys, SALT, repeated)
        return [y.detach(), *torch.autograd.grad(y, leaves, d)]

    first = once()
    with no_waiting():
        got = once()
    assert all(torch.equal(a, b) for a, b in zip(first, got, strict=True))
    wide = [
        ExpertLowRank(*[None if t is None else t.detach().double().requires_grad_() for t in (a.A, a.B)], a.scaling, a.dropout,
                      None if a.magnitude is None else a.magnitude.detach().double().requires_grad_(),
                      None if a.norm is None else a.norm.double())
        for a in adapters
    ]  # fmt: skip
    source = tokens.detach().double().requires_grad_()
    whose = torch.zeros_like(token) if owner is None else owner[token]
    y = reference(
        source[token], ExpertWeight(frozen.weight.double()), chosen.reshape(-1), whose, wide, keys[token], SALT, not repeated
    )  # fmt: skip
    exact_leaves = [source, *[t for a in wide for t in (a.A, a.B, a.magnitude) if t is not None]]
    want = [y, *torch.autograd.grad(y, exact_leaves, d.double()[routing.place])]
    got[0] = got[0][routing.place]
    if not repeated:
        got[1] = got[1][routing.place].view(T, TOP_K, K).double().sum(1)
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        assert float((a.double() - b).norm() / b.norm()) < 0.02, at
