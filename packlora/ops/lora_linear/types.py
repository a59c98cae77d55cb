"""Arguments of a call of the operator, with their checks: layers with their adapters, and the segments that say which adapter
owns which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.lora_linear.plan import Situation

COUNTER = "counted_with"
"""Attribute of a parameter: a tensor whose version counts its writes too."""


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
        """Operands that get gradients, by name."""
        named = {"A": self.A, "B": self.B, "magnitude": self.magnitude, "bias": self.bias}
        return {name: operand for name, operand in named.items() if operand is not None}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layer:
    """One frozen layer of a group: weight [N, K] (frozen.Dense of a tensor), bias [N] or None, adapters by number.

    keep_output: the caller promises that this layer's output is not written to (kernels that work in place move no version
    counter), so a DoRA backward may read it there and keeps nothing of its own. Where there is a bias z is kept all the same.
    """

    frozen: FrozenWeight
    bias: torch.Tensor | None
    adapters: Mapping[int, LowRank]
    keep_output: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one adapter. Tokens in no segment see the base model alone.

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

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of the segment in a tensor [T, ...]; the tensor itself where the segment has all rows, because views cost the
        host time."""
        return tensor if (self.start, self.stop) == (0, tensor.shape[0]) else tensor[self.start : self.stop]


def owns_all(segments: Sequence[Segment], num_tokens: int) -> bool:
    """Whether there is one segment, which has all tokens."""
    return len(segments) == 1 and (segments[0].start, segments[0].stop) == (0, num_tokens)


def cover(segments: Sequence[Segment], num_tokens: int) -> list[tuple[int, int, int, float]]:
    """(adapter, start, stop, dropout) over all tokens in order; adapter -1 where no segment is."""
    out: list[tuple[int, int, int, float]] = []
    end = 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        if segment.start > end:
            out.append((-1, end, segment.start, 0.0))
        out.append((segment.adapter, segment.start, segment.stop, segment.dropout))
        end = segment.stop
    if end < num_tokens:
        out.append((-1, end, num_tokens, 0.0))
    return out


def gaps(segments: Sequence[Segment], num_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of the tokens that no segment owns."""
    return [(start, stop) for adapter, start, stop, _ in cover(segments, num_tokens) if adapter < 0]


def situation(layers: Sequence[Layer], segments: Sequence[Segment], num_tokens: int, known: bool = True) -> Situation:
    """Properties of a call of lora_group that decide which plans compute it. known: see Boundaries."""
    low_rank = dropped = composed = base_dropped = False
    two = not known or any(layer.frozen.change is None for layer in layers)
    for segment in segments:
        for layer in layers:
            low = layer.adapters.get(segment.adapter)
            if low is None:
                continue
            low_rank |= low.rank > 0
            dropped |= low.rank > 0 and segment.dropout > 0
            composed |= not low.plain
            base_dropped |= two and segment.dropout > 0 and segment.base_dropped and low.magnitude is not None
    double = any(layer.frozen.dtype == torch.float64 for layer in layers)
    dense = all(layer.frozen.has_tensor for layer in layers)
    single = owns_all(segments, num_tokens) and known
    return Situation(single, low_rank, dropped, composed, base_dropped, double, dense, not known)


def composed_of(
    layers: Sequence[Layer], segments: Sequence[Segment]
) -> tuple[dict[int, tuple[tuple[Segment, bool, bool], ...]], tuple[Segment, ...]]:
    """Call.composed and Call.base_dropped of these layers and segments."""
    found = {}
    for index, layer in enumerate(layers):
        own = tuple(
            (segment, low.magnitude is not None, low.bias is not None)
            for segment in segments
            if (low := layer.adapters.get(segment.adapter)) is not None and not low.plain
        )
        if own:
            found[index] = own
    return found, tuple(dict.fromkeys(one[0] for own in found.values() for one in own if drops_base(*one)))


def drops_base(segment: Segment, has_magnitude: bool, has_bias: bool) -> bool:
    """Whether a segment scales the base product of its dropped x."""
    return has_magnitude and segment.dropout > 0 and segment.base_dropped


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [T, K]."""
    return x if x.ndim == 2 or not x.ndim else x.reshape(-1, x.shape[-1])


def check_tokens(x: torch.Tensor, segments: Sequence[Segment], keys_T2: torch.Tensor | None) -> None:
    """Raise ValueError, naming the operand, where x [..., K], the segments or the keys do not fit."""
    if not x.ndim or not x.is_floating_point() or x.stride(-1) != 1:
        raise ValueError(
            f"x must be a float tensor [..., K] with contiguous rows; got {tuple(x.shape)} {x.dtype}, strides {x.stride()}"
        )
    T, end = x.numel() // max(1, x.shape[-1]), 0
    kind = (T, 2), torch.int32, True
    for segment in segments if len(segments) < 2 else sorted(segments, key=lambda segment: segment.start):
        if not end <= segment.start < segment.stop <= T or segment.adapter < 0:
            raise ValueError(
                f"segment {segment.start}:{segment.stop} of adapter {segment.adapter} overlaps another, is empty or leaves "
                f"the {T} tokens"
            )
        end = segment.stop
        if segment.dropout and (keys_T2 is None or (keys_T2.shape, keys_T2.dtype, keys_T2.is_contiguous()) != kind):
            found = None if keys_T2 is None else f"{tuple(keys_T2.shape)} {keys_T2.dtype}, strides {keys_T2.stride()}"
            raise ValueError(f"dropout needs keys [{T}, 2] int32, got {found}; they must be contiguous")


def check_layers(x: torch.Tensor, layers: Sequence[Layer]) -> None:
    """Raise ValueError, naming the operand, for shapes, dtypes and devices that do not fit."""
    K = x.shape[-1]
    for index, layer in enumerate(layers):
        weight = layer.frozen
        if len(weight.shape) != 2 or weight.shape[1] != K or weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"weight of layer {index} must be [N, {K}] {x.dtype} on {x.device}; got {tuple(weight.shape)} "
                f"{weight.dtype} on {weight.device}"
            )
        N = weight.shape[0]
        if layer.bias is not None and tuple(layer.bias.shape) != (N,):
            raise ValueError(f"bias of layer {index} must be [{N}]; got {tuple(layer.bias.shape)}")
        for number, low in layer.adapters.items():
            if (low.A is None) != (low.B is None):
                raise ValueError(f"A and B of adapter {number} on layer {index} come together or not at all")
            if low.magnitude is not None and (low.A is None or low.norm is None):
                raise ValueError(
                    f"the magnitude of adapter {number} on layer {index} needs A, B and the norm of W + s B A"
                )
            shapes = {"A": (low.rank, K), "B": (N, low.rank), "magnitude": (N,), "bias": (N,), "norm": (N,)}
            operands = low.operands()
            if isinstance(low.norm, torch.Tensor):
                operands["norm"] = low.norm
            for name, operand in operands.items():
                if tuple(operand.shape) != shapes[name] or operand.device != x.device or not operand.numel():
                    rank = ", rank 1 or more," if name in "AB" else ""
                    raise ValueError(
                        f"{name} of adapter {number} on layer {index} must be {shapes[name]}{rank} on {x.device}; got "
                        f"{tuple(operand.shape)} on {operand.device}"
                    )
