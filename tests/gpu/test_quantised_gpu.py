"""Quantised base models on a GPU: codes behind the kernels, PEFT's layers over them, and a run.

make gpu
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from exactness import assert_as_exact
from group_cases import cast, make_case, outcome
from peft import LoraConfig, get_peft_model
from quantised import KINDS, codes, dequantise, load_quantised
from seeds import SEED

import packlora
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.quantized import Quantized

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dora", [False, True])
def test_accelerated_models_are_as_exact_as_peft_s(kind: str, dora: bool, tmp_path: Path) -> None:
    """Against float64 over dense weights that say the same; of 8 bits, whose products round the inputs, against PEFT itself."""
    tiny_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=1).save_pretrained(tmp_path)
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM")

    def run(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": out.logits.detach(), **grads}

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


def test_a_run_has_the_losses_of_dense_weights_which_say_the_same_and_no_graphs(
    tiny_base: Base, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    base = tiny_base()
    plain = dequantise(load_quantised(base, "nf4 double", torch.bfloat16, DEVICE), torch.bfloat16)
    del plain.config.quantization_config
    plain.save_pretrained(tmp_path / "plain")
    for file in Path(base).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    jobs = [
        {"name": name, "data": {"path": write_rows(name, 12, seed=at)}, "adapter": {"r": 8, "use_dora": at == 1}}
        for at, name in enumerate(("one", "two"))
    ]
    quantization = {"method": "nf4", "double_quant": True}
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
    assert "the weights of quantised layers are made where they are read" in record
