"""Targets on models whose experts and routers are parameters: what PEFT takes, what is left out, what is refused by name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import TINY
from expert_models import MODELS, tiny_experts
from peft import LoraConfig, get_peft_model

from packlora.adapters import expert_layout
from packlora.adapters.attach import attach
from packlora.adapters.expert_targets import divided_ranks
from packlora.adapters.files import keyed
from packlora.adapters.reading import tensor_shapes
from packlora.adapters.spec import AdapterSpec, resolve
from packlora.adapters.starts import check_starts
from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.choose import piped, sharded_layouts
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_job import trainable_parameters
from packlora.runtime.wholeness import needs_whole_base

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def model_of(name: str, **changes: Any) -> Any:
    kind, extra = MODELS[name]
    config = getattr(transformers, kind)(**TINY | extra | changes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def targets(wanted: Any, model: Any, **settings: Any) -> AdapterSpec:
    return resolve(LoraConfig(target_modules=wanted, task_type="CAUSAL_LM", **settings), model, "x")


def peft_s(model: Any, wanted: Any, **settings: Any) -> dict[str, torch.Size]:
    """Shapes of what PEFT trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(target_modules=wanted, task_type="CAUSAL_LM", **settings))
    return {name.replace(".default", ""): p.shape for name, p in peft.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_linear_takes_what_peft_takes_and_what_it_leaves_out_is_said(name: str) -> None:
    model = model_of(name)
    if name == "llama4":
        wanted = set(targets("all-linear", model).modules)
    else:
        spec = targets("all-linear", model)
        wanted, shapes = set(spec.modules), tensor_shapes(spec, model)
        assert trainable_parameters(spec, model) == sum(shape.numel() for shape in shapes.values())
        theirs = peft_s(model_of(name), "all-linear")
        if name == "phimoe":  # PEFT takes its router for a linear layer, and fails when it runs
            theirs = {key: shape for key, shape in theirs.items() if "router" not in key}
        assert shapes == theirs
    told = " ".join(targets("all-linear", model).notes)
    for path, parameter in model.named_parameters():
        if "experts." in path and parameter.ndim == 3 and path not in wanted:
            assert path.replace("layers.0", "layers.*").replace("layers.1", "layers.*") in told
    assert ("leaves out" in told) is (told != "")


@pytest.mark.parametrize(
    "wanted", [["q_proj", "gate_proj", "up_proj"], ["down_proj"], r".*\.(q_proj|gate_proj|up_proj)", ".*_proj"]
)
def test_names_that_mean_experts_to_peft_mean_experts_also_where_a_dense_layer_bears_them(wanted: Any) -> None:
    """Layer 0 has a gate_proj of its own; PEFT adapts the experts of the others under this name."""
    model = model_of("qwen3_moe", mlp_only_layers=[0])
    assert "model.layers.0.mlp.gate_proj" in dict(model.named_modules())
    found = targets(wanted, model)
    assert not [path for path in found.modules if path.startswith("model.layers.0.mlp")]
    assert tensor_shapes(found, model) == peft_s(model_of("qwen3_moe", mlp_only_layers=[0]), wanted)


def test_an_expression_that_matches_parameters_alone_means_these() -> None:
    found = targets(r".*experts.*_proj", model_of("qwen3_moe"))
    assert tensor_shapes(found, model_of("qwen3_moe")) == peft_s(model_of("qwen3_moe"), r".*experts.*_proj")
    assert {path.rpartition(".")[2] for path in found.modules} == {"gate_up_proj", "down_proj"}


def test_names_of_a_folder_that_match_nothing_are_passed_over_whichever_key_has_them() -> None:
    """PEFT writes such names for expressions and for all-linear, and loads them."""
    model = model_of("qwen3_moe")
    peft = LoraConfig(target_modules=["q_proj", "gate_up_proj"], target_parameters=["wg.weight", "experts.down_proj"])
    assert {path.rpartition(".")[2] for path in resolve(peft, model, "x", of_folder=True).modules} == {
        "q_proj", "down_proj",
    }  # fmt: skip
    peft = LoraConfig(target_modules=["gate_up_proj"], target_parameters=["wg.weight"])
    with pytest.raises(InputError, match=r"names 'wg\.weight', which matches nothing"):
        resolve(peft, model, "x", of_folder=True)


def test_dora_of_experts_whose_folder_peft_does_not_load_is_told() -> None:
    model, said = model_of("qwen3_moe"), "layers.0.mlp.experts.gate_up_proj has an adapter; PEFT has no DoRA of"
    assert said in targets("all-linear", model, use_dora=True).notes[0]
    with pytest.raises(ValueError, match="does not work with use_dora"):
        peft_s(model_of("qwen3_moe"), "all-linear", use_dora=True)
    assert not targets("all-linear", model).notes
    assert not targets(["q_proj"], model, use_dora=True).notes


def test_one_half_of_what_is_one_parameter_is_refused() -> None:
    with pytest.raises(InputError, match=r"'x': target_modules 'gate_proj': Cannot convert .* up_proj"):
        targets(["gate_proj"], model_of("qwen3_moe"))


UNFIT: dict[str, tuple[str, dict[str, Any], set[str], str]] = {
    "MiniMax-M2": (
        "MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"k_proj", "o_proj", "q_proj", "v_proj", "gate_up_proj", "down_proj"},
        r"leaves out model\.layers\.\*\.mlp\.gate\.weight of MiniMaxM2TopKRouter, which cannot be adapted: .* missing 1 req",
    ),
    "LongCat-Flash": (
        "LongcatFlashConfig",
        {"num_layers": 1, "ffn_hidden_size": 96, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "q_lora_rank": 24,
         "expert_ffn_hidden_size": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
         "num_key_value_heads": 4},
        {"classifier", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"},
        r"mlp\.experts\.gate_up_proj of LongcatFlashExperts, whose experts transformers does not call",
    ),
    "Beam": ("BeamConfig", {"head_dim": 16}, {"k_proj", "o_proj", "q_proj", "v_proj"}, r"\.mlp\.gate_proj\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_all_linear_leaves_out_what_cannot_be_adapted_and_says_why(name: str) -> None:
    """PEFT reads all-linear as names of experts and routers; no key of these was written, so none is refused."""
    kind, extra, leaves, said = UNFIT[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**TINY | extra))
    spec = targets("all-linear", model)
    assert {path.rpartition(".")[2] for path in spec.modules} == leaves
    assert re.search(said, spec.notes[0])
    named = {*spec.peft.target_modules, *(spec.peft.target_parameters or ())}
    assert named == leaves and {key.rpartition(".")[2] for key in spec.peft.rank_pattern} <= leaves
    if name == "MiniMax-M2":
        with pytest.raises(
            InputError, match=r"target_modules 'gate, q_proj' is read by PEFT as model.layers.0.mlp.gate.weight of Mini"
        ):
            targets(["q_proj", "gate"], model)
        assert divided_ranks(LoraConfig(r=8, target_modules="all-linear"), model, "x").rank_pattern
        with pytest.raises(InputError, match=r"target_parameters matches model.layers.0.mlp.gate.weight of MiniMaxM2"):
            targets([], model, target_parameters=["gate.weight"])


@pytest.mark.parametrize(
    ("family", "parameters", "message"),
    [
        (
            "llama4",
            EXPERTS[1:],
            "experts.down_proj of Llama4TextExperts, whose experts transformers does not call through",
        ),
        ("qwen3_moe", ["experts.up_proj"], r"matches nothing .* are mlp.experts.down_proj, mlp.experts.gate_up_proj"),
        (
            "gpt_oss",
            ["down_proj_bias"],
            "of GptOssExperts; of experts the weights can be adapted: gate_up_proj, down_proj",
        ),
        ("qwen3_moe", ["q_norm.weight"], "q_norm.weight of Qwen3MoeRMSNorm, a parameter of 1 dimensions"),
        ("qwen3_moe", ["embed_tokens.weight"], "of the output layer or the embeddings"),
    ],
)
def test_parameters_that_cannot_be_adapted_are_refused_by_name(family: str, parameters: Any, message: str) -> None:
    with (
        mock.patch.object(expert_layout, "SCALED", ()),
        pytest.raises(InputError, match=message),
    ):  # Llama 4 as if not known
        targets([], model_of(family), target_parameters=parameters)


def test_the_weight_of_a_linear_layer_is_the_layer() -> None:
    model = model_of("qwen3_moe")
    settings: dict[str, Any] = {"target_parameters": ["q_proj.weight"], "rank_pattern": {"q_proj.weight": 3}}
    found = targets([], model, **settings)
    assert [(path, own.rank) for path, own in found.modules.items()] == [
        ("model.layers.0.self_attn.q_proj", 3), ("model.layers.1.self_attn.q_proj", 3)
    ]  # fmt: skip
    assert tensor_shapes(found, model) == peft_s(model_of("qwen3_moe"), [], **settings)


# --- ranks by the number of experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
def test_a_rank_that_is_divided_by_top_k_is_in_both_patterns_with_the_scaling_of_r(rslora: bool) -> None:
    """Experts alone: shared experts and dense layers of the same names keep theirs."""
    model = model_of("deepseek_v3")  # top_k is 2
    wanted = LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules=["o_proj"],
        target_parameters=EXPERTS,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    whole, divided = resolve(wanted, model, "x"), resolve(divided_ranks(wanted, model, "x"), model, "x")
    for path, own in divided.modules.items():
        assert own.rank == (4 if "experts" in path else 8)
        assert own.scaling == pytest.approx(whole.modules[path].scaling)
    assert divided.peft.rank_pattern == {r"experts\.gate_up_proj": 4, r"experts\.down_proj": 4}
    assert divided.peft.alpha_pattern.keys() == divided.peft.rank_pattern.keys()
    again = LoraConfig(**{key: getattr(divided.peft, key) for key in wanted.to_dict() if key in ("r", "lora_alpha")} | {
        "target_modules": ["o_proj"], "target_parameters": EXPERTS, "rank_pattern": divided.peft.rank_pattern,
    })  # fmt: skip
    assert peft_s(
        model_of("deepseek_v3"), ["o_proj"], r=8, target_parameters=EXPERTS, rank_pattern=again.rank_pattern
    ) == (tensor_shapes(divided, model))


def test_a_rank_that_top_k_does_not_divide_and_one_without_experts_are_refused() -> None:
    model = model_of("qwen3_moe")
    for r, parameters, message in (
        (7, EXPERTS, "the rank 7 of .* no multiple of the 2"),
        (8, None, "takes no experts"),
    ):
        wanted = LoraConfig(r=r, target_modules=["q_proj"], target_parameters=parameters, task_type="CAUSAL_LM")
        with pytest.raises(InputError, match=message):
            divided_ranks(wanted, model, "x")


# --- with other keys of an adapter -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"exclude_modules": ["mlp.experts"]},
            "exclude_modules matches model.layers.0.mlp.experts, but PEFT excludes no",
        ),
        (
            {"exclude_modules": r".*experts.*"},
            "exclude_modules matches model.layers.0.mlp.experts, but PEFT excludes no",
        ),
        ({"layers_to_transform": [1]}, "layers_to_transform does not go with model.layers.0.mlp.experts.gate_up_proj"),
        ({"init_lora_weights": "orthogonal"}, "orthogonal is not for experts"),
    ],
)
def test_keys_that_peft_ignores_or_breaks_on_with_experts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        targets(["q_proj"], model_of("qwen3_moe"), target_parameters=EXPERTS, **settings)


