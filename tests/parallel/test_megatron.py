"""Adapters on Megatron-Core models: what one process computes is computed in every layout, in float64."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from seeds import SOAK

pytest.importorskip("megatron.core")

from megatron_runs import (
    BOUND,
    Case,
    Layout,
    around,
    benched,
    broken,
    compared,
    damaged,
    divided,
    documented,
    fewer_words,
    handed_on,
    handed_on_experts,
    kept,
    latent,
    lora,
    padded,
    piped,
    recomputed,
    refusals,
    replicated,
    sent,
    spread,
    staged,
    stepped,
    taken_over,
    tied_stages,
    unseen_writes,
    worst,
)  # fmt: skip

from benchmarks.__main__ import main
from packlora.config import AdapterConfig
from packlora.errors import InputError
from packlora.megatron.targets import config_of

Pool = Callable[[int], Ranks]
THREE = {
    "a": lora(lora_dropout=0.2),
    "b": lora(use_dora=True, r=2),
    "c": lora(use_rslora=True, target_modules=["linear_qkv"]),
}
OWNERS = ("b", "a", None, "c")
EVERYTHING = [
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router", "word_embeddings", "output_layer",
]  # fmt: skip
MOE: dict[str, Any] = {
    "num_layers": 1, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12,
    "moe_token_dispatcher_type": "allgather",
    "moe_shared_expert_intermediate_size": 8,
}  # fmt: skip
MOE2 = MOE | {"num_layers": 2}
OVERLAPPED = {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": True}
SPREAD = (Layout(1, False, 2), Layout(2, True, 2), Layout(2, True, 1, 2))


def test_every_layout_learns_what_one_process_learns(ranks: Pool) -> None:
    """Logits and whole gradients of all parameters: LoRA, rsLoRA, DoRA, dropout, embedding and output layer, several owners;
    also with biases, without gates, with one key for both processes' queries, with a tied output layer."""
    plain: dict[str, Any] = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}
    biased = {"add_bias_linear": True, "add_qkv_bias": True}
    words = lora(target_modules=["word_embeddings", "linear_fc2"], init_lora_weights="gaussian")
    cases = [
        Case({"one": lora(use_rslora=True, lora_dropout=0.2)}, model=plain | biased),
        Case({"one": lora(use_dora=True, lora_dropout=0.1)}, model={"num_query_groups": 1}),
        Case({"one": lora(target_modules=["word_embeddings", "output_layer", "linear_fc2"])}),
        Case({"one": words}, model={"tied": True}, layouts=(Layout(2, True),)),
        Case(THREE, OWNERS, biased),
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
        Case({"one": moe}, model=MOE | OVERLAPPED, layouts=SPREAD[1:2]),
    ]
    for error, where in worst(ranks(2).run(compared, cases)):
        assert error < BOUND, where


def test_steps_of_megatrons_own_optimizer_are_those_of_one_process(ranks: Pool) -> None:
    """Three of them, under its DistributedDataParallel and finalize_model_grads, and the gradient's norm as it counts it."""
    moe = lora(target_modules=["linear_fc1", "linear_fc2"], use_dora=True)
    cases = {
        (Layout(2), Layout(2, True)): Case(THREE, OWNERS),
        (Layout(1, False, 2), Layout(2, True, 2)): Case({"one": moe}, model=MOE),
    }
    for layouts, case in cases.items():
        [error] = worst([[one] for one in ranks(2).run(stepped, case, layouts)])
        assert error[0] < BOUND, error[1]


@pytest.mark.soak
def test_replicas_learn_what_one_process_learns(ranks: Pool, tmp_path: Path) -> None:
    """On other data each; with the distributed optimizer and its overlaps; and from an optimizer's state in another layout."""
    [error] = worst([[one] for one in ranks(2).run(replicated, str(tmp_path / "state"))])
    assert error[0] < BOUND, error[1]


