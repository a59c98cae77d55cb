"""Where everything of a group of layers lies: rows of the stacked A, columns of S, blocks of the flat B's; and the tables that
tell a kernel which tokens, adapter and offsets are its own.

A group is one or several frozen layers that read the same x. For one adapter the A's of all layers are stacked, so S of a
token is one row `[S_layer0 | S_layer1 | ...]` of its own adapter; S is [T, width], width that of the widest adapter. Ranks
are padded to a multiple of `align` with zeros (16 for the kernels, whose products need it; 1 for plain torch products).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from packlora.ops.dropout import dropout_threshold
from packlora.ops.lora_linear.plan import Situation
from packlora.ops.stamp import Stamps, stamps

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The last `size` values of a pure function, by key."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = make()
            if len(self._values) > self.size:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return value


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter on one layer, operands of any float dtype, on the layer's device.

    A [r, K] and B [N, r], both None for an adapter that trains the bias alone. magnitude [N] makes it a DoRA adapter and needs
    norm, the row norms [N] of W + s B A, constant for autograd; a callable is asked for them at every forward. bias [N] takes
    the place of the layer's own.
    """

    A: torch.Tensor | None
    B: torch.Tensor | None
    scaling: float
    magnitude: torch.Tensor | None = None
    norm: torch.Tensor | Callable[[], torch.Tensor] | None = None
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.A is None else self.A.shape[0]

    @property
    def plain(self) -> bool:
        """Neither a magnitude nor a bias of its own."""
        return self.magnitude is None and self.bias is None

    def operands(self) -> dict[str, torch.Tensor]:
        """What gets gradients, by name."""
        named = {"A": self.A, "B": self.B, "magnitude": self.magnitude, "bias": self.bias}
        return {name: operand for name, operand in named.items() if operand is not None}


@dataclass(frozen=True, slots=True)
class Layer:
    """One frozen layer of a group: weight [N, K], bias [N] or None, adapters by number.

    keep_output: the caller promises that nobody writes into this layer's output (kernels that work in place move no version
    counter), so a DoRA backward may read it there and keeps nothing of its own. Where there is a bias z is kept all the same.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    adapters: Mapping[int, LowRank]
    keep_output: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one adapter. Tokens in no run see the base model alone.

    base_dropped: with a magnitude, the base product that it scales is that of the dropped x, as PEFT has it; without, dropout
    is on the low-rank branch alone.
    """

    adapter: int
    start: int
    stop: int
    dropout: float = 0.0
    base_dropped: bool = True

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def situation(layers: Sequence[Layer], runs: Sequence[Run], num_tokens: int) -> Situation:
    """What of a call of group.lora_group decides which plans compute it."""
    low_rank = dropped = composed = base_dropped = False
    for run in runs:
        for layer in layers:
            low = layer.adapters.get(run.adapter)
            if low is None:
                continue
            low_rank |= low.rank > 0
            dropped |= low.rank > 0 and run.dropout > 0
            composed |= not low.plain
            base_dropped |= run.dropout > 0 and run.base_dropped and low.magnitude is not None
    single = len(runs) == 1 and (runs[0].start, runs[0].stop) == (0, num_tokens)
    double = any(layer.weight.dtype == torch.float64 for layer in layers)
    return Situation(single, low_rank, dropped, composed, base_dropped, double)


@dataclass(frozen=True, slots=True)
class Place:
    """Of one adapter on one layer: rank, padded rank, first column in S (and row in the adapter's stacked A), and first
    element in the layer's flat B."""

    rank: int
    padded: int
    column: int
    b_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """rows: (first row in the stacked A, padded rank over all layers) by adapter; places: by (adapter, layer)."""

    rows: dict[int, tuple[int, int]]
    places: dict[tuple[int, int], Place]
    num_rows: int
    width: int
    b_sizes: tuple[int, ...]
    max_padded: tuple[int, ...]
    """Largest padded rank of each layer."""
    sizes: tuple[int, ...]
    """N of each layer."""

    def b_block(self, flat: torch.Tensor, number: int, index: int) -> torch.Tensor:
        """B, or dB, of one adapter on one layer in the layer's flat one: [N, padded]."""
        place, N = self.places[number, index], self.sizes[index]
        if self.b_sizes[index] == N * place.padded:  # nobody else's
            return flat.view(N, place.padded)
        return flat[place.b_offset : place.b_offset + N * place.padded].view(N, place.padded)


