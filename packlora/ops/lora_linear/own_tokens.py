"""Gradients of A where the input of a group was gathered from processes each of which has some of the tokens.

Every process computes all tokens and a slice of the outputs, so its dS = s c e B is a part of a sum. Summed over the processes,
dS of a process's own tokens gives its part of dA = dS' drop(x) from its own rows of x. So no process keeps x of all tokens or
gathers it again, and the sum of dS goes with that of dx, in one message:

    x = gather(own x)         has an OwnTokens with it (`gathered`)
    y = lora_group(x, ...)    its backward gives dx, and leaves dS there
    backward of the gather    sends [dx | dS], and gives own dx and the gradients of the A's

Shapes: T tokens, t own ones, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from packlora.ops.lora_linear.boundaries import Boundaries
from packlora.ops.lora_linear.call import Call, Gradients, Wanted
from packlora.ops.lora_linear.prepared import Prepared

ONLY_A = Wanted(False, True, False, set(), set())


class _Left(NamedTuple):
    """dS [T, width] of a group, with the group, its calls over all and over own tokens (None: no adapter has any), the dropout
    keys of all tokens, and the layers whose outputs had a gradient."""

    dS: torch.Tensor
    prepared: Prepared
    call: Call
    own: Call | None
    keys_T2: torch.Tensor | None
    layers: frozenset[int]


class OwnTokens:
    """Tokens `first` to `first + count` of a gathered x, for the groups that read it.

    operands: A's of the groups; `gradients` gives theirs.
    """

    def __init__(self, first: int, count: int, operands: Sequence[torch.Tensor]) -> None:
        self.first, self.count, self.operands = first, count, tuple(operands)
        self._left: list[_Left] = []

    def gives(self, prepared: Prepared, call: Call) -> bool:
        """Whether `gradients` gives those of all A's of a call."""
        known, owned = set(map(id, self.operands)), prepared.owned(call)
        return all(
            id(owned[slot.at]) in known for slot in call.slots if slot.name == "A" and owned[slot.at].requires_grad
        )

    def call_of(self, prepared: Prepared, call: Call, x: torch.Tensor, boundaries: Boundaries) -> Call | None:
        """The same call over own tokens; None where no adapter has any. x [1, T, K], boundaries: of the call."""
        place = self.first, self.count
        if place not in call.own_tokens:
            placed, its_own = boundaries.part(call.segments, *place)
            by_adapter = {segment.adapter: segment for segment in call.segments}
            segments = tuple(replace(by_adapter[number], start=start, stop=stop) for number, start, stop in placed)
            own_x = x[:, self.first : self.first + self.count]
            made = prepared.call(own_x, segments, call.salt, call.plan, its_own) if segments else None
            call.own_tokens[place] = made
        return call.own_tokens[place]

    def leave(
        self, dS: torch.Tensor, prepared: Prepared, call: Call, own: Call | None, keys_T2: torch.Tensor | None, d: Gradients
    ) -> None:  # fmt: skip
        """Take over dS [T, width] of a group. own: see `call_of`. d: gradients of the group's outputs."""
        layers = frozenset(index for index, grad in enumerate(d) if grad is not None)
        self._left.append(_Left(dS, prepared, call, own, keys_T2, layers))

    @property
    def dS(self) -> list[torch.Tensor]:
        """Tensors [T, width] to be summed over the processes."""
        return [left.dS for left in self._left]

    def gradients(self, x_tK: torch.Tensor, sums: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the operands, a part of a sum over the processes; None where nothing came back. What was left is
        forgotten.

        Args:
            x_tK: own tokens.
            sums: of `dS`, own tokens [t, width].
        """
        found: dict[int, torch.Tensor] = {}
        left, self._left = self._left, []
        for one, dS in zip(left, sums, strict=True):
            for A, grad in self._of_group(one, x_tK, dS):
                found[id(A)] = found[id(A)] + grad if id(A) in found else grad
        return [found.get(id(A)) for A in self.operands]

    def _of_group(self, one: _Left, x_tK: torch.Tensor, dS: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A's with their gradients. Zeros of adapters that have tokens elsewhere alone: all processes take the same steps."""
        blocks: dict[int, tuple[torch.Tensor, ...]] = {}
        if (own := one.own) is not None:
            none: Gradients = [None] * len(one.prepared.layers)
            keys_t2 = None if one.keys_T2 is None else one.keys_T2[self.first : self.first + self.count]
            _, dA = own.inputs.inputs(own, one.prepared.operands, x_tK, keys_t2, dS, none, none, ONLY_A)
            assert dA is not None
            numbers = {segment.adapter for segment in own.segments} & own.layout.rows.keys()
            blocks = {number: own.layout.a_blocks(dA, number) for number in numbers if own.layout.rows[number][1]}
        grads = []
        for _, index, number, name, place, block, source in one.call.slots:
            if name == "A" and place is not None and index in one.layers:
                A = one.prepared.flat[source]
                grad = blocks[number][block][: place.rank] if number in blocks else torch.zeros_like(A)
                grads.append((A, grad.to(A.dtype)))
        return grads


def gathered(x: torch.Tensor, own: OwnTokens) -> torch.Tensor:
    """x, which was gathered from processes with tokens of their own. Any operation on it loses that."""
    x._packlora_own_tokens = own  # type: ignore[attr-defined]
    return x


def own_tokens_of(x: torch.Tensor) -> OwnTokens | None:
    """The own tokens of an x that was gathered; None of any other, or where x was written to since."""
    own: OwnTokens | None = getattr(x, "_packlora_own_tokens", None)
    return own if own is not None and x._version == 0 else None
