"""Messages between the processes of a group in forwards and backwards, as functions of autograd. Nothing else of packlora,
but tokens.py, sends a tensor in a forward or a backward.

    copied    forward nothing              backward sums       into the layers that each compute a part of the outputs
    summed    forward sums                 backward nothing    out of those that each compute a part of a sum
    gathered  forward joins last dims      backward takes own  out of the former, where what follows needs all outputs
    split     forward takes own            backward joins      into the latter, where all inputs are everywhere

What follows a sum, or is joined, is the same on all processes to the bit, so its gradient is too.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

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
SCATTER_SEVERAL = "reduce_scatter_tensor_coalesced"
"""The method of process groups that adds up parts of several tensors in one message."""


@contextmanager
def answered() -> Iterator[None]:
    """Turn a failure inside of the block into the error that another process has ended, or does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise in_vain(error) from error


def in_vain(error: Exception) -> ProcessError:
    """The error of a process whose message has failed, without gloo's source line and advice."""
    reason = re.sub(r"^\[\S+:\d+\] ", "", foreign(error)).partition(". ")[0]
    return ProcessError(
        f"process {dist.get_rank()} of {dist.get_world_size()} waited in vain for another one of the run ({reason})"
    )


def is_unanswered(error: BaseException) -> TypeGuard[RuntimeError]:
    """Whether a message has failed, one of a library that does not say so: FSDP2's are outside of `answered`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and frames[-1].f_globals["__name__"] == dist.all_reduce.__module__


def add_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the group, in place."""
    assert tensor.is_contiguous()
    with answered():
        dist.all_reduce(tensor, group=group)


def sum_own(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Sums over the group of tensors [rows, ...], whose dtypes may differ: of each this process's share of the rows. One
    message, without a copy that joins the tensors."""
    size, opts = dist.get_world_size(group), dist.ReduceScatterOptions()
    opts.asyncOp = False
    own = [tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:]) for tensor in tensors]
    with answered():
        sending = getattr(group, SCATTER_SEVERAL)(own, [tensor.contiguous() for tensor in tensors], opts)
        if sending is not None:  # NCCL's is on the device's queue already
            sending.wait()
    return own


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
    out, recompute = _copied(x, group), recompute_of(x)
    return (
        out if recompute is None or recompute.elsewhere else recomputable(out, recompute.function, *recompute.operands)
    )


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


def _joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return torch.cat(all_of(part.contiguous(), group), -1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def _sum(d: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    d = d.contiguous()  # in place: the layers that read x have made it for nobody else
    add_up(d, group)
    return d


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


def function_of(name: str, forward: Through, backward: Through) -> Through:
    """Function of a tensor and a group. backward: gives the gradient from that of the output, and the group."""

    def run(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return forward(x, group)

    def back(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return backward(d, ctx.group), None

    methods = {"forward": staticmethod(run), "backward": staticmethod(first_order(back))}
    kind: Any = type(name, (torch.autograd.Function,), methods)

    def apply(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out: torch.Tensor = kind.apply(x, group)
        return out

    return apply


_copied = function_of("Copied", lambda x, group: x.view_as(x), _sum)
gathered = function_of("Gathered", _joined, _own)
"""[..., n] of all processes as [..., n times processes]."""
split = function_of("Split", _own, _joined)
"""This process's part [..., n] of [..., n times processes]."""
