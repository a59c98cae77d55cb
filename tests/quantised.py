"""Weights as bitsandbytes quantises them, for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packlora.ops.lora_linear.quantized import Codes, EightBit, FourBit

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
    """What bitsandbytes makes of codes, in float32."""
    if isinstance(own, FourBit):
        made: torch.Tensor = bnb.functional.dequantize_4bit(own.stored, own.state)
        return made.float()
    assert isinstance(own, EightBit)
    return own.stored.float() * (own.largest_N[:, None] * (1 / 127))
