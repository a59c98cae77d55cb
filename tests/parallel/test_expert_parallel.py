"""Expert parallelism: adapters on a model whose experts are shared out to processes learn what they learn on the whole one, in
float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from expert_models import tiny_experts
from expert_runs import BOTH, adapter_of, compared, errors_when_broken, threes
from ranks import Ranks
from tensor_runs import BOUND, PATIENCE, WRONG, Case, assert_exact

from packlora.adapters.expert_layout import experts_of
from packlora.config import ParallelConfig
from packlora.errors import InputError
from packlora.experts import cut as parallel_experts
from packlora.experts.cut import check_experts
from packlora.experts.part import ExpertPart
from packlora.experts.replicas import ExchangingReplicas
from packlora.ops.lora_experts.routing import Routing
from packlora.parallel import adapter as parallel_adapter
from packlora.parallel.adapter import WholeGradient
from packlora.parallel.collectives import add_up
from packlora.parallel.layout import Layout
from packlora.parallel.replicas import Replicas
from packlora.parallel.tensor import check_cut

Pool = Callable[[int], Ranks]
FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "olmoe", "granitemoe", "phimoe", "llama4")
UNCUT = ("granitemoe", "phimoe", "gpt_oss")
"""Of which transformers' plan has nothing beside the experts."""
ONE_LAYER = {"num_hidden_layers": 1}


def cases() -> list[Case]:
    """Several jobs, with and without dropout, one and two experts a token; and jobs whose tokens are all of one process."""
    one = {**ONE_LAYER, "num_experts_per_tok": 1}
    return [
        Case("qwen3_moe", threes(0.2)),
        Case("qwen3_moe", threes(0.0)[:3], one, checkpointing=True),
        Case("qwen3_moe", (adapter_of("DoRA", 0.2),), {**one, "one": True}, checkpointing=True),
    ]


def more_cases() -> list[Case]:
    first = {**ONE_LAYER, "num_experts_per_tok": 1, "one": True}
    kinds = [adapter_of(kind, dropout, target_parameters=own) for kind in ("LoRA", "DoRA") for dropout in (0.0, 0.1)
             for own in (BOTH, ["gate.weight"], ["experts.gate_up_proj"])]  # fmt: skip
    low_rank = adapter_of("DoRA", 0.1, dora_dropout="low_rank")
    found = [
        Case("qwen3_moe", (one,), ONE_LAYER, checkpointing=at % 2 == 0) for at, one in enumerate([*kinds, low_rank])
    ]
    return [*found, Case("qwen3_moe", (adapter_of("LoRA", dropout=0.1, init_lora_weights="gaussian"),), first)]


def beside_tensor(experts: int) -> list[Case]:
    """Other layers are cut, each over two processes, with fewer key-value heads than that; all processes share the experts, and
    see all tokens there also where each has some of them elsewhere."""
    few = {"num_experts": experts, "num_key_value_heads": 1}
    return [
        Case("qwen3_moe", threes(0.2), ONE_LAYER | few, tensor=2),
        Case("qwen3_moe", (adapter_of("DoRA", 0.1, target_modules="all-linear"),), few, True, tensor=2, sequence=True),
    ]


def families(*more: str, tensor: int = 0) -> list[Case]:
    found = []
    for family in (*FAMILIES, *more):
        router = "router.weight" if family in ("granitemoe", "phimoe", "gpt_oss", "llama4") else "gate.weight"
        own = {"target_modules": ["o_proj"], "target_parameters": [*BOTH, router]}
        both = adapter_of("DoRA", 0.1, **own), adapter_of("LoRA", 0.0, **own)
        found.append(Case(family, both, checkpointing=True, tensor=tensor))
    return found


@pytest.mark.soak
def test_other_families_learn_what_they_learn_on_one_process(ranks: Pool) -> None:
    assert_exact(ranks(2).run(compared, families(), seconds=PATIENCE))


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [False, True])
def test_other_families_learn_it_beside_layers_that_are_cut(sequence: bool, ranks: Pool) -> None:
    """Also a latent attention and a linear one, which stay whole, and layers whose outputs are joined before the next one in
    their block; with tokens of their own between the layers."""
    cases = families("gpt_oss", "qwen3_next", tensor=2)
    cases = [replace(one, sequence=True) for one in cases if one.family not in UNCUT] if sequence else cases
    assert_exact(ranks(2).run(compared, cases, seconds=PATIENCE))


@pytest.mark.parametrize(
    ("size", "more"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.soak), pytest.param(3, False, marks=pytest.mark.soak)],
)
def test_what_is_learnt_is_that_of_one_process(size: int, more: bool, ranks: Pool) -> None:
    """Losses, whole gradients, their norms and the parameters after three steps; and of what is not on experts the same bits on
    all processes."""
    assert_exact(ranks(size).run(compared, more_cases() if more else cases()))


@pytest.mark.parametrize(("size", "experts"), [(2, 6), pytest.param(4, 8, marks=pytest.mark.soak)])
def test_beside_layers_that_are_cut_what_is_learnt_is_that_of_one_process(size: int, experts: int, ranks: Pool) -> None:
    """Also with two processes for each slice of a layer. A step adds one message to those of the frozen model."""
    assert_exact(ranks(size).run(compared, beside_tensor(experts)))


def mesh_of(rank: int) -> Any:
    """Mesh of a process, whose groups are lists of ranks."""
    return mock.Mock(rank=rank, new_group=lambda ranks, backend=None: list(ranks))


