"""Segments whose boundaries change from call to call while the addresses of all that a call reads stay: for CUDA graphs.

A call that is settled for them (settle.py) reads who owns which tokens from tables on the device, and from nowhere else: what
is recorded once serves any boundaries. It leaves the operands as they are; whoever replays it brings them up to date first.

    owners = MovingSegments(T, adapters)
    with capture:                      # calls with boundaries=owners, over `owners.nominal`
        ...
    owners.write(boundaries)           # for every microbatch
    owners.refresh()
    replay
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.ops.lora_linear.types import COUNTER, Segment


class Operands(Protocol):
    """Operands of a group of layers (prepared.Prepared)."""

    def refresh(self) -> None:
        """Bring all up to date with the parameters."""

    def refresh_scales(self) -> None:
        """Bring those up to date that are more than copies."""

    def copies(self) -> Sequence[tuple[int, torch.Tensor, torch.Tensor]]:
        """Adapter, place and source of those that are copies."""


EACH = 4
"""Copies of all adapters are replayed where at least one in so many is due. A replay costs the host nothing, the launches of an
adapter half a millisecond; the device takes some 20 microseconds for each adapter of 10 million parameters."""


class _Copies:
    """Copies of the operands of one adapter, over all groups."""

    def __init__(self) -> None:
        self._parts: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...] = (([], []), ([], []))
        """Places and sources that lie alike, which are copied by few launches, and the others."""
        self._counters: dict[int, torch.Tensor] = {}
        """Tensors whose versions tell a write to the sources, which stay the objects that they are."""
        self.versions: list[int] = []
        """Of these at the last copy."""
        self.seen: list[int] = []
        """Of these when they were looked at last; none where a tensor counts no writes."""
        self._counts_writes = True

    def add(self, into: torch.Tensor, source: torch.Tensor) -> None:
        counter = getattr(source, COUNTER, source)
        self._counters[id(counter)] = counter
        self._counts_writes = self._counts_writes and not source.is_inference()
        places, sources = self._parts[into.stride() != source.stride()]
        places.append(into)
        sources.append(source)

    def is_due(self) -> bool:
        """Whether sources were written to since the last copy, as far as one can tell."""
        self.seen = [counter._version for counter in self._counters.values()] if self._counts_writes else []
        return not self.seen or self.seen != self.versions

    @torch.no_grad()
    def copy(self) -> None:
        for places, sources in self._parts:
            if places:
                torch._foreach_copy_(places, sources)


class KeptTensor:
    """A tensor of an adapter, as DoRA's norm, in a buffer that graphs read. It is computed outside of them, once the adapter
    changed.

    Args:
        get: gives the tensor: the same object while the adapter is what it was.
    """

    def __init__(self, get: Callable[[], torch.Tensor]) -> None:
        self._get, self._seen = get, get()
        self.kept = self._seen.clone()
        """The tensor as it was when boundaries were written last."""

    def write(self, segments: Sequence[Segment]) -> None:
        """Bring it up to date."""
        if (now := self._get()) is not self._seen:
            self.kept.copy_(now)
            self._seen = now


class MovingSegments:
    """The Boundaries of `total` tokens whose segments move: at most one for each of `adapters`, with tokens without an adapter
    between them. A single adapter is given all tokens, also those without an adapter: calls then need no look-up of boundaries,
    and are as fast as without them.
    """

    replayed = True

    def __init__(self, total: int, adapters: Sequence[int]) -> None:
        self.total, self.adapters = total, tuple(adapters)
        share = total // max(1, len(adapters))
        stops = [*(share * at for at in range(1, len(self.adapters))), total]
        self.nominal = tuple(
            (number, share * at, stop) for at, (number, stop) in enumerate(zip(adapters, stops, strict=False))
        )
        """(adapter, start, stop) in the place of the boundaries that are not known yet: equal shares, the rest for the last."""
        self._boundaries = self.nominal
        self._tables: dict[Hashable, tuple[tuple[Segment, ...], Any]] = {}
        self._operands: dict[int, Operands] = {}
        self._copies: dict[int, _Copies] = {}
        self._copy_all: Callable[[], None] | None = None
        """Replays the copies of all adapters; None where they are not recorded."""
        self._parts: dict[tuple[int, int], MovingSegments] = {}
        """Boundaries among consecutive tokens, by the first of these and their number."""

    @property
    def known(self) -> bool:
        """See Boundaries: a single adapter has all tokens."""
        return len(self.adapters) == 1

    @property
    def settled(self) -> Boundaries:
        """See Boundaries."""
        return ON_HOST if self.known else self

    @property
    def most(self) -> int:
        """Largest number of parts that segments and the tokens between them may make."""
        return 2 * len(self.adapters) + 1

    def part(self, first: int, count: int) -> MovingSegments:
        """Boundaries among consecutive tokens of these, which follow these."""
        found = self._parts.get((first, count))
        if found is None:
            found = self._parts[first, count] = MovingSegments(count, self.adapters)
            found.write(inside(self._boundaries, first, count))
        return found

    def tables(self, key: Hashable, segments: tuple[Segment, ...], make: Callable[[], Any]) -> Any:
        """Tables for nominal segments and for whatever else is in `key`, made once; from then on `write` fills them."""
        found = self._tables.get((key, segments))
        if found is None:
            found = segments, make()
            found[1].write(self._placed(segments))
            self._tables[key, segments] = found
        return found[1]

    def write(self, boundaries: Sequence[tuple[int, int, int]]) -> None:
        """Write the boundaries (adapter, start, stop) of the segments for what runs on the device from now on."""
        self._boundaries = tuple(boundaries)
        for segments, tables in self._tables.values():
            tables.write(self._placed(segments))
        for (first, count), part in self._parts.items():
            part.write(inside(boundaries, first, count))

    def kept(self, key: Hashable, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See Boundaries."""
        kept: torch.Tensor = self.tables((KeptTensor, key), (), partial(KeptTensor, get)).kept
        return kept

    def ready(self, operands: Operands, call: object = None) -> None:
        """See Boundaries: they are up to date now, and after each `refresh`."""
        if id(operands) in self._operands:
            return
        operands.refresh()
        self._operands[id(operands)], self._copy_all = operands, None
        for adapter, into, source in operands.copies():
            self._copies.setdefault(adapter, _Copies()).add(into, source)

    def refresh(self) -> None:
        """Bring the operands of the adapters that own tokens now up to date with their parameters, in all calls."""
        here = {number for number, _, _ in self._boundaries}
        due = [own for number, own in self._copies.items() if number in here and own.is_due()]
        calls = [own.copy for own in due]
        if self._copy_all is not None and 0 < len(self._copies) <= EACH * len(due):
            due, calls = [own for own in self._copies.values() if own.is_due()], [self._copy_all]
        for call in calls:
            call()
        for own in due:
            own.versions = own.seen
        for operands in self._operands.values():
            operands.refresh_scales()

    def record(self, record: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Let `refresh` replay copies. record: makes of a function one that repeats its launches."""

        def copy_all() -> None:
            for own in self._copies.values():
                own.copy()

        self._copy_all = record(copy_all) if self._copies else None

    def forget(self) -> None:
        """Keep nothing that was recorded: recordings share a pool of memory, which is free once all of them are gone."""
        self._copy_all = None

    def _placed(self, segments: Sequence[Segment]) -> list[Segment]:
        by_adapter = {segment.adapter: segment for segment in segments}
        return [
            replace(by_adapter[number], start=start, stop=stop)
            for number, start, stop in self._boundaries
            if number in by_adapter
        ]


def inside(boundaries: Iterable[tuple[int, int, int]], first: int, count: int) -> list[tuple[int, int, int]]:
    """Parts of segments (adapter, start, stop) that are among `count` tokens, by their place among these."""
    cut = [(number, max(a - first, 0), min(b - first, count)) for number, a, b in boundaries]
    return [one for one in cut if one[1] < one[2]]
