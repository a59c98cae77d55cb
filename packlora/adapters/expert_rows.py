"""Rows that go to experts on other processes and come back: whose they are, and their dropout keys, go with them.

Shapes: T tokens, k experts a token, S = T k rows sent, R rows that come here, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from packlora.adapters.expert_part import ExpertPart
from packlora.adapters.owners import TokenOwners
from packlora.ops.lora_experts.routing import Routing

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows of the experts here. x [R, D]; routing sorts them by expert and owner, of whom nobody is the last; keys [R, 2], None
    where no process drops anything."""

    x: torch.Tensor
    routing: Routing
    keys: torch.Tensor | None
    back: Callable[[torch.Tensor], torch.Tensor]
    """Of what the experts give for x [R, D], what comes back to the tokens that were sent, [T k, D] in the order of (token,
    choice)."""


def sent_to_experts(
    part: ExpertPart,
    hidden_TD: torch.Tensor,
    experts_Tk: torch.Tensor,
    owners: TokenOwners | None,
    numbers: Sequence[int],
) -> Arrived:
    """Send every token to its experts. All processes of the group call it, with the same numbers.

    Args:
        part: with an exchange.
        owners: of the tokens here, of which `part.sends` says which go.
        numbers: of all adapters that these experts have.
    """
    exchange, k = part.exchange, experts_Tk.shape[1]
    assert exchange is not None
    device, own = hidden_TD.device, part.sends(len(hidden_TD))
    chosen = experts_Tk[own].reshape(-1).to(torch.int64)
    _, order_S = torch.sort(chosen, stable=True)
    keys_T2 = None if owners is None else owners.keys_T2
    counts = torch.zeros(part.count * part.experts, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen)).view(part.count, part.experts)
    dropping = torch.full((part.count, 1), int(keys_T2 is not None), device=device)
    came = exchange.numbers(torch.cat([counts, dropping], 1))
    sizes = torch.stack([counts.sum(1), came[:, :-1].sum(1), came[:, -1]]).tolist()  # the host waits once
    sent, got, drops = sizes[0], sizes[1], any(sizes[2])
    told_T3 = torch.cat(
        [_owner_of_tokens(owners, len(hidden_TD), device), _as_int64(keys_T2, len(hidden_TD), device)], 1
    )
    token_S = own.start + order_S // k
    told_R3 = exchange.rows(told_T3[token_S], sent, got)
    x_RD = exchange.rows(hidden_TD[token_S], sent, got)
    expert_R = torch.arange(part.experts, device=device).repeat(part.count)
    expert_R = expert_R.repeat_interleave(came[:, :-1].reshape(-1), output_size=sum(got))
    owner_R = _places(told_R3[:, 0], numbers)
    routing = Routing.of(expert_R[:, None], part.experts, owner_R, len(numbers) + 1)

    def back(y_RD: torch.Tensor) -> torch.Tensor:
        returned_SD = exchange.rows(y_RD, got, sent)
        return returned_SD.new_zeros(returned_SD.shape).index_copy(0, order_S, returned_SD)

    keys_R2 = told_R3[:, 1:].to(torch.int32) if drops else None
    return Arrived(x_RD, replace(routing, first=part.first), keys_R2, back)


def _owner_of_tokens(owners: TokenOwners | None, tokens: int, device: torch.device) -> torch.Tensor:
    """Numbers of the adapters [T, 1]."""
    out = torch.full((tokens, 1), NOBODY, dtype=torch.int64, device=device)
    for number, start, stop in () if owners is None else owners.segments:
        out[start:stop] = number
    return out


def _as_int64(keys_T2: torch.Tensor | None, tokens: int, device: torch.device) -> torch.Tensor:
    if keys_T2 is None:
        return torch.zeros(tokens, 2, dtype=torch.int64, device=device)
    return keys_T2.to(device=device, dtype=torch.int64)


def _places(number_R: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """The place of every adapter in `numbers`, the one after the last for all others."""
    out = torch.full_like(number_R, len(numbers))
    for place, number in enumerate(numbers):
        out = torch.where(number_R == number, place, out)
    return out
