"""Training of a tiny model whose experts are shared out to the processes of a group, and by one process alone, as in
tensor_runs.py, in float64: routers too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import tensor_runs
import torch
import torch.distributed as dist
from expert_models import in_float64, tiny_experts
from tensor_runs import Case, Learnt, learn

from packlora.adapters.attach import Adapter
from packlora.adapters.sharded import Shard
from packlora.base.packing import prepare_model
from packlora.experts.cut import shard_experts
from packlora.experts.part import ExpertPart
from packlora.parallel.collectives import all_of
from packlora.parallel.tensor import shard

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def adapter_of(kind: str, dropout: float = 0.0, r: int = 4, **more: Any) -> dict[str, Any]:
    targets = {"target_modules": ["q_proj"], "target_parameters": [*BOTH, "gate.weight"]}
    return tensor_runs.adapter_of(kind, dropout, r=r, **{**targets, **more})


def threes(dropout: float) -> tuple[dict[str, Any], ...]:
    """All kinds beside each other, on both weights of the experts, on one, and not on experts."""
    return (
        adapter_of("LoRA", dropout, r=3),
        adapter_of("DoRA", dropout / 2, r=5, target_modules=["v_proj", "o_proj"], target_parameters=BOTH),
        adapter_of(
            "rsLoRA", 0.0, target_modules=["embed_tokens"], target_parameters=["experts.down_proj", "gate.weight"]
        ),
        adapter_of("LoRA", dropout, target_parameters=None),
    )


def model_of(case: Case, group: Any = None) -> Any:
    """Cut over the group where there is one. `one` among the changes: all tokens go to the first two experts."""
    changes = dict(case.model)
    first = changes.pop("one", False)
    model = tiny_experts(case.family, **changes)
    if first:
        only_first(model)
    if group is not None and case.tensor:
        width = case.tensor
        sets = [dist.new_group(range(at, at + width)) for at in range(0, dist.get_world_size(group), width)]
        shard(model, sets[dist.get_rank(group) // width], case.sequence, group)
    elif group is not None:
        shard_experts(model, group)
    prepare_model(model, case.checkpointing)
    return model


@torch.no_grad()
def only_first(model: Any) -> None:
    """One token goes to one expert, the first or the second; the others get none."""
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight
        weight[1] = -weight[0]
        weight[2:] = 0.0


def assert_alike(adapter: Adapter, group: Any) -> None:
    """What is whole has the same bits on all processes, a slice of a layer on those that have the same one."""
    views = [adapter.layout.views(own) for own in all_of(adapter.flat, group)]
    for name in adapter.layout.places:
        path, _, leaf = name.rpartition("/")
        own = adapter.weights[path].shard
        assert isinstance(own, ExpertPart) == (".experts." in name)
        each = 1
        if own is not None and own.is_slice(leaf):
            each = own.count if isinstance(own, Shard) else len(views)
        copies = len(views) if each == 1 else own.copies if isinstance(own, Shard) else 1
        for at, view in enumerate(views):
            first = at % (each * copies) // copies * copies if each > 1 else 0
            assert torch.equal(view[name], views[first][name]), name


def trained(case: Case, group: Any = None) -> Learnt:
    with in_float64(), mock.patch.multiple(tensor_runs, model_of=model_of, assert_alike=assert_alike):
        return learn(case, group)


def compared(rank: int, cases: list[Case]) -> list[dict[str, float]]:
    """By case, the largest relative errors over the group beside one process alone; each rank has some of the cases."""
    own = {at: trained(case) for at, case in enumerate(cases) if at % dist.get_world_size() == rank}
    learnt = [trained(case, dist.group.WORLD) for case in cases]
    return [learnt[at].errors(exact) for at, exact in own.items()]


def errors_when_broken(
    rank: int, wrong: Mapping[str, Callable[[], AbstractContextManager[Any]]], case: Case
) -> dict[str, float]:
    """By name of what is wrong, the largest error; "" is of nothing."""
    exact, found = trained(case), {}
    for name, breaking in {"": nullcontext, **wrong}.items():
        with breaking(), mock.patch(f"{__name__}.assert_alike"):
            found[name] = max(trained(case, dist.group.WORLD).errors(exact).values())
    return found