def test_stages_and_chunks_of_a_pipeline_learn_what_one_process_learns(ranks: Pool) -> None:
    own = ["linear_qkv", "linear_fc2"]
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cases = {
        "several": Case({"a": lora(lora_dropout=0.1), "b": lora(use_dora=True)}, ("a", "b", None, "a")),
        "a stage without adapters": Case({"one": lora(target_modules=own, layers_to_transform=[1])}),
        "recomputed": Case({"a": lora(lora_dropout=0.1), "b": lora(use_dora=True)}, ("a", "b", None, "a"), again),
        "tied": Case({"one": lora(target_modules=["word_embeddings", "linear_qkv"])}, model={"tied": True}),
        "chunks": Case({"one": lora(use_dora=True, target_modules=own)}, model={"num_layers": 4}),
    }
    [error] = worst([[one] for one in ranks(2).run(piped, cases)])
    assert error[0] < BOUND, error[1]


def test_a_checkpoint_is_read_in_another_layout(ranks: Pool, tmp_path: Path) -> None:
    """Gate and up, queries, keys and values, experts, also grouped ones: whole tensors are the same to the bit."""
    case = Case({"a": lora(use_dora=True), "b_1": lora(target_modules=EVERYTHING)}, model=MOE)
    layouts = [Layout(1, False, 2), Layout(2, True, 1, 2)]
    wrong = ranks(2).run(kept, str(tmp_path / "experts"), case, Layout(2, True, 2), layouts)
    grouped = Case({"a": lora(target_modules=["linear_fc1", "linear_fc2"], use_dora=True)}, model=MOE, te=True)
    wrong += ranks(2).run(
        kept, str(tmp_path / "grouped"), grouped, Layout(1, False, 2), [Layout(1), Layout(2, True, 2)]
    )
    dense = Case({"a": lora(use_dora=True), "b": lora(target_modules=["linear_qkv"], layers_to_transform=[1])})
    wrong += ranks(2).run(kept, str(tmp_path / "dense"), dense, Layout(2), [Layout(1), Layout(2, True)])
    assert not any(wrong), wrong


def test_the_models_own_state_has_adapters_on_some_layers_and_of_unlike_ranks(ranks: Pool, tmp_path: Path) -> None:
    """Megatron-Core puts the layers of a model into one tensor, where all have an adapter of one rank."""
    fc1 = ["linear_fc1"]
    adapters = {
        "some": lora(target_modules=["linear_qkv", "linear_fc1"], layers_to_transform=[1], use_dora=True),
        "unlike": lora(target_modules=fc1, rank_pattern={"layers.1.mlp.linear_fc1": 2}), "all": lora(target_modules=fc1),
    }  # fmt: skip
    layouts = [Layout(1), Layout(2)]
    wrong = ranks(2).run(kept, str(tmp_path / "dense"), Case(adapters), Layout(2, True), layouts, True)
    some = Case({"some": lora(target_modules=["linear_fc1", "linear_fc2"], layers_to_transform=[1])}, model=MOE2)
    wrong += ranks(2).run(kept, str(tmp_path / "experts"), some, Layout(1, False, 2), [Layout(1)], True)
    assert not any(wrong), wrong


@pytest.mark.parametrize("words", [44, 52])
def test_a_checkpoint_is_read_where_the_vocabulary_is_padded_otherwise(ranks: Pool, tmp_path: Path, words: int) -> None:
    for found in ranks(2).run(fewer_words, str(tmp_path / "state"), words):
        for key in [key.removeprefix("two ") for key in found if key.startswith("two ")]:
            two, one = found[f"two {key}"], found[f"one {key}"]
            same = tuple(slice(0, min(sizes)) for sizes in zip(two.shape, one.shape, strict=True))
            assert torch.equal(two[same], one[same]), key


def test_a_tied_embedding_is_merged_on_no_stage(ranks: Pool) -> None:
    for said in ranks(2).run(tied_stages):
        assert [words.partition(",")[0] for words in said] == [
            f"adapter 'x' is on {own}" for own in ("embedding.word_embeddings", "output_layer")
        ]


