"""Fingerprint that tells one base model from another: it covers every bit of the weights and the configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from packlora.given import given

NOT_OF_THE_MODEL = {"transformers_version", "_name_or_path"}
"""Keys of a config.json that say who wrote it."""


class Fingerprint(BaseModel):
    """Two hashes, in hex."""

    model_config = ConfigDict(strict=True, frozen=True)

    weights: str
    config: str


def fingerprint(model: PreTrainedModel, path: str, revision: str | None) -> Fingerprint:
    """Fingerprint of a loaded model, before adapters are attached to it. The same on every device; as fast as its weights can
    be read. Where the model is sharded over ranks, all of them call it.

    Args:
        model: in the dtype that it is used in, so what the cast rounds away does not count.
        path, revision: what it was loaded from.
    """
    held = model.state_dict()
    return fingerprint_of(held, dict(zip(held, word_sums([*held.values()]), strict=True)), path, revision)


def fingerprint_of(
    held: Mapping[str, torch.Tensor], sums: Mapping[str, int], path: str, revision: str | None
) -> Fingerprint:
    """Fingerprint of a model whose weights are elsewhere.

    Args:
        held: its state dict, on the meta device.
        sums: the word sum of each tensor.
    """
    weights = hashlib.blake2b(digest_size=16)
    for name, tensor in held.items():
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums[name]}\n".encode())
    loaded = given().model
    config = json.loads(_config_text(path, revision) if loaded is None else loaded.config_text)
    told = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    text = json.dumps(told, sort_keys=True)
    return Fingerprint(weights=weights.hexdigest(), config=hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def _config_text(path: str, revision: str | None) -> str:
    file = cached_file(path, "config.json", revision=revision)
    assert file is not None
    return Path(file).read_text(encoding="utf-8")


def word_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """word_sum of each tensor; of those that are sharded by rows the sum over the ranks of one mesh, by one collective."""
    sharded = [isinstance(tensor, DTensor) for tensor in tensors]
    sums = [_own_part(tensor) if isinstance(tensor, DTensor) else word_sum(tensor) for tensor in tensors]
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            halves = [[own & 0xFFFFFFFF, own >> 32] for own in sums]
            device = tensor.device_mesh.device_type  # also where the tensor is kept on the host
            total = torch.tensor(halves, dtype=torch.int64, device=device)  # sums of 32 bits do not overflow
            dist.all_reduce(total, group=tensor.device_mesh.get_group())
            found = [(low + (high << 32)) % 2**64 for low, high in total.tolist()]
            return [whole if apart else own for whole, own, apart in zip(found, sums, sharded, strict=True)]
    return sums


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Rows of a weight of `rows` rows that this rank of a one-dimensional mesh holds, shared out as by torch.chunk."""
    share = -(-rows // mesh.size())
    start = min(share * mesh.get_local_rank(), rows)
    return slice(start, min(start + share, rows))


def _own_part(tensor: DTensor) -> int:
    """Contribution of this rank's rows to the word sum."""
    local = tensor.to_local()
    first = own_rows(tensor.shape[0], tensor.device_mesh).start
    return word_sum(local, first * (tensor.numel() // max(1, tensor.shape[0])) * tensor.element_size())


def word_sum(tensor: torch.Tensor, before: int = 0) -> int:
    """The tensor's memory as 64-bit words, added modulo 2^64: exact in any order, so a GPU gives what a CPU gives. It takes a
    hundredth of the time of a cryptographic hash on the host; a weight that was changed changes it.

    before: bytes that lie before it, of a part of a tensor: the sums of the parts add up to that of the tensor.
    """
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if before % 8:
        octets = torch.cat([octets.new_zeros(before % 8), octets])
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    rest = int.from_bytes(bytes(octets[whole:].tolist()), "little")
    return (int(octets[:whole].view(torch.int64).sum()) + rest) % 2**64
