"""Scales and biases of a layer's outputs, row by row, of adapters with DoRA or a bias of their own.

Shapes: N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from packlora.ops.gpu import HAS_TRITON, runs_triton
from packlora.ops.lora_linear.call import Scales
from packlora.ops.lora_linear.types import Layer, LowRank
from packlora.ops.stamp import Stamps, stamps


class LayerScales:
    """Keeps the scales of one layer up to date with the magnitudes, norms and biases of its adapters."""

    def __init__(self, layer: Layer, numbers: tuple[int, ...], dtype: torch.dtype, kernels: bool) -> None:
        N, device = layer.frozen.shape[0], layer.frozen.device
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._ratio: Callable[..., None] | None = None
        """The kernel that divides, where it does."""
        if HAS_TRITON and wide == torch.float32 and (kernels or runs_triton(device)):
            from packlora.ops.lora_linear.kernels import forward

            self._ratio = forward.ratio
        g = torch.ones(len(numbers) + 1, N, dtype=wide, device=device)
        self._base_bias, bias = layer.bias, None
        if layer.bias is not None or any(low.bias is not None for low in layer.adapters.values()):
            bias = torch.zeros(len(numbers) + 1, N, dtype=wide, device=device)
        rows = [[place, which] for place in range(len(numbers)) for which in (0, 1)]
        sum_rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self.scales = Scales(g, torch.ones_like(g), bias, sum_rows, numbers)
        self._launches: dict[Hashable, Any] = {}
        self._low_ranks: dict[int, LowRank] = {n: low for n, low in layer.adapters.items() if not low.plain}
        self._unchanged: dict[int | None, Unchanged] = {number: Unchanged() for number in (None, *layer.adapters)}
        """Stamps of each adapter's operands, by number; None is the base layer's bias, which is in all rows of `bias`."""

    def refresh(self, version_counted: bool) -> None:
        """Make anew what has changed, or all where writes are not counted."""
        bias, overwritten = self.scales.bias, False
        if bias is not None and self._base_bias is not None:
            overwritten = not version_counted or not self._unchanged[None]([self._base_bias])
            if overwritten:
                with self._unchanged[None].unless_it_fails():
                    bias.copy_(self._base_bias.detach())
        for number, low in self._low_ranks.items():
            norm = low.norm() if callable(low.norm) else low.norm
            if version_counted:
                parts = [t for t in (low.magnitude, norm, low.bias) if t is not None]
                if self._unchanged[number](parts) and not overwritten:
                    continue
            with self._unchanged[number].unless_it_fails():
                if low.magnitude is not None:
                    assert norm is not None
                    self.divide(number, low.magnitude, norm)
                if low.bias is not None and (row := self.scales.bias_rows[number]) is not None:
                    row.copy_(low.bias.detach())

    def divide(self, number: int, magnitude_N: torch.Tensor, norm_N: torch.Tensor) -> None:
        """g = magnitude / norm and w = norm of one adapter."""
        g_N, w_N = self.scales.g_rows[number], self.scales.w_rows[number]
        if self._ratio is not None:
            self._ratio(magnitude_N.contiguous(), norm_N.contiguous(), g_N, w_N, self._launches)
            return
        torch.div(magnitude_N.detach(), norm_N.detach(), out=g_N)
        w_N.copy_(norm_N.detach())


class Unchanged:
    """Remembers tensors; says of others whether they are those: the same objects with the same stamps."""

    __slots__ = ("_stamps", "_tensors")

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []  # themselves: a new one may lie where an older one lay
        self._stamps: Stamps = None

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Context of an update after a change: if it fails, the tensors count as changed next time, too."""
        try:
            yield
        except BaseException:
            self._stamps, self._tensors = None, []
            raise

    def __call__(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the tensors are the same, with the same stamps, as in the last call."""
        now, before, seen = stamps(tensors), self._stamps, self._tensors
        self._stamps, self._tensors = now, tensors
        return now is not None and now == before and all(a is b for a, b in zip(tensors, seen, strict=True))
