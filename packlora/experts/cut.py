"""Expert parallelism: each process of a group holds some of the experts of every layer, and all else of the frozen model.

All processes of the group run the same microbatches. Routers and attention are computed by each of them; each process's experts
compute the tokens that are theirs, and what they give is summed over the group, as transformers' "all_reduce" implementation
does. Which experts a layer has is known wherever transformers calls them through its registry of experts' functions, and of
Llama 4: every parameter of such a module has the experts as its first dimension.

Adapters are put on a model that was cut (part.py); parallel/adapter.py makes norms whole and joins what is saved.

All processes run the same microbatches, or they wait for one another for ever: none goes on by itself after an error in a
forward or a backward (out of memory), the run ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import PART, experts_of
from packlora.adapters.experts import compute_here
from packlora.adapters.linear import Attached
from packlora.errors import InputError
from packlora.experts.part import ExpertPart
from packlora.parallel.collectives import copied, exchanged, summed
from packlora.parallel.cut import Slices
from packlora.parallel.sharded import run_nobody, with_gradient

APART = re.compile(r"\bexperts\.\d+\.")
"""Pattern in the path of a parameter of one expert."""


class ExchangedExperts(Slices):
    """The same where each process has tokens of its own. All processes of the group exchange rows in the same layers, in one
    order, or they wait for ever: every backward goes through all layers, and who has no microbatch runs tokens of nobody."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        model.get_input_embeddings().register_forward_hook(with_gradient)

    def idle(self, attached: Attached, backward: bool) -> None:
        """Exchange rows with processes that run a microbatch, forward, and backward."""
        run_nobody(self.model, self.model.device, attached, backward)


def check_experts(model: PreTrainedModel, degree: int, key: str = "parallel.expert") -> None:
    """Refuse a model, which may be without weights, whose experts cannot be shared out to so many processes.

    Args:
        key: of the run file that asks for it.

    Raises:
        InputError: it has no experts, experts that lie in an unknown way, or a number that the degree does not divide.
    """
    what, kind, found = f"{key} is {degree}, but ", model.config.model_type, experts_of(model)
    unknown = [
        name for name, parameter in model.named_parameters()
        if APART.search(name) or (parameter.ndim == 3 and _owner(name) not in found and not _is_convolution(model, name))
    ]  # fmt: skip
    if unknown:
        raise InputError(
            f"{what}how the experts of a {kind} model lie is not known: transformers does not call {_owner(unknown[0])} "
            "through its registry of experts' functions; leave it out"
        )
    if not found:
        raise InputError(f"{what}a {kind} model has no experts; leave it out")
    for path, experts in found.items():
        if experts.num_experts % degree:
            fitting = [n for n in range(2, experts.num_experts + 1) if experts.num_experts % n == 0]
            raise InputError(
                f"{what}{path} has {experts.num_experts} experts, which it does not divide; give one of "
                f"{', '.join(map(str, fitting))}"
            )
        for name, parameter in experts.named_parameters(recurse=False):
            if parameter.shape[0] != experts.num_experts:
                raise InputError(
                    f"{what}how the experts of a {kind} model lie is not known: {path}.{name} is {list(parameter.shape)}, and "
                    f"there are {experts.num_experts} experts; leave it out"
                )


class Messages:
    """The Exchange of the processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def numbers(self, own: torch.Tensor) -> torch.Tensor:
        return exchanged(own, [1] * len(own), [1] * len(own), self.group)

    def rows(self, own: torch.Tensor, sent: Sequence[int], got: Sequence[int]) -> torch.Tensor:
        return exchanged(own, sent, got, self.group)


def exchange_rows(model: PreTrainedModel, group: dist.ProcessGroup, alike: dist.ProcessGroup | None = None) -> None:
    """Let each process of a model that `shard_experts` has cut have tokens of its own, which go to the experts and back.

    Args:
        alike: processes that have the same tokens, as they hold the other layers together; each sends some. None: this one.
    """
    new: dict[str, Any] = {"exchange": Messages(group), "enter": _itself, "leave": _itself}
    if alike is not None:
        new |= {"enter": partial(copied, group=alike), "leave": partial(summed, group=alike)}
        new["share"] = dist.get_rank(alike), dist.get_world_size(alike)
    for experts in experts_of(model).values():
        setattr(experts, PART, replace(getattr(experts, PART), **new))


def exchanging(
    model: PreTrainedModel, group: dist.ProcessGroup, layers: dist.ProcessGroup | None
) -> tuple[Slices, str]:
    """Storage of a model whose processes have tokens of their own from now on, and what the user should know.

    Args:
        group: processes that share out the experts.
        layers: those that hold the other layers together; the same where none does.
    """
    alike = None if layers is group else layers
    exchange_rows(model, group, alike)
    own = "of these processes has microbatches of its own"
    if alike is not None:
        own = f"{dist.get_world_size(alike)} of these processes have microbatches of their own"
    return ExchangedExperts(model), f"each {own}, whose tokens go to the experts and back"


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_convolution(model: PreTrainedModel, name: str) -> bool:
    return isinstance(model.get_submodule(_owner(name)), torch.nn.modules.conv._ConvNd)


def shard_experts(
    model: PreTrainedModel, group: dist.ProcessGroup, beside: str = ", and all else whole"
) -> list[str]:  # fmt: skip
    """Cut a model, in place, to the experts of this process. All processes of the group call it with the same model.

    Call it before adapters are put on the model, and before the model is moved to its device where it is too large for one.

    Args:
        group: of at least two processes.
        beside: what is said of all else.

    Returns:
        What the user should know.

    Raises:
        InputError: see check_experts.
    """
    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    check_experts(model, degree)
    found = experts_of(model)
    for path, experts in found.items():
        here = experts.num_experts // degree
        part = ExpertPart(rank, degree, here, partial(copied, group=group), partial(summed, group=group))
        for name, parameter in list(experts.named_parameters(recurse=False)):
            own = parameter.detach()[part.first : part.first + here].clone()  # so that the whole can be freed
            setattr(experts, name, torch.nn.Parameter(own, requires_grad=False))
        experts.num_experts = here
        setattr(experts, PART, part)
        compute_here(model, path)
    numbers = sorted({experts.num_experts for experts in found.values()})
    return [
        f"expert parallelism over {degree} processes: each has {' or '.join(map(str, numbers))} of the experts of "
        f"{len(found)} layers{beside}"
    ]
