"""Which rows go to which expert and whose they are, as tables on the device: nothing of them is known to the host.

Shapes: T tokens, k experts a token, S = T k rows, E experts, J owners, G = E J groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from packlora.ops.lora_experts.grouped import Groups


@dataclass(frozen=True, slots=True)
class Routing:
    """The rows of one call, sorted by (expert, owner) and within these by token.

    order: the place t k + j, before sorting, of every row, int64 [S]. place: the row of every such place, [S]. pair: the group
    expert * J + owner of every row, [S]. by_pair, by_expert: G and E groups.
    """

    tokens: int
    top_k: int
    owners: int
    order: torch.Tensor
    place: torch.Tensor
    pair: torch.Tensor
    by_pair: Groups
    by_expert: Groups
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(experts_Tk: torch.Tensor, num_experts: int, owner_T: torch.Tensor | None = None, owners: int = 1) -> Routing:
        """experts_Tk: chosen experts [T, k]. owner_T: of every token, from 0 to `owners` - 1; None: all are of one."""
        T, k = experts_Tk.shape
        pair = experts_Tk.to(torch.int64)
        if owner_T is not None:
            pair = pair * owners + owner_T[:, None]
        pair, order = torch.sort(pair.reshape(-1), stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(T * k, device=order.device))
        lengths = torch.zeros(num_experts * owners, dtype=torch.int64, device=pair.device)
        by_pair = Groups.of(lengths.scatter_add_(0, pair, torch.ones_like(pair)))
        return Routing(T, k, owners, order, place, pair, by_pair, by_pair.merged(owners))

    def kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A table that is made once."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def token_of_row(self) -> torch.Tensor:
        """[S]"""
        return self.kept("token", lambda: self.order // self.top_k)

    def expert_of_row(self) -> torch.Tensor:
        """[S]"""
        return self.pair // self.owners

    def rows_of(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Every row's token, [S, K]."""
        return x_TK[self.token_of_row()]

    def sum_to_tokens(self, x_SK: torch.Tensor) -> torch.Tensor:
        """The sum of every token's rows, [T, K]: always added in the order of the token's choices."""
        if self.top_k == 1:
            return x_SK[self.place]
        return x_SK[self.place].view(self.tokens, self.top_k, -1).sum(1)
