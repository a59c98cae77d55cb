"""CUDA graphs of prompts: a pass that the host launches in tens of milliseconds, for which all samples that run wait.

A graph holds packed prompts of any lengths and owners that its sizes have room for: tokens of nobody fill the row, whose keys
and values are not kept. All adapters that prompts have had are in it, so that one serves whoever sends the next prompt.

Shapes: T tokens of the packed row, N that are kept, L rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from packlora.adapters.attach import adapted_layers
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.kv_cache import Prefill
from packlora.base.packing import packed_logits
from packlora.engine.collate import fillers
from packlora.engine.decode import Packed, Passes, Prompt, pack
from packlora.engine.rows import NO_ADAPTER
from packlora.ops.attention.blocks import SampleBlocks, most_blocks, table_of
from packlora.ops.lora_linear.boundaries import ON_HOST
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.recent import Recent

UNRECORDED = 1
"""Passes of a size that run without a graph before one is made for it: prompts that come once are not worth a recording."""
MOST = 32
"""Graphs that are kept; the one that was not used for longest goes."""
SEEN = 1024
"""Sizes and adapters of passes that are known."""
FEWEST, STEPS = 64, 4
"""Tokens of a graph at least, and numbers of them from a power of two to the next."""
MOST_TOKENS, MOST_ROWS = 4096, 256
"""Of a pass that has a graph. Longer ones have the device work for as long as the host, and the memory that they pass through
would be kept; more logits are of prompts' own tokens, which are asked for once."""


