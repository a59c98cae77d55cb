"""What passes between the processes of a group in forwards and backwards, as functions of autograd. Nothing else of packlora
sends a tensor in a forward or a backward.

    copied    forward nothing              backward sums       into the layers that each compute a part of the outputs
    summed    forward sums                 backward nothing    out of those that each compute a part of a sum
    gathered  forward joins last dims      backward takes own  out of the former, where what follows needs all outputs
    split     forward takes own            backward joins      into the latter, where all inputs are everywhere

What follows a sum, or is joined, is the same on all processes to the bit, so its gradient is too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from packlora.ops.first_order import first_order
from packlora.ops.recompute import recomputable, recompute_of


def add_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the group, in place."""
    assert tensor.is_contiguous()
    dist.all_reduce(tensor, group=group)


def all_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all processes, which are of one shape, in their order."""
    assert tensor.is_contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
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


def gathered(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[..., n] of all processes as [..., n times processes]."""
    out: torch.Tensor = _Gathered.apply(y, group)
    return out


def split(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's part [..., n] of [..., n times processes]."""
    out: torch.Tensor = _Split.apply(x, group)
    return out


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


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(y, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _own(d, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _joined(d, ctx.group), None
