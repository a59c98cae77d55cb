"""A LoRA adapter as one GGUF file for llama.cpp (`llama-cli --lora FILE`).

    general.type = adapter     general.architecture     adapter.type = lora     adapter.lora.alpha
    <name of the weight>.lora_a [r, K]                  <name of the weight>.lora_b [N, r]

llama.cpp computes W x + alpha / r B A x, r being the number of columns of each B. Names of weights are those of the `gguf`
package. For its architecture `llama` rotary embedding turns neighbouring features and not the two halves of a head, so rows of
q and k are in another order there, and so are those of their B.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from packlora.adapters.files import tensor_key
from packlora.commands.adapter_folder import AdapterFolder
from packlora.errors import InputError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3, "gemma": gguf.MODEL_ARCH.GEMMA, "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "gemma3": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip
"""GGUF architectures by model_type, for models whose linear layers llama.cpp holds row by row unchanged, except q and k of
`llama`."""
STORED = {
    torch.float32: gguf.GGMLQuantizationType.F32, torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}  # fmt: skip


def gguf_names(opened: AdapterFolder) -> dict[str, str]:
    """Names in GGUF files of the weights of adapted layers, by their paths. A file is of the text model alone.

    Raises:
        InputError: the model is of a type whose weights are not known to lie in GGUF files as they do here, or a layer has no
            name there.
    """
    config = opened.skeleton.config
    if config.model_type not in ARCHITECTURES:
        raise InputError(
            f"base model {opened.base} is of type {config.model_type}, for which no GGUF file is written here (only for "
            f"{', '.join(ARCHITECTURES)}); export it with --for peft and convert that with llama.cpp's convert_lora_to_gguf"
        )
    arch = ARCHITECTURES[config.model_type]
    known = gguf.get_tensor_name_map(arch, config.get_text_config().num_hidden_layers)
    names = {path: known.get_name(path.replace("model.language_model.", "model.", 1)) for path in opened.spec.modules}
    if without := [path for path, name in names.items() if name is None]:
        raise InputError(
            f"{opened.path}: {without[0]} has no name in GGUF files of {gguf.MODEL_ARCH_NAMES[arch]} models; `packlora merge "
            f"{opened.path} OUT` makes a plain model of it"
        )
    return {path: f"{name}.weight" for path, name in names.items()}


def write_gguf(file: Path, opened: AdapterFolder, names: Mapping[str, str]) -> None:
    """Write an adapter of one rank and one scaling. names: see gguf_names."""
    config = opened.skeleton.config.get_text_config()
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(opened.spec.peft.lora_alpha))
    for path, module in opened.spec.modules.items():
        A, B = (opened.tensors[tensor_key(path, part, module)] for part in "AB")
        if arch == gguf.MODEL_ARCH.LLAMA and path.endswith((".q_proj", ".k_proj")):
            B = _rows_of_pairs(B, config.num_attention_heads if path.endswith("q_proj") else config.num_key_value_heads)
        _add(writer, f"{names[path]}.lora_a", A)
        _add(writer, f"{names[path]}.lora_b", B)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rows_of_pairs(B: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, r] with row j of a head's first half followed by row j of its second half."""
    pairs: torch.Tensor = B.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.flatten(0, 2)


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    kind = STORED[tensor.dtype]
    values = tensor.float().contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.BF16:  # numpy has no such type; what is exact in it is not rounded again
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values.astype(np.float16) if kind == gguf.GGMLQuantizationType.F16 else values)
