"""Quantised base models on a GPU: codes behind the kernels, PEFT's layers over them, and a run.

make gpu
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from conftest import tiny_model
from exactness import assert_as_exact
from group_cases import cast, make_case, outcome
from peft import LoraConfig, get_peft_model
from quantised import KINDS, codes, dequantise, load_quantised
from seeds import SEED
from transformers import AutoModelForCausalLM

import packlora
from packlora.codes import four_bit
from packlora.codes.library import FourBit, library_codes
from packlora.codes.load import read_in_codes
from packlora.codes.weight import Quantized
from packlora.config import QuantizationConfig
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan

DEVICE = "cuda"
IDS = torch.randint(3, 320, (2, 33), generator=torch.Generator().manual_seed(SEED))
Base = Callable[..., str]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan", [CHAIN, ROUTED, Plan("routed", "fused", "one-pass", "fused"), Plan(dx="merged")], ids=lambda plan: plan.name
)
def test_codes_give_the_bits_of_the_weights_that_they_stand_for(kind: str, plan: Plan) -> None:
    case = make_case(96, 64, [128, 32], [[16, 16]], [0.0], True, SEED, torch.bfloat16, DEVICE, whole=0)
    case, _ = cast(case, torch.bfloat16, torch.float32)
    stored = [codes(layer.frozen.rows(0, layer.frozen.shape[0]).contiguous(), kind) for layer in case.layers]
    both: list[list[Any]] = [
        [Quantized(own, torch.bfloat16) for own in stored],
        [Dense(own.values(torch.bfloat16)) for own in stored],
    ]
    got, want = (
        outcome(
            replace(case, layers=tuple(replace(layer, frozen=w) for layer, w in zip(case.layers, own, strict=True))),
            plan,
        )
        for own in both
    )
    assert all(torch.equal(got[name], want[name]) for name in want)


def run(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dora", [False, True])
def test_accelerated_models_are_as_exact_as_peft_s(kind: str, dora: bool, tmp_path: Path) -> None:
    """Against float64 over dense weights that say the same; of 8 bits, whose products round the inputs, against PEFT itself."""
    tiny_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=1).save_pretrained(tmp_path)
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(load_quantised(str(tmp_path), kind, torch.bfloat16, DEVICE), config)
            plain = dequantise(load_quantised(str(tmp_path), kind, torch.bfloat16, DEVICE), torch.float64)
            exact = get_peft_model(plain.to(DEVICE), config).double()
        torch.manual_seed(SEED + number)
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                if "lora_" in name:
                    own[name].copy_(torch.randn_like(parameter) * 0.1 if "vector" not in name else parameter)
                    parameter.copy_(own[name])
        ids = IDS.roll(number).to(DEVICE)
        peft, reference = run(model, ids), run(exact, ids)
        report = packlora.accelerate(model)
        assert report.accelerated == len(report.modules)
        return run(model, ids), peft, reference

    if kind == "int8":
        got, peft, _ = draw(0)
        assert all(float((got[name] - peft[name]).norm() / peft[name].norm()) < 0.05 for name in peft)
    else:
        assert_as_exact(draw, 3, SEED, lambda name: name.rpartition("layers.0.")[2])


INT4 = QuantizationConfig(method="torchao", quant_type="int4_weight_only", group_size=32)


def with_codes(base: str, asked: QuantizationConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model over weights in codes, bfloat16, and what packlora makes of them by path."""
    model, codes = read_in_codes(base, asked, torch.bfloat16, torch.device(DEVICE))
    return model, {path: own.values(torch.bfloat16) for path, own in codes.items()}


