"""PEFT adapter folders in and out: adapter_config.json and adapter_model.safetensors.

The tensors of an adapted layer, each under base_model.model.<path of the layer>:

    .lora_A.weight [r, K]      .lora_B.weight [N, r]      .lora_magnitude_vector [N]
    .base_layer.bias [N]       its trained bias, or .bias where the layer has no low-rank part

Any float dtype is read, float32 is written. Magnitudes of older adapters are bfloat16, or were rounded to it when PEFT made
them from a bfloat16 base. They are taken as they are: g = m / ||W + s B A|| of a fresh one is then within 0.4 % of 1 instead of
1, which is what PEFT gives too where it computes in float32.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from packlora.adapters.attach import Adapter
from packlora.adapters.linear import AdapterWeights
from packlora.adapters.spec import peft_config
from packlora.config import AdapterConfig
from packlora.errors import InputError
from packlora.files import write_file, write_json, write_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ATTRIBUTE = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude"}
UNSUPPORTED = {
    "lora_bias": False, "modules_to_save": None, "layer_replication": None, "target_parameters": None,
    "trainable_token_indices": None, "fan_in_fan_out": False, "megatron_config": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "alora_invocation_tokens": None, "velora_config": None,
    "monteclora_config": None, "kasa_config": None,
}  # fmt: skip
"""Keys of a LoraConfig, with the value they have when unused, that change what is computed and are not implemented."""
FORKED = {
    "_dora_composition_version": "written by a fork of PEFT with other DoRA code; what a linear layer computes is the same"
}
"""Keys that are not PEFT's and change nothing here, with what they are."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights alone; pissa, olora, corda, loftq, lora_ga change them."""


