"""Products in FP8 on a GPU that has them: rows, products and fused products against float64 on the same codes, graphs, a run.

make gpu
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from fp8_cases import in_fp8, specified
from group_cases import KINDS, cast, make_case, outcome
from peft import LoraConfig, get_peft_model
from seeds import SEED
from transformers import LlamaConfig, LlamaForCausalLM

import packlora
from packlora.fp8.rows import coded, plain_rows_of, rows_of
from packlora.fp8.weight import Fp8Weight, TwiceCoded, why_not_on
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.prepared import GroupState

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or why_not_on(torch.device("cuda", 0)) is not None, reason="no FP8"
)
HALF = torch.bfloat16
FUSED = Plan("routed", "fused", "one-pass", "fused")
WIDE = Plan("mm", "fused", "mm", "fused")
ERROR = 3e-3
"""Root mean square of what rounding to bfloat16 and sums of some 14 bits add."""


@pytest.mark.parametrize("shape", [(33, 64), (1, 4096), (70, 12288), (5, 1040)], ids=str)
@pytest.mark.parametrize("has_factors", [False, True])
def test_rows_have_torch_s_codes(shape: tuple[int, int], has_factors: bool) -> None:
    x = torch.randn(shape, device=DEVICE, dtype=HALF) * torch.logspace(-9, 9, shape[0], device=DEVICE)[:, None].to(HALF)
    factors = torch.exp2(torch.randint(-9, 3, (shape[1],), device=DEVICE).float()) if has_factors else None
    got, want = rows_of(x, factors), plain_rows_of(x, factors)
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 64, 32), (7, 64, 48), (100, 1024, 768), (4096, 4096, 1024)], ids=str)
def test_products_of_the_library_are_those_of_the_codes(shape: tuple[int, int, int]) -> None:
    T, K, N = shape
    x, d = torch.randn(T, K, device=DEVICE, dtype=HALF), torch.randn(T, N, device=DEVICE, dtype=HALF)
    codes = TwiceCoded.of(coded(torch.randn(N, K, device=DEVICE) / K**0.5))
    weight, W = Fp8Weight(codes, HALF), codes.values(torch.float64)
    exact = rows_of(x).values(torch.float64) @ W.T
    assert (weight.matmul(x).double() - exact).norm() < ERROR * exact.norm()
    low, bias = torch.randn(T, N, device=DEVICE), torch.randn(N, device=DEVICE, dtype=HALF)
    more = exact + low.double() + bias.double()
    assert (weight.matmul(x, bias, low.clone()).double() - more).norm() < ERROR * more.norm()
    exact = rows_of(d, codes.scales_N).values(torch.float64) @ codes.values(torch.float64).div(
        codes.scales_N.double()[:, None]
    )
    assert (weight.matmul_t(d).double() - exact).norm() < ERROR * exact.norm()


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("four adapters", CHAIN), ("DoRA", CHAIN), ("all tokens", WIDE), ("all tokens", FUSED), ("dropout", FUSED),
     ("four adapters", FUSED), ("DoRA and LoRA, siblings, some absent, biases", FUSED),
     ("all tokens, dropout, siblings, beside idle adapters", FUSED)],
)  # fmt: skip
def test_a_group_is_as_exact_as_its_codes(kind: str, plan: Plan) -> None:
    ranks = KINDS[kind]["ranks"]
    case = make_case(300, 512, (256, 272, 1040)[: len(ranks[0])], with_bias=True, seed=SEED, dtype=HALF, **KINDS[kind])
    exact = specified(case)
    own = in_fp8(cast(case, HALF)[0], HALF)
    moved = replace(
        own, x=own.x.to(DEVICE), keys=own.keys.to(DEVICE), dy=[d.to(DEVICE) for d in own.dy],
        layers=tuple(_moved(layer) for layer in own.layers),
    )  # fmt: skip
    got = outcome(moved, plan)
    for name, want in exact.items():
        # g d is rounded to bfloat16 before it gets its codes: a part of them are the next ones
        bound = (5 if name == "dx" and "DoRA" in kind else 3) * ERROR
        assert (got[name].double().cpu() - want).norm() <= bound * want.norm(), name


def _moved(layer: Any) -> Any:
    def on(value: Any) -> Any:
        return value.detach().to(DEVICE) if isinstance(value, torch.Tensor) else value

    adapters = {
        number: replace(low, **{name: on(getattr(low, name)) for name in ("A", "B", "magnitude", "norm", "bias")})
        for number, low in layer.adapters.items()
    }
    codes = layer.frozen.codes
    frozen = Fp8Weight(codes.with_stored(codes.stored.to(DEVICE)), HALF)
    return replace(layer, frozen=frozen, bias=on(layer.bias), adapters=adapters)


@pytest.mark.parametrize("plan", [FUSED, CHAIN], ids=lambda plan: plan.name)
def test_a_graph_replays_the_bits_of_the_call(plan: Plan) -> None:
    case = make_case(256, 512, [256, 1024], [[16, 16]], [0.1], False, SEED, HALF, DEVICE, whole=0)
    own = in_fp8(cast(case, HALF)[0], HALF)
    state, x = GroupState(), own.x.detach().requires_grad_()
    leaves = [x, *(t for layer in own.layers for low in layer.adapters.values() for t in low.operands().values())]

    def step() -> list[torch.Tensor]:
        outputs = lora_group(x, own.layers, own.segments, own.keys, own.salt, plan, state)
        return [*outputs, *torch.autograd.grad(outputs, leaves, own.dy)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            want = [one.clone() for one in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    kept = x.detach().clone()
    x.data.zero_()  # other tokens in between
    graph.replay()
    x.data.copy_(kept)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_run_by_graphs_has_the_losses_of_one_without_and_nearly_those_of_bfloat16(
    write_rows: Callable[..., str], tmp_path: Path, tokenizer: Any
) -> None:
    base = str(tmp_path / "base")
    tiny_model("qwen2", hidden_size=128, intermediate_size=256).save_pretrained(base)
    tokenizer.save_pretrained(base)
    jobs = [
        {"name": name, "data": {"path": write_rows(name, 12)}, "adapter": {"r": 8, "use_dora": dora, "lora_dropout": dropout},
         "train": {"global_batch_size": 4, "max_steps": 3}}
        for name, dora, dropout in (("lora", False, 0.1), ("dora", True, 0.0))
    ]  # fmt: skip
    losses = {}
    for name, keys in {
        "graphs": {"cuda_graphs": True},
        "none": {"cuda_graphs": False},
        "bf16": {"compute": "dtype"},
    }.items():
        tree = {
            "base_model": base,
            "output_dir": str(tmp_path / name),
            "compute": "fp8",
            "device": "cuda",
            "jobs": jobs,
            **keys,
        }
        result = packlora.train(tree)
        assert result.status == "done"
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
    assert losses["graphs"] == pytest.approx(losses["none"], rel=2e-2)
    assert losses["graphs"] == pytest.approx(losses["bf16"], rel=5e-2) and losses["graphs"] != losses["bf16"]


def test_an_accelerated_model_is_near_its_own_numbers() -> None:
    """Weights as transformers draws them: in models whose attention is saturated the codes' rounding alone moves gradients."""
    torch.manual_seed(SEED)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).to(DEVICE, HALF)
    model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = torch.randint(3, 300, (2, 64), device=DEVICE)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE, HALF):
            model(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    want = gradients()
    report = packlora.accelerate(model, compute="fp8")
    assert "in FP8" in str(report)
    assert torch.cosine_similarity(gradients(), want, dim=0) > 0.97
