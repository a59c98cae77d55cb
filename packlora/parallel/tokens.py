"""Messages between the processes of a group in forwards and backwards where each process has consecutive tokens of its own
between the layers:

    all_tokens       forward joins           backward sums, takes own    in the place of copied
    summed_tokens    forward sums, takes own backward joins              in the place of summed
    own_tokens       forward takes own       backward joins              before the first layer
    joined_tokens    forward joins           backward takes own          after the last one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.ops.first_order import first_order
from packlora.ops.lora_linear.autograd import is_checkpoint, saving_hooks
from packlora.ops.lora_linear.own_tokens import OwnTokens, gathered
from packlora.ops.lora_linear.types import rows_of
from packlora.ops.recompute import Recompute, recompute_of, recomputed
from packlora.parallel.collectives import GATHER, SCATTER, answered, function_of, sum_own


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup, trained: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """[1, t, K] of all processes as [1, T, K].

    Args:
        trained: A's of adapters on layers that read it. Where x gets a gradient, they get theirs in its message, and no
            process keeps other tokens than its own; else, as in the first layer, all tokens are kept.
    """
    if not (trained and x.requires_grad and torch.is_grad_enabled()):
        return _all_tokens(x, group)
    own = OwnTokens(dist.get_rank(group) * x.shape[1], x.shape[1], trained)
    hooks = saving_hooks()
    recompute = None if hooks is not None and is_checkpoint(hooks) else recompute_of(x)
    return gathered(_AllTokens.apply(x, group, own, recompute, *trained), own)


def _join_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    whole = x.new_empty(1, x.shape[1] * dist.get_world_size(group), x.shape[2])
    with answered():
        getattr(dist, GATHER)(whole[0], x[0], group=group)
    return whole.data  # of version 0, as recompute_of wants what nobody has written into since it was made


def _sum_tokens(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    y = y.contiguous()
    own = y.new_empty(1, y.shape[1] // dist.get_world_size(group), y.shape[2])
    with answered():
        getattr(dist, SCATTER)(own[0], y[0], group=group)
    return own


def _take_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class _AllTokens(torch.autograd.Function):
    """The node of tokens that layers with adapters read: one message for the gradients of x and of the A's."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, own: OwnTokens, recompute: Recompute | None,
        *trained: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.own, ctx.function = group, own, None if recompute is None else recompute.function
        ctx.save_for_backward(*((x,) if recompute is None else recompute.operands))
        return _join_tokens(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        low = ctx.own.dS
        if not low:
            return (_sum_tokens(d, ctx.group), *(None,) * (3 + len(ctx.own.operands)))
        dx, *own = sum_own([d[0], *low], ctx.group)
        x = ctx.saved_tensors[0] if ctx.function is None else recomputed(ctx.function, ctx.saved_tensors)
        return (dx[None], None, None, None, *ctx.own.gradients(rows_of(x), own))


_all_tokens = function_of("AllTokens", _join_tokens, _sum_tokens)
summed_tokens = function_of("SummedTokens", _sum_tokens, _join_tokens)
"""The sum of [1, T, N] over the group, of which this process has [1, t, N]."""
own_tokens = function_of("OwnTokens", _take_tokens, _join_tokens)
"""This process's [1, t, K] of [1, T, K]."""
joined_tokens = function_of("JoinedTokens", _join_tokens, _take_tokens)
"""[1, t, K] of all processes as [1, T, K], for what every process computes alike."""
