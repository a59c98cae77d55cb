"""Routing tables on the device: the expert and the owning adapter of each row. The host does not read them.

Where a process has some of the experts, its rows are those that go to them. How many these are the host learns from the device,
once for a layer, so what is made of the rows takes as much memory as there are rows.

Shapes: T tokens, k experts a token, S = T k rows or those of the experts here, E experts here, J owners, G = E J groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from packlora.ops.lora_experts.grouped import Groups


@dataclass(frozen=True, slots=True)
class Routing:
    """The rows of one call, sorted by (expert, owner) and within these by token.

    order: the place t k + j, before sorting, of every row, int64 [S]. pair: the group expert * J + owner of every row, [S], the
    expert counted among those here. by_pair, by_expert: G and E groups. owner: of every token, [T]; None where there is one.
    place: the row of every place, [T k]; None where some places have no row. first: number of the first expert here.
    """

    tokens: int
    top_k: int
    owners: int
    order: torch.Tensor
    pair: torch.Tensor
    by_pair: Groups
    by_expert: Groups
    owner: torch.Tensor | None
    place: torch.Tensor | None
    first: int
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        experts_Tk: torch.Tensor, num_experts: int, owner_T: torch.Tensor | None = None, owners: int = 1,
        first: int | None = None,
    ) -> Routing:  # fmt: skip
        """
        Args:
            experts_Tk: chosen experts [T, k].
            owner_T: of every token, from 0 to `owners` - 1; None: all are of one.
            first: of the experts the first of `num_experts` that are here, the others elsewhere; None: all are here.
        """
        T, k = experts_Tk.shape
        pair, groups = experts_Tk.to(torch.int64), num_experts * owners
        pair = pair - first if first else pair
        if owner_T is not None:
            pair = pair * owners + owner_T[:, None]
        if first is not None:
            pair = torch.where((pair >= 0) & (pair < groups), pair, groups)
        pair, order = torch.sort(pair.reshape(-1), stable=True)
        lengths = torch.zeros(groups + (first is not None), dtype=torch.int64, device=pair.device)
        by_pair = Groups.of(lengths.scatter_add_(0, pair, torch.ones_like(pair))[:groups])
        if first is not None:
            rows = int(by_pair.ends[-1])
            return Routing(
                T, k, owners, order[:rows], pair[:rows], by_pair, by_pair.merged(owners), owner_T, None, first
            )
        place = torch.empty_like(order).scatter_(0, order, torch.arange(T * k, device=order.device))
        return Routing(T, k, owners, order, pair, by_pair, by_pair.merged(owners), owner_T, place, 0)

    def kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A table that is made once."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def token_of_row(self) -> torch.Tensor:
        """[S]"""
        return self.kept("token", lambda: self.order // self.top_k)

    def expert_of_row(self) -> torch.Tensor:
        """Counted among those here, [S]."""
        return self.pair // self.owners

    def rows_of(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Token of every row, [S, K]."""
        return x_TK[self.token_of_row()]

    def of_places(self, x_SK: torch.Tensor) -> torch.Tensor:
        """The row of every place, [T k, K]; zeros where it has none."""
        if self.place is not None:
            return x_SK[self.place]
        return x_SK.new_zeros(self.tokens * self.top_k, x_SK.shape[1]).index_copy(0, self.order, x_SK)

    def sum_to_tokens(self, x_SK: torch.Tensor) -> torch.Tensor:
        """The sum of every token's rows, [T, K]: always added in the order of the token's choices."""
        placed = self.of_places(x_SK)
        return placed if self.top_k == 1 else placed.view(self.tokens, self.top_k, placed.shape[1]).sum(1)