def test_experts_begin_with_values_of_the_size_of_peft_s() -> None:
    starts: dict[Any, list[torch.Tensor]] = {}
    for start in (True, False, "gaussian"):
        settings: dict[str, Any] = {"target_parameters": EXPERTS[:1], "init_lora_weights": start}
        _, (own,) = attach(
            tiny_experts("qwen3_moe", torch.float32), {"x": targets([], model_of("qwen3_moe"), **settings)}, 0
        )
        peft = get_peft_model(
            tiny_experts("qwen3_moe", torch.float32), LoraConfig(target_modules=[], task_type="CAUSAL_LM", **settings)
        )
        theirs = {name.replace(".default", ""): p for name, p in peft.named_parameters() if p.requires_grad}
        ours = keyed(own, own.named_parameters())
        assert ours.keys() == theirs.keys()
        for key, parameter in ours.items():
            assert parameter.std().item() == pytest.approx(theirs[key].std().item(), rel=0.1), (start, key)
        starts[start] = list(ours.values())
    assert not starts[True][1].any() and starts[False][1].any()


@pytest.mark.parametrize("named", ["experts.down_proj", "mlp.gate.weight"])
def test_a_start_of_linear_layers_is_refused_by_the_key_that_names_experts_or_routers(named: str) -> None:
    model = model_of("qwen3_moe")
    spec = targets(["q_proj"], model, target_parameters=[named], init_lora_weights="pissa")
    message = (
        "pissa is for linear layers, and target_parameters, or target_modules in its place, matches model.layers.0."
    )
    with pytest.raises(InputError, match=f"^job 'x': init_lora_weights: {message}.*{named};"):
        check_starts(spec, model, "x")