def make_layout(ranks: Sequence[Mapping[int, int]], sizes: Sequence[int], align: int) -> Layout:
    """Lay out a group.

    Args:
        ranks: per layer, by adapter number.
        sizes: N of each layer.
        align: what padded ranks are multiples of.
    """
    rows: dict[int, tuple[int, int]] = {}
    places: dict[tuple[int, int], Place] = {}
    b_sizes, largest, first = [0] * len(sizes), [0] * len(sizes), 0
    for number in sorted({number for by_adapter in ranks for number in by_adapter}):
        column = 0
        for layer, by_adapter in enumerate(ranks):
            rank = by_adapter.get(number, 0)
            if rank:
                padded = -(-rank // align) * align
                places[number, layer] = Place(rank, padded, column, b_sizes[layer])
                b_sizes[layer] += sizes[layer] * padded
                largest[layer] = max(largest[layer], padded)
                column += padded
        rows[number] = (first, column)
        first += column
    width = max((padded for _, padded in rows.values()), default=0)
    return Layout(rows, places, first, width, tuple(b_sizes), tuple(largest), tuple(sizes))


class Packed:
    """A's of a group stacked and B's flattened, in the compute dtype and padded with zeros.

    `refresh` copies the parameters in. Where they are `trusted` a parameter is copied only when its stamp (ops/stamp.py) is
    another; else always: optimizers that write through `.data` or by their own kernels do not move the version. Operands that
    already lie as they should (one adapter, no padding, the compute dtype) are used in place. All calls are for layers with the
    same operands, the very objects.
    """

    def __init__(self, layout: Layout, K: int, dtype: torch.dtype, device: torch.device, trusted: bool = False) -> None:
        self.layout, self.trusted = layout, trusted
        self.shape = (layout, K, dtype)
        self._make = (K, dtype, device)
        self._A: torch.Tensor | None = None
        self.B: list[torch.Tensor | None] = [None] * len(layout.b_sizes)
        self._owns_A, self._owns_B = False, [False] * len(layout.b_sizes)
        self._used: tuple[int, int, torch.Tensor, int, torch.Tensor, int] | None = None
        """Adapter, layer, and A and B with their addresses, where there are no others and both are used where they are."""
        self._slots: dict[tuple[str, int, int], torch.Tensor] = {}
        self._operands: list[torch.Tensor] = []
        """A and B by place."""
        self._seen: Stamps = None
        """Theirs when they were copied last, where they are trusted."""
        self._blocks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """What b_block gave last, and of which flat B."""

    @property
    def A_RK(self) -> torch.Tensor:
        assert self._A is not None
        return self._A

    def refresh(self, layers: Sequence[Layer]) -> None:
        """Copy the parameters in, by one call for all that have to be copied."""
        if self._as_they_were(layers):
            return
        if not self._operands:
            lows = [layers[index].adapters[number] for number, index in self.layout.places]
            self._operands = [operand for low in lows for operand in (low.A, low.B) if operand is not None]
        before, now = self._seen, stamps(self._operands) if self.trusted else None
        if now is not None and now == before:
            return
        self._seen = now
        into: list[torch.Tensor] = []
        out_of: list[torch.Tensor] = []
        for at, ((number, index), place) in enumerate(self.layout.places.items()):
            own = slice(2 * at, 2 * at + 2)
            if now is not None and before is not None and now[own] == before[own]:
                continue
            low = layers[index].adapters[number]
            assert low.A is not None and low.B is not None
            if self._in_place(place, low.A, len(self.layout.places) == 1):
                if self._A is None or self._owns_A or self._A.data_ptr() != low.A.data_ptr():
                    self._A = low.A.detach()
                    self._owns_A = False
                    self._slots.pop(("A", number, index), None)
            else:
                into.append(self._A_slot(number, index, place))
                out_of.append(low.A)
            if self._in_place(place, low.B, self.layout.b_sizes[index] == low.B.shape[0] * place.padded):
                known = self.B[index]
                if known is None or self._owns_B[index] or known.data_ptr() != low.B.data_ptr():
                    self.B[index] = low.B.detach().view(-1)
                    self._owns_B[index] = False
                    self._slots.pop(("B", number, index), None)
            else:
                into.append(self._B_slot(number, index, place))
                out_of.append(low.B)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, out_of)
        self._used = None
        if len(self.layout.places) == 1 and not self._slots:
            (((number, index), _),) = self.layout.places.items()
            A, B = layers[index].adapters[number].A, layers[index].adapters[number].B
            assert A is not None and B is not None
            self._used = number, index, A, A.data_ptr(), B, B.data_ptr()

    def _as_they_were(self, layers: Sequence[Layer]) -> bool:
        """Whether all operands are used where they are, and still lie there."""
        if self._used is None:
            return False
        number, index, A, A_at, B, B_at = self._used
        low, dtype = layers[index].adapters[number], self._make[1]
        return (
            low.A is A and low.B is B and A.data_ptr() == A_at and B.data_ptr() == B_at and A.dtype == dtype
            and B.dtype == dtype
        )  # fmt: skip

    def _in_place(self, place: Place, operand: torch.Tensor, alone: bool) -> bool:
        """Whether the operand can be used where it is."""
        return (
            alone and place.rank == place.padded and operand.dtype == self._make[1] and operand.is_contiguous()
            and operand.data_ptr() % 16 == 0
        )  # fmt: skip

    def _A_slot(self, number: int, index: int, place: Place) -> torch.Tensor:
        """Where an A is copied to."""
        slot = self._slots.get(("A", number, index))
        if slot is None:
            K, dtype, device = self._make
            with torch.inference_mode(False):
                if not self._owns_A:
                    self._A = torch.zeros(self.layout.num_rows, K, dtype=dtype, device=device)
                    self._owns_A = True
                first = self.layout.rows[number][0] + place.column
                assert self._A is not None
                slot = self._slots["A", number, index] = self._A[first : first + place.rank]
        return slot

    def _B_slot(self, number: int, index: int, place: Place) -> torch.Tensor:
        """Where a B is copied to."""
        slot = self._slots.get(("B", number, index))
        if slot is None:
            _, dtype, device = self._make
            with torch.inference_mode(False):
                if not self._owns_B[index]:
                    self.B[index] = torch.zeros(self.layout.b_sizes[index], dtype=dtype, device=device)
                    self._owns_B[index] = True
                slot = self._slots["B", number, index] = self.b_block(number, index)[:, : place.rank]
        return slot

    def b_block(self, number: int, index: int) -> torch.Tensor:
        """B of one adapter on one layer, [N, padded]."""
        flat = self.B[index]
        assert flat is not None
        known = self._blocks.get((number, index))
        if known is None or known[0] is not flat:
            known = self._blocks[number, index] = (flat, self.layout.b_block(flat, number, index))
        return known[1]


