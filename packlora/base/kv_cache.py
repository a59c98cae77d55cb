"""Keys and values of sequences that are being sampled, and the two passes that read and write them through a packed model.

A cache has a slot for each sequence, with room for the same number of tokens in each. A pass is given to the model in the place
of sample lengths (packing.py): `Prefill` packs whole prompts and writes what their tokens give; `Decode` has one token of each
sequence in its row, in any order, and looks at all slots.

Shapes: S slots, L places of a slot, T tokens of a packed row, R rows of a decode pass, H heads of queries, h of keys, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from packlora.base.packing import CachedPass
from packlora.ops.attention.attention import packed_attention, uses_kernels
from packlora.ops.attention.blocks import SampleBlocks
from packlora.ops.attention.cached import Visible, cached_attention


class KeyValueCache:
    """Keys and values by attention layer, [S, h, L, D] each; allocated by the first prefill. All are finite at all places."""

    def __init__(self) -> None:
        self.slots = self.length = 0
        self.turn = 0
        """Changes whenever the tensors are others."""
        self.layers: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def resize(self, slots: int, length: int, moved: Mapping[int, int]) -> None:
        """Make room for `slots` sequences of `length` tokens. moved: slots that are kept, and their numbers from now on."""
        old, new = (torch.tensor([*numbers], dtype=torch.int64) for numbers in (moved.keys(), moved.values()))
        common = min(length, self.length)
        for module, pair in self.layers.items():
            made = []
            for tensor in pair:
                room = tensor.new_zeros(slots, tensor.shape[1], length, tensor.shape[3])
                if moved:
                    room[new.to(tensor.device), :, :common] = tensor[old.to(tensor.device), :, :common]
                made.append(room)
            self.layers[module] = made[0], made[1]
        self.slots, self.length = slots, length
        self.turn += 1

    def clear(self, slot: int) -> None:
        """Zeros in a slot that may hold what is not finite: places that nobody sees are multiplied by 0."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[slot] = 0

    def free(self) -> None:
        """Give the memory back, and all that is in it."""
        self.slots = self.length = 0
        self.turn += 1
        self.layers.clear()

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel attends to it, in all layers: it looks at the places that are there, however many are said."""
        return bool(self.layers) and all(uses_kernels(k, v) for k, v in self.layers.values())

    def of(self, module: torch.nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer whose new ones are k and v, [h, ..., D]."""
        if module not in self.layers:
            self.layers[module] = tuple(  # type: ignore[assignment]
                x.new_zeros(self.slots, x.shape[0], self.length, x.shape[-1]) for x in (k, v)
            )
        return self.layers[module]


@dataclass(frozen=True, slots=True)
class Prefill(CachedPass):
    """Packed prompts whose keys and values are kept.

    lengths: tokens of each sample of the row, in order, or their blocks on the device; some may be padding, of which nothing is
        kept.
    tokens_N, slots_N, places_N: int64; token n of the row is kept in a slot at a place. A token may be kept in several slots.
    """

    cache: KeyValueCache
    lengths: tuple[int, ...] | SampleBlocks
    tokens_N: torch.Tensor
    slots_N: torch.Tensor
    places_N: torch.Tensor

    def attend(
        self, module: torch.nn.Module, q_HTD: torch.Tensor, k_hTD: torch.Tensor, v_hTD: torch.Tensor, scale: float,
        window: int | None, softcap: float | None, sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of each sample to itself, [T, H, D]."""
        with in_any_order():
            for kept, new in zip(self.cache.of(module, k_hTD, v_hTD), (k_hTD, v_hTD), strict=True):
                kept[self.slots_N, :, self.places_N] = new[:, self.tokens_N].transpose(0, 1)
        return packed_attention(q_HTD, k_hTD, v_hTD, self.lengths, scale, window, softcap, sinks_H=sinks_H)


@dataclass(frozen=True, slots=True)
class Decode(CachedPass):
    """One token of each sequence, in rows of any order.

    rows_S: int64; row of each slot's token. A slot without a sequence names any row: it may be written at its first place,
        which the next prefill writes over.
    slots_R: int64; slot of each row. A row of padding names any slot.
    visible: places of the tokens by slot, and how many places are looked at.
    """

    cache: KeyValueCache
    rows_S: torch.Tensor
    slots_R: torch.Tensor
    visible: Visible
    every_S: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "every_S", torch.arange(len(self.rows_S), device=self.rows_S.device))

    def attend(
        self, module: torch.nn.Module, q_HRD: torch.Tensor, k_hRD: torch.Tensor, v_hRD: torch.Tensor, scale: float,
        window: int | None, softcap: float | None, sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of each row to its sequence, [R, H, D]."""
        if uses_kernels(q_HRD, v_hRD):
            from packlora.ops.attention.cached_kernel import attend

            pair, places_S = self.cache.of(module, k_hRD, v_hRD), self.visible.places_S
            return attend(
                q_HRD, k_hRD, v_hRD, pair, self.rows_S, self.slots_R, places_S, scale, window, softcap, sinks_H
            )
        with in_any_order():
            pair = self.cache.of(module, k_hRD, v_hRD)
            for kept, new in zip(pair, (k_hRD, v_hRD), strict=True):
                kept[self.every_S, :, self.visible.places_S] = new[:, self.rows_S].transpose(0, 1)
        k_ShLD, v_ShLD = (kept[:, :, : self.visible.length] for kept in pair)
        q_SHD = q_HRD.transpose(0, 1)[self.rows_S]
        return cached_attention(q_SHD, k_ShLD, v_ShLD, self.visible, scale, window, softcap, sinks_H)[self.slots_R]


@contextmanager
def in_any_order() -> Iterator[None]:
    """For writes of which each has a place of its own. Where torch must be deterministic it sorts the places first, a dozen
    launches for each tensor; some releases also wait for the device there, so that no graph can hold it."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def kept_in(slots: Sequence[Sequence[int]], lengths: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """Lists of Prefill's tokens, slots and places. slots: of each sample; starts: its first token in the row."""
    tokens: list[int] = []
    where: list[int] = []
    places: list[int] = []
    for own, length, start in zip(slots, lengths, starts, strict=True):
        for slot in own:
            tokens += range(start, start + length)
            where += [slot] * length
            places += range(length)
    return [tokens, where, places]
