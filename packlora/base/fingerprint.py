"""What tells one base model from another: every bit of its weights, and what its configuration says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel
from transformers.utils import cached_file

NOT_OF_THE_MODEL = {"transformers_version", "_name_or_path"}
"""Keys of a config.json that say who wrote it."""


class Fingerprint(BaseModel):
    """Two hashes, in hex."""

    model_config = ConfigDict(strict=True, frozen=True)

    weights: str
    config: str


def fingerprint(model: PreTrainedModel, path: str, revision: str | None) -> Fingerprint:
    """Of a loaded model, before anything is put on it. The same on every device; as fast as its weights can be read.

    Args:
        model: in the dtype that it is used in, so what the cast rounds away does not count.
        path, revision: what it was loaded from.
    """
    weights = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {word_sum(tensor)}\n".encode())
    file = cached_file(path, "config.json", revision=revision)
    assert file is not None
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    told = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    text = json.dumps(told, sort_keys=True)
    return Fingerprint(weights=weights.hexdigest(), config=hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def word_sum(tensor: torch.Tensor) -> int:
    """The tensor's memory as 64-bit words, added modulo 2^64: exact in any order, so a GPU gives what a CPU gives. It takes a
    hundredth of the time of a cryptographic hash on the host; a weight that was changed changes it.
    """
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    rest = int.from_bytes(bytes(octets[whole:].tolist()), "little")
    return (int(octets[:whole].view(torch.int64).sum()) + rest) % 2**64