# --- tables on the device ----------------------------------------------------------------------------------------------


def cover(runs: Sequence[Run], num_tokens: int) -> list[tuple[int, int, int, float]]:
    """(adapter, start, stop, dropout) over all tokens in order; adapter -1 where no run is."""
    out: list[tuple[int, int, int, float]] = []
    end = 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start > end:
            out.append((-1, end, run.start, 0.0))
        out.append((run.adapter, run.start, run.stop, run.dropout))
        end = run.stop
    if end < num_tokens:
        out.append((-1, end, num_tokens, 0.0))
    return out


def gaps(runs: Sequence[Run], num_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of the tokens that no run owns."""
    return [(start, stop) for adapter, start, stop, _ in cover(runs, num_tokens) if adapter < 0]


class RunTables:
    """Tokens cut into blocks that never cross from one run into another; one table per block size, one copy to the device.

    A row is (adapter or -1, start, stop, dropout threshold), int32. `ranges` has per block size and adapter the first row
    that is the adapter's and one past its last; rows of others may lie between. `whole` has a row for each run, and for the
    tokens between runs, uncut; `spans` per tile of so many tokens, cut without regard to runs, the first of those rows that
    the tile meets and one past its last.
    """

    def __init__(
        self, runs: Sequence[Run], num_tokens: int, device: torch.device, sizes: Sequence[int], num_adapters: int, tile: int
    ) -> None:  # fmt: skip
        flat: list[int] = []
        ranges: dict[int, int] = {}
        bounds: dict[int, tuple[int, int]] = {}
        parts = cover(runs, num_tokens)
        for size in dict.fromkeys(sizes):
            first = len(flat) // 4
            for adapter, start, stop, p in parts:
                threshold = dropout_threshold(p)
                for at in range(start, stop, size):
                    flat += (adapter, at, min(at + size, stop), threshold)
            bounds[size] = (first, len(flat) // 4)
        whole = len(flat) // 4
        for adapter, start, stop, p in parts:
            flat += (adapter, start, stop, dropout_threshold(p))
        for size, (first, last) in bounds.items():
            ranges[size] = len(flat) // 2
            owners = [flat[4 * row] for row in range(first, last)]
            for adapter in range(num_adapters):
                own = [row for row, owner in enumerate(owners) if owner == adapter]
                flat += (own[0], own[-1] + 1) if own else (0, 0)
            flat += (0, 0) * (len(flat) % 4 // 2)
        spans, number = len(flat) // 2, 0
        for at in range(0, num_tokens, tile):
            while parts[number][2] <= at:
                number += 1
            last = number
            while last + 1 < len(parts) and parts[last + 1][1] < at + tile:
                last += 1
            flat += (number, last + 1)
        tiles = len(flat) // 2 - spans
        flat += (0, 0) * (len(flat) % 4 // 2)
        table = torch.tensor(flat, dtype=torch.int32)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        rows, pairs = table.view(-1, 4), table.view(-1, 2)
        self.blocks = {size: rows[first:last] for size, (first, last) in bounds.items()}
        self.counts = {size: last - first for size, (first, last) in bounds.items()}
        """How many blocks there are."""
        self.ranges = {size: pairs[at : at + num_adapters] for size, at in ranges.items()}
        self.whole, self.spans = rows[whole : whole + len(parts)], pairs[spans : spans + tiles]
        self.dropout = any(run.dropout > 0 for run in runs)
        self.sites: dict[Hashable, Any] = {}
        """Launches made on these tables, see launcher.py."""
        self.bands: dict[tuple[tuple[int, ...], int], int] = {}
        """Block sizes chosen for these tables, see launch.py."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A group's offsets on the device; -1 and unknown adapters are never looked up, absent ones have rank 0.

    rows: int32 [adapters, 2], (first row in the stacked A, padded rank over all layers).
    places: per layer int32 [adapters, 4], (column in S, offset in flat B, padded rank, 0).
    scalings: per layer float32 [adapters].
    row_scales: float32 [rows of the stacked A], the scaling of each row.
    owners: int32 [rows of the stacked A, 2], adapter and column in S of each row.
    adapters: how many.
    """

    rows: torch.Tensor
    places: list[torch.Tensor]
    scalings: list[torch.Tensor]
    row_scales: torch.Tensor
    owners: torch.Tensor
    adapters: int


def make_group_tables(layout: Layout, scalings: Mapping[tuple[int, int], float], num: int, device: Any) -> GroupTables:
    """`num`: one more than the largest adapter number that a run may have."""
    layers = range(len(layout.b_sizes))
    rows = [[0, 0] for _ in range(num)]
    for number, (first, padded) in layout.rows.items():
        rows[number] = [first, padded]
    places = [[[0, 0, 0, 0] for _ in range(num)] for _ in layers]
    factors = [[0.0] * num for _ in layers]
    for (number, layer), place in layout.places.items():
        places[layer][number] = [place.column, place.b_offset, place.padded, 0]
        factors[layer][number] = scalings[number, layer]

    by_row = [0.0] * layout.num_rows
    owners = [[number, row] for number, (_, padded) in layout.rows.items() for row in range(padded)]
    for (number, layer), place in layout.places.items():
        first = layout.rows[number][0] + place.column
        by_row[first : first + place.padded] = [scalings[number, layer]] * place.padded

    def put(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return GroupTables(
        put(rows, torch.int32),
        [put(table, torch.int32) for table in places],
        [put(table, torch.float32) for table in factors],
        put(by_row, torch.float32),
        put(owners, torch.int32).view(-1, 2),
        num,
    )
