"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors. They are written here and read by reading.py.

The tensors of an adapted layer, each under base_model.model.<path of the layer>:

    .lora_A.weight [r, K]      .lora_B.weight [N, r]      .lora_magnitude_vector.weight [N]
    .base_layer.bias [N]       its trained bias, or .bias where the layer has no low-rank part

Modules of other kinds have the keys that kinds/ lists.

Any float dtype is read, float32 is written. Magnitudes of older adapters are bfloat16, or were rounded to it when PEFT made
them from a bfloat16 base. They are taken as they are: g = m / ||W + s B A|| of a fresh one is then within 0.4 % of 1 instead of
1, which is what PEFT gives too where it computes in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from packlora.adapters.attach import Adapter
from packlora.adapters.kinds import PREFIX, owners, suffixes
from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.files import from_everywhere, write_json, write_tensors, write_text
from packlora.lora_config import CONFIG as CONFIG
from packlora.lora_config import OF_WEIGHTS, LoraConfig, is_doubled
from packlora.lora_config import WEIGHTS as WEIGHTS

TRAINED_ON = "packlora.quantization"
"""Key in the header of WEIGHTS: how the base model's layers were quantised, `Adapter.trained_on`. Others do not read it."""
STARTED = "packlora.start"
"""Key in the same header: the start of an adapter of which half of the ranks is trained, see starts.py. A job that continues
the folder goes on so; to others it is an ordinary adapter."""
MAGNITUDE = ".lora_magnitude_vector"
"""PEFT reads magnitudes with and without .weight after it, and writes them without. transformers' own loader reads only those
with it, and begins with others where it finds none; so they are written with it."""
T = TypeVar("T")


def keyed(adapter: Adapter, named: Mapping[str, T]) -> dict[str, T]:
    """Rename what is named by the adapter's parameters to PEFT's keys."""
    out = {}
    for name, value in named.items():
        path, _, attribute = name.rpartition("/")
        out[tensor_key(path, attribute, adapter.spec.modules[path])] = value
    return out


def tensor_key(path: str, attribute: str, spec: ModuleSpec) -> str:
    """The key of one of an adapter's tensors in its file, a magnitude's without its last part."""
    suffix = suffixes(spec.kind)[attribute]
    if attribute == "bias" and not spec.rank:
        suffix = "bias"
    return f"{PREFIX}{spec.stored_at or path}.{suffix}"


def under_both(tensors: Mapping[str, torch.Tensor], spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """Tensors that are keyed by tensor_key, and copies under the names of the model's twin, see names.py."""
    also = {own: other for other, own in spec.also.items()}
    copies = {under_other_name(key, also): tensor for key, tensor in tensors.items()}
    return dict(tensors) | {key: tensor.clone() for key, tensor in copies.items() if key is not None}


def under_other_name(key: str, names: Mapping[str, str]) -> str | None:
    """A key with another path, where there is one for it."""
    path = next((one for one in owners(key) if one in names), None) if names else None
    return None if path is None else PREFIX + names[path] + key.removeprefix(PREFIX + path)


def save_adapter(folder: Path, adapter: Adapter, whole: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a PEFT adapter folder (created if needed); each file appears whole or not at all.

    Args:
        whole: its tensors by the names of named_parameters, where those of `adapter` are slices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = keyed(adapter, adapter.layout.views(adapter.flat.cpu()) if whole is None else whole)
    tensors = under_both(tensors, adapter.spec)
    named = {key + ".weight" * key.endswith(MAGNITUDE): tensors[key] for key in tensors}
    told = {} if adapter.trained_on is None else {TRAINED_ON: json.dumps(adapter.trained_on)}
    if is_doubled(start := adapter.spec.peft.init_lora_weights):
        told[STARTED] = str(start)
    write_tensors(folder / WEIGHTS, named, told or None)
    write_json(folder / CONFIG, config_dict(adapter.spec.peft))


def config_dict(peft: LoraConfig) -> dict[str, Any]:
    """Content of an adapter_config.json."""
    config: dict[str, Any] = peft.to_dict() | {"inference_mode": True}
    start = str(peft.init_lora_weights)
    if OF_WEIGHTS.fullmatch(start) or start == "orthogonal":  # PEFT would begin anew: change the base, or fail on codes
        config["init_lora_weights"] = True
    if peft.base_model_name_or_path is not None:
        config["base_model_name_or_path"] = from_everywhere(peft.base_model_name_or_path)
    if peft.target_parameters:  # PEFT trains no dropout there, and so loads no adapter that names one
        config["lora_dropout"] = 0.0
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def write_card(folder: Path, adapter: Adapter, lines: list[str]) -> None:
    """A README.md beside the adapter, as hubs expect it: front matter, then plain sentences."""
    peft = adapter.spec.peft
    text = [
        "---", f"base_model: {json.dumps(str(peft.base_model_name_or_path))}", "library_name: peft",
        "tags: [lora, packlora]", "---", "", f"# {adapter.name}", "",
        f"{'DoRA' if peft.use_dora else 'LoRA'} adapter of rank {peft.r}, trained with packlora.", "", *lines, "",
    ]  # fmt: skip
    write_text(folder / "README.md", "\n".join(text))
