"""Loading a base model that tensor or expert parallelism cuts: each process reads what it holds, none ever holds the model.

The packed, cut model is held against what the whole one gives. For that the model is first sharded by rows over the same
processes (sharded.py), which gather a layer at a time; then it goes, and the slices are read. Where replicas share their slices
by rows in turn, all processes that hold the model together do so.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import experts_of, part_of
from packlora.adapters.slices import Slice, slice_of
from packlora.base.demo_model import base_path
from packlora.base.device import choose_device, settle_dtype
from packlora.base.model import Base, look_at, ready_base
from packlora.base.shape import check_row
from packlora.base.weight_files import WeightFiles, keys_of
from packlora.config import Run
from packlora.ops.cross_entropy.parts import VocabularyPart
from packlora.ops.lora_linear.frozen import InMemory
from packlora.ops.lora_linear.storage import Storage
from packlora.parallel.alone import Alone
from packlora.parallel.sharded import Shards, empty_model, fill_by_rows, fill_with, mesh_of, untie
from packlora.parallel.tensor import cut_model


class Slices(InMemory):
    """The Storage of a model of which the process holds a slice of every layer, or some of the experts.

    NCCL's messages of slices are recorded like launches. Of experts it has not been tried.
    """

    is_whole = False

    def __init__(self, can_record: bool = False) -> None:
        self.can_record = can_record


def load_cut(
    run: Run, tokenizer: Any, longest: Mapping[str, int], replica: Alone, vocabulary: bool = True,
    weights: WeightFiles | None = None,
) -> Base:  # fmt: skip
    """Load the base model for packed training, cut over the processes of a replica. All of them call it, and those of the
    replicas with which they share rows, with equal arguments.

    Args:
        longest: see load_base.
        vocabulary: cut embedding and output layer too.
        weights: of the base model; None: its files.

    Raises:
        InputError: see load_sharded, shard and shard_experts.
    """
    settle_dtype(run)
    path, device = base_path(run.base_model), choose_device(run.device)
    assert replica.model is not None and replica.base is not None
    files, mesh = weights or WeightFiles(path, run.revision), mesh_of(replica.base, device)

    def empty() -> PreTrainedModel:
        return empty_model(path, run.revision, getattr(torch, run.dtype), run.trust_remote_code)

    whole = empty()
    check_row(whole, run.max_tokens_per_microbatch, path)
    keys = keys_of(whole, files)
    fill_by_rows(whole, replica.base, device, files, keys, run.parallel.offload_base)
    looked_at = look_at(run, whole, path, longest)
    del whole
    gc.collect()  # its modules and their hooks refer to one another

    model = empty()
    untie(model, mesh, files, keys)
    storage: Storage = Slices(
        can_record=run.parallel.expert == 1 and (run.cuda_graphs is True or not experts_of(model))
    )
    layers = replica.layers or replica.model
    notes = cut_model(run.parallel, model, layers, replica.model, vocabulary)
    if replica.shards is None:
        fill(model, files, keys, device)
        model.to(device)
    else:
        rows = mesh_of(replica.shards, device)
        storage = Shards(model, rows, files, keys, partial(_part, model), run.parallel.offload_base)
    base = ready_base(run, model, tokenizer, device, path, longest, storage, looked_at)
    if run.parallel.exchanges:  # the proof was of the same tokens on all processes, which take the same decisions there
        exchanged, note = import_module("packlora.experts.cut").exchanging(model, replica.model, layers)
        base.storage = exchanged if replica.shards is None else storage
        notes.append(note)
    base.warnings[:0] = notes
    return base


def fill(model: PreTrainedModel, files: WeightFiles, keys: Mapping[str, str], device: torch.device) -> None:
    """Read what a model that was cut holds of its weights, which are on the meta device.

    Args:
        keys: of the model before it was cut (weight_files.keys_of).
    """

    def made(name: str, empty: torch.Tensor, key: str) -> torch.nn.Parameter:
        filled = torch.nn.Parameter(torch.empty_like(empty, device=device), requires_grad=False)
        filled.copy_(files.read(key, *_part(model, name)))
        return filled

    fill_with(model, files, keys, made)


def _part(model: PreTrainedModel, name: str) -> tuple[slice, ...]:
    """Rows, columns or experts of a parameter that is a slice; nothing for a whole one."""
    parent, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(parent)
    words = getattr(module, "vocabulary", None)
    if isinstance(words, VocabularyPart):
        return (slice(words.start, words.start + words.count),)
    own: Slice | None = part_of(module) or slice_of(module)
    return () if own is None else own.place(leaf, getattr(module, leaf).shape)
