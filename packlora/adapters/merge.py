"""`packlora merge`: fold a PEFT adapter into its base model's weights.

    LoRA   W + s B A          DoRA   diag(m / ||W + s B A||_row) (W + s B A)          and the trained biases

The sum is made in float32 whatever the base is stored in, and rounded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import AdaptedLinear
from packlora.adapters.peft_files import load_adapter, read_config
from packlora.adapters.spec import resolve
from packlora.demo_model import base_path
from packlora.errors import InputError
from packlora.files import write_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


def merge_adapter(adapter_dir: Path, out: Path, base_model: str | None = None, dtype: str = "auto") -> None:
    """Write the merged model and its tokenizer to `out`, as a plain Hugging Face folder.

    Args:
        adapter_dir: a PEFT LoRA or DoRA adapter folder.
        out: the folder to write; must not exist or be empty.
        base_model: where to load the base from; default is the adapter's base_model_name_or_path.
        dtype: of the result; auto keeps the base's.

    Raises:
        InputError: the adapter, the base or the output folder cannot be used.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; choose another folder")
    name = adapter_dir.name
    transformers.utils.logging.disable_progress_bar()
    config = read_config(str(adapter_dir), name)
    base = base_path(base_model or str(config.base_model_name_or_path))
    try:
        stored = AutoConfig.from_pretrained(base, revision=config.revision).dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            base, revision=config.revision, dtype=torch.float32, use_safetensors=True
        )
        tokenizer = AutoTokenizer.from_pretrained(base, revision=config.revision)
    except Exception as error:  # transformers raises many types for a model that does not load
        raise InputError(f"cannot load the base model {base!r} (give --base-model): {error}") from None
    _, (adapter,) = attach(model, {name: resolve(config, model, name)}, seed=0)
    load_adapter(adapter_dir, adapter)
    fold(model, adapter)
    model.to(stored if dtype == "auto" else getattr(torch, dtype))

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_folder(out, write)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error}") from None


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
