"""Check of the weight files of a folder: the tensors named in their headers are compared with what config.json declares."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from packlora.base.stored import BITSANDBYTES, read_as_floats, stored_as
from packlora.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = "floats"
MARKS = {
    r"\.quant_state\.bitsandbytes__nf4$": ("nf4",),
    r"\.quant_state\.bitsandbytes__fp4$": ("fp4",),
    r"\.SCB$": ("int8",),
    r"\.qweight$": ("gptq", "awq"),
    r"\.weight_scale_inv$": ("fp8",),
    r"_blocks$": ("mxfp4",),
    r"\.(weight_packed|weight_scale)$": ("compressed-tensors",),
}
"""Ends of keys that only the files of these methods have."""
UNMARKED = ("torchao",)
"""Methods whose names of tensors depend on their version."""


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
    stored = stored_as(skeleton.config, path)
    says = "mxfp4" if read_as_floats(skeleton.config) else FLOATS if stored is None else stored.as_asked.method
    held = {methods: key for mark, methods in MARKS.items() if (key := _first(mark, keys)) is not None}
    if not held and says not in (FLOATS, *UNMARKED):
        raise _refused(path, says, FLOATS)
    for methods, key in held.items():
        if says not in methods and not (says == "fp8" and methods == ("compressed-tensors",)):
            raise _refused(path, says, f"codes of {' or '.join(methods)} ({key})")
    if says in BITSANDBYTES and stored is not None:
        for layer in stored.layers(skeleton):
            own = {key.removeprefix(f"{layer}.") for key in keys if key.startswith(f"{layer}.")}
            if "weight" in own and own <= {"weight", "bias"}:
                raise _refused(path, says, f"floats in {layer}")


def _refused(path: str, says: str, holds: str) -> InputError:
    return InputError(
        f"base_model {path!r}: config.json says that the weights are {says}, and the files hold {holds}; mend its "
        "quantization_config, or take a whole copy of the model"
    )


def _first(mark: str, keys: Collection[str]) -> str | None:
    return next((key for key in keys if re.search(mark, key)), None)


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
