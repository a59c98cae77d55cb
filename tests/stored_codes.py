"""Checkpoints as GPTQ, AWQ, compressed-tensors and fine-grained FP8 store them, written by the published formats.

What their codes stand for is computed here from the numbers before they are packed, so no library says what is right.

Shapes: N outputs, K inputs, G inputs that share a scale.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = (16, 24)
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a layer by name, and the weight [N, K] that they stand for in float32."""


def _words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of 4 bits along the last dimension to an int32, the first one lowest."""
    parts = codes.to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(parts[..., source] << (4 * place) for place, source in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _grouped(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] of 4 bits, zeros and scales [N, K / G] of float16."""
    parts = weight_NK.float().unflatten(1, (-1, GROUP))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = ((parts / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1), zeros, scales


def _stands_for(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As 16-bit arithmetic has it: the product is rounded once."""
    wide = (codes.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales.float()[..., None]
    return wide.flatten(1).half().float()


def gptq(weight_NK: torch.Tensor) -> Stored:
    codes, zeros, scales = _grouped(weight_NK)
    tensors = {
        "qweight": _words(codes).t().contiguous(),
        "qzeros": _words(zeros.t() - 1),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // GROUP).int(),
    }
    return tensors, _stands_for(codes, zeros, scales)


def awq(weight_NK: torch.Tensor) -> Stored:
    codes, zeros, scales = _grouped(weight_NK)
    tensors = {
        "qweight": _words(codes.t(), AWQ_ORDER),
        "qzeros": _words(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return tensors, _stands_for(codes, zeros, scales)


def fp8(weight_NK: torch.Tensor) -> Stored:
    """Blocks at the borders are smaller."""
    weight, (rows, columns) = weight_NK.float(), BLOCK
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes, dense = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[here] = codes[here].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, dense


def packed_int4(weight_NK: torch.Tensor) -> Stored:
    parts = weight_NK.float().unflatten(1, (-1, GROUP))
    scales = (parts.abs().amax(2) / 7).float()
    codes = (parts / scales[..., None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": _words(codes.flatten(1) + 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight_NK.shape),
    }
    return tensors, (codes * scales[..., None]).flatten(1)


def int8(weight_NK: torch.Tensor) -> Stored:
    scales = weight_NK.float().abs().amax(1, keepdim=True) / 127
    codes = (weight_NK.float() / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def float8(weight_NK: torch.Tensor) -> Stored:
    scales = weight_NK.float().abs().amax(1, keepdim=True) / 448
    codes = (weight_NK.float() / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    told = {"dynamic": False, "symmetric": True, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": told, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "fp8": (
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK), "fmt": "e4m3"},
    ),
    "packed int4": (
        packed_int4,
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
    "int8": (int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "float8": (float8, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
}
"""By name what packs a weight, and what config.json says of it."""
NEEDS = {
    "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "fp8": (), "packed int4": ("compressed_tensors",),
    "int8": ("compressed_tensors",), "float8": ("compressed_tensors",),
}  # fmt: skip
"""Modules without which transformers does not load it."""


def save_stored(
    kind: str, source: str | Path, folder: Path, picked: str = r".*_proj", **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of the model in `source`, whose layers are stored in codes.

    picked: which layers, by a pattern of their paths. changes: of what config.json says of the codes.

    Returns:
        What they stand for, by path of the layer.
    """
    pack, told = FORMATS[kind]
    shutil.copytree(source, folder)
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if name == path or tensor.ndim != 2 or not re.fullmatch(picked, path):
            tensors[name] = tensor
            continue
        parts, dense[path] = pack(tensor)
        tensors |= {f"{path}.{leaf}": part.contiguous() for leaf, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, {**told, **changes})
    return dense


def write_config(folder: Path, told: Mapping[str, Any] | None) -> None:
    """Say in config.json how a model is quantised."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config | ({} if told is None else {"quantization_config": told})))


def save_dense(source: str | Path, folder: Path, dense: Mapping[str, torch.Tensor]) -> None:
    """Write the model in `source` with these weights in the place of its own."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{path}.weight": tensor.contiguous() for path, tensor in dense.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
