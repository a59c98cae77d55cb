"""Tensors of one adapter from all processes of a model, by bytes: shapes as JSON, then numbers."""

from __future__ import annotations

import json
import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from packlora.adapters.weights import AdapterWeights
from packlora.megatron.attach import Placed, cut_of
from packlora.megatron.layers import Found, size_of

Tensors = dict[str, torch.Tensor]


def whole_tensors(placed: Placed, adapter: str) -> dict[str, Tensors]:
    """Gather A, B and magnitude of an adapter over all tensor, expert and pipeline parallel processes, on the CPU, by the
    layer's name.

    All processes call it, and all of them get all tensors.
    """
    own: Tensors = {}
    for path, weights in placed.weights[adapter].items():
        for key, whole in _joined(placed.layers[path], weights).items():
            own[f"{path}/{key}"] = whole
    for group in _others():
        for other in exchanged(own, group):
            own |= other
    found: dict[str, Tensors] = {}
    for name, tensor in own.items():
        path, _, key = name.rpartition("/")
        found.setdefault(path, {})[key] = tensor
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _others() -> list[dist.ProcessGroup]:
    """Groups whose processes have other experts, and other layers."""
    groups = (
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    return [group for group in groups if size_of(group) > 1]


def _joined(layer: Found, weights: AdapterWeights) -> Tensors:
    """The tensors of one layer, joined over the processes that have slices."""
    out, shard = {}, cut_of(layer)
    for key, parameter in weights.named_parameters().items():
        own = parameter.detach()
        if shard is not None and shard.is_slice(key):
            parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(layer.degree)]
            dist.all_gather(parts, own.contiguous(), group=layer.group)
            own = shard.joined(key, parts)
        out[key] = own.cpu()
    return out


def exchanged(own: Tensors, group: dist.ProcessGroup) -> list[Tensors]:
    """Exchange tensors in a group: the tensors of each process, in the order of ranks. Float tensors on the CPU of one
    dtype."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in own.values()}
    head = json.dumps([sorted(dtypes), {name: list(tensor.shape) for name, tensor in own.items()}]).encode()
    body = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in own.values()]
    data = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *body])
    return [_read(part) for part in _all_bytes(data, len(head), group)]


def _all_bytes(data: torch.Tensor, head: int, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, int]]:
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
    sizes = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(size_of(group))]
    dist.all_gather(sizes, torch.tensor([len(data), head], device=device), group=group)
    longest = max(int(size[0]) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data.to(device)
    all_of = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(all_of, padded, group=group)
    return [
        (part[: int(size[0])].cpu(), int(size[1])) for part, size in zip(all_of, sizes, strict=True)
    ]  # fmt: skip


def _read(part: tuple[torch.Tensor, int]) -> Tensors:
    data, head = part
    dtypes, shapes = json.loads(bytes(data[:head].tolist()))
    out, at = {}, head
    for name, shape in shapes.items():
        dtype = getattr(torch, dtypes[0])
        size = math.prod(shape) * dtype.itemsize
        out[name] = data[at : at + size].clone().view(dtype).view(shape)
        at += size
    return out


def everywhere(words: set[str]) -> set[str]:
    """Union of the sets of all processes of the expert and pipeline parallel groups."""
    found = set(words)
    for group in _others():
        data = json.dumps(sorted(found)).encode()
        parts = _all_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group)
        found |= {word for part, _ in parts for word in json.loads(bytes(part.tolist()))}
    return found
