"""The two paths compute the same steps: every method of one against that of the other, on the same inputs and in isolation."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import KINDS, cast, make_case
from seeds import SEED

from packlora.ops.lora_linear import torch_path, triton_path
from packlora.ops.lora_linear.autograd import gradients, outputs_of
from packlora.ops.lora_linear.call import Call, Operands, Path, Wanted
from packlora.ops.lora_linear.plan import CHAIN, ROUTED
from packlora.ops.lora_linear.prepared import GroupState, Prepared

METHODS = ["down", "up", "magnitude", "grads", "inputs"]
SOME = [
    "one adapter", "dropout", "siblings", "four adapters", "six adapters, siblings, some absent", "DoRA", "trained bias",
    "DoRA and LoRA, siblings, some absent, biases", "all tokens, DoRA",
]  # fmt: skip


class Step:
    """A call settled for the kernels with its operands, and what the steps before gave."""

    def __init__(self, kind: str) -> None:
        ranks = KINDS[kind]["ranks"]
        drawn = make_case(45, 50, [37, 20, 66][: len(ranks[0])], with_bias=True, seed=SEED, **KINDS[kind])
        case, _ = cast(drawn, torch.float32)
        self.prepared: Prepared = GroupState().prepared(case.x, case.layers, ROUTED)
        self.prepared.refresh()
        self.call: Call = self.prepared.call(case.x.detach(), case.segments, case.salt, ROUTED)
        self.own: Operands = self.prepared.operands
        self.x_TK, self.keys_T2, self.d = case.x.detach(), case.keys, case.dy
        with torch.no_grad():
            self.S = torch_path.down(self.call, self.own, self.x_TK, self.keys_T2, {})
            self.dropped = self.call.dropped(self.x_TK, self.keys_T2)
            self.kept = outputs_of(self.prepared, self.call, self.x_TK, self.dropped, self.S, self.x_TK.shape, True)[1]
        trained = {
            name: frozenset(slot.layer for slot in self.call.slots if slot.name == name)
            for name in ("magnitude", "bias")
        }
        self.wanted = Wanted(True, True, True, trained["magnitude"], trained["bias"])

    def by(self, path: Path) -> Call:
        """The call with every step on one path."""
        plan_up = self.call.plan_up if path is triton_path else tuple("after" for _ in self.call.plan_up)
        return replace(self.call, plan_up=plan_up, down=path, magnitude=path, grads=path, inputs=path)

    def run(self, name: str, path: Any) -> list[torch.Tensor | None]:
        """What one method gives, of what it must write."""
        call, common = self.by(path), (self.own, self.x_TK, self.keys_T2)
        if path is torch_path:
            call = replace(call, plan=replace(call.plan, dx="after"))
        if name == "down":
            return self._of_S(path.down(call, *common, {}))
        if name == "up":
            given = (self.own, self.x_TK, self.dropped, self.S)
            return [path.up(call, *given, index, False)[0] for index in range(len(self.d))]
        if name == "magnitude":
            found: list[torch.Tensor | None] = []
            for index in call.composed:
                e_TN, sums = path.magnitude(call, self.own, index, self.d[index], self.kept[index], self.wanted)
                found += [e_TN, *(t for number in sorted(sums) for t in (sums[number].dm, sums[number].d))]
            return found
        if name == "grads":
            e, dS, dB, sums, _ = path.grads(call, *common, self.S, self.d, self.kept, self.wanted)
            totals = [t for own in sums for number in sorted(own) for t in (own[number].dm, own[number].d)]
            return [*e, *self._of_S(dS), *self._blocks(dB), *totals]
        dx, dA = path.inputs(call, *common, self._zeroed(self.S), self.d, self.d, self.wanted)
        present = {segment.adapter for segment in call.segments}
        rows = [dA[first : first + padded] for n, (first, padded) in call.layout.rows.items() if n in present]
        return [dx, *rows]

    def _zeroed(self, S: torch.Tensor) -> torch.Tensor:
        """S as a gradient of S, with padding of 0: products over padded ranks read it."""
        out = torch.zeros_like(S)
        for parts in self.call.parts:
            for part in parts:
                part.of_S(out).copy_(part.of_S(S))
        return out

    def _of_S(self, S: torch.Tensor) -> list[torch.Tensor | None]:
        """The columns that adapters own: others hold anything."""
        return [part.of_S(S) for parts in self.call.parts for part in parts]

    def _blocks(self, dB: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        present = {segment.adapter for segment in self.call.segments}
        return [
            self.call.layout.b_block(dB[index], number, index)
            for number, index in self.call.layout.places
            if number in present and dB[index] is not None
        ]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", METHODS)
def test_both_paths_give_the_same(name: str, kind: str) -> None:
    step = Step(kind)
    got, want = (step.run(name, path) for path in (triton_path, torch_path))
    assert len(got) == len(want)
    assert want or name == "magnitude"
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_have_the_same_arguments(name: str) -> None:
    by_path = [list(inspect.signature(getattr(path, name)).parameters) for path in (torch_path, triton_path)]
    assert by_path[0] == by_path[1] == list(inspect.signature(getattr(Path, name)).parameters)[1:]


@pytest.mark.parametrize("kind", ["DoRA", "DoRA, dropout", "DoRA with dropout and LoRA", "trained bias", "bias alone"])
def test_magnitudes_by_the_kernels_around_plain_products_give_the_same(kind: str) -> None:
    """As on a GPU, where the plain chain has its magnitudes from the kernels, two base products and all."""
    ranks = KINDS[kind]["ranks"]
    case, _ = cast(
        make_case(45, 50, [37, 20][: len(ranks[0])], with_bias=True, seed=SEED, **KINDS[kind]), torch.float32
    )
    prepared = GroupState().prepared(case.x, case.layers, CHAIN)
    prepared.refresh()
    x_TK, own = case.x.detach(), prepared.operands
    plain = prepared.call(x_TK, case.segments, case.salt, CHAIN)
    assert plain.composed
    tables = triton_path.segment_tables(case.segments, plain.T, plain.device, plain.dtype, prepared.layout.numbers)
    up = tuple(
        torch_path if plain.base_dropped or i not in plain.composed else triton_path for i in range(len(case.dy))
    )
    kernels = replace(plain, magnitude=triton_path, up=up, scale_rows=triton_path.scale_rows, segment_tables=tables)
    kernels = replace(kernels, add_dropped=triton_path.add_dropped)
    results = []
    for call in (kernels, plain):
        with torch.no_grad():
            dropped = call.dropped(x_TK, case.keys)
            S = call.down.down(call, own, x_TK, case.keys, dropped)
            outputs, kept = outputs_of(prepared, call, x_TK, dropped, S, x_TK.shape, True)
            needed = (True,) * len(call.slots)
            dx, grads = gradients(prepared, call, x_TK, case.keys, S, kept, case.dy, True, needed)
        results.append([*outputs, dx, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
