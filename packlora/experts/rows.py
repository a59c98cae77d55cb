"""Rows that go to experts on other processes and come back: whose they are, and their dropout keys, go with them.

Shapes: T tokens, k experts a token, S = T k rows sent, R rows that come here, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from packlora.ops.lora_experts.routing import Routing


class Exchange(Protocol):
    """Takes rows from process to process; all processes of the group call it alike.

    sent, got: rows to and from each process, in their order.
    """

    def numbers(self, own: torch.Tensor) -> torch.Tensor:
        """Exchange int64 [processes, n]: row p goes to process p, and row p of the result came from process p."""

    def rows(self, own: torch.Tensor, sent: Sequence[int], got: Sequence[int]) -> torch.Tensor:
        """Rows [sum of sent, ...] in the order of their processes -> [sum of got, ...], differentiable."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows of the experts here. x [R, D]; routing sorts them by expert and owner, of whom nobody is the last; keys [R, 2], None
    where no process drops anything."""

    x: torch.Tensor
    routing: Routing
    keys: torch.Tensor | None
    back: Callable[[torch.Tensor], torch.Tensor]
    """Return the experts' outputs for x [R, D] to the tokens that were sent: [T k, D] in the order of (token, choice)."""


def sent_to_experts(
    exchange: Exchange, first: int, processes: int, experts: int, own: slice, hidden_TD: torch.Tensor,
    experts_Tk: torch.Tensor, owner_T: torch.Tensor, count: int, keys_T2: torch.Tensor | None,
) -> Arrived:  # fmt: skip
    """Send tokens to their experts. All processes of the group call it, with the same owners.

    Args:
        first: expert here. experts: that each of the processes has.
        own: tokens that this process sends.
        owner_T: the place of every token's owner among `count`, int64.
        keys_T2: dropout keys; None where nothing is dropped here.
    """
    device, k = hidden_TD.device, experts_Tk.shape[1]
    chosen = experts_Tk[own].reshape(-1).to(torch.int64)
    _, order_S = torch.sort(chosen, stable=True)
    counts = torch.zeros(processes * experts, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen)).view(processes, experts)
    dropping = torch.full((processes, 1), int(keys_T2 is not None), device=device)
    came = exchange.numbers(torch.cat([counts, dropping], 1))
    sizes = torch.stack([counts.sum(1), came[:, :-1].sum(1), came[:, -1]]).tolist()  # the host waits once
    sent, got, drops = sizes[0], sizes[1], any(sizes[2])
    token_S = own.start + order_S // k
    told_R3 = exchange.rows(_told(owner_T, keys_T2)[token_S], sent, got)
    x_RD = exchange.rows(hidden_TD[token_S], sent, got)
    expert_R = torch.arange(experts, device=device).repeat(processes)
    expert_R = expert_R.repeat_interleave(came[:, :-1].reshape(-1), output_size=sum(got))
    routing = Routing.of(expert_R[:, None], experts, told_R3[:, 0], count)

    def back(y_RD: torch.Tensor) -> torch.Tensor:
        returned_SD = exchange.rows(y_RD, got, sent)
        return returned_SD.new_zeros(returned_SD.shape).index_copy(0, order_S, returned_SD)

    keys_R2 = told_R3[:, 1:].to(torch.int32) if drops else None
    return Arrived(x_RD, replace(routing, first=first), keys_R2, back)


def _told(owner_T: torch.Tensor, keys_T2: torch.Tensor | None) -> torch.Tensor:
    """Numbers that go with every token, int64 [T, 3]: the place of its owner, and its dropout key or zeros."""
    keys_T2 = owner_T.new_zeros(len(owner_T), 2) if keys_T2 is None else keys_T2.to(owner_T)
    return torch.cat([owner_T[:, None], keys_T2], 1)
