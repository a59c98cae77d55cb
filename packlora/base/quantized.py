"""Base models whose linear layers are quantised: as they are loaded, which the run file asks for, or as they were saved.

bitsandbytes makes the codes and transformers loads them, one tensor after the other: neither the host nor the device ever holds
the whole model in the wider type. What they leave are layers of their own, in whose place `own_layers` puts this package's.
Embeddings and the output layer stay as they are, as transformers has it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import is_bitsandbytes_available

from packlora.config import QuantizationConfig
from packlora.errors import InputError
from packlora.ops.lora_linear.quantized import EightBit, FourBit, QuantizedLinear, codes_of

FLAGS = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_quantizer")
"""What transformers writes onto a quantised model; it refuses things that are right for other layers."""


def check_quantization(asked: QuantizationConfig, device: torch.device, what: str = "quantization") -> None:
    """Raise InputError where codes cannot be made or read here. what: asks for them, for the message."""
    said = f"{what}: {asked.method} cannot be met: "
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"{said}bitsandbytes is not installed; pip install 'packlora[quant]'")
    if not is_bitsandbytes_available():
        raise InputError(f"{said}bitsandbytes is too old for transformers; pip install -U 'packlora[quant]'")
    import bitsandbytes

    known: set[str] = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in known:
        raise InputError(f"{said}bitsandbytes {bitsandbytes.__version__} has nothing for {device.type}; it has {known}")


def stored_quantization(config: Any, path: str) -> QuantizationConfig | None:
    """How the files of a model are quantised, by its configuration. Raises InputError where that is not known here."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    stored: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(stored.get("quant_method"), "value", stored.get("quant_method")))
    if method != "bitsandbytes":
        raise InputError(
            f"base_model {path!r} is quantised by {method}; this version takes floats and bitsandbytes' nf4, fp4 and int8. "
            "Where transformers can, load it there, call model.dequantize(), and save_pretrained it"
        )
    if stored.get("load_in_8bit"):
        if stored.get("llm_int8_has_fp16_weight"):
            raise InputError(f"base_model {path!r} is saved with llm_int8_has_fp16_weight; save its weights as floats")
        return QuantizationConfig(method="int8")
    return QuantizationConfig(
        method=stored.get("bnb_4bit_quant_type", "fp4"),
        double_quant=bool(stored.get("bnb_4bit_use_double_quant", False)),
    )


def check_stored(asked: QuantizationConfig | None, config: Any, path: str) -> QuantizationConfig | None:
    """How the base model of a run is quantised. Raises InputError where it is saved in another way than it is asked for."""
    stored = stored_quantization(config, path)
    if asked is not None and stored is not None and asked != stored:
        raise InputError(
            f"quantization is {asked.described}, but base_model {path!r} is saved as {stored.described}; leave the key out"
        )
    return asked or stored


def loading(quantization: QuantizationConfig, stored: bool, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What from_pretrained is given for it. stored: the files have it."""
    if stored:
        return {"device_map": {"": device}}
    if quantization.method == "int8":
        own = BitsAndBytesConfig(load_in_8bit=True)
    else:
        own = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.method,
            bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": own, "device_map": {"": device}}


def quantised_paths(model: PreTrainedModel) -> set[str]:
    """The layers of a model without weights that are quantised where that is asked for."""
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return {
        path
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and should_convert_module(path, kept)
    }


def made_of(dtype: torch.dtype) -> torch.dtype:
    """What codes are made of in a run of this dtype; bitsandbytes has none of float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def own_layers(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Put layers of ours in the place of bitsandbytes', which compute in this dtype; the rest of the model gets it."""
    for path, module in list(_quantised(model)):
        model.set_submodule(path, QuantizedLinear(codes_of(module), module.bias, dtype))
    for name in FLAGS:
        model.__dict__.pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.to(dtype)


def _quantised(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for path, module in model.named_modules():
        if isinstance(module, Linear4bit | Linear8bitLt):
            yield path, module


def dequantised(weight_NK: torch.Tensor, quantization: QuantizationConfig, dtype: torch.dtype) -> torch.Tensor:
    """What a run of this dtype computes with in the place of a weight: float32, on the weight's device."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    weight_NK = weight_NK.to(made_of(dtype))
    if quantization.method == "int8":
        stored, largest_N, _ = int8_vectorwise_quant(weight_NK.half())
        return EightBit(stored, largest_N).values(made_of(dtype)).float()
    stored, state = quantize_4bit(
        weight_NK.contiguous(), quant_type=quantization.method, compress_statistics=quantization.double_quant
    )
    return FourBit(stored, state).values(made_of(dtype)).float()