def test_layers_of_transformer_engine_learn_what_megatrons_own_do(ranks: Pool) -> None:
    """By stand-ins with their attributes and calls: a norm before the product, grouped experts, layers that every process has
    whole, other names of everything."""
    moe = lora(target_modules=["linear_fc1", "linear_fc2"])
    whole = lora(target_modules=["mix", "linear_qkv"], lora_dropout=0.1)
    cases = [
        Case({"one": lora(use_dora=True)}, layouts=(Layout(1), Layout(2), Layout(2, True)), te=True),
        Case(
            {"a": moe, "b": moe | {"use_dora": True}, "c": moe}, OWNERS, MOE, (Layout(1), Layout(2, True, 2)), te=True
        ),
        Case({"a": whole, "b": whole | {"use_dora": True}, "c": whole}, OWNERS, {"mixed": True}),
    ]
    for error, where in worst(ranks(2).run(compared, cases)):
        assert error < BOUND, where


def test_peft_computes_the_same_from_an_adapters_folder(ranks: Pool, tmp_path: Path) -> None:
    """Also where ranks and scalings differ by layer; and what is read again, or merged, is the same."""
    unlike = {"rank_pattern": {"linear_fc1": 2}, "alpha_pattern": {"linear_qkv": 3}}
    adapters = {
        "a": lora(**unlike),
        "b": lora(use_dora=True, use_rslora=True, **unlike),
        "c": lora(target_modules=EVERYTHING[2:4]),
    }
    [error] = worst([[one] for one in ranks(2).run(handed_on, str(tmp_path), Case(adapters), Layout(2, True))])
    assert error[0] < BOUND, error[1]


def test_peft_computes_the_same_where_the_output_layer_is_tied(ranks: Pool, tmp_path: Path) -> None:
    adapters = {"a": lora(use_dora=True), "b": lora(target_modules=["word_embeddings", "linear_fc2"])}
    case = Case(adapters, model={"tied": True})
    [error] = worst([[one] for one in ranks(2).run(handed_on, str(tmp_path), case, Layout(2, True))])
    assert error[0] < BOUND, error[1]


def test_adapters_of_q_k_v_gate_and_up_are_taken_over_exactly(ranks: Pool, tmp_path: Path) -> None:
    [error] = worst([[one] for one in ranks(2).run(taken_over, str(tmp_path))])
    assert error[0] < BOUND, error[1]


def test_peft_and_other_layouts_compute_the_same_from_a_folder_with_experts(ranks: Pool, tmp_path: Path) -> None:
    """All experts of a layer in one tensor, routers and shared experts as parameters, ranks and scalings that differ; the same
    bytes in any layout."""
    unlike: dict[str, Any] = {
        "rank_pattern": {"linear_fc1": 2}, "alpha_pattern": {"linear_fc2": 7, "local_experts.1.linear_fc1": 9},
    }  # fmt: skip
    cases = {
        "all": lora(target_modules=["linear_qkv", "linear_fc1", "linear_fc2", "router"], **unlike),
        "down": lora(target_modules=["linear_fc2"], layers_to_transform=[1], use_rslora=True),
        "DoRA": lora(target_modules=["linear_fc1", "linear_fc2", "router"], use_dora=True),
    }
    [error] = worst([[one] for one in ranks(2).run(handed_on_experts, str(tmp_path), cases)])
    assert error[0] < BOUND, error[1]


def test_peft_computes_the_same_from_a_folder_with_latent_attention(ranks: Pool, tmp_path: Path) -> None:
    [error] = worst([[one] for one in ranks(2).run(latent, str(tmp_path))])
    assert error[0] < BOUND, error[1]


def test_the_rank_of_experts_is_divided_and_their_scaling_stays(ranks: Pool) -> None:
    assert ranks(2).run(divided) == [(3, 9 / 6**0.5, 6, 9 / 6**0.5)] * 2


