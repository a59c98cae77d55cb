"""The forward of few tokens without gradients, as a decode pass has them: a product in float32 for each layer, and two
launches for what all adapters add to all layers of a group. The plan has no part in it.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch

from packlora.ops.gpu import why_no_kernels
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.products import summed_mm
from packlora.ops.lora_linear.types import Layer, Segment

MOST = 256
"""Most tokens: with more, base products take longer than launches."""


def are_few(x: torch.Tensor, layers: Sequence[Layer], segments: Sequence[Segment]) -> bool:
    """Whether x [..., K], in 16 bits, is few tokens, of layers that lie in memory as they are and have low-rank adapters,
    without dropout, where kernels run."""
    return (
        0 < x.numel() <= MOST * x.shape[-1] and _runs(x.device)
        and not any(segment.dropout for segment in segments)
        and all(type(layer.frozen) is Dense and any(low.rank for low in layer.adapters.values()) for layer in layers)
    )  # fmt: skip


def _runs(device: torch.device) -> bool:
    return device.type == "cuda" and why_no_kernels(device) is None


def outputs(call: Call, own: Operands, x_TK: torch.Tensor) -> list[torch.Tensor]:
    """y [T, N] of every layer. call: of a plan of kernels."""
    from packlora.ops.lora_linear.kernels import few_rows

    indices = range(len(own.frozen))
    weights = [own.frozen[index].rows(0, call.layout.sizes[index]) for index in indices]
    works = [partial(_product, x_TK, weight) for weight in weights]
    *products, P = side_by_side(x_TK.device, [*works, partial(few_rows.down, call, own, x_TK)])
    found: dict[int, torch.Tensor] = {}

    def kind(index: int) -> tuple[bool, bool]:
        composed = index in call.composed
        return composed, (own.scales[index].bias if composed else own.biases[index]) is not None

    for _, alike in groupby(sorted(indices, key=kind), key=kind):
        members = list(alike)
        for at in range(0, len(members), few_rows.LAYERS):
            some = members[at : at + few_rows.LAYERS]
            found |= zip(some, few_rows.up(call, own, P, some, [products[index] for index in some]), strict=True)
    return [found[index] for index in indices]


_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


def side_by_side(device: torch.device, works: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """Results of works of which none needs another's. While a graph is recorded each has a stream of its own, since none fills
    the device; without a graph launches take longer than works.

    What was made on another stream than the current one is used on the current one alone. So its memory is given away again
    after that: each stream waits for the current one before it begins.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [work() for work in works]
    others = _STREAMS.setdefault(device, [])
    while len(others) < len(works) - 1:
        others.append(torch.cuda.Stream(device))
    here, found = torch.cuda.current_stream(device), list[torch.Tensor]()
    others = others[: len(works) - 1]
    for stream in others:
        stream.wait_stream(here)
    for stream, work in zip([here, *others], works, strict=True):
        with torch.cuda.stream(stream):
            found.append(work())
    for stream in others:
        here.wait_stream(stream)
    return found


def _product(x_TK: torch.Tensor, W_NK: torch.Tensor) -> torch.Tensor:
    """x W' in float32, [T, N]."""
    if x_TK.is_cuda:
        return summed_mm(x_TK, W_NK.t(), torch.float32)
    return x_TK.float() @ W_NK.float().t()
