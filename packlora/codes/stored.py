"""Models whose weights are saved in codes: their configuration, the layers that transformers quantises, and the way it loads
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AwqConfig, GPTQConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from packlora.config import QuantizationConfig
from packlora.errors import InputError, quoted
from packlora.form import read_as_floats, said_of

BITSANDBYTES, SKIPPED = ("nf4", "fp4", "int8"), "llm_int8_skip_modules"
"""Methods of bitsandbytes, and its key for layers that are left out; the key holds for 4 bits too."""
MADE = ("nf4", "fp4", "int8", "torchao")
"""Methods whose codes are made while a model is loaded."""
TAKEN = "floats, and what bitsandbytes, torchao, gptq, awq, compressed-tensors, fp8 (in blocks) and mxfp4 make"


@dataclass(frozen=True, slots=True)
class Stored:
    """Quantisation of the files of a model. told: its configuration's quantization_config. bits: bits of a number.

    group: number of weights, rows times columns, that share a scale; 0: those of an output, or of the layer. scale_bytes: bytes
    of a scale; 0: as many as the run's dtype has. zero_bytes: bytes of the group's other values. per_input: bytes for each
    input.
    """

    as_asked: QuantizationConfig
    told: Mapping[str, Any]
    bits: float = 8
    group: int = 0
    scale_bytes: int = 0
    zero_bytes: float = 0
    per_input: int = 0

    def bytes_of(self, N: int, K: int, dtype: torch.dtype) -> int:
        """Bytes of a layer with N outputs and K inputs in a run of this dtype."""
        each = (self.scale_bytes or min(dtype.itemsize, 4)) + self.zero_bytes
        return round(N * K * self.bits / 8 + N * K / (self.group or K) * each + self.per_input * K)

    def layers(self, skeleton: PreTrainedModel) -> list[str]:
        """The layers that are stored so, by path."""
        embedding = skeleton.get_input_embeddings().weight  # an output layer that is the embedding is of floats
        linear = [
            path
            for path, module in skeleton.named_modules()
            if type(module) is torch.nn.Linear and module.weight is not embedding
        ]
        said = {
            "fp8": "modules_to_not_convert", "compressed-tensors": "ignore", **dict.fromkeys(BITSANDBYTES, SKIPPED),
        }.get(self.as_asked.method, "")  # fmt: skip
        kept = list(self.told.get("modules_to_not_convert") or []) + list(self.told.get(SKIPPED) or [])
        if self.told.get(said) is None:  # these then leave out nothing else
            kept += get_keys_to_not_convert(skeleton)
        ignored = [re.compile(one[3:]) for one in self.told.get("ignore") or [] if one.startswith("re:")]
        kept += [one for one in self.told.get("ignore") or [] if not one.startswith("re:")]
        inside = [name for names in self.told.get("modules_in_block_to_quantize") or [] for name in names]
        return [
            path
            for path in linear
            if should_convert_module(path, kept)
            and not any(one.match(path) for one in ignored)
            and (not inside or path.endswith(tuple(inside)))
        ]

    def loading(self) -> Any:
        """Quantisation config for from_pretrained: codes are loaded in the layout of the files, not in that of an inference
        kernel. None where the default does so."""
        if self.as_asked.method == "gptq":
            return GPTQConfig(bits=int(self.bits), backend="gptq_torch")
        if self.as_asked.method == "awq":
            return AwqConfig(bits=int(self.bits), backend="torch_awq")
        return None


def stored_as(config: Any, path: str) -> Stored | None:
    """Quantisation of the files of a model, by its configuration; None where they are loaded as floats. Raises InputError where
    that is not known here."""
    method, told = said_of(config)
    if not method or read_as_floats(config):
        return None
    if method not in _READERS:
        raise InputError(
            f"base_model {path!r} is quantised by {method}; this version takes {TAKEN}. "
            "Where transformers can, load it there, call model.dequantize(), and save_pretrained it"
        )
    try:
        _check_names(told)
        return _READERS[method](told, path)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"base_model {path!r}: its quantization_config of {method} cannot be read ({type(error).__name__}: {error})"
        ) from None


def _check_names(told: Mapping[str, Any]) -> None:
    """Raises ValueError where layers are not named as transformers reads it: as patterns, and inside of blocks in groups."""
    keys = ("modules_to_not_convert", "ignore", "modules_in_block_to_quantize", SKIPPED)
    named = {key: told.get(key) or [] for key in keys}
    inside = named["modules_in_block_to_quantize"]
    if all(isinstance(group, list) for group in inside):
        named["modules_in_block_to_quantize"] = [name for group in inside for name in group]
    else:
        raise ValueError(f"modules_in_block_to_quantize is {quoted(inside, 80)}, and not a list of lists of names")
    for key, names in named.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} is {quoted(names, 80)}, and not a list of names")
        for name in names:
            try:
                re.compile(name.removeprefix("re:"))
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"{key} has {quoted(name, 80)}, which is no pattern: {error}") from None


def _refuse(path: str, method: str, found: str) -> InputError:
    return InputError(
        f"base_model {path!r} is quantised by {method} with {found}, which is not read here; taken are {TAKEN}"
    )


def _bitsandbytes(told: Mapping[str, Any], path: str) -> Stored:
    if told.get("load_in_8bit"):
        if told.get("llm_int8_has_fp16_weight"):
            raise InputError(f"base_model {path!r} is saved with llm_int8_has_fp16_weight; save its weights as floats")
        return Stored(QuantizationConfig(method="int8"), told, scale_bytes=4)
    double = bool(told.get("bnb_4bit_use_double_quant", False))
    own = QuantizationConfig(method=told.get("bnb_4bit_quant_type", "fp4"), double_quant=double)
    return Stored(own, told, 4, 64, 1, 4 / 256) if double else Stored(own, told, 4, 64, 4)


def _torchao(told: Mapping[str, Any], path: str) -> Stored:
    kind = told["quant_type"]["default"]
    name, data = str(kind["_type"]), kind["_data"]
    if name == "Int4WeightOnlyConfig":
        group = int(data["group_size"])
        sized: Any = group if group != 128 else None
        own = QuantizationConfig(method="torchao", quant_type="int4_weight_only", group_size=sized)
        return Stored(own, told, 4, group, 2, 2)
    if name == "Int8WeightOnlyConfig":
        return Stored(QuantizationConfig(method="torchao", quant_type="int8_weight_only"), told)
    if name == "Float8WeightOnlyConfig":
        return Stored(QuantizationConfig(method="torchao", quant_type="float8_weight_only"), told, scale_bytes=4)
    raise _refuse(path, "torchao", name)


def _gptq(told: Mapping[str, Any], path: str) -> Stored:
    if told.get("rotation") or (told.get("meta") or {}).get("rotation"):
        raise _refuse(path, "gptq", "a rotation of the inputs")
    return _grouped("gptq", told, per_input=4)


def _awq(told: Mapping[str, Any], path: str) -> Stored:
    version = str(told.get("version", told.get("format", "gemm"))).lower()
    if version != "gemm":
        raise _refuse(path, "awq", f"version {version}, and not gemm")
    return _grouped("awq", told)


def _grouped(method: Any, told: Mapping[str, Any], per_input: int = 0) -> Stored:
    bits, group = int(told["bits"]), int(told["group_size"])
    own = QuantizationConfig(method=method)
    return Stored(own, told, bits, max(group, 0), 2, bits / 8, per_input)


def _compressed(told: Mapping[str, Any], path: str) -> Stored:
    name = "compressed-tensors"
    for key in ("sparsity_config", "transform_config"):
        if told.get(key) and told[key].get("format", "") != "dense":
            raise _refuse(path, name, f"a {key}")
    if told.get("quantization_status", "compressed") != "compressed":
        raise _refuse(path, name, f"quantization_status {told['quantization_status']}, and not compressed")
    groups = list(told["config_groups"].values())
    weights = groups[0]["weights"]
    bits, strategy = int(weights["num_bits"]), weights.get("strategy")
    own = QuantizationConfig(method="compressed-tensors")
    if strategy in ("group", "tensor_group"):
        return Stored(own, told, bits, int(weights["group_size"]))
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return Stored(own, told, bits, int(rows) * int(columns))
    return Stored(own, told, bits)


def _fp8(told: Mapping[str, Any], path: str) -> Stored:
    if told.get("fmt", "e4m3") != "e4m3" or told.get("expert_dtype") not in (None, "fp8"):
        raise _refuse(path, "fp8", f"fmt {quoted(told.get('fmt'))}, expert_dtype {quoted(told.get('expert_dtype'))}")
    block = told.get("weight_block_size")
    own = QuantizationConfig(method="fp8")
    rows, columns = (0, 0) if block is None else (int(size) for size in block)
    return Stored(own, told, group=rows * columns, scale_bytes=4)


_READERS: dict[str, Callable[[Mapping[str, Any], str], Stored]] = {
    "bitsandbytes": _bitsandbytes, "torchao": _torchao, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed,
    "fp8": _fp8,
}  # fmt: skip


# --- loading -----------------------------------------------------------------------------------------------------------


@contextmanager
def as_stored() -> Iterator[None]:
    """While a model is loaded: transformers keeps the codes and the dtype of the files where it would give them up for kernels
    that this device lacks, FP8 for 16 bits and bfloat16 for float16."""
    before: dict[str, Any] = {name: AUTO_QUANTIZER_MAPPING[name] for name in ("fp8", "awq")}
    AUTO_QUANTIZER_MAPPING.update(
        fp8=type("StoredFP8", (before["fp8"],), {"validate_environment": lambda *_, **__: None}),
        awq=type("StoredAwq", (before["awq"],), {"update_dtype": lambda _, dtype: dtype}),
    )
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING.update(before)


def check_stored(asked: QuantizationConfig | None, config: Any, path: str) -> QuantizationConfig | None:
    """Quantisation of a run's base model. Raises InputError where it is saved in another way than it is asked for."""
    stored = stored_as(config, path)
    if asked is None:
        return None if stored is None else stored.as_asked
    if read_as_floats(config):
        raise InputError(
            f"quantization is {asked.described}, but base_model {path!r} is saved as mxfp4, of which floats are made; leave "
            "the key out"
        )
    if stored is not None and asked != stored.as_asked:
        raise InputError(
            f"quantization is {asked.described}, but base_model {path!r} is saved as {stored.as_asked.described}; leave the "
            "key out"
        )
    if stored is None and asked.method not in MADE:
        raise InputError(
            f"quantization is {asked.described}, which is not made while a model is loaded, and base_model {path!r} is saved "
            "as floats; give one that is saved so, or ask for nf4, fp4, int8 or torchao"
        )
    return asked