def test_the_code_of_the_page_runs(ranks: Pool, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    for found in ranks(2).run(documented, str(tmp_path / "page"), page):
        assert found["losses"][-1] < found["losses"][0] - 0.1
        assert found["files"] == ["adapter", "law", "state"]


def test_adapters_send_nothing_in_a_layer(ranks: Pool) -> None:
    """The same collectives, of the same bytes, as the frozen model."""
    for found in ranks(2).run(sent):
        for names, size, own_names, own_size in found.values():
            assert names == own_names and size == own_size > 0


def test_a_model_that_is_wrapped_already_and_states_of_merged_weights(ranks: Pool) -> None:
    """A Float16Module changes no names and hides no embedding; merged weights are kept without the adapters in them."""
    for found in ranks(2).run(around):
        assert found == {"state": (16, 16), "learns": True, "merged": True, "unmerged": 16, "routers": True}


def test_words_that_megatron_has_more_of_are_filled_up_when_an_adapter_is_read(ranks: Pool, tmp_path: Path) -> None:
    [error] = worst([[one] for one in ranks(2).run(padded, str(tmp_path / "x"))])
    assert error[0] < BOUND, error[1]


def test_damaged_files_and_states_of_something_else_are_refused(ranks: Pool, tmp_path: Path) -> None:
    words = {
        "nan": "not finite", "infinite": "not finite", "whole": "int32", "one row": "(1, 3)", "one number": "(1,)",
        "flat": "lora_B.weight is (", "a column more": "down_proj.lora_A.weight is (", "empty": "holds nothing",
        "foreign": "'decoder.lora_A_y'", "partial": "lacks", "less than none": "-2 tokens",
        "an expert's row": "lora_A.weight is (11, 12)", "one weight": "down_proj has {}", "one by one": "the same",
    }  # fmt: skip
    for said in ranks(2).run(damaged, str(tmp_path)):
        assert said.keys() == words.keys()
        for name, word in words.items():
            assert word in said[name], (name, said[name])


def test_faults_that_are_put_in_are_seen(ranks: Pool) -> None:
    """Those of other implementations: each makes the comparisons of this file fail by far."""
    one, other = ranks(2).run(broken)
    seen = {name: max(error, other[name]) for name, error in one.items()}
    assert len(seen) == 8 and all(error > 1e-3 for error in seen.values()), seen


def test_writes_that_no_version_shows_are_seen_after_a_step(ranks: Pool) -> None:
    [(error, moved), _] = ranks(2).run(unseen_writes)
    assert error < BOUND < 1e-3 < moved


def test_recomputed_layers_draw_the_same_masks(ranks: Pool) -> None:
    [error] = worst([[one] for one in ranks(2).run(recomputed)])
    assert error[0] < BOUND, error[1]


def test_what_is_not_supported_is_refused_by_name(ranks: Pool, tmp_path: Path) -> None:
    said, _ = ranks(2).run(refusals, str(tmp_path))
    words = {
        "target": "linear_qkvs", "half": "without k_proj", "bias": "bias is 'all'", "start": "'pissa'",
        "pattern": "rank_pattern",
        "embedding": "which DoRA does not support", "name": "'a.b'", "none": "no adapter", "kind": "not int",
        "folder": "not a PEFT adapter folder", "tied": "untie it", "twice": "has adapters", "owner": "'c'",
        "graph": "cuda_graph_impl", "fused": "is a MLP", "merged": "unmerge first", "saved": "unmerge before save",
        "unlike experts": "need the same rank", "some experts": "has 1 of the 4 experts of ",
        "no experts": "takes no experts", "no multiple": "no multiple of the 2",
        "apart": "on several devices", "moved": "was moved from cpu to meta", "tied words": "the output layer's too",
        "state": "unmerge before sharded_state_dict", "exclusion": "exclude_modules has 'o_proj'",
        "layers": "layers_to_transform has 7, and the model has no layer of that number",
        "rest": "linear_fc1 linear_fc2 linear_qkv", "ahead": "decoder.layers.0.mlp.linear_fc1",
    }  # fmt: skip
    assert said.keys() == words.keys()
    for name, word in words.items():
        assert word in said[name], said[name]


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["norm"]}, {"trainable_token_indices": [3]}, {"target_parameters": ["experts.down_proj"]},
        {"dora_dropout": "low_rank"}, {"init_from": "a/folder"},
    ],
)  # fmt: skip
def test_what_models_of_transformers_alone_have_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))} is set, which adapters on Megatron-Core"):
        config_of(AdapterConfig(**settings), "a")


