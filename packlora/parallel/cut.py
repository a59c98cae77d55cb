"""Loading a base model that tensor or expert parallelism cuts: each process reads what it holds, none ever holds the model.

The packed, cut model is held against what the whole one gives. For that the model is first sharded by rows over the same
processes (sharded.py), which gather a layer at a time; then it goes, and the slices are read.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from packlora.adapters.expert_part import part_of
from packlora.adapters.sharded import ShardedLinear
from packlora.base.demo_model import base_path
from packlora.base.device import choose_device
from packlora.base.model import Base, look_at, ready_base
from packlora.base.shape import check_row
from packlora.base.weight_files import WeightFiles, keys_of, keys_with_experts
from packlora.config import Run
from packlora.ops.cross_entropy.linear_cross_entropy import VocabularyPart
from packlora.ops.lora_linear.frozen import InMemory
from packlora.parallel.experts import ExchangedExperts, ExpertSlices, exchange_rows, shard_experts
from packlora.parallel.sharded import Shards, empty_model, untie
from packlora.parallel.tensor import shard


class Slices(InMemory):
    """The Storage of a model of which the process holds a slice of every layer."""

    is_whole = takes_experts = False


def load_cut(run: Run, tokenizer: Any, longest: Mapping[str, int], group: dist.ProcessGroup) -> Base:
    """Load the base model for packed training, cut over a group. All its processes call it, with equal arguments.

    Args:
        longest: see load_base.

    Raises:
        InputError: see load_sharded, shard and shard_experts.
    """
    path, device = base_path(run.base_model), choose_device(run.device)
    files, mesh = WeightFiles(path, run.revision), DeviceMesh.from_group(group, device.type)

    def empty() -> PreTrainedModel:
        return empty_model(path, run.revision, getattr(torch, run.dtype), run.trust_remote_code)

    whole = empty()
    check_row(whole, run.max_tokens_per_microbatch, path)
    by_experts = run.parallel.expert > 1
    keys = keys_with_experts(whole, files) if by_experts else keys_of(whole, files)
    Shards(whole, mesh, files, keys)
    looked_at = look_at(run, whole, path, longest)
    del whole
    gc.collect()  # its modules and their hooks refer to one another

    model = empty()
    untie(model, mesh, files, keys)
    notes = shard_experts(model, group) if by_experts else shard(model, group, run.parallel.sequence_parallel)
    fill(model, files, keys, device)
    storage = ExpertSlices() if by_experts else Slices()
    base = ready_base(run, model.to(device), tokenizer, device, path, longest, storage, looked_at)
    if run.parallel.exchanges:  # the proof was of the same tokens on all processes, which take the same decisions there
        exchange_rows(model, group)
        base.storage = ExchangedExperts(model)
        notes.append("each of these processes has microbatches of its own, whose tokens go to the experts and back")
    base.warnings[:0] = notes
    return base


@torch.no_grad()
def fill(model: PreTrainedModel, files: WeightFiles, keys: Mapping[str, str], device: torch.device) -> None:
    """Read what a model that was cut holds of its weights, which are on the meta device.

    Args:
        keys: of the model before it was cut (weight_files.keys_of).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        places.setdefault(id(parameter), []).append(name)
    for names in places.values():
        empty = parameters[names[0]]
        key = next(keys[name] for name in names if name in keys)
        filled = torch.nn.Parameter(torch.empty_like(empty, device=device), requires_grad=False)
        filled.copy_(files.read(key, *_part(model, names[0])))
        for name in names:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._parameters[leaf] = filled
    for name, buffer in model.named_buffers():
        if name in keys:
            buffer.copy_(files.read(keys[name]))


def _part(model: PreTrainedModel, name: str) -> tuple[slice, ...]:
    """Of a parameter that is a slice, which rows, columns or experts it has; nothing of a whole one."""
    parent, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(parent)
    if (experts := part_of(module)) is not None:
        return (slice(experts.first, experts.first + experts.experts),)
    words = getattr(module, "vocabulary", None)
    if isinstance(words, VocabularyPart):
        return (slice(words.start, words.start + words.count),)
    if not isinstance(module, ShardedLinear) or (leaf == "bias" and module.shard.dim):
        return ()
    dim, index = module.shard.dim, module.shard.index
    size = getattr(module, leaf).shape[dim]
    own = slice(index * size, (index + 1) * size)
    return (own,) if dim == 0 else (slice(None), own)
