"""adapter_config.json of a PEFT adapter folder: read with the types and ranges of the run file, and refused where it means
what is not computed here."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from packlora.config.adapter import AdapterConfig
from packlora.errors import InputError, quoted, shown
from packlora.lora_config import CONFIG as CONFIG
from packlora.lora_config import OF_WEIGHTS, STARTS, LoraConfig, Task

UNSUPPORTED = {
    "lora_bias": False, "layer_replication": None, "ensure_weight_tying": False, "megatron_config": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "alora_invocation_tokens": None, "velora_config": None,
    "monteclora_config": None, "kasa_config": None,
}  # fmt: skip
"""Keys of a LoraConfig, with the value they have when unused, that change what is computed and are not implemented."""
MAY_BE_EMPTY = (
    "modules_to_save", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "trainable_token_indices",
)  # fmt: skip
"""Keys that may be there with nothing in them, which means the same as without them."""
OURS_ALONE = {"init_from", "dora_dropout", "expert_rank"}
"""Keys of a job's adapter in the run file that a LoraConfig does not have."""


class _Stored(AdapterConfig):
    """Content that is read of an adapter_config.json: types and ranges of the run file, and what only PEFT has."""

    target_modules: str | list[str] = Field()
    task_type: Task | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None


def config_notes(raw: dict[str, Any]) -> list[str]:
    """Notes on keys of an adapter_config.json that PEFT's LoraConfig does not have. Unused ones are not named."""
    return [
        f"{shown(key)} = {quoted(value)} has no effect: this version of PEFT has no such key"
        for key, value in raw.items()
        if value and key not in LoraConfig.__dataclass_fields__ and key not in UNSUPPORTED
    ]


def read_config(folder: str, job: str) -> LoraConfig:
    """The LoraConfig of an adapter folder. Keys without effect are named in a warning.

    Raises:
        InputError: no such folder, not a LoRA adapter, a value is of the wrong type or out of range, or it uses a feature that
            packlora does not have.
    """
    file = Path(folder) / CONFIG
    raw = _read_json(file, folder, job)
    if raw.get("peft_type") != "LORA":
        raise InputError(
            f"job {job!r}: {file} describes {quoted(raw.get('peft_type'))}; only LORA adapters can be continued"
        )
    for key, unused in UNSUPPORTED.items():
        value = raw.get(key, unused)
        if value not in (unused, None, False) and not (key in MAY_BE_EMPTY and value == []):
            raise InputError(f"job {job!r}: {file} uses {key}, which packlora does not support")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start != "eva" and (OF_WEIGHTS.fullmatch(start) or not STARTS.fullmatch(start)):
        raise InputError(
            f"job {job!r}: {file} has init_lora_weights {quoted(start)}, which goes with other base weights; convert it "
            "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for note in config_notes(raw):
        warnings.warn(f"job {job!r}: {file}: {note}", stacklevel=2)
    try:
        found = {key: raw[key] for key in _Stored.model_fields.keys() - OURS_ALONE if key in raw}
        found = {key: value for key, value in found.items() if key not in MAY_BE_EMPTY or value not in ([], "", {})}
        if found.get("init_lora_weights") in (None, "eva"):  # of what the tensors began with nothing depends
            found.pop("init_lora_weights", None)
        _Stored.model_validate(found)
        config = LoraConfig(**found)
    except ValidationError as error:
        from packlora.run_file_errors import explained

        raise InputError(f"job {job!r}: {file}: {explained(error, found)[0]}") from None
    except (TypeError, ValueError) as error:  # PEFT's own checks, of keys that exclude each other
        raise InputError(f"job {job!r}: {file}: {error}") from None
    return config


def _read_json(file: Path, folder: str | Path, job: str) -> dict[str, Any]:
    """An object of a file that anybody may have written."""
    try:
        if file.exists() and not file.is_file():
            raise OSError(f"{file} is not a file")  # a pipe would be waited for
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"{CONFIG} holds no object, but {type(raw).__name__}")
    except RecursionError:
        raise InputError(f"job {job!r}: {folder} is not a PEFT adapter folder: {CONFIG} is nested too deeply") from None
    except FileNotFoundError as error:
        inside = named_adapters(Path(folder))
        raise InputError(f"job {job!r}: {folder} is not a PEFT adapter folder: {inside or error}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"job {job!r}: {folder} is not a PEFT adapter folder: {error}") from None
    return raw


def named_adapters(folder: Path) -> str | None:
    """Note on a folder without an adapter in which PEFT has saved some by their names; None where it has not."""
    found = [shlex.quote(str(file.parent)) for file in sorted(folder.glob(f"*/{CONFIG}"))]
    return (
        f"it holds no {CONFIG}, but adapters by their names: {', '.join(found[:9])}; give one of them"
        if found
        else None
    )