@pytest.mark.soak
def test_the_benchmark_writes_what_it_measures(ranks: Pool, tmp_path: Path) -> None:
    """On one process, as on one GPU, and on two, plain and with sequence parallelism; adapters send what frozen layers do."""
    out = tmp_path / "megatron.json"
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        assert main(["megatron", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    assert ranks(2).run(benched, tmp_path / "two.json") == [0, 0]
    written = [json.loads(file.read_text()) for file in (out, tmp_path / "two.json")]
    assert [row["case"] for file in written for row in file["rows"]] == [
        "tiny plain tp1",
        "tiny plain tp2",
        "tiny sp tp2",
    ]
    for row in written[0]["rows"] + written[1]["rows"]:
        assert row["ms"].keys() == {"frozen", "packlora", "packlora_dora", "plain"} and all(row["ms"].values()), row
        sent = {name: found["sent"] for name, found in row["messages"].items()}
        assert sent["packlora"] == sent["packlora_dora"] == sent["frozen"] and (
            row["processes"] == 1 or sent["frozen"]
        ), sent
        assert sent["plain"] > sent["frozen"] or row["processes"] == 1, sent
    assert written[1]["summary"].keys() >= {"part_packlora_over_frozen_tp2", "part_packlora_dora_over_frozen_tp2_sp"}


def test_stages_of_a_pipeline_have_the_adapters_of_the_whole_model(ranks: Pool, tmp_path: Path) -> None:
    """First values by the layer's number in the whole model, and one folder of all stages; names are those of all stages."""
    targets = ["word_embeddings", "output_layer", "linear_qkv", "linear_fc1"]
    last = {"decoder.layers.1.self_attention.linear_qkv": 2}
    case = Case({"one": lora(target_modules=targets, rank_pattern=last)})
    assert ranks(2).run(staged, str(tmp_path / "stages"), case) == [[], []]
    assert ranks(2).run(staged, str(tmp_path / "embedding"), case, 1, "E|ttL") == [[], []]
    if SOAK:
        case = Case({"one": lora(use_dora=True)}, model={"num_layers": 4})
        assert ranks(2).run(staged, str(tmp_path / "chunks"), case, 2) == [[], []]


@pytest.mark.soak
def test_four_processes_learn_and_read_what_one_process_does(ranks: Pool, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"num_query_groups": 4, "ffn_hidden_size": 24}
    moe = MOE | {"num_query_groups": 4, "moe_ffn_hidden_size": 16}
    two, owners = {"a": lora(lora_dropout=0.1), "b": lora(use_dora=True)}, ("a", "b", None, "a")
    sent = moe | {
        "moe_token_dispatcher_type": "alltoall"
    }  # gloo gathers no parts of unlike sizes: no expert tensor parallelism
    cases = [
        Case(THREE, OWNERS, wide, (Layout(4), Layout(4, True), Layout(2, True))),
        Case(two, owners, moe, (Layout(4, True, 4), Layout(2, True, 2, 2), Layout(2, True, 2), Layout(1, False, 4))),
        Case(two, owners, sent, (Layout(4, True, 4), Layout(1, False, 4))),
    ]
    for error, where in worst(ranks(4).run(compared, cases)):
        assert error < BOUND, where
    [wrong, *_] = ranks(4).run(
        kept, str(tmp_path / "dense"), cases[0], Layout(2), [Layout(4), Layout(1), Layout(4, True)]
    )
    assert not wrong
    others = [Layout(1, False, 4), Layout(4, True, 4), Layout(1)]
    [wrong, *_] = ranks(4).run(kept, str(tmp_path / "experts"), cases[1], Layout(2, True, 2, 2), others)
    assert not wrong


@pytest.mark.soak
def test_four_processes_with_replicas_learn_what_one_process_does(ranks: Pool) -> None:
    """Tensor and expert parallelism beside data parallelism, on other data each, with the distributed optimizer too."""
    moe = lora(target_modules=["linear_fc1", "linear_fc2", "router"], use_dora=True)
    cases = [
        Case({"a": lora(), "b": lora(use_dora=True)}, ("a", "b", None, "a"), layouts=(Layout(2, True),)),
        Case({"a": moe}, model=MOE, layouts=(Layout(2, True, 2), Layout(1, False, 4), Layout(1, False, 2))),
    ]
    [error] = worst([[one] for one in ranks(4).run(spread, cases)])
    assert error[0] < BOUND, error[1]
