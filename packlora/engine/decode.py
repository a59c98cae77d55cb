"""The two passes of sampling over one frozen model: packed prompts of several adapters, and one new token of each sample.

Rows are ordered by adapter, so one pass of the adapters' operator serves all. On a CPU every adapter's rows are rounded up to
a multiple of EVEN, at least FEW, and all rows to `fewest`: so a row has the same bits whatever rows there are beside it.

Shapes: T tokens of a packed row, R rows of a decode pass, S slots, L rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from packlora.adapters.linear import Attached
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.kv_cache import Decode, KeyValueCache, Prefill, kept_in
from packlora.base.packing import packed_logits
from packlora.engine.passes import one_error_for_memory
from packlora.engine.rows import NO_ADAPTER
from packlora.ops.attention.cached import EVEN, Visible

FEW = 16
"""Rows of an adapter at least, on a CPU. On some, MKL's products of up to 12 rows have other bits than those of more."""
VIEW = 64
"""Multiple of which the places are that a decode pass looks at."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that are prefilled for one or more samples. places: of those whose logits are wanted, in order."""

    ids: Sequence[int]
    adapter: int
    slots: Sequence[int]
    places: Sequence[int]


class NextToken(NamedTuple):
    """The last token of a sample, and its place; its logits are wanted."""

    id: int
    adapter: int
    slot: int
    place: int


