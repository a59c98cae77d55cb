"""One adapter over the processes of a tensor-parallel group: its gradient made whole, its tensors joined and cut.

See adapters/sharded.py for what of an adapter is a slice, and of which of its tensors every process computes a part of the
gradient.
"""

from __future__ import annotations

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
        layout, whole = adapter.layout, adapter.whole_shapes
        self._parts = list(partial_sums(adapter))
        self._sums = FlatLayout({name: whole[name] for name in self._parts})
        """Sums over the group; slices that several hold have their place in the whole."""
        self._held_by_several = {name for name in self._parts if _is_slice(adapter, name)}
        slices = [name for name in layout.places if _is_slice(adapter, name) and name not in self._parts]
        self._slices = [name for name in slices if not is_repeated or slice_of_parameter(adapter, name).of_experts]
        self._others = [name for name in layout.places if name not in self._parts and name not in slices]

    def norm(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add up in place what of a gradient, laid out as adapter.flat, is parts, and give the norm of the adapter's whole
        gradient, the same on all processes. One message: the parts, and what the norm needs of the slices.

        One call cuts all tensors out, and one joins them: views of each by itself take the host milliseconds.
        """
        grads = self.adapter.layout.chunks(gradient)
        head, sent = gradient.new_zeros(ROW), [self._sent(name, grads[name]) for name in self._parts]
        head[0] = _square(gradient, [grads[name] for name in self._slices])
        message = torch.cat([head, *_filled_up(gradient, sent)])
        add_up(message, self.group)
        summed, square = message[ROW:], _square(gradient, [grads[name] for name in self._others])
        if self._parts:
            sums = self._sums.chunks(summed)
            pairs = [self._pair(name, grads[name], sums[name]) for name in self._parts]
            torch._foreach_copy_([part for part, _ in pairs], [whole for _, whole in pairs])
            square = total_norm(summed).square() + square
        return (message[0] + square).sqrt()

    def _sent(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The elements of the message that a part is added up in, where this process has it."""
        if not self.is_repeated and name not in self._held_by_several:
            return part
        place = self._sums.places[name]
        whole = part.new_zeros(place.stop - place.start)
        if not self.is_repeated:
            part, own = self._pair(name, part, whole)
            own.copy_(part)
        return whole

    def _pair(self, name: str, part: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A part and its place in the whole, from the elements of both."""
        if name not in self._held_by_several:
            return part, whole
        path, leaf = _split_name(name)
        whole = self._sums.places[name].view(whole)
        return self.adapter.layout.places[name].view(part), self.adapter.weights[path].own(leaf, whole)


def _filled_up(like: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of one dimension, the last of them zeros up to a whole number of rows."""
    return [*tensors, like.new_zeros(-sum(own.numel() for own in tensors) % ROW)]


def _square(like: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Square of the 2-norm of tensors of one dimension, []."""
    return total_norm(torch.cat(_filled_up(like, tensors))).square() if tensors else like.new_zeros(())


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
