"""DoRA under dropout as what dropout changes, where the frozen weights multiply that by themselves (`ChangeProduct`).

PEFT's DoRA scales the base product of the dropped x (reference.py). With v = c drop(x) - x, c the survivors' factor, that is

    y = g (x W' + S B') + bias + (g - 1) v W'        z = x W' + S B' + v W'        dx = e W + drop(dS A) + c drop(u) - u,
                                                                                    u = (g - 1) d W

All but the products with v and u is DoRA whose dropout is on the low-rank branch alone: a call that any plan computes. Its
paths are put into `Changed`, which adds the rest. v is sqrt(p / (1 - p)) the size of x, 0.23 at a rate of 0.05, so a product
with v may round more than one with drop(x): its error counts as much less.

Shapes: T tokens, t of a segment, K inputs, N outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from packlora.ops.lora_linear.call import Call, Dropped, Gradients, Operands, Path, Wanted
from packlora.ops.lora_linear.temporary import made_of
from packlora.ops.lora_linear.types import Segment, rows_of

Optional = torch.Tensor | None


class Mask(NamedTuple):
    """Dropout of the tokens of one segment: keys int32 [t, 2], salt and rate (ops/dropout/keys.py)."""

    keys_t2: torch.Tensor
    salt: int
    rate: float


class ChangeProduct(Protocol):
    """Product of a weight with what dropout changes, for the tokens of one segment. It writes into its last arguments."""

    def of_input(self, x_tK: torch.Tensor, mask: Mask) -> Any:
        """v [t, K] as `add` takes it, which siblings share."""

    def add(self, change: Any, g_N: torch.Tensor, y_tN: torch.Tensor, z_tN: Optional) -> None:
        """y += (g - 1) v W' and z += v W'; g in float32."""

    def add_t(self, d_tN: torch.Tensor, g_N: torch.Tensor, mask: Mask, dx_tK: torch.Tensor) -> None:
        """dx += c drop(u) - u, for u = (g - 1) d W."""


def without(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The segments without dropout on the base product."""
    return tuple(replace(segment, base_dropped=False) for segment in segments)


def by_change(call: Call, apart: tuple[Segment, ...]) -> Call:
    """The call, settled without dropout on the base product, with what this changes of the segments that have it."""
    changed = frozenset(without(apart))
    call.down, call.inputs = Changed(call.down, changed), Changed(call.inputs, changed)
    call.up = tuple(Changed(path, changed) for path in call.up)
    call.from_y = (False,) * len(call.from_y)
    return call


class _Running(threading.local):
    """Dropout keys of the call whose outputs this thread computes: S, which `down` computes with them, comes first."""

    keys_T2: Optional = None


_RUNNING = _Running()


class Changed:
    """Path (call.Path) with what dropout changes of some segments. Steps that are not here are not asked of it."""

    def __init__(self, path: Path, segments: frozenset[Segment]) -> None:
        self.path, self.segments = path, segments
        self.magnitude, self.grads = path.magnitude, path.grads

    def down(self, call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, dropped: Dropped) -> torch.Tensor:
        _RUNNING.keys_T2 = keys_T2
        return self.path.down(call, own, x_TK, keys_T2, dropped)

    def up(
        self, call: Call, own: Operands, x_TK: torch.Tensor, dropped: Dropped, S: Optional, index: int, keep_z: bool
    ) -> tuple[torch.Tensor, Optional]:
        y, z = self.path.up(call, own, x_TK, dropped, S, index, keep_z)
        made: dict[Segment, Any] = made_of(x_TK, dict)
        for segment, product, g_N in self._products(call, own, index):
            if segment not in made:
                made[segment] = product.of_input(segment.of(x_TK), _mask(call, segment, _RUNNING.keys_T2))
            z_tN = None if z is None else segment.of(rows_of(z))
            product.add(made[segment], g_N, segment.of(rows_of(y)), z_tN)
        return y, z

    def inputs(
        self, call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: Optional, dS: Optional, e: Gradients, d: Gradients,
        wanted: Wanted,
    ) -> tuple[Optional, Optional]:  # fmt: skip
        dx, dA = self.path.inputs(call, own, x_TK, keys_T2, dS, e, d, wanted)
        for index, d_TN in enumerate(d) if dx is not None else ():
            for segment, product, g_N in self._products(call, own, index) if d_TN is not None else ():
                assert d_TN is not None and dx is not None
                product.add_t(segment.of(rows_of(d_TN)), g_N, _mask(call, segment, keys_T2), segment.of(rows_of(dx)))
        return dx, dA

    def _products(self, call: Call, own: Operands, index: int) -> Iterator[tuple[Segment, ChangeProduct, torch.Tensor]]:
        """Segments whose base product on a layer dropout changes, with the layer's product and their scales."""
        for segment, has_magnitude, _ in call.composed.get(index, ()):
            if has_magnitude and segment in self.segments:
                yield segment, own.frozen[index].change, own.scales[index].g_rows[segment.adapter]


def _mask(call: Call, segment: Segment, keys_T2: Optional) -> Mask:
    assert keys_T2 is not None
    return Mask(segment.of(keys_T2), call.salt, segment.dropout)
