"""One adapter over the processes of a tensor-parallel group: its gradient made whole, its tensors joined and cut.

See adapters/sharded.py for what of an adapter is a slice, and of which of its tensors every process computes a part of the
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import ROW, FlatLayout, Place, total_norm
from packlora.parallel.collectives import add_up, all_of


def partial_sums(adapter: Adapter) -> dict[str, Place]:
    """Places by parameter in the flat gradient that hold parts of a sum over the group; for a slice that several processes
    hold, over these processes."""
    return {name: place for name, place in adapter.layout.places.items() if _is_part(adapter, name)}


def _split_name(name: str) -> tuple[str, str]:
    path, _, leaf = name.rpartition("/")
    return path, leaf


def slice_of_parameter(adapter: Adapter, name: str) -> Any:
    """Slice of the layer that a parameter of an adapter is of; None where the layer is whole."""
    return adapter.weights[_split_name(name)[0]].shard


def _is_part(adapter: Adapter, name: str) -> bool:
    shard = slice_of_parameter(adapter, name)
    return shard is not None and shard.is_part(_split_name(name)[1])


def _is_slice(adapter: Adapter, name: str) -> bool:
    shard = slice_of_parameter(adapter, name)
    return shard is not None and shard.is_slice(_split_name(name)[1])


class WholeGradient:
    """Makes the gradient of a job's adapter whole, once a step: see `norm`.

    Args:
        adapter: on a model that `shard` has cut over `group`.
        is_repeated: other processes of the group, which share out experts with this one, have the same slices of all else, and
            speak for them.
    """

    def __init__(self, adapter: Adapter, group: dist.ProcessGroup, is_repeated: bool = False) -> None:
        self.adapter, self.group, self.is_repeated = adapter, group, is_repeated
        shapes = {name: place.shape for name, place in adapter.layout.places.items()}
        self._parts = list(partial_sums(adapter))
        whole = adapter.whole_shapes
        self._summed = FlatLayout({name: whole[name] for name in self._parts})
        """Sums over the group; slices that several hold have their place in the whole."""
        slices = [name for name in shapes if _is_slice(adapter, name) and name not in self._parts]
        self._slices = [name for name in slices if not is_repeated or slice_of_parameter(adapter, name).of_experts]
        self._here = FlatLayout({name: shapes[name] for name in self._slices})
        self._others = [name for name in shapes if name not in self._parts and name not in slices]
        self._same = FlatLayout({name: shapes[name] for name in self._others})

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add up in place what of a gradient, laid out as adapter.flat, is parts, and give the norm of the adapter's whole
        gradient, the same on all processes. One message: the parts, and what the norm needs of the slices."""
        grads = self.adapter.layout.views(gradient)
        own = gradient.new_zeros(ROW + self._summed.size)
        square, summed = own[:1], own[ROW:]
        square += _square(self._copied(grads, self._slices, self._here))
        sums = self._summed.views(summed)
        if self._parts and not self.is_repeated:
            torch._foreach_copy_([self._own(name, sums[name]) for name in self._parts], [grads[n] for n in self._parts])
        add_up(own, self.group)
        if self._parts:
            torch._foreach_copy_([grads[n] for n in self._parts], [self._own(name, sums[name]) for name in self._parts])
        square += _square(summed) + _square(self._copied(grads, self._others, self._same))
        return square[0].sqrt()

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        path, leaf = _split_name(name)
        return self.adapter.weights[path].own(leaf, whole)

    def _copied(self, grads: Mapping[str, torch.Tensor], names: Sequence[str], layout: FlatLayout) -> torch.Tensor:
        flat = self.adapter.flat.new_zeros(layout.size)
        if names:
            torch._foreach_copy_(list(layout.views(flat).values()), [grads[name] for name in names])
        return flat


def _square(flat: torch.Tensor) -> torch.Tensor:
    return total_norm(flat).square() if flat.numel() else flat.new_zeros(())


def joined(adapter: Adapter, group: dist.ProcessGroup, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole tensors, on the CPU by the names of the adapter's parameters, from one that lies like adapter.flat: itself, a copy,
    its optimizer's moments. All processes of the group call it; one message."""
    views = [adapter.layout.views(own.cpu()) for own in all_of(flat, group)]
    whole = {}
    for name in adapter.layout.places:
        path, leaf = _split_name(name)
        shard, slices = adapter.weights[path].shard, [own[name] for own in views]
        whole[name] = slices[0] if shard is None else shard.joined(leaf, slices)
    return whole