class BothPasses(Protocol):
    """Runs both passes; see Passes."""

    @property
    def cache(self) -> KeyValueCache: ...

    def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]: ...

    def decode(self, tokens: Sequence[NextToken]) -> torch.Tensor: ...

    def free(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs both. All calls raise torch.OutOfMemoryError where memory runs out; nothing of the callers' has changed then.

    fewest: rows of a pass at least; with 1 no rows are rounded up.
    """

    model: PreTrainedModel
    attached: Attached
    fewest: int = MIN_ROWS
    cache: KeyValueCache = field(default_factory=KeyValueCache)

    @property
    def _even(self) -> int:
        return EVEN if self.model.device.type == "cpu" and self.fewest > 1 else 1

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Logits [places, V] of each prompt; its keys and values are in the cache then."""
        packed = pack(prompts, self._even, self.fewest)
        positions = np.concatenate([np.arange(length) for length in packed.lengths])
        ids_T, positions_T, rows_L, *kept_N = self._send([packed.ids, positions, packed.rows, *packed.kept])
        label_rows = packed.label_segments, rows_L
        owners = TokenOwners(len(packed.ids), packed.segments, label_rows=label_rows)
        own_pass = Prefill(self.cache, tuple(packed.lengths), *kept_N)
        with one_error_for_memory(), self.attached.active(owners):
            logits_LV = packed_logits(self.model, ids_T, positions_T, own_pass, rows_L)
        return [logits_LV[own] for own in packed.found]

    @torch.no_grad()
    def decode(self, tokens: Sequence[NextToken]) -> torch.Tensor:
        """Logits [len(tokens), V]; the tokens' keys and values are in the cache then."""
        layout = lay_out(tokens, self.cache.slots, self._even, self.fewest)
        columns, wanted_N = self._send([layout.columns, layout.wanted])
        ids_R, places_R, slots_R, rows_S, places_S = columns.split(layout.sizes)
        length = min(-(-layout.places // VIEW) * VIEW, self.cache.length)
        every_R = torch.arange(len(ids_R), device=ids_R.device)
        owners = TokenOwners(len(ids_R), layout.segments, label_rows=(layout.segments, every_R))
        own_pass = Decode(self.cache, rows_S, slots_R, Visible(places_S, length))
        with one_error_for_memory(), self.attached.active(owners):
            logits_RV = packed_logits(self.model, ids_R, places_R, own_pass, every_R)
        return logits_RV[wanted_N]

    def free(self) -> None:
        """Give the cache's memory back, and all that is in it."""
        self.cache.free()

    def _send(self, columns: Sequence[Sequence[int] | np.ndarray]) -> tuple[torch.Tensor, ...]:
        """Columns as int64 tensors on the device, by one copy."""
        host = torch.from_numpy(np.concatenate([np.asarray(column, np.int64) for column in columns]))
        sent: tuple[torch.Tensor, ...] = host.to(self.model.device).split([len(column) for column in columns])
        return sent


class Packed(NamedTuple):
    """Prompts in one row, ordered by adapter.

    ids: of the row's tokens. lengths: of its samples, padding among them. rows: places in it whose logits are wanted.
    segments, label_segments: of the tokens, and of these places, that adapters own. kept: tokens, slots and places, see
        Prefill. found: of each prompt, its part of `rows`.
    """

    ids: list[int]
    lengths: list[int]
    rows: list[int]
    segments: tuple[tuple[int, int, int], ...]
    label_segments: tuple[tuple[int, int, int], ...]
    kept: list[list[int]]
    found: list[slice]


def pack(prompts: Sequence[Prompt], even: int, fewest: int) -> Packed:
    """Pack prompts. even: multiple of which each adapter's rows are; fewest: rows at least."""
    ids: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    segments: list[tuple[int, int, int]] = []
    label_segments: list[tuple[int, int, int]] = []
    starts, found = dict[int, int](), dict[int, slice]()
    for adapter, own in _by_adapter(range(len(prompts)), [prompt.adapter for prompt in prompts]):
        first, first_row = len(ids), len(rows)
        for at in own:
            starts[at] = len(ids)
            found[at] = slice(len(rows), len(rows) + len(prompts[at].places))
            rows += [len(ids) + place for place in prompts[at].places]
            ids += prompts[at].ids
            lengths.append(len(prompts[at].ids))
        if filler := _lacking(len(ids) - first, even):
            ids += (ids[first:] * filler)[:filler]
            lengths.append(filler)
        rows += [rows[-1]] * _lacking(len(rows) - first_row, even)
        segments.append((adapter, first, len(ids)))
        label_segments.append((adapter, first_row, len(rows)))
    while len(ids) < fewest:
        lengths.append(min(lengths[0], fewest - len(ids)))
        ids += ids[: lengths[-1]]
    rows += [0] * (fewest - len(rows))
    kept = kept_in([prompts[at].slots for at in starts], [len(prompts[at].ids) for at in starts], [*starts.values()])
    parts = [found[at] for at in range(len(prompts))]
    return Packed(ids, lengths, rows, _owned(segments), _owned(label_segments), kept, parts)


class Layout(NamedTuple):
    """Rows of a decode pass.

    columns: int64, token, place and slot of each row [R], then row and place of each slot [S]. sizes: R, R, R, S, S.
    wanted: row of each token, in their order. segments: of the rows that adapters own. places: that are looked at, at least.
    """

    columns: np.ndarray
    sizes: tuple[int, ...]
    wanted: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]
    places: int


class _Order(NamedTuple):
    """Order of rows, the same from pass to pass while the same samples run in the same slots.

    columns: those of Layout, without tokens and places. tokens_R: number of each row's token. places_N: index of the place of
    each token's slot in the columns.
    """

    columns: np.ndarray
    tokens_R: np.ndarray
    places_N: np.ndarray
    wanted: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]


def lay_out(tokens: Sequence[NextToken], slots: int, even: int, fewest: int) -> Layout:
    """Order tokens by adapter. even: multiple of which each adapter's rows are; fewest: rows at least."""
    ids, adapters, own_slots, places = zip(*tokens, strict=True)
    order = _order(adapters, own_slots, slots, even, fewest)
    R, columns = len(order.tokens_R), order.columns.copy()
    columns[:R] = np.array(ids)[order.tokens_R]
    columns[R : 2 * R] = np.array(places)[order.tokens_R]
    columns[order.places_N] = places
    return Layout(columns, (R, R, R, slots, slots), order.wanted, order.segments, max(places) + 1)


@lru_cache(maxsize=16)
def _order(adapters: tuple[int, ...], own_slots: tuple[int, ...], slots: int, even: int, fewest: int) -> _Order:
    """Order of tokens of these adapters and slots."""
    rows: list[int] = []
    segments: list[tuple[int, int, int]] = []
    row_of: dict[int, int] = {}
    for adapter, own in _by_adapter(range(len(adapters)), adapters):
        first = len(rows)
        row_of.update((at, first + number) for number, at in enumerate(own))
        rows += own
        rows += [rows[first]] * _lacking(len(rows) - first, even)
        segments.append((adapter, first, len(rows)))
    rows += [rows[0]] * (fewest - len(rows))
    R, taken = len(rows), np.array(own_slots)
    wanted = tuple(row_of[at] for at in range(len(adapters)))
    columns = np.zeros(3 * R + 2 * slots, np.int64)
    columns[2 * R : 3 * R] = taken[rows]
    columns[3 * R + taken] = wanted
    return _Order(columns, np.array(rows), 3 * R + slots + taken, wanted, _owned(segments))


def _lacking(rows: int, even: int) -> int:
    """Rows by which those of an adapter are rounded up."""
    return 0 if even == 1 else max(-rows % even, FEW - rows)


def _by_adapter(numbers: Iterable[int], adapters: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Numbers of prompts or tokens by their adapters, those of the base model first."""
    order = sorted(numbers, key=lambda at: adapters[at])
    return [(adapter, list(own)) for adapter, own in groupby(order, key=lambda at: adapters[at])]


def _owned(segments: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Segments of adapters alone."""
    return tuple(segment for segment in segments if segment[0] != NO_ADAPTER)
