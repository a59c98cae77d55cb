"""Groups of layers as processes compute them that have slices of the outputs and some of the tokens each, up to the message and
after it. Used on the CPU and on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from group_cases import KINDS, GroupCase, cast, make_case, poisoned, renumbered
from seeds import SEED

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.lora_linear.own_tokens import OwnTokens, gathered
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, Segment
from packlora.ops.recompute import recompute_of

SIZE = 2
ROWS = ("B", "magnitude", "norm", "bias")
Results = dict[str, torch.Tensor]


def slice_of(case: GroupCase, rank: int) -> GroupCase:
    """The case with some rows of its weights, as a column-parallel layer has."""

    def own(whole: Any) -> Any:
        return None if whole is None else whole.chunk(SIZE)[rank].clone()

    def sliced(layer: Layer) -> Layer:
        adapters = {n: replace(low, **{k: own(getattr(low, k)) for k in ROWS}) for n, low in layer.adapters.items()}
        return replace(layer, frozen=Dense(own(layer.frozen.dense())), bias=own(layer.bias), adapters=adapters)

    return replace(case, layers=tuple(map(sliced, case.layers)), dy=[d.chunk(SIZE, 1)[rank] for d in case.dy])


class Process:
    """One process's forward and backward, up to the message."""

    def __init__(self, case: GroupCase, rank: int, dtype: torch.dtype, plan: Plan, moves: bool) -> None:
        own, leaves = cast(slice_of(case, rank), dtype)
        own = renumbered(own)
        self.names = [name for name in leaves if name.startswith("A")]
        t, state, x = len(own.x) // SIZE, GroupState(version_counted=True), own.x.detach()[None]
        self.here = slice(rank * t, rank * t + t)
        self.x_tK = x[0, self.here].clone()
        for segments, boundaries in self.runs(own, moves):  # the last one counts
            self.tokens = OwnTokens(rank * t, t, [leaves[name] for name in self.names])
            leaves["x"] = gathered(x.clone().requires_grad_(), self.tokens)
            outputs = lora_group(
                leaves["x"],
                own.layers,
                segments,
                own.keys,
                own.salt,
                plan,
                state,
                recompute_of(leaves["x"]),
                boundaries,
            )
            grads = torch.autograd.grad(outputs, list(leaves.values()), [d[None] for d in own.dy], allow_unused=True)
        self.found = {f"y{index}": y.detach()[0] for index, y in enumerate(outputs)}
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            assert grad is None or not name.startswith("A"), "it comes with the message"
            self.found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad

    @staticmethod
    def runs(case: GroupCase, moves: bool) -> list[tuple[list[Segment], Boundaries]]:
        if not moves:
            return [(list(case.segments), ON_HOST)]
        of = {segment.adapter: segment for segment in case.segments}
        moving = MovingSegments(len(case.x), sorted(of))
        nominal = [replace(of[number], start=start, stop=stop) for number, start, stop in moving.nominal]

        def runs() -> Any:
            for placed in ([(number, at, at + 1) for at, number in enumerate(of)], [*case.segments]):
                moving.write([(s.adapter, s.start, s.stop) if isinstance(s, Segment) else s for s in placed])
                yield nominal, moving

        return runs()  # type: ignore[no-any-return]

    def receive(self, sums: list[torch.Tensor]) -> Results:
        """Results with the gradients of the A's, by the sums of dS over the processes."""
        grads = self.tokens.gradients(self.x_tK, [dS[self.here].clone() for dS in sums])
        assert not self.tokens.dS
        self.found |= {f"d{name}": grad for name, grad in zip(self.names, grads, strict=True) if grad is not None}
        return self.found


def run_on_slices(
    case: GroupCase, dtype: torch.dtype, plan: Plan, poison: bool = False, moves: bool = False
) -> Results:
    """Outputs and gradients by name, of processes that share the tokens and the outputs."""
    with poisoned() if poison else mock.MagicMock():
        every = [Process(case, rank, dtype, plan, moves) for rank in range(SIZE)]
        sums = [torch.stack(own).sum(0) for own in zip(*(one.tokens.dS for one in every), strict=True)]
        results = [one.receive(sums) for one in every]
    return {name: joined(name, [found[name].double() for found in results]) for name in results[0]}


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.startswith(("dA", "dx")):
        return sum(parts[1:], parts[0]).view(parts[0].shape[-2:])
    return torch.cat(parts, 1 if name.startswith("y") else 0)


def case_of(kind: str, trial: int, dtype: torch.dtype, device: str = "cpu") -> GroupCase:
    """A case whose tokens and outputs SIZE divides."""
    sizes = [64, 32, 160][: len((KINDS[kind]["ranks"] or [[0]])[0])]
    return make_case(
        72 + 2 * trial, 64, sizes, with_bias=trial % 2 == 1, seed=SEED + trial, dtype=dtype, device=device, **KINDS[kind]
    )  # fmt: skip
