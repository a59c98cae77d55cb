"""The kernel of 4-bit codes against bitsandbytes, in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from peft import LoraConfig

from benchmarks.shapes import TARGETS, build_layers, config_of
from packlora.adapters.attach import attach
from packlora.adapters.spec import resolve
from packlora.base.packing import prepare_model
from packlora.codes.library import FourBit
from packlora.codes.weight import QuantizedLinear
from packlora.ops.recompute_hooks import add_recompute

pytest.importorskip("bitsandbytes")
pytest.importorskip("triton")
from bitsandbytes.functional import quantize_4bit

from packlora.codes import four_bit


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_the_kernel_gives_the_bits_of_bitsandbytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all sizes, and blocks that fill no program, or no block of scales; what the kernel leaves out would be NaN."""
    empty = torch.empty

    def poisoned(*size: int, **how: Any) -> torch.Tensor:
        made = empty(*size, **how)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(four_bit.torch, "empty", poisoned)
    shapes = ((64, 64), (100, 192), (257, 128))
    for nested, dtype, shape in itertools.product((False, True), four_bit.TYPES, shapes):
        W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        W = (W * torch.logspace(-3, 2, shape[0])[:, None]).to(dtype)
        stored, state = quantize_4bit(W, quant_type=kind, compress_statistics=nested)
        got, want = four_bit.computed(stored, state, dtype).view(shape), FourBit(stored, state).values(dtype)
        off = (
            2**-7 * want.abs() if dtype == torch.bfloat16 else 0.0
        )  # the interpreter cuts what a GPU rounds to bfloat16
        assert ((got - want).abs() <= off).all(), (nested, dtype, shape)


def test_codes_are_the_library_s_until_the_kernel_has_given_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit, "_EQUAL", known := {})
    stored, state = quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    asked: list[int] = []

    def library() -> torch.Tensor:
        asked.append(1)
        return FourBit(stored, state).values(torch.float32).flatten()

    first, second = (four_bit.dense(stored, state, torch.float32, library) for _ in range(2))
    assert len(asked) == 1 and torch.equal(first, second) and list(known.values()) == [True]
    monkeypatch.setattr(four_bit, "computed", lambda *_: first + 1)
    known.clear()
    assert all(torch.equal(four_bit.dense(stored, state, torch.float32, library), first) for _ in range(2))
    assert len(asked) == 3


def test_gated_products_over_codes_are_tried_with_the_sizes_of_the_weights() -> None:
    """And so are not kept for the backward; codes of 4 bits lie as [N * K / 2, 1]."""

    def layer(weight_NK: torch.Tensor) -> torch.nn.Module:
        return QuantizedLinear(FourBit(*quantize_4bit(weight_NK, quant_type="nf4")), None, torch.bfloat16)

    config = config_of("Qwen3-0.6B", tiny=True)
    model = build_layers(config, torch.device("cpu"), layer)
    prepare_model(model, gradient_checkpointing=False)
    spec = resolve(LoraConfig(r=4, lora_dropout=0.0, target_modules=TARGETS), model, "a")
    attach(model, {"a": spec}, 0)
    seen: list[tuple[int, ...]] = []
    for one in model.model.layers:
        one.mlp.act_fn.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    said, left = add_recompute(model)
    assert f"{config.num_hidden_layers} gated products" in said and not left
    assert {shape[-1] for shape in seen} == {config.intermediate_size}