@pytest.mark.parametrize("shape", [(72, 1056), (64, 2048)], ids=["filled up", "whole"])
def test_four_bits_of_torchao_are_the_weights_that_were_quantised(shape: tuple[int, int]) -> None:
    """To half a step of their group and its rounding; and the library multiplies with the very same weights."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, device=DEVICE, dtype=torch.bfloat16)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(DEVICE)
    layer.weight.data = (drawn * torch.linspace(0.5, 2.0, shape[1], device=DEVICE) + 0.3).bfloat16()
    dense = layer.weight.detach().float()
    asked = quantization.Int4WeightOnlyConfig(
        group_size=32, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    quantization.quantize_(layer, asked)
    codes = library_codes(layer)
    assert codes is not None
    W_NK = codes.values(torch.float32)
    parts = dense.unflatten(1, (-1, 32))
    step = (parts.amax(2) - parts.amin(2)) / 15
    rounding = 2**-6 * parts.abs().amax(2)  # scales, zeros, codes and weights are computed in bfloat16
    assert bool(((W_NK - dense).unflatten(1, (-1, 32)).abs().amax(2) <= 0.6 * step + rounding).all())
    x = torch.randn(33, shape[1], device=DEVICE, dtype=torch.bfloat16)
    y, expected = layer(x).float(), x.float() @ W_NK.T
    assert float((y - expected).norm() / expected.norm()) < 4e-3


def test_accelerated_models_over_four_bits_of_torchao_are_as_exact_as_dense_ones(tmp_path: Path) -> None:
    """Against float64; PEFT's own layers over these codes give no gradients of their inputs and have no DoRA, so beside it is
    PEFT over dense bfloat16 weights that say the same."""
    pytest.importorskip("torchao")
    tiny_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=1).save_pretrained(tmp_path)
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")

    def dense(dtype: torch.dtype) -> Any:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
        for path, W_NK in values.items():
            plain.get_submodule(path).weight.data = W_NK.to("cpu")
        return get_peft_model(plain.to(DEVICE, dtype), config).to(dtype).train()

    model, values = with_codes(str(tmp_path), INT4)
    model = get_peft_model(model, config).train()
    peft, exact = dense(torch.bfloat16), dense(torch.float64)
    report = packlora.accelerate(model)
    assert report.accelerated == len(report.modules) == 7

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        torch.manual_seed(SEED + number)
        others = dict(model.named_parameters()), dict(peft.named_parameters())
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                if "lora_" in name:
                    if "vector" not in name:
                        parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
                    for own in others:
                        own[name].copy_(parameter)
        ids = IDS.roll(number).to(DEVICE)
        return run(model, ids), run(peft, ids), run(exact, ids)

    assert_as_exact(draw, 3, SEED, lambda name: name.rpartition("layers.0.")[2])


@pytest.mark.parametrize("kind", ["nf4", "torchao int4"])
def test_a_run_has_the_losses_of_dense_weights_which_say_the_same(
    kind: str, tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    base = tiny_base()
    if kind == "nf4":
        quantization: dict[str, Any] = {"method": "nf4", "double_quant": True}
        plain = dequantise(load_quantised(base, "nf4 double", torch.bfloat16, DEVICE), torch.bfloat16)
        del plain.config.quantization_config
    else:
        pytest.importorskip("torchao")
        quantization = INT4.model_dump(exclude_none=True)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        for path, W_NK in with_codes(base, INT4)[1].items():
            plain.get_submodule(path).weight.data = W_NK.to("cpu")
    plain.save_pretrained(tmp_path / "plain")
    for file in Path(base).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    jobs = [
        {"name": name, "data": {"path": write_rows(name, 12, seed=at)}, "adapter": {"r": 8, "use_dora": at == 1}}
        for at, name in enumerate(("one", "two"))
    ]
    tree = {"dtype": "bfloat16", "device": DEVICE, "max_tokens_per_microbatch": 512, "jobs": jobs}
    losses = []
    for name, own in (
        ("codes", {"base_model": base, "quantization": quantization}),
        ("dense", {"base_model": str(tmp_path / "plain"), "cuda_graphs": False}),
    ):
        packlora.train(tree | own | {"output_dir": str(tmp_path / name)})
        losses.append([json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    record = (tmp_path / "codes" / "run.json").read_text()
    assert ("are made where they are read, by their library" in record) == (kind != "nf4")


@pytest.mark.parametrize("dtype", four_bit.TYPES, ids=str)
def test_the_kernel_of_4_bit_codes_gives_the_bits_of_bitsandbytes(dtype: torch.dtype) -> None:
    for kind, nested, shape in itertools.product(("nf4", "fp4"), (False, True), ((4096, 1024), (100, 192), (257, 128))):
        W = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 2, shape[0], device=DEVICE)[:, None]
        stored, state = quantize_4bit(W.to(dtype), quant_type=kind, compress_statistics=nested)
        got = four_bit.computed(stored, state, dtype).view(shape)
        assert torch.equal(got, FourBit(stored, state)._by_library(dtype)), (kind, nested, shape)
