"""Adapter folders of PEFT, read and held against the adapter that they are for; files.py says what they hold."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from packlora.adapters.attach import Adapter
from packlora.adapters.files import MAGNITUDE, STARTED, TRAINED_ON, keyed, tensor_key, under_other_name
from packlora.adapters.kinds import PARAMETERS
from packlora.adapters.slices import slice_of
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import shapes_at
from packlora.errors import InputError, quoted
from packlora.lora_config import CONFIG, STARTS, WEIGHTS, is_doubled

BASE = ".base_layer."
"""Part of keys of base weights and biases after the path, which PEFT writes beside an adapted embedding or output layer."""
TWICE = re.compile(r"\.(modules_to_save|original_module)\.")
"""Parts of keys of a copied module's weights, and of its base's, that are there beside the copy."""
WHOLE = re.compile(r"(embed\w*|wte|word_embeddings|lm_head|embed_out)(\.token_adapter\.base_layer)?\.weight$")
"""Keys of whole weights that PEFT saves where a vocabulary was grown."""


def base_note(folder: str, used: str) -> str | None:
    """Note where an adapter folder, which read_config takes, names another base model than `used`."""
    named = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named or named == used or _same_folder(named, used):
        return None
    return f"{folder} was made for the base model {_with_type(named)}, not for {_with_type(used)}"


def _same_folder(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def _with_type(base: str) -> str:
    kind = model_type(base)
    return quoted(base, 300) + (f" ({kind})" if kind else "")


def model_type(base: str) -> str | None:
    """The architecture of a base model that is on this machine, without running anything of it."""
    try:
        config: Any = PreTrainedConfig.get_config_dict(base, local_files_only=True)[0]
    except Exception:  # transformers raises many types; whoever loads the model says what is wrong
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else None


def load_adapter(folder: str | Path, adapter: Adapter) -> None:
    """Copy a PEFT adapter's tensors, or this process's slices of them, into an attached adapter of the same layers and shapes.

    Raises:
        InputError: the file is missing or broken, or its tensors are not exactly those of the adapter.
    """
    parameters = adapter.named_parameters()
    with torch.no_grad():
        for name, own in adapter.own_of(read_adapter(folder, adapter)).items():
            parameters[name].copy_(own)


def read_adapter(folder: str | Path, adapter: Adapter) -> dict[str, torch.Tensor]:
    """Whole tensors of a PEFT adapter of the same layers and shapes as an attached one, by the names of its parameters, those
    elsewhere included. Raises as load_adapter."""
    shapes = {key: torch.Size(shape) for key, shape in keyed(adapter, adapter.whole_shapes).items()}
    tensors = read_tensors(folder, shapes, adapter.name, adapter.spec.read_as)
    return {name: tensors[key] for key, name in keyed(adapter, {name: name for name in adapter.whole_shapes}).items()}


def read_tensors(
    folder: str | Path, shapes: Mapping[str, torch.Size], job: str, also: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT adapter folder by PEFT's keys, float32 or float64.

    Args:
        also: other paths of modules that the file may name, with those that are meant: AdapterSpec.read_as.

    Raises:
        InputError: the file is missing or broken, its tensors are not exactly those named in `shapes`, or they are not finite
            floating-point numbers.
    """
    file = Path(folder) / WEIGHTS
    tensors = stored_tensors(file, job)
    suffix = MAGNITUDE + ".weight"
    tensors = {key.removesuffix(".weight") if key.endswith(suffix) else key: value for key, value in tensors.items()}
    tensors = _by_one_name(tensors, also or {}, f"job {job!r}: {file}")
    _drop_base(tensors, shapes, f"job {job!r}: {file}")
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if not missing and (grown := next((key for key in extra if WHOLE.search(key) and tensors[key].ndim), None)):
        found, rows = tensors[grown], len(tensors[grown])
        raise InputError(
            f"job {job!r}: {file} has {grown} {list(found.shape)}, whole embeddings or an output layer beside the adapter, as "
            f"where a vocabulary was grown. Load it in PEFT, on this base after resize_token_embeddings({rows}); there "
            "save_pretrained(A, save_embedding_layers=False) writes the adapter, and unload().save_pretrained(B) its base"
        )
    if missing or extra:
        problem = f"lacks {missing[0]} (and {len(missing) - 1} more)" if missing else ""
        problem += " and " if missing and extra else ""
        problem += f"has {extra[0]!r} (and {len(extra) - 1} more), which is not of this adapter" if extra else ""
        raise InputError(f"job {job!r}: {file} {problem}")
    for key, shape in shapes.items():
        found = tensors[key]
        problem = ""
        if found.shape != shape:
            problem = f"is {tuple(found.shape)}, the model needs {tuple(shape)}"
        elif not found.is_floating_point():
            problem = f"holds {str(found.dtype).removeprefix('torch.')}, not floating-point numbers"
        else:
            wide = tensors[key] = found if found.dtype == torch.float64 else found.float()
            if not wide.float().isfinite().all():
                problem = "holds numbers that are not finite in float32"
        if problem:
            raise InputError(f"job {job!r}: {file}: {key!r} {problem}")
    return tensors