@pytest.mark.parametrize("exchange", [False, True])
def test_processes_that_share_experts_beside_cut_layers_are_grouped(exchange: bool) -> None:
    """Eight processes, of which two and two hold the same experts, and each two a slice of the other layers."""
    layout = Layout((("job",),), 4 if exchange else 2, tensor=2, expert=2, exchange=exchange)
    found = [(ExchangingReplicas if exchange else Replicas)(mesh_of(rank), layout) for rank in range(8)]
    for rank, own in enumerate(found):
        first, place = rank - rank % 4, rank % 4
        assert own.model == own.base == [first, first + 1, first + 2, first + 3]
        assert own.layers == [rank - rank % 2, rank - rank % 2 + 1] and own.is_repeated == (place > 1)
        assert not exchange or own.alike == [place, place + 4]
        assert own._sums == (list(range(rank % 2, 8, 2)) if exchange else [place, place + 4])
        assert (own.rank, own.saves) == (rank // 2 if exchange else rank // 4, rank < 4)


def test_processes_of_a_stage_that_share_experts_beside_cut_layers_are_grouped() -> None:
    """Two stages of four processes, of which each two hold a slice of the other layers."""
    layout = Layout((("job",),), tensor=2, pipeline=2, expert=2)
    found = [Replicas(mesh_of(rank), layout) for rank in range(8)]
    for rank, own in enumerate(found):
        assert own.layers == [rank - rank % 2, rank - rank % 2 + 1] and own.is_repeated == (rank % 4 > 1)


# --- what must not go unnoticed ----------------------------------------------------------------------------------------


def summed_over_the_group() -> AbstractContextManager[Any]:
    """Gradients of experts' adapters are added up over processes that have other experts."""
    norm = WholeGradient.norm

    def broken(self: WholeGradient, gradient: torch.Tensor) -> torch.Tensor:
        add_up(gradient, self.group)
        return norm(self, gradient)

    return mock.patch.object(WholeGradient, "norm", broken)


def masks_of_local_experts() -> AbstractContextManager[Any]:
    of = Routing.of
    return mock.patch.object(Routing, "of", staticmethod(lambda *args: _local(of(*args))))


def _local(routing: Routing) -> Routing:
    return replace(routing, first=0)


def routers_counted_for_each_process() -> AbstractContextManager[Any]:
    is_part = parallel_adapter._is_part
    return mock.patch.object(
        parallel_adapter, "_is_part", lambda adapter, name: ".gate." in name or is_part(adapter, name)
    )


def own_gradients_of_what_experts_read() -> AbstractContextManager[Any]:
    return mock.patch.object(parallel_experts, "copied", lambda x, group: x)


def norms_of_own_experts() -> AbstractContextManager[Any]:
    return mock.patch.object(ExpertPart, "is_slice", return_value=False)


BROKEN = {
    "over the wrong group": summed_over_the_group, "masks of local experts": masks_of_local_experts,
    "routers counted twice": routers_counted_for_each_process, "inputs not added up": own_gradients_of_what_experts_read,
    "norm of own experts": norms_of_own_experts,
}  # fmt: skip


def test_faults_of_expert_parallelism_would_be_seen(ranks: Pool) -> None:
    case = Case("qwen3_moe", (adapter_of("LoRA", 0.2),), ONE_LAYER, steps=2)
    for found in ranks(2).run(errors_when_broken, BROKEN, case):
        assert found.pop("") < BOUND
        assert all(error > WRONG for error in found.values()), found


def slices_counted_by_each_that_has_them() -> AbstractContextManager[Any]:
    made = WholeGradient.__init__
    return mock.patch.object(WholeGradient, "__init__", lambda self, adapter, group, _: made(self, adapter, group))


@pytest.mark.soak
def test_faults_beside_layers_that_are_cut_would_be_seen(ranks: Pool) -> None:
    few = ONE_LAYER | {"num_experts": 8, "num_key_value_heads": 1}
    case = Case("qwen3_moe", (adapter_of("LoRA", 0.2, target_modules="all-linear"),), few, tensor=2, steps=2)
    broken = {"twice": slices_counted_by_each_that_has_them, "inputs": own_gradients_of_what_experts_read}
    for found in ranks(4).run(errors_when_broken, broken, case):
        assert found.pop("") < BOUND
        assert all(error > WRONG for error in found.values()), found


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", UNCUT)
def test_tokens_are_not_shared_where_no_layer_is_cut(family: str) -> None:
    asked = ParallelConfig(tensor=2, sequence_parallel=True)
    with pytest.raises(InputError, match=r"nothing is cut between whose parts parallel\.sequence_parallel could share"):
        check_cut(tiny_experts(family), asked)
    check_cut(tiny_experts("qwen3_moe"), asked)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next", "gpt_oss"])
def test_families_that_transformers_calls_through_its_registry_can_be_shared_out(family: str) -> None:
    """By a degree that divides their experts, all of which are found: by no other."""
    model = tiny_experts(family)
    check_experts(model, 2)
    (number,) = {experts.num_experts for experts in experts_of(model).values()}
    held = sum(p.ndim == 3 and p.shape[0] == number for _, p in model.named_parameters())
    assert held and held == sum(
        p.ndim == 3 for experts in experts_of(model).values() for _, p in experts.named_parameters()
    )
    with pytest.raises(InputError, match=f"has {number} experts, which it does not divide"):
        check_experts(model, number + 1)