def state_dict(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's keys."""
    return {
        PREFIX + f"{path}.{_suffix(name, weights)}": parameter.detach()
        for path, weights in adapter.weights.items()
        for name, parameter in weights.named_parameters().items()
    }


def _suffix(attribute: str, weights: AdapterWeights) -> str:
    if attribute == "bias":
        return "base_layer.bias" if weights.spec.rank else "bias"
    return {value: key for key, value in ATTRIBUTE.items()}[attribute]


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write a PEFT adapter folder (created if needed); each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    config = adapter.spec.peft.to_dict()
    config["inference_mode"] = True
    if isinstance(config["target_modules"], str) and config["target_modules"].lower() == "all-linear":
        # named, as PEFT does, so that the file means the same to tools that do not know the shorthand
        config["target_modules"] = sorted(
            {path.rpartition(".")[2] for path, weights in adapter.weights.items() if weights.spec.rank}
        )
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    write_tensors(folder / WEIGHTS, state_dict(adapter))
    write_json(folder / CONFIG, config)


def config_notes(raw: dict[str, Any]) -> list[str]:
    """What to say about keys of an adapter_config.json that PEFT's LoraConfig does not have. Unused ones are not named."""
    notes = []
    for key, value in raw.items():
        if key in FORKED:
            notes.append(f"{key} = {value!r} has no effect: {FORKED[key]}")
        elif value and key not in LoraConfig.__dataclass_fields__ and key not in UNSUPPORTED:
            notes.append(f"{key} = {value!r} has no effect: this version of PEFT has no such key")
    return notes


def read_config(folder: str, job: str) -> LoraConfig:
    """The LoraConfig of an adapter folder. Keys without effect are named in a warning.

    Raises:
        InputError: no such folder, not a LoRA adapter, or it uses a feature that packlora does not have.
    """
    file = Path(folder) / CONFIG
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"job {job!r}: {folder} is not a PEFT adapter folder: {error}") from None
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else type(raw).__name__
        raise InputError(f"job {job!r}: {file} describes {kind!r}; only LORA adapters can be continued")
    for key, unused in UNSUPPORTED.items():
        if raw.get(key, unused) not in (unused, None, False):
            raise InputError(f"job {job!r}: {file} uses {key}, which packlora does not support")
    if (start := raw.get("init_lora_weights")) not in PLAIN_STARTS:
        raise InputError(
            f"job {job!r}: {file} has init_lora_weights {start!r}, which goes with other base weights; convert it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for note in config_notes(raw):
        warnings.warn(f"job {job!r}: {file}: {note}", stacklevel=2)
    try:
        config = LoraConfig(**{key: value for key, value in raw.items() if key in LoraConfig.__dataclass_fields__})
    except (TypeError, ValueError) as error:
        raise InputError(f"job {job!r}: {file}: {error}") from None
    config.init_lora_weights = True
    config.inference_mode = False
    return config


def continued_config(adapter: AdapterConfig, base_model: str, revision: str | None, job: str) -> LoraConfig:
    """The configuration of a job with `init_from`: that of the file, and no disagreement with the run file.

    lora_dropout may be changed by the run file; everything else that is set in both must agree.
    """
    assert adapter.init_from is not None
    found = read_config(adapter.init_from, job)
    wanted = peft_config(adapter, base_model, revision)
    for key in sorted(adapter.model_fields_set - {"init_from", "lora_dropout"}):
        in_file, in_run = getattr(found, key), getattr(wanted, key)
        if key == "target_modules" and (in_run == "all-linear" or in_file == "all-linear"):
            continue  # the shorthand against names: the tensors decide, in load_adapter
        if in_file != in_run:
            shown = sorted(in_file) if isinstance(in_file, set) else in_file
            raise InputError(
                f"job {job!r}: adapter.{key} is {getattr(adapter, key)!r}, but {adapter.init_from} was made with "
                f"{shown!r}; leave the key out to take the file's"
            )
    if "lora_dropout" in adapter.model_fields_set:
        found.lora_dropout = adapter.lora_dropout
    found.base_model_name_or_path, found.revision = base_model, revision
    return found


def load_adapter(folder: str | Path, adapter: Adapter) -> None:
    """Copy a PEFT adapter's tensors into an attached adapter of the same layers and shapes.

    Raises:
        InputError: the file is missing or broken, or its tensors are not exactly those of the adapter.
    """
    file = Path(folder) / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"job {adapter.name!r}: cannot read {file}: {error}") from None
    # PEFT reads magnitudes with and without .weight, and writes them without
    suffix = ".lora_magnitude_vector.weight"
    tensors = {key.removesuffix(".weight") if key.endswith(suffix) else key: value for key, value in tensors.items()}
    wanted = state_dict(adapter)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        problem = f"lacks {missing[0]} (and {len(missing) - 1} more)" if missing else ""
        problem += " and " if missing and extra else ""
        problem += f"has {extra[0]} (and {len(extra) - 1} more), which is not of this adapter" if extra else ""
        raise InputError(f"job {adapter.name!r}: {file} {problem}")
    for key, target in wanted.items():
        if tensors[key].shape != target.shape:
            raise InputError(
                f"job {adapter.name!r}: {file}: {key} is {tuple(tensors[key].shape)}, the model needs {tuple(target.shape)}"
            )
    with torch.no_grad():
        for key, target in wanted.items():
            target.copy_(tensors[key])


def write_card(folder: Path, adapter: Adapter, lines: list[str]) -> None:
    """A README.md beside the adapter, as hubs expect it: front matter, then plain sentences."""
    peft = adapter.spec.peft
    text = [
        "---", f"base_model: {json.dumps(str(peft.base_model_name_or_path))}", "library_name: peft",
        "tags: [lora, packlora]", "---", "", f"# {adapter.name}", "",
        f"{'DoRA' if peft.use_dora else 'LoRA'} adapter of rank {peft.r}, trained with packlora.", "", *lines, "",
    ]  # fmt: skip
    write_file(folder / "README.md", lambda file: _write_text(file, "\n".join(text)))


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
