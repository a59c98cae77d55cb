"""Messages between the processes of a group in forwards and backwards where each process has consecutive tokens of its own
between the layers:

    all_tokens       forward joins           backward sums, takes own    in the place of copied
    summed_tokens    forward sums, takes own backward joins              in the place of summed
    own_tokens       forward takes own       backward joins              before the first layer
    joined_tokens    forward joins           backward takes own          after the last one
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from packlora.ops.first_order import first_order
from packlora.ops.recompute import recomputable, recompute_of
from packlora.parallel.collectives import GATHER, SCATTER, Through, answered, function_of


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[1, t, K] of all processes as [1, T, K]. Who needs it in a backward may have it joined again, and keeps t tokens."""
    out, recompute = _all_tokens(x, group), recompute_of(x)
    function, operands = (None, (x,)) if recompute is None else (recompute.function, recompute.operands)
    again = JoinedAgain(function, operands, group)
    return recomputable(out, again, *operands, wanted=again.want)


class JoinedAgain:
    """Tokens of all processes, joined again in a backward for whoever has not kept them.

    `begin` joins them for one that wants them, while what comes before it in the backward is computed.

    Args:
        function: gives the tokens of this process from the operands; None: the operand is they.
    """

    def __init__(self, function: Through | None, operands: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> None:
        self.function, self.group = function, group
        self._operands: tuple[torch.Tensor, ...] | None = tuple(one.detach() for one in operands)
        self.is_wanted = False
        """Whether somebody has said that they will be asked for."""
        self._begun: tuple[torch.Tensor, Any] | None = None

    def want(self) -> None:
        """See Recompute."""
        self.is_wanted = True

    def begin(self) -> None:
        """Begin the message, once. All processes of the group do so at the same place in their backward."""
        operands, self._operands = self._operands, None
        if operands is not None:
            with torch.no_grad():
                self._begun = _begin_to_join(self._own(operands), self.group)

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        begun, self._begun, self._operands = self._begun, None, None
        if begun is None:
            return _join_tokens(self._own(operands), self.group)
        with answered():
            begun[1].wait()
        return begun[0]

    def _own(self, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return operands[0] if self.function is None else self.function(*operands)


def summed_tokens(y: torch.Tensor, group: dist.ProcessGroup, ahead: JoinedAgain | None = None) -> torch.Tensor:
    """The sum of [1, T, N] over the group, of which this process has [1, t, N]. ahead: begins in its backward."""
    out: torch.Tensor = _SummedTokens.apply(y, group, ahead)
    return out


def _join_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _begin_to_join(x, group, waits=True)[0]


def _begin_to_join(x: torch.Tensor, group: dist.ProcessGroup, waits: bool = False) -> tuple[torch.Tensor, Any]:
    """Tokens of all processes, which are there when the message has been waited for; and the message."""
    x = x.contiguous()
    whole = x.new_empty(1, x.shape[1] * dist.get_world_size(group), x.shape[2])
    with answered():
        message = getattr(dist, GATHER)(whole[0], x[0], group=group, async_op=not waits)
    return whole.data, message  # of version 0, as recompute_of wants what nobody has written into since it was made


def _sum_tokens(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y = y.contiguous()
    own = y.new_empty(1, y.shape[1] // dist.get_world_size(group), y.shape[2])
    with answered():
        getattr(dist, SCATTER)(own[0], y[0], group=group)
    return own


def _take_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class _SummedTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup, ahead: JoinedAgain | None) -> torch.Tensor:
        ctx.group, ctx.ahead = group, ahead
        return _sum_tokens(y, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole, ahead = _join_tokens(d, ctx.group), ctx.ahead
        if ahead is not None:
            ahead.begin()
        return whole, None, None


_all_tokens = function_of("AllTokens", _join_tokens, _sum_tokens)
own_tokens = function_of("OwnTokens", _take_tokens, _join_tokens)
"""This process's [1, t, K] of [1, T, K]."""
joined_tokens = function_of("JoinedTokens", _join_tokens, _take_tokens)
"""[1, t, K] of all processes as [1, T, K], for what every process computes alike."""
