"""Gradients of A where the input of a group was gathered from processes each of which has some of the tokens.

Every process computes all tokens and a slice of the outputs, so its dS = s c e B is a part of a sum. Summed over the processes,
dS of a process's own tokens gives its part of dA = dS' drop(x) from its own rows of x. So no process keeps x of all tokens or
gathers it again, and the sum of dS goes with that of dx, in one message:

    x = gather(own x)         has an OwnTokens with it (`gathered`)
    y = lora_group(x, ...)    its backward gives dx, and leaves dS there
    backward of the gather    sends dx and dS together, and gives own dx and the gradients of the A's

Shapes: T tokens, t own ones, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from packlora.ops.lora_linear.boundaries import Boundaries
from packlora.ops.lora_linear.call import Call, Gradients, Wanted
from packlora.ops.lora_linear.moving import MovingSegments, inside
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import Prepared
from packlora.ops.recompute import Recompute

ONLY_A = Wanted(False, True, False, set(), set())


class _Left(NamedTuple):
    """dS [T, width] of a group, with the group, its calls over all and over own tokens (None: no adapter has any), the dropout
    keys of all tokens, and the gradients of its outputs."""

    dS: torch.Tensor
    prepared: Prepared
    call: Call
    own: Call | None
    keys_T2: torch.Tensor | None
    d: Gradients


class OwnTokens:
    """Tokens `first` to `first + count` of a gathered x, for the groups that read it.

    operands: A's of the groups; `gradients` gives theirs.
    """

    def __init__(self, first: int, count: int, operands: Sequence[torch.Tensor]) -> None:
        self.first, self.count, self.operands = first, count, tuple(operands)
        self._left: list[_Left] = []

    # --- for the group's node (autograd.py) ----------------------------------------------------------------------------------

    @staticmethod
    def plan(plan: Plan) -> Plan:
        """The plan, or one like it, whose backward reads x for dA = dS' xd alone."""
        if plan.rearranged:
            return CHAIN
        return plan if plan.keep_s else replace(plan, keep_s=True)

    def recompute(self, prepared: Prepared, call: Call, x: torch.Tensor, boundaries: Boundaries) -> Recompute | None:
        """Recipe that gives nothing in the place of x, since A's get their gradients here; None where x is to be kept.

        Args:
            x: [1, T, K]. boundaries: of the call.
        """
        known, owned = set(map(id, self.operands)), prepared.owned(call)
        trained = (owned[slot.at] for slot in call.slots if slot.name == "A")
        if not all(id(A) in known for A in trained if A.requires_grad):
            return None
        place = self.first, self.count
        if place not in call.own_tokens:
            call.own_tokens[place] = self._call(prepared, call, x, boundaries)
        return Recompute(_Nothing(self, prepared, call), ())

    def _call(self, prepared: Prepared, call: Call, x: torch.Tensor, boundaries: Boundaries) -> Call | None:
        """The call over own tokens; None where no adapter has any."""
        by_adapter = {segment.adapter: segment for segment in call.segments}
        placed, its_own = (
            [(segment.adapter, segment.start, segment.stop) for segment in call.segments],
            boundaries.settled,
        )
        if boundaries.known:
            placed = inside(placed, self.first, self.count)
        else:
            its_own = part = cast(MovingSegments, boundaries).part(self.first, self.count)
            placed = [one for one in part.nominal if one[0] in by_adapter]
        segments = tuple(replace(by_adapter[number], start=start, stop=stop) for number, start, stop in placed)
        own_x = x[:, self.first : self.first + self.count]
        return prepared.call(own_x, segments, call.salt, call.plan, its_own) if segments else None

    def leave(self, left: _Left) -> None:
        """Take over dS of a group."""
        self._left.append(left)

    # --- for the gather's node -----------------------------------------------------------------------------------------------

    @property
    def dS(self) -> list[torch.Tensor]:
        """Tensors [T, width] to be summed over the processes."""
        return [left.dS for left in self._left]

    def gradients(self, x_tK: torch.Tensor, sums: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the operands, parts of sums over the processes; None where nothing came back. What was left is
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
        """A's with their gradients: zeros for adapters whose tokens are all elsewhere, as all processes take the same steps."""
        blocks: dict[int, tuple[torch.Tensor, ...]] = {}
        if (own := one.own) is not None and own.stacked:
            keys_t2 = None if one.keys_T2 is None else one.keys_T2[self.first : self.first + self.count]
            none: Gradients = [None] * len(one.d)
            _, dA = own.inputs.inputs(own, one.prepared.operands, x_tK, keys_t2, dS, none, none, ONLY_A)
            assert dA is not None
            blocks = {stack.segment.adapter: own.layout.a_blocks(dA, stack.segment.adapter) for stack in own.stacked}
        grads = []
        for _, index, number, name, place, block, source in one.call.slots:
            if name == "A" and place is not None and one.d[index] is not None:
                A = one.prepared.flat[source]
                grad = blocks[number][block][: place.rank] if number in blocks else torch.zeros_like(A)
                grads.append((A, grad.to(A.dtype)))
        return grads


class _Nothing:
    """Recomputes nothing in the place of x, and takes over dS."""

    def __init__(self, tokens: OwnTokens, prepared: Prepared, call: Call) -> None:
        self.tokens, self.prepared, self.call = tokens, prepared, call

    def __call__(self) -> torch.Tensor:
        assert self.call.unread is not None
        return self.call.unread.expand(self.call.T, self.call.K)

    def leave(self, dS: torch.Tensor, keys_T2: torch.Tensor | None, d: Gradients) -> None:
        """Take over dS [T, width]. d: gradients of the group's outputs."""
        own = self.call.own_tokens[self.tokens.first, self.tokens.count]
        self.tokens.leave(_Left(dS, self.prepared, self.call, own, keys_T2, d))


def gathered(x: torch.Tensor, own: OwnTokens) -> torch.Tensor:
    """x, which was gathered from processes with tokens of their own. Any operation on it loses that, as a write does
    (recompute_of)."""
    x._packlora_recompute = Recompute(_never, (), own)  # type: ignore[attr-defined]
    return x


def _never() -> torch.Tensor:
    raise RuntimeError("tokens of other processes are not computed again")
