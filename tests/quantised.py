"""Weights as bitsandbytes quantises them, for tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from packlora.codes.library import EightBit, FourBit, codes_of
from packlora.codes.weight import Codes

with mock.patch.object(
    torch, "compile", lambda function, **settings: function
):  # Inductor would take 15 s of each process
    bnb: Any = pytest.importorskip("bitsandbytes")
KINDS = ("nf4", "nf4 double", "fp4", "int8")


def codes(weight_NK: torch.Tensor, kind: str) -> Codes:
    """A weight in codes of a kind; float64 is quantised as float32."""
    weight_NK = weight_NK.float() if weight_NK.dtype == torch.float64 else weight_NK
    method, _, double = kind.partition(" ")
    if method == "int8":
        stored, largest_N, _ = bnb.functional.int8_vectorwise_quant(weight_NK.half())
        return EightBit(stored, largest_N)
    stored, state = bnb.functional.quantize_4bit(weight_NK, quant_type=method, compress_statistics=bool(double))
    return FourBit(stored, state)


def dequantised(own: Codes) -> torch.Tensor:
    """What codes stand for, in float64: of 4 bits the upper half of a byte comes first, and blocks go on from row to row."""
    if isinstance(own, FourBit):
        state, packed = own.state, own.stored.view(-1).long()
        scales = state.absmax
        if state.nested:
            scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset
        of_code = state.code.float()[torch.stack([packed >> 4, packed & 15], 1).flatten()]
        numbers = own.shape[0] * own.shape[1]
        made = of_code[:numbers] * scales.float().repeat_interleave(state.blocksize)[:numbers]
        whole: torch.Tensor = made.view(own.shape).double()
        return whole
    assert isinstance(own, EightBit)
    return own.stored.double() * (own.largest_N[:, None] * (1 / 127))


CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def load_quantised(
    folder: str, kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu", storage: str = "uint8"
) -> Any:
    """A model as users of PEFT load it for training on quantised weights. storage: type of the tensors with codes of 4 bits."""
    settings = dict(CONFIGS[kind])
    if "load_in_4bit" in settings:
        settings |= {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": storage}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": device},
        quantization_config=transformers.BitsAndBytesConfig(**settings), attn_implementation="eager",
    )  # fmt: skip
    return model.train()


def dequantise(model: Any, dtype: torch.dtype) -> Any:
    """The model with plain layers in the place of quantised ones, which hold what their codes stand for."""
    for path, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=dtype)
            plain.weight = torch.nn.Parameter(dequantised(codes_of(module)).to(dtype), requires_grad=False)
            if module.bias is not None:
                plain.bias = torch.nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
            model.set_submodule(path, plain)
    for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method", "hf_quantizer"):
        model.__dict__.pop(name, None)
    return model.to(dtype)