class Size(NamedTuple):
    """Sizes, rounded up, of the passes that share a graph."""

    tokens: int
    samples: int
    kept: int
    rows: int

    @staticmethod
    def of(packed: Packed) -> Size | None:
        """None where such a pass has no graph."""
        tokens = _rounded(len(packed.ids))
        if tokens > MOST_TOKENS or not 0 < len(packed.rows) <= MOST_ROWS:
            return None
        more = len(fillers(tokens - len(packed.ids), max(packed.lengths)))
        samples = _power(max(len(packed.lengths) + more, MIN_ROWS))
        return Size(tokens, samples, _rounded(len(packed.kept[0])), _power(max(len(packed.rows), MIN_ROWS)))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _rounded(number: int) -> int:
    step = max(_power(number) // (2 * STEPS), FEWEST // STEPS)
    return max(-(-number // step) * step, FEWEST)


class GraphedPrompts:
    """Prompts by CUDA graphs, where they can be.

    Args:
        passes: whose prompts they are.
        fits: whether such adapters can be in a graph.
        recorder: gives the recorder.
    """

    def __init__(self, passes: Passes, fits: Callable[[tuple[int, ...]], bool], recorder: Callable[[], Any]) -> None:
        self._passes, self._fits, self._recorder = passes, fits, recorder
        self.why_not: str | None = None
        self._adapters = frozenset[int]()
        """Those that prompts have had since graphs were dropped last."""
        self._bodies: dict[tuple[Size, frozenset[int]], _Body] = {}
        self._seen: dict[tuple[Size, frozenset[int]], int] = {}
        self._fitting: Recent[bool] = Recent(SEEN)

    def run(self, prompts: Sequence[Prompt]) -> list[torch.Tensor] | None:
        """Logits of each prompt, see Passes.prefill; None where it goes without a graph."""
        owners = {prompt.adapter for prompt in prompts}
        adapters = frozenset(owners - {NO_ADAPTER})
        if self.why_not is not None or not self._passes.cache.by_kernel or not self._fit(adapters):
            return None
        packed = pack(prompts, 1, 1)
        size = Size.of(packed)
        body = None if size is None else self._body(size, adapters, NO_ADAPTER in owners)
        return None if body is None else body.run(packed)

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._bodies.clear()
        self._seen.clear()
        self._fitting = Recent(SEEN)
        self._adapters = frozenset()

    def forget(self, adapter: int) -> None:
        """An adapter has left the model; graphs would hold its weights."""
        self._adapters -= {adapter}
        self._bodies = {key: body for key, body in self._bodies.items() if adapter not in key[1]}
        self._seen = {key: times for key, times in self._seen.items() if adapter not in key[1]}

    def _body(self, size: Size, adapters: frozenset[int], with_base: bool) -> _Body | None:
        self._adapters |= adapters
        for key, body in self._bodies.items():
            if key[0] == size and _holds(key[1], adapters, with_base):
                self._bodies[key] = self._bodies.pop(key)
                return body
        known = self._adapters if _holds(self._adapters, adapters, with_base) else adapters
        self._seen[size, known] = self._seen.get((size, known), 0) + 1
        if self._seen[size, known] <= UNRECORDED:
            return None
        here = frozenset(number for layer in self._layers() for number in layer.adapters)
        self._adapters &= here
        # graphs of adapters that have left would hold their weights
        self._bodies = {key: kept for key, kept in self._bodies.items() if key[1] <= here}
        self._seen = {key: times for key, times in self._seen.items() if key[1] <= here}
        known &= here
        if not _holds(known, adapters, with_base) or not self._fit(known) or len(known) > size.tokens:
            return None
        if len(self._bodies) >= MOST:
            del self._bodies[next(iter(self._bodies))]
        body = self._bodies[size, known] = _Body(self._passes, size, tuple(sorted(known)), self._recorder())
        return body

    def _fit(self, adapters: frozenset[int]) -> bool:
        """Whether these can be in a graph: not where one is on what stands behind the decoder, which is given other rows."""

        def fit() -> bool:
            behind = any(not adapters.isdisjoint(layer.adapters) for layer in self._layers() if layer.of_rows)
            return not behind and self._fits(tuple(sorted(adapters)))

        return self._fitting.get(adapters, fit)

    def _layers(self) -> list[AdaptedLinear]:
        layers = adapted_layers(self._passes.model).values()
        return [layer for layer in layers if isinstance(layer, AdaptedLinear)]


def _holds(known: frozenset[int], adapters: frozenset[int], with_base: bool) -> bool:
    """Whether a graph of known adapters holds prompts of these, and of the base model. A single adapter is given all tokens."""
    return known >= adapters if len(known) > 1 else known == adapters and not (known and with_base)


class _Body:
    """Prompts of one size: their buffers, and their graph once they have run."""

    def __init__(self, passes: Passes, size: Size, adapters: tuple[int, ...], recorder: Any) -> None:
        self._passes, self._size, self._recorder = passes, size, recorder
        where, T = passes.model.device, size.tokens
        self._sizes = [T, T, size.rows, size.kept, size.kept, size.kept]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=where)
        self._staged = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=self._buffer.is_cuda)
        blocks = most_blocks(T, size.samples)
        self._samples = SampleBlocks(torch.zeros(2, 3, blocks, dtype=torch.int32, device=where))
        self._moving = MovingSegments(T, adapters) if adapters else None
        nominal = self._moving.nominal if self._moving is not None else ()
        of_head = (), self._buffer.split(self._sizes)[2]  # none of these adapters is on the output layer
        self._owners = TokenOwners(T, nominal, boundaries=self._moving or ON_HOST, label_rows=of_head)
        self._logits_LV: torch.Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def run(self, packed: Packed) -> list[torch.Tensor]:
        """Logits [places, V] of each prompt. The first time it runs without a graph, so that whatever is made at first calls is
        there; the second time it is recorded."""
        self._load(packed)
        if self._replay is None and self._logits_LV is not None:
            self._replay = self._recorder.record(self._forward)
        (self._replay or self._forward)()
        assert self._logits_LV is not None
        logits_LV = self._logits_LV[: len(packed.rows)].clone()
        return [logits_LV[own] for own in packed.found]

    def _load(self, packed: Packed) -> None:
        """Whoever samples reads the tokens of a pass, and so waits for it, before the next one is loaded."""
        more = fillers(self._size.tokens - len(packed.ids), max(packed.lengths))
        lengths = [*packed.lengths, *more]
        positions = np.concatenate([np.arange(length) for length in lengths])
        columns: list[Sequence[int] | np.ndarray] = [packed.ids, positions, packed.rows, *packed.kept]
        for part, column in zip(np.split(self._staged.numpy(), np.cumsum(self._sizes)[:-1]), columns, strict=True):
            part[: len(column)] = column
            part[len(column) :] = column[0]  # a filler's tokens are the first one's, and what is kept twice is the same
        self._buffer.copy_(self._staged, non_blocking=True)
        table = torch.from_numpy(table_of(lengths, self._samples.table.shape[2]))
        self._samples.table.copy_(table.pin_memory() if self._buffer.is_cuda else table, non_blocking=True)
        if self._moving is not None:
            self._moving.write(packed.segments)
            self._moving.refresh()

    @torch.no_grad()
    def _forward(self) -> None:
        ids_T, positions_T, rows_L, *kept_N = self._buffer.split(self._sizes)
        own_pass = Prefill(self._passes.cache, self._samples, *kept_N)
        with self._passes.attached.active(self._owners):
            self._logits_LV = packed_logits(self._passes.model, ids_T, positions_T, own_pass, rows_L)
