"""Adapters on Megatron-Core models: what one process computes is computed in every layout, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

pytest.importorskip("megatron.core")

from megatron_runs import BOUND, Case, Layout, compared, kept, lora, stepped, worst

Pool = Callable[[int], Ranks]
THREE = {"a": lora(lora_dropout=0.2), "b": lora(use_dora=True, r=2), "c": lora(use_rslora=True, target_modules=["linear_qkv"])}
OWNERS = ("b", "a", None, "c")
EVERYTHING = [
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router", "word_embeddings", "output_layer",
]  # fmt: skip
MOE: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_token_dispatcher_type": "allgather",
    "moe_shared_expert_intermediate_size": 8,
}  # fmt: skip
SPREAD = (Layout(1, False, 2), Layout(2, True, 2), Layout(2, True, 1, 2))


def test_every_layout_learns_what_one_process_learns(ranks: Pool) -> None:
    """Logits and whole gradients of all parameters: LoRA, rsLoRA and DoRA, dropout, embedding and output layer, several owners."""
    cases = [
        Case({"one": lora(use_rslora=True, lora_dropout=0.2)}),
        Case({"one": lora(use_dora=True, lora_dropout=0.1)}),
        Case({"one": lora(target_modules=["word_embeddings", "output_layer", "linear_fc2"])}),
        Case(THREE, OWNERS),
    ]
    for error, where in worst(ranks(2).run(compared, cases)):
        assert error < BOUND, where


def test_experts_routers_and_shared_experts_learn_in_every_layout(ranks: Pool) -> None:
    moe = lora(target_modules=["linear_fc1", "linear_fc2", "router"])
    several = {"a": moe | {"lora_dropout": 0.2}, "b": moe | {"use_dora": True}, "c": moe}
    cases = [
        Case({"one": moe}, model=MOE, layouts=SPREAD),
        Case(several, OWNERS, MOE, SPREAD),
        Case(several, OWNERS, MOE | {"moe_token_dispatcher_type": "alltoall"}, SPREAD),
    ]
    for error, where in worst(ranks(2).run(compared, cases)):
        assert error < BOUND, where


def test_steps_of_megatrons_own_optimizer_are_those_of_one_process(ranks: Pool) -> None:
    """Three of them, under its DistributedDataParallel and finalize_model_grads, and the gradient's norm as it counts it."""
    layouts = [Layout(2), Layout(2, True)]
    [error] = worst([[one] for one in ranks(2).run(stepped, Case(THREE, OWNERS), layouts)])
    assert error[0] < BOUND, error[1]


def test_a_checkpoint_is_read_in_another_layout(ranks: Pool, tmp_path: Path) -> None:
    """Gate and up, queries, keys and values, experts: whole tensors are the same to the bit."""
    case = Case({"a": lora(use_dora=True), "b_1": lora(target_modules=EVERYTHING)}, model=MOE)
    layouts = [Layout(1), Layout(1, False, 2), Layout(2, True, 1, 2)]
    wrong = ranks(2).run(kept, str(tmp_path / "experts"), case, Layout(2, True, 2), layouts)
    dense = Case({"a": lora(use_dora=True), "b": lora(target_modules=["linear_qkv"], layers_to_transform=[1])})
    wrong += ranks(2).run(kept, str(tmp_path / "dense"), dense, Layout(2), [Layout(1), Layout(2, True)])
    assert not any(wrong), wrong
