"""Tensors of one adapter from all processes of a model, which send one another files in the form of safetensors and JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load, save

from packlora.adapters.weights import AdapterWeights
from packlora.megatron.attach import Placed
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
        for other in _gathered(save(own), group):
            own |= load(other)
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
    out, shard = {}, weights.shard
    for key, parameter in weights.named_parameters().items():
        own = parameter.detach()
        if shard is not None and shard.is_slice(key):
            parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(layer.degree)]
            dist.all_gather(parts, own.contiguous(), group=layer.group)
            own = shard.joined(key, parts)
        out[key] = own.cpu().contiguous()
    return out


def _gathered(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Gather the bytes of each process of a group, in the order of ranks; torch's own way for objects takes pickles."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size_of(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def everywhere(words: set[str]) -> set[str]:
    """Union of the sets of all processes of the expert and pipeline parallel groups."""
    found = set(words)
    for group in _others():
        found = found.union(*map(json.loads, _gathered(json.dumps(sorted(found)).encode(), group)))
    return found
