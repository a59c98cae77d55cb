"""CUDA graphs of decode passes: one replay gives the logits of all samples' next tokens, which costs the host nothing.
Prompts: recorded_prefill.py.

As in graphs.py, what changes from pass to pass lies in buffers at fixed addresses: tokens, places, slots, and who owns which
rows. A pass of the same numbers of rows, slots and places and of the same adapters has a graph, recorded after some that ran
without. What cannot be recorded goes on without, and `why_not` says why.

Shapes: R rows, S slots, L places that are looked at, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from packlora.adapters.attach import adapted_layers
from packlora.adapters.expert_layout import adapted_experts
from packlora.adapters.linear import AdaptedLinear, Attached
from packlora.adapters.owners import MIN_ROWS, TokenOwners
from packlora.base.host_embedding import why_host_waits
from packlora.base.kv_cache import Decode, KeyValueCache
from packlora.base.packing import packed_logits
from packlora.engine.decode import NextToken, Passes, Prompt, lay_out
from packlora.engine.memory import free_memory
from packlora.engine.passes import one_error_for_memory
from packlora.engine.recorded import TRIES, Recorder
from packlora.engine.recorded_prefill import SEEN, GraphedPrompts
from packlora.engine.rows import NO_ADAPTER
from packlora.ops.attention.cached import Visible
from packlora.ops.lora_linear.boundaries import ON_HOST
from packlora.ops.lora_linear.frozen import FrozenLinear
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.recent import Recent

UNRECORDED = 8
"""Passes of a shape that run without a graph, or by that of a larger one, before one is recorded."""
MOST = 16
"""Shapes whose graphs are kept; the one that was not used for longest goes."""
VIEW = 256
"""Fewest places that a pass looks at; more are powers of two."""


class Shape(NamedTuple):
    """Key of a recorded graph."""

    rows: int
    slots: int
    places: int
    adapters: tuple[int, ...]

    def holds(self, other: Shape) -> bool:
        """Whether a pass of the other shape can be run as one of this. A single adapter would be given all rows."""
        adapters = self.adapters == other.adapters or (len(self.adapters) > 1 and {*self.adapters} >= {*other.adapters})
        sizes = self.rows >= other.rows and self.slots == other.slots and self.places >= other.places
        return adapters and sizes


def why_no_decode_graphs(model: PreTrainedModel, attached: Attached) -> str | None:
    """Explain in words why decode passes of a model have no graphs; None: they are tried."""
    if model.device.type != "cuda":
        return f"there are none on {model.device.type}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"kernels with rows whose owners are on the device are for bfloat16 and float16, not for {model.dtype}"
    if not attached.storage.is_whole:
        return "the base model is in parts on several processes"
    if (reason := why_host_waits(model)) is not None:
        return reason
    if any(isinstance(module, FrozenLinear) and module.frozen.dense() is None for module in model.modules()):
        return "the weights of quantised layers are made where they are read, by their libraries"
    return None


class GraphedPasses:
    """Passes whose decode goes by CUDA graphs where it can.

    Args:
        eager: runs what graphs do not.
    """

    def __init__(self, eager: Passes, recorder: Callable[[torch.device], Any] = Recorder) -> None:
        self.eager, self._new_recorder = eager, recorder
        self.why_not: str | None = None
        self._recorder: Any = None
        self._bodies: dict[Shape, _Body] = {}
        self._seen: dict[Shape, int] = {}
        self._fits: Recent[bool] = Recent(SEEN)
        """Whether adapters can be in a graph; any mix of those that there are comes."""
        self._turn, self._lacking = eager.cache.turn, 0
        self.prompts = GraphedPrompts(eager, self._fits_one, self._recorder_now)

    @property
    def cache(self) -> KeyValueCache:
        """Keys and values."""
        return self.eager.cache

    def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """See Passes."""
        self._follow_cache()
        try:
            with one_error_for_memory():
                found = self.prompts.run(prompts)
        except Exception as error:  # of a model, a kernel or a library; without graphs it may be none
            self.prompts.why_not, found = self._why_none(error), None
            self._drop()
        return self.eager.prefill(prompts) if found is None else found

    def free(self) -> None:
        """Give the memory of the cache and of all graphs back."""
        self.cache.free()
        self._drop()

    def forget(self, adapter: int) -> None:
        """An adapter has left the model; graphs would hold its weights."""
        self._bodies = {shape: body for shape, body in self._bodies.items() if adapter not in shape.adapters}
        self._seen = {shape: times for shape, times in self._seen.items() if adapter not in shape.adapters}
        self.prompts.forget(adapter)

    @torch.no_grad()
    def decode(self, tokens: Sequence[NextToken]) -> torch.Tensor:
        """See Passes."""
        self._follow_cache()
        shape = self._shape(tokens)
        if shape is not None and self._seen.setdefault(shape, 0) < UNRECORDED:
            self._seen[shape] += 1
            if len(self._seen) > SEEN:
                self._seen.clear()
            shape = self._recorded_larger(shape)
        if shape is None:
            return self.eager.decode(tokens)
        try:
            with one_error_for_memory():
                return self._body(shape).run(tokens)
        except Exception as error:  # of a model, a kernel or a library; without graphs it may be none
            self.why_not = self._why_none(error)
        self._drop()
        return self.eager.decode(tokens)

    def _why_none(self, error: Exception) -> str | None:
        """Reason why there are no graphs from now on; None where only memory has run out, which may be there later."""
        if isinstance(error, torch.OutOfMemoryError):
            self._lacking += 1
            self._seen.clear()  # what comes goes without them for a while
            if self._lacking < TRIES:
                return None
        return _words(error)

    def _shape(self, tokens: Sequence[NextToken]) -> Shape | None:
        """None where these tokens have no graph."""
        owners = {token.adapter for token in tokens}
        adapters = tuple(sorted(owners - {NO_ADAPTER}))
        if self.why_not is not None or (len(adapters) == 1 and NO_ADAPTER in owners):
            return None  # a single adapter would be given all rows
        if not self._fits_one(adapters):
            return None
        rows = max(MIN_ROWS, 1 << (len(tokens) - 1).bit_length())
        places = max(VIEW, 1 << max(token.place for token in tokens).bit_length())
        places = self.cache.length if self.cache.by_kernel else min(places, self.cache.length)
        return Shape(rows, self.cache.slots, places, adapters)

    def _recorded_larger(self, shape: Shape) -> Shape | None:
        """The smallest recorded shape whose graph can run a pass of this one."""
        found = [own for own, body in self._bodies.items() if body.is_recorded and own.holds(shape)]
        return min(found, key=lambda own: (own.rows, own.places, len(own.adapters)), default=None)

    def _fits_one(self, adapters: tuple[int, ...]) -> bool:
        return self._fits.get(adapters, lambda: self._fit(adapters))

    def _fit(self, adapters: Sequence[int]) -> bool:
        """Whether all that these adapters train is low-rank, of linear layers."""
        model = self.eager.model
        others = [layer.adapters for layer in adapted_layers(model).values() if not isinstance(layer, AdaptedLinear)]
        others += [own for _, state in adapted_experts(model) for own in state.adapters.values()]
        return not any(number in own for own in others for number in adapters)

    def _body(self, shape: Shape) -> _Body:
        body = self._bodies.pop(shape, None)
        if body is None:
            layers = adapted_layers(self.eager.model).values()
            here = {number for layer in layers if isinstance(layer, AdaptedLinear) for number in layer.adapters}
            # graphs of adapters that have left would hold their weights
            self._bodies = {own: kept for own, kept in self._bodies.items() if here.issuperset(own.adapters)}
            if len(self._bodies) >= MOST:
                del self._bodies[next(iter(self._bodies))]
            body = _Body(self.eager, shape, self._recorder_now())
        self._bodies[shape] = body
        return body

    def _recorder_now(self) -> Any:
        """Records in one pool of memory until graphs are dropped."""
        self._recorder = self._recorder or self._new_recorder(self.eager.model.device)
        return self._recorder

    def _follow_cache(self) -> None:
        if self._turn != self.cache.turn:
            self._drop()

    def _drop(self) -> None:
        """Free the memory of all graphs. A decode pass that had one is recorded again when it is met again."""
        had_any, self._turn = self._recorder is not None, self.cache.turn
        self._recorder = None
        self._fits = Recent(SEEN)
        self._bodies.clear()
        self.prompts.clear()
        if had_any:
            free_memory(self.eager.model.device)


class _Body:
    """A decode pass of one shape: its buffers, and its graph once it has run."""

    def __init__(self, passes: Passes, shape: Shape, recorder: Any) -> None:
        self._passes, self._shape, self._recorder = passes, shape, recorder
        R, S, where = shape.rows, shape.slots, passes.model.device
        self._buffer = torch.zeros(3 * R + 2 * S, dtype=torch.int64, device=where)
        self._staged = torch.zeros(3 * R + 2 * S, dtype=torch.int64, pin_memory=self._buffer.is_cuda)
        self._every_R = torch.arange(R, device=where)
        self._moving = MovingSegments(R, shape.adapters) if shape.adapters else None
        nominal = self._moving.nominal if self._moving is not None else ()
        self._owners = TokenOwners(R, nominal, boundaries=self._moving or ON_HOST)
        self._flats = _flats(passes.model, shape.adapters)
        self._versions: list[int] = []
        """Of `_flats`, when the operands were brought up to date."""
        self._written: tuple[tuple[int, int, int], ...] = ()
        self._wanted: tuple[tuple[int, ...], torch.Tensor] = (), self._every_R
        self._logits_RV: torch.Tensor | None = None
        self._replay: Callable[[], None] | None = None

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def run(self, tokens: Sequence[NextToken]) -> torch.Tensor:
        """Logits [len(tokens), V]. The first time it runs without a graph, so that whatever is made at first calls is there;
        the second time it is recorded."""
        layout = lay_out(tokens, self._shape.slots, 1, self._shape.rows)
        # one staging buffer is enough: whoever samples reads the tokens of a pass, and so waits for it, before the next one
        self._staged.numpy()[:] = layout.columns
        self._buffer.copy_(self._staged, non_blocking=True)
        if layout.wanted != self._wanted[0]:
            self._wanted = layout.wanted, torch.tensor(layout.wanted, device=self._buffer.device)
        if self._moving is not None:
            self._bring_up_to_date(self._moving, layout.segments)
        if self._replay is None and self._logits_RV is not None:
            self._replay = self._recorder.record(self._forward)
        (self._replay or self._forward)()
        assert self._logits_RV is not None
        return self._logits_RV[self._wanted[1]]

    def _bring_up_to_date(self, moving: MovingSegments, segments: tuple[tuple[int, int, int], ...]) -> None:
        """Owners of rows, and operands; nothing where neither has changed since the last pass, as token by token."""
        versions = [flat._version for flat in self._flats]
        if self._replay is not None and versions == self._versions and segments == self._written:
            return
        moving.write(segments)
        moving.refresh()
        self._versions, self._written = versions, segments

    def _forward(self) -> None:
        R, S = self._shape.rows, self._shape.slots
        ids_R, places_R, slots_R, rows_S, places_S = self._buffer.split([R, R, R, S, S])
        own_pass = Decode(self._passes.cache, rows_S, slots_R, Visible(places_S, self._shape.places))
        with self._passes.attached.active(self._owners):
            self._logits_RV = packed_logits(self._passes.model, ids_R, places_R, own_pass, self._every_R)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _flats(model: PreTrainedModel, adapters: Sequence[int]) -> list[torch.Tensor]:
    """A tensor of each memory that parameters of these adapters lie in; all in one share a version (adapters/flat.py)."""
    layers = [layer for layer in adapted_layers(model).values() if isinstance(layer, AdaptedLinear)]
    found = {
        tensor.untyped_storage().data_ptr(): tensor
        for layer in layers
        for number in adapters
        if number in layer.adapters
        for tensor in layer.adapters[number].named_parameters().values()
    }
    return [*found.values()]
