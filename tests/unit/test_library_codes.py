"""Weights in the codes of libraries: what their layers say is what is multiplied with, in any dtype and on being moved."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import tiny_model
from stored_codes import BLOCK, FORMATS, fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

from packlora.codes.library import IDENTITY_ROWS, LibraryCodes, by_identity, library_codes
from packlora.codes.load import own_layers
from packlora.codes.stored import stored_as
from packlora.codes.weight import QuantizedLinear
from packlora.errors import InputError


def block_layer(N: int, K: int) -> tuple[FP8Linear, torch.Tensor]:
    """A layer of FP8 in blocks, and what it stands for."""
    tensors, dense = fp8(torch.randn(N, K))
    layer = FP8Linear(K, N, block_size=BLOCK, has_bias=True)
    layer.weight = torch.nn.Parameter(tensors["weight"], requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(tensors["weight_scale_inv"], requires_grad=False)
    torch.nn.init.normal_(layer.bias)
    return layer, dense


@pytest.mark.parametrize("shape", [(16, 24), (33, 50), (7, 5), (64, 49)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_fp8_are_codes_times_scales_also_at_borders(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer, dense = block_layer(*shape)
    codes = library_codes(layer)
    assert codes is not None and codes.shape == shape and codes.settings == {"method": "fp8"}
    made = codes.values(dtype)
    assert made.is_contiguous() and torch.equal(made, dense.to(dtype))


def test_one_scale_for_a_whole_layer_is_read_too() -> None:
    layer = FP8Linear(6, 4, block_size=None)
    layer.weight = torch.nn.Parameter(torch.randn(4, 6).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.tensor(0.37), requires_grad=False)
    codes = library_codes(layer)
    assert codes is not None and torch.equal(codes.values(torch.float32), layer.weight.float() * 0.37)


def test_a_layer_is_cast_and_moved_without_its_codes_and_keeps_no_other_layer() -> None:
    library, dense = block_layer(20, 30)
    codes = library_codes(library)
    assert codes is not None
    layer = QuantizedLinear(codes, library.bias, torch.float64)
    gone = weakref.ref(library)
    del library, codes
    gc.collect()
    assert gone() is None
    x = torch.randn(3, 30, dtype=torch.float64, requires_grad=True)
    for each in (layer, layer.to(torch.bfloat16), layer.to("cpu")):
        bias = None if each.bias is None else each.bias.detach().double()
        y = each(x) if each.bias.dtype == x.dtype else None
        if y is not None:
            torch.testing.assert_close(y, torch.nn.functional.linear(x, dense.double(), bias), rtol=1e-12, atol=1e-12)
        assert each.weight.dtype == torch.uint8 and torch.equal(each.frozen.codes.values(torch.float32), dense)
    held = layer.state_dict()
    assert {name for name in held if name.startswith("weight")} == {"weight", "weight.weight_scale_inv"}
    moved = layer.frozen.codes.with_stored(layer.weight.clone())
    assert torch.equal(moved.values(torch.float32), dense) and moved.stored is not layer.weight


@pytest.mark.parametrize("shape", [(5, 3), (8, IDENTITY_ROWS + 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_with_the_identity_is_the_weight_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    W = torch.randn(shape).to(dtype)
    seen = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return torch.nn.functional.linear(x, W)

    assert torch.equal(by_identity(product, shape, dtype, W.device), W) and max(seen) <= IDENTITY_ROWS


def test_torchao_s_tensors_without_a_dense_form_are_read_by_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao: Any = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(40, 24, dtype=torch.bfloat16)
    torchao.quantize_(layer, torchao.Float8WeightOnlyConfig())
    codes = library_codes(layer)
    assert isinstance(codes, LibraryCodes) and codes.settings["quant_type"] == "float8_weight_only"
    want = codes.values(torch.bfloat16)
    kind, asked = type(layer.weight), []

    def none(self: Any) -> torch.Tensor:
        asked.append(self)
        raise NotImplementedError

    dequantize = kind.dequantize
    monkeypatch.setattr(kind, "dequantize", lambda self, *a: none(self) if not asked else dequantize(self, *a))
    assert torch.equal(codes.values(torch.bfloat16), want) and asked
    assert library_codes(torch.nn.Linear(3, 3)) is None


def test_codes_that_nobody_has_read_are_refused_by_the_name_of_their_layer() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        InputError, match=r"'base': model.layers.0.mlp.up_proj is a quantised torch.nn.*, which is not read"
    ):
        own_layers(model, torch.float32, "base")


@pytest.mark.parametrize("kind", FORMATS)
def test_what_a_configuration_says_is_what_the_codes_take(kind: str) -> None:
    pack, told = FORMATS[kind]

    class Config:
        quantization_config = told

    stored = stored_as(Config, "base")
    assert stored is not None
    tensors, dense = pack(torch.randn(64, 96))
    held = sum(tensor.nbytes for name, tensor in tensors.items() if name != "weight_shape")
    assert stored.bytes_of(64, 96, torch.float32) == pytest.approx(held, rel=0.02)
    assert stored.as_asked.described == told["quant_method"] and dense.shape == (64, 96)
