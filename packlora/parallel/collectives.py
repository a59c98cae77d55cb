"""Messages between the processes of a group in forwards and backwards, as functions of autograd. Nothing else of packlora
sends a tensor in a forward or a backward.

    copied    forward nothing              backward sums       into the layers that each compute a part of the outputs
    summed    forward sums                 backward nothing    out of those that each compute a part of a sum
    gathered  forward joins last dims      backward takes own  out of the former, where what follows needs all outputs
    split     forward takes own            backward joins      into the latter, where all inputs are everywhere

The same for tokens, where each process has consecutive ones of its own between the layers:

    all_tokens       forward joins           backward sums, takes own    in the place of copied
    summed_tokens    forward sums, takes own backward joins              in the place of summed
    own_tokens       forward takes own       backward joins              before the first layer
    joined_tokens    forward joins           backward takes own          after the last one

What follows a sum, or is joined, is the same on all processes to the bit, so its gradient is too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from packlora.errors import ProcessError, foreign
from packlora.ops.first_order import first_order
from packlora.ops.recompute import recomputable, recompute_of

Through = Callable[..., torch.Tensor]
NEW = hasattr(dist, "all_gather_single")
GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single") if NEW else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
"""Names that torch has for joining and for adding up parts of one tensor; it warns of the older ones since 2.13."""


@contextmanager
def answered() -> Iterator[None]:
    """Turn a failure inside of the block into the error that another process has ended, or does not answer."""
    try:
        yield
    except RuntimeError as error:
        rank, size = dist.get_rank(), dist.get_world_size()
        raise ProcessError(
            f"process {rank} of {size} waited in vain for another one of the run ({unanswered(error)})"
        ) from error


def unanswered(error: RuntimeError) -> str:
    """Error of a message, without gloo's source line and advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", foreign(error)).partition(". ")[0]


def add_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the group, in place."""
    assert tensor.is_contiguous()
    with answered():
        dist.all_reduce(tensor, group=group)


def all_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all processes, which are of one shape, in their order."""
    assert tensor.is_contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with answered():
        dist.all_gather(found, tensor, group=group)
    return found


def copied(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x, whose gradient becomes the sum over the group. How x is recomputed goes with it."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    out: torch.Tensor = _Copied.apply(x, group)
    recompute = recompute_of(x)
    return out if recompute is None else recomputable(out, recompute.function, *recompute.operands)


def summed(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the group, in the place of y."""
    out: torch.Tensor = _Summed.apply(y, group)
    return out


def exchanged(x: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows that each process gets from the others: of x [sum of sent, ...] the first `sent[0]` go to the first one, and so on;
    `got` rows come from each. The gradient goes the other way."""
    if not x.is_floating_point():
        return _all_to_all(x, sent, got, group)
    out: torch.Tensor = _Exchanged.apply(x, sent, got, group)
    return out


def _all_to_all(x: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    with answered():
        dist.all_to_all_single(out, x.contiguous(), list(got), list(sent), group=group)
    return out


def gathered(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[..., n] of all processes as [..., n times processes]."""
    out: torch.Tensor = _Gathered.apply(y, group)
    return out


def split(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's part [..., n] of [..., n times processes]."""
    out: torch.Tensor = _Split.apply(x, group)
    return out


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[1, t, K] of all processes as [1, T, K]. Who needs it in a backward may have it joined again, and keeps t tokens."""
    out: torch.Tensor = _AllTokens.apply(x, group)
    recompute = recompute_of(x)
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
        self._is_wanted = False
        self._begun: tuple[torch.Tensor, Any] | None = None

    def want(self) -> None:
        """See Recompute."""
        self._is_wanted = True

    def begin(self) -> None:
        """Begin the message, once. All processes of the group do so at the same place in their backward."""
        operands, self._operands = self._operands, None
        if self._is_wanted and operands is not None:
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


def own_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's [1, t, K] of [1, T, K]."""
    out: torch.Tensor = _OwnTokens.apply(x, group)
    return out


def joined_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[1, t, K] of all processes as [1, T, K], for what every process computes alike."""
    out: torch.Tensor = _JoinedTokens.apply(x, group)
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


def _joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.cat(all_of(part.contiguous(), group), -1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d = d.contiguous()  # in place: the layers that read x have made it for nobody else
        add_up(d, ctx.group)
        return d, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        add_up(y, group)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return d, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _all_to_all(x, sent, got, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(d, ctx.got, ctx.sent, ctx.group), None, None, None


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


def _function(name: str, forward: Through, backward: Through) -> Any:
    """An autograd function of a tensor and a group that both directions are given."""

    def run(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return forward(x, group)

    def back(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward(d, ctx.group), None

    methods = {"forward": staticmethod(run), "backward": staticmethod(first_order(back))}
    return type(name, (torch.autograd.Function,), methods)


_Gathered = _function("Gathered", _joined, _own)
_Split = _function("Split", _own, _joined)
_AllTokens = _function("AllTokens", _join_tokens, _sum_tokens)
_OwnTokens = _function("OwnTokens", _take_tokens, _join_tokens)
_JoinedTokens = _function("JoinedTokens", _join_tokens, _take_tokens)
