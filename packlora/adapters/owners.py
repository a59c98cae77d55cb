"""Who owns the tokens of a microbatch: a value that goes with the microbatch through its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries

W = TypeVar("W")
MIN_ROWS = 16
"""Fewest rows of a matrix product whose rows have the same bits whatever other rows there are. Products of a handful of rows
take other routines with other rounding (MKL on the CPU: fewer than 12 rows)."""


class BesideOwners(Protocol):
    """The owners of rows of modules beside the language model, which are given other rows than tokens."""

    last: TokenOwners | None
    """Owners that were asked for last: siblings have the rows of the first one called."""

    def of(self, total: int) -> TokenOwners:
        """The owners of so many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOwners:
    """The owners of the T tokens of one packed microbatch. Two of them are equal only if they are the same object.

    total: T.
    segments: (adapter number, start, stop) of consecutive tokens, in order; tokens in no segment see the base model alone.
    keys_T2: dropout keys [T, 2] int32 (ops.dropout.token_keys), or None when nothing is dropped (evaluation).
    boundaries: of the segments, which are nominal where they move (ops.lora_linear.moving).
    columns: named values of tokens [T], for what is done to embeddings (embeddings.py).
    label_rows: segments of the rows of labels, which the output layer is given, and which tokens these are; None where it is
        given all tokens, if any.
    beside: owners of the rows of modules beside the language model; None where no sample has any.
    recorded: what layers keep for calls that are recorded with these owners (recorded_groups.py).
    """

    total: int
    segments: tuple[tuple[int, int, int], ...]
    keys_T2: torch.Tensor | None = None
    boundaries: Boundaries = ON_HOST
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    label_rows: tuple[tuple[tuple[int, int, int], ...], torch.Tensor] | None = None
    beside: BesideOwners | None = None
    recorded: dict[Any, Any] = field(default_factory=dict)
    adapters: frozenset[int] = field(init=False)
    """Numbers of those that own tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", frozenset(number for number, _, _ in self.segments))

    @property
    def rows(self) -> TokenOwners | None:
        """Owners of the rows of labels."""
        if self.label_rows is None:
            return None
        segments, rows_L = self.label_rows
        return TokenOwners(len(rows_L), segments, None if self.keys_T2 is None else self.keys_T2[rows_L])

    def runs(self, adapters: Container[int]) -> list[tuple[int | None, int, int]]:
        """(adapter, start, stop) of all tokens in order: those of these adapters, and None with the others between them."""
        found: list[tuple[int | None, int, int]] = []
        at = 0
        for number, start, stop in self.segments:
            if number in adapters:
                found += [(None, at, start), (number, start, stop)] if at < start else [(number, start, stop)]
                at = stop
        return [*found, (None, at, self.total)] if at < self.total else found

    def by_owner(
        self, adapters: Mapping[int, W], base: Callable[[int, int], torch.Tensor],
        own: Callable[[W, int, int], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Rows of all tokens [T, ...] in order.

        Args:
            adapters: by number, what some owners have.
            base: gives the rows of the tokens [start, stop) of all others.
            own: gives the rows of the tokens [start, stop) of one owner.
        """
        runs = self.runs(adapters)
        return torch.cat([base(a, b) if number is None else own(adapters[number], a, b) for number, a, b in runs])

    def part(self, start: int, stop: int) -> TokenOwners:
        """Owners of consecutive ones of these tokens."""
        inside = [(number, max(a, start) - start, min(b, stop) - start) for number, a, b in self.segments]
        keys = None if self.keys_T2 is None else self.keys_T2[start:stop]
        return TokenOwners(stop - start, tuple(one for one in inside if one[1] < one[2]), keys)
