"""Check of the weight files of a folder: the tensors named in their headers are compared with what config.json declares."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from packlora.errors import InputError
from packlora.form import plugin, said_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_held(path: str, skeleton: PreTrainedModel) -> None:
    """Refuse a folder whose files hold something else than its configuration says, or of which only some are there. A hub id is
    not looked at, nor a file that cannot be read, which loading names."""
    keys, gone = _keys(Path(path))
    if gone:
        raise InputError(
            f"base_model {path!r}: the folder lacks {gone}, which its index names; it is not whole: copy or download it again"
        )
    if not keys:
        return
    known = itertools.chain(skeleton.named_parameters(), skeleton.named_buffers())
    leaves = {name.rpartition(".")[2] for name, _ in known}
    if said_of(skeleton.config)[0] or any(key.rpartition(".")[2] not in leaves for key in keys):
        plugin().check_keys(path, keys, skeleton)


def _keys(folder: Path) -> tuple[list[str], str]:
    """Names of all tensors, as transformers looks for them, nothing where they cannot be read; and a file of the index that is
    not there beside others that are."""
    try:
        if not (folder / SINGLE).is_file():
            files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            there = {name: (folder / name).exists() for name in sorted(set(files.values()))}
            return sorted(files), next(
                (name for name, is_there in there.items() if not is_there and any(there.values())), ""
            )
        with safe_open(folder / SINGLE, "pt") as opened:
            return list(opened.keys()), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError):
        return [], ""