# --- what does not go together -----------------------------------------------------------------------------------------

ON_EXPERTS = {"target_modules": [], "target_parameters": EXPERTS}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"parallel": {"tensor": 4}}, "parallel.tensor is 4, but model.layers.0.mlp.experts has 6 experts, .* 2, 3, 6"),
    "both": ({"parallel": {"tensor": 2, "expert": 2}}, "parallel.tensor times parallel.expert is 4, but .* has 6 experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_experts_do_not_go_with_is_refused_before_training(
    case: str, tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    keys, message = REFUSED[case]
    kind, extra = MODELS["qwen3_moe"]
    getattr(transformers, kind)(**TINY | extra).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    tree = {
        "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu", **keys,
        "jobs": [{"name": "x", "data": {"path": write_rows("rows")}, "adapter": ON_EXPERTS}],
    }  # fmt: skip
    with pytest.raises(InputError, match=message):
        prepare(Run.model_validate(tree))


def test_a_base_with_adapted_experts_may_be_shared_by_auto(tokenizer: Any, write_rows: Any, tmp_path: Path) -> None:
    kind, extra = MODELS["qwen3_moe"]
    getattr(transformers, kind)(**TINY | extra).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    tree = {
        "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu",
        "jobs": [{"name": "x", "data": {"path": write_rows("rows")}, "adapter": ON_EXPERTS}],
    }  # fmt: skip
    prepared = prepare(Run.model_validate(tree))
    assert not needs_whole_base(prepared)
    assert [layout.shard for layout in sharded_layouts(prepared, 2, {"x": 1.0})] == [2]
    assert [layout.pipeline for layout in piped(prepared, 2, {"x": 1.0})] == [2]


def test_memory_counts_the_products_that_magnitudes_need_and_no_mlp_beside_experts(
    tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    kind, extra = MODELS["qwen3_moe"]
    config = getattr(transformers, kind)(**TINY | extra)
    config.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapter = ON_EXPERTS | {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    jobs = [
        {"name": f"x{dora}", "data": {"path": write_rows("rows")}, "adapter": adapter | {"use_dora": dora}}
        for dora in (False, True)
    ]
    tree = {"base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": jobs}
    prepared = prepare(Run.model_validate(tree))
    plain, dora = prepared.jobs
    assert plain.products == {} and prepared.shape.inner == 0
    of_each = {
        "q_proj": config.num_attention_heads * config.head_dim, "v_proj": config.num_key_value_heads * config.head_dim,
        "gate_up_proj": 2 * config.moe_intermediate_size * config.num_experts_per_tok,
        "down_proj": config.hidden_size * config.num_experts_per_tok,
    }  # fmt: skip
    assert {path: of_each[path.rpartition(".")[2]] for path in dora.spec.modules} == dora.products
    assert len(dora.products) == 4 * config.num_hidden_layers


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"target_modules": []}, "target_modules: is empty"),
        ({"target_parameters": [""]}, "target_parameters.0\n  String should have at least 1 character"),
        ({"init_from": "x", "expert_rank": "r // top_k"}, "expert_rank is not for an adapter with init_from"),
    ],
)
def test_what_a_run_file_may_not_say_of_experts(adapter: dict[str, Any], message: str) -> None:
    tree = {"base_model": "x", "output_dir": "x", "jobs": [{"name": "x", "data": {"path": "x"}, "adapter": adapter}]}
    with pytest.raises(ValueError) as caught:
        Run.model_validate(tree)
    assert message.split(": ")[-1] in str(caught.value)