def _by_one_name(tensors: dict[str, torch.Tensor], also: Mapping[str, str], where: str) -> dict[str, torch.Tensor]:
    """Tensors under the paths that are meant. Raises InputError where a file has two tensors of one."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        meant = under_other_name(key, also) or key
        there = out.setdefault(meant, tensor)
        if there is not tensor and not (there.shape == tensor.shape and torch.equal(there, tensor)):
            raise InputError(
                f"{where}: {key!r} and {meant!r} are names of one tensor in two classes of the base model, and hold other "
                "numbers; leave out those of one class"
            )
    return out


def _drop_base(tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size], where: str) -> None:
    """Leave out copies of the base's weights and biases of adapted modules, where they are of the model's shapes, and of copies
    of modules those that PEFT writes beside them where a vocabulary was grown."""
    for key in [key for key in tensors if TWICE.search(key) and TWICE.sub(".", key) in shapes.keys() & tensors.keys()]:
        if ".original_module." in key or torch.equal(tensors[key], tensors[TWICE.sub(".", key)]):
            del tensors[key]
    copies = {key for key in tensors if BASE in key and key not in shapes}
    for key in sorted(copies):
        path, _, leaf = key.rpartition(BASE)
        if f"{path}{BASE}weight" not in copies:  # PEFT copies a bias with its weight; one that is alone was trained
            continue
        wanted: tuple[int, int] | None = None
        if (A := shapes.get(f"{path}.lora_A.weight")) is not None:
            wanted = shapes[f"{path}.lora_B.weight"][0], A[1]
        elif (A := shapes.get(f"{path}.lora_embedding_A")) is not None:
            wanted = A[1], shapes[f"{path}.lora_embedding_B"][0]
        if wanted is not None and {"weight": wanted, "bias": wanted[:1]}.get(leaf) == tensors[key].shape:
            del tensors[key]
            warnings.warn(f"{where}: {key!r} is a copy of a base {leaf}; the base model's own is used", stacklevel=4)


def read_start(folder: str | Path) -> str | None:
    """Start that save_adapter wrote, under which half of the ranks is trained; None where there is none."""
    found = _header(folder, STARTED)
    return found if found is not None and STARTS.fullmatch(found) and is_doubled(found) else None


def read_trained_on(folder: str | Path) -> dict[str, Any] | None:
    """Quantisation of the base model that save_adapter wrote, unchecked; None where there is nothing to be read."""
    try:
        found = json.loads(_header(folder, TRAINED_ON) or "null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def stored_keys(folder: str | Path) -> list[str]:
    """The keys of the tensors of an adapter folder; none where there is nothing to be read, as read_tensors tells."""
    file = Path(folder) / WEIGHTS
    try:
        with safe_open(file if file.is_file() else "", "pt") as stored:
            return list(stored.keys())
    except (OSError, SafetensorError):
        return []


def _header(folder: str | Path, key: str) -> str | None:
    """Value under a key in the header of an adapter's tensors, unchecked; None where there is nothing to be read."""
    file = Path(folder) / WEIGHTS
    try:
        if not file.is_file():  # a pipe would be waited for
            return None
        with safe_open(file, "pt") as stored:
            found: str | None = (stored.metadata() or {}).get(key)
            return found
    except (OSError, SafetensorError):
        return None


def stored_tensors(file: Path, job: str) -> dict[str, torch.Tensor]:
    try:
        if file.exists() and not file.is_file():
            raise OSError("it is not a file")  # a pipe would be waited for
        with safe_open(file, "pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        pickled = file.with_suffix(".bin")
        remedy = (
            f"; {pickled.name} is a pickle, which is not opened: load it in PEFT, and save_pretrained writes this file"
        )
        raise InputError(f"job {job!r}: cannot read {file}: {error}{remedy * pickled.is_file()}") from None


def tensor_shapes(spec: AdapterSpec, model: PreTrainedModel) -> dict[str, torch.Size]:
    """Shapes of the whole tensors of an adapter of the model, which may be without weights, or of slices."""
    shapes: dict[str, torch.Size] = {}
    for path, module in spec.modules.items():
        shard = None if module.kind in PARAMETERS else slice_of(model.get_submodule(path))
        for name, shape in shapes_at(model, path, module).items():
            shapes[tensor_key(path, name, module)] = torch.Size(
                shape if shard is None else shard.whole_shape(name, shape)
            )
    return shapes
