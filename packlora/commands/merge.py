"""`packlora merge`: fold a PEFT adapter into its base model's weights.

    LoRA   W + s B A          DoRA   diag(m / ||W + s B A||_row) (W + s B A)          and the trained biases

The sum is made in float32 whatever the base is stored in, and rounded once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.files import (
    base_note,
    load_adapter,
    model_type,
    read_config,
    read_tensors,
    tensor_shapes,
)
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.spec import resolve
from packlora.base.demo_model import base_path
from packlora.base.load import read_model, read_skeleton, read_tokenizer
from packlora.errors import InputError, WriteError, unwritten
from packlora.files import write_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


def merge_adapter(adapter_dir: Path, out: Path, base_model: str | None = None, dtype: str = "auto") -> str | None:
    """Write the merged model and its tokenizer to `out`, as a plain Hugging Face folder.

    Args:
        adapter_dir: a PEFT LoRA or DoRA adapter folder.
        out: the folder to write; must not exist or be empty.
        base_model: where to load the base from; default is the adapter's base_model_name_or_path.
        dtype: of the result; auto keeps the base's.

    Returns:
        What the user should know: the adapter names another base model, one that is not on this machine or of the same
        architecture.

    Raises:
        InputError: the adapter, the base or the output folder cannot be used, the adapter was made for another architecture,
            or the result would not be finite.
        WriteError: the disk is full or broken.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; choose another folder")
    name = adapter_dir.name
    config = read_config(str(adapter_dir), name)
    if base_model is None and config.base_model_name_or_path is None:
        raise InputError(f"{adapter_dir} names no base model; give one with --base-model")
    base = base_path(base_model or str(config.base_model_name_or_path))
    note = base_note(str(adapter_dir), base)
    kinds = [model_type(where) for where in (str(config.base_model_name_or_path), base)]
    if note and all(kinds) and kinds[0] != kinds[1]:
        raise InputError(f"{note}: the architectures differ; merge into a base model of the first kind")
    with _of_the_base():
        skeleton = read_skeleton(base, config.revision)
        tokenizer = read_tokenizer(base, config.revision)
    spec = resolve(config, skeleton, name)
    read_tensors(adapter_dir, tensor_shapes(spec, skeleton), name)
    with _of_the_base():
        model = read_model(base, config.revision, torch.float32)
    _, (adapter,) = attach(model, {name: spec}, seed=0)
    load_adapter(adapter_dir, adapter)
    fold(model, adapter)
    model.to(skeleton.config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype))
    _check_finite(model, adapter, adapter_dir)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    try:
        target = Path(os.path.realpath(out))  # a link stays, and what it leads to is written
        target.parent.mkdir(parents=True, exist_ok=True)
        write_folder(target, write)
    except (OSError, SafetensorError) as error:
        if reason := unwritten(error):
            raise WriteError(f"cannot write {out}: {reason}") from None
        raise InputError(f"cannot write {out}: {error}") from None
    return note


@contextlib.contextmanager
def _of_the_base() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; --base-model names another one") from None


def _check_finite(model: PreTrainedModel, adapter: Adapter, adapter_dir: Path) -> None:
    for path in adapter.weights:
        for name, parameter in model.get_submodule(path).named_parameters():
            if not parameter.isfinite().all():
                raise InputError(f"{adapter_dir}: merged, {path}.{name} is not finite in {parameter.dtype}")


def fold(model: PreTrainedModel, adapter: Adapter) -> None:
    """Fold an attached adapter into the model's weights, in place, and put the plain layers back."""
    for path, weights in adapter.weights.items():
        layer: Any = model.get_submodule(path)
        assert isinstance(layer, AdaptedLinear)
        with torch.no_grad():
            if weights.A is not None and weights.B is not None:
                merged = layer.base.weight.to(weights.A.dtype).addmm(weights.B, weights.A, alpha=weights.spec.scaling)
                if weights.magnitude is not None:
                    merged *= (weights.magnitude / weights.norm()).unsqueeze(1)
                layer.base.weight.copy_(merged)
            if weights.bias is not None:
                layer.base.bias.copy_(weights.bias)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.base)
