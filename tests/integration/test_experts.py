"""Adapters on experts and routers against PEFT, which makes dense deltas, and against each job alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import in_float64, tiny_experts, whole_llama_4
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_export import factors
from test_training import like_peft, train_by_peft
from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration
from typer.testing import CliRunner

import packlora
from packlora.adapters.attach import Adapter, attach, attach_one, detach_one
from packlora.adapters.experts import Owned
from packlora.adapters.files import keyed, save_adapter
from packlora.adapters.linear import Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import AdapterSpec, resolve
from packlora.base.packing import packed_logits, prepare_model
from packlora.cli import app
from packlora.config import Run
from packlora.errors import InputError
from packlora.export.export import export_adapter
from packlora.export.merge import merge_adapter
from packlora.images.proof import check_images
from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.runtime.prepare import prepare


def on_ranks(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> tuple[str, int]:
    result = packlora.train(tree, **options)
    return result.status, result.tokens


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
T = 26


def config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | settings)


def with_adapters(
    family: str, configs: dict[str, LoraConfig], checkpointing: bool = False, **changes: Any
) -> tuple[Any, Attached, list[Adapter], dict[str, AdapterSpec]]:
    """A model that is prepared for packing, with adapters far from their first values."""
    model = tiny_experts(family, **changes)
    specs = {job: resolve(one, model, job) for job, one in configs.items()}
    prepare_model(model, checkpointing)
    attached, adapters = attach(model, specs, {job: len(job) for job in specs})
    with torch.no_grad():
        for adapter in adapters:
            generator = torch.Generator().manual_seed(len(adapter.name))
            for name, parameter in adapter.named_parameters().items():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
                parameter.add_(noise.abs() if name.endswith("magnitude") else noise)
    return model, attached, adapters, specs


def tokens() -> torch.Tensor:
    return torch.randint(3, 300, (T,), generator=torch.Generator().manual_seed(1))


def packed(
    model: Any, attached: Attached, owners: TokenOwners, lengths: tuple[int, ...], ids: torch.Tensor
) -> torch.Tensor:
    """Logits of all tokens, after their backward."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    with attached.active(owners):
        logits = packed_logits(model, ids, positions, lengths, torch.arange(len(ids)))
        (logits.square() * torch.arange(1, len(ids) + 1)[:, None]).sum().backward()
    return logits.detach()


def relative(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert a is not None and b is not None
    return float((a.detach() - b).norm() / b.norm().clamp(min=1e-30))


PEFT_CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_parameters": EXPERTS, "use_rslora": True},
    "down alone": {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []},
    "patterns": {
        "target_parameters": [*EXPERTS, "gate.weight"], "rank_pattern": {"experts.down_proj": 5},
        "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 3},
    },
    "embedding beside": {"target_parameters": [*EXPERTS, "gate.weight"], "target_modules": ["embed_tokens", "o_proj"]},
    "old names": {"target_modules": r".*\.(gate_proj|up_proj|o_proj)"},
}  # fmt: skip


@pytest.mark.parametrize("case", PEFT_CASES)
def test_experts_and_routers_give_the_logits_and_gradients_that_peft_gives(case: str) -> None:
    against_peft("qwen3_moe", config(**PEFT_CASES[case]), checkpointing=case == "rslora")


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "qwen2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "olmoe",
        "granitemoe",
        "phimoe",
        "gpt_oss",
        "llama4",
        "qwen3_next",
    ],
)
def test_other_families_go_the_same_way(family: str) -> None:
    linear = ["in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"] if family == "qwen3_next" else ["o_proj"]
    against_peft(
        family, config(target_parameters=[*EXPERTS, router_of(family)], target_modules=linear), family == "llama4"
    )


def against_peft(family: str, wanted: LoraConfig, checkpointing: bool = False) -> None:
    """In float64, with all parameters away from their first values."""
    with in_float64():
        model, attached, (adapter,), specs = with_adapters(family, {"job": wanted}, checkpointing)
        ids = tokens()
        peft = get_peft_model(tiny_experts(family), specs["job"].peft).eval()
        theirs = {name.replace(".default", ""): p for name, p in peft.named_parameters() if p.requires_grad}
        mine = keyed(adapter, adapter.named_parameters())
        assert {name: p.shape for name, p in theirs.items()} == {name: p.shape for name, p in mine.items()}
        with torch.no_grad():
            for name, parameter in theirs.items():
                parameter.copy_(mine[name])
        got = packed(model, attached, TokenOwners(T, ((0, 0, T),)), (T,), ids)
        want = peft(input_ids=ids[None]).logits[0]
        (want.square() * torch.arange(1, T + 1)[:, None]).sum().backward()
    assert relative(got, want) < 1e-10
    for name, parameter in theirs.items():
        assert relative(mine[name].grad, parameter.grad) < 1e-10, name


THREE = {
    "lora": config(target_modules="all-linear", lora_dropout=0.2),
    "dora job": config(target_parameters=EXPERTS, use_dora=True, r=5, lora_dropout=0.1),
}
ANOTHER = {
    "use_rslora": True, "r": 2, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["model.norm"],
}  # fmt: skip


def router_of(family: str) -> str:
    return "router.weight" if family in ("granitemoe", "gpt_oss", "phimoe", "llama4") else "gate.weight"


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_moe", True), ("qwen3_next", False), ("llama4", False)])
def test_every_job_has_the_numbers_beside_others_that_it_has_alone(family: str, checkpointing: bool) -> None:
    """LoRA, DoRA and rsLoRA on different parameters, of different ranks, with different dropout, and tokens of nobody; where
    some layers are linear attention, and where experts are given all tokens."""
    jobs = THREE | {"another job": config(**ANOTHER | {"target_parameters": ["experts.down_proj", router_of(family)]})}
    lengths = (7, 10, 6, 3)
    ids, keys = tokens(), torch.from_numpy(token_keys(5, 1, 2, T))
    starts = [sum(lengths[:at]) for at in range(5)]
    with in_float64():
        model, attached, adapters, _ = with_adapters(family, jobs, checkpointing)
        segments = tuple((at, starts[at], starts[at + 1]) for at in range(3))
        together = packed(model, attached, TokenOwners(T, segments, keys), lengths, ids)
        for at, adapter in enumerate(adapters):
            own = slice(starts[at], starts[at + 1])
            alone_model, alone, (same,), _ = with_adapters(family, {adapter.name: jobs[adapter.name]})
            n = lengths[at]
            assert relative(
                _weighted(alone_model, alone, TokenOwners(n, ((0, 0, n),), keys[own]), ids[own], own.start), together[own]
            ) < 1e-10  # fmt: skip
            for name, parameter in adapter.named_parameters().items():
                assert relative(parameter.grad, same.named_parameters()[name].grad) < 1e-10, (adapter.name, name)
        plain, nothing, _, _ = with_adapters(family, {"job": config()})
        positions = torch.arange(3)
        with nothing.active(TokenOwners(3, ())):
            assert relative(packed_logits(plain, ids[-3:], positions, (3,), positions), together[-3:]) < 1e-10


def _weighted(model: Any, attached: Attached, owners: TokenOwners, ids: torch.Tensor, first: int) -> torch.Tensor:
    """As `packed`, of a sample that begins at another place."""
    positions = torch.arange(len(ids))
    with attached.active(owners):
        logits = packed_logits(model, ids, positions, (len(ids),), positions)
        (logits.square() * torch.arange(first + 1, first + len(ids) + 1)[:, None]).sum().backward()
    return logits.detach()


# --- by a run file -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """A saved tiny Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("qwen3-moe")
    tiny_experts("qwen3_moe").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"], "rank_pattern": {"q_proj": 2}},
        {"target_modules": "all-linear", "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ],
)  # fmt: skip
def test_keys_that_made_a_folder_may_stand_beside_init_from_and_no_others(
    keys: dict[str, Any], base: str, write_rows: Any, tmp_path: Path
) -> None:
    """Though the folder names experts and what begins with random numbers otherwise than the run file."""
    data, asked = {"path": write_rows("rows", 3)}, {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, **keys}

    def tree(name: str, adapter: dict[str, Any]) -> dict[str, Any]:
        job = {"name": "job", "data": data, "adapter": adapter, "train": {"max_steps": 1}}
        return {"base_model": base, "output_dir": str(tmp_path / name), "jobs": [job]}

    packlora.train(tree("first", asked))
    start = str(tmp_path / "first" / "job")
    again = tree("second", {**asked, "init_from": start})
    found, plain = (
        prepare(Run.model_validate(one)).jobs[0].spec.peft for one in (again, tree("second", {"init_from": start}))
    )
    assert found == plain
    others = ("target_modules", ["q_proj", "k_proj"]), ("rank_pattern", {"q_proj": 3}), ("init_lora_weights", "pissa")
    for key, other in others:
        again["jobs"][0]["adapter"] = {**asked, "init_from": start, key: other}
        with pytest.raises(InputError, match=f"^job 'job': adapter.{key} is .*, but {start} was made with "):
            prepare(Run.model_validate(again))


def test_dropout_of_experts_that_would_not_be_the_checkpoint_s_is_refused(
    base: str, write_rows: Any, tmp_path: Path
) -> None:
    """Though adapter_config.json says 0 of it, and run.json has the default of a key that is not written."""
    data = {"path": write_rows("rows", 6)}

    def tree(name: str, **adapter: Any) -> dict[str, Any]:
        job = {"name": "job", "data": data, "adapter": adapter, "train": {"max_steps": 3, "global_batch_size": 2}}
        return {"base_model": base, "output_dir": str(tmp_path / name), "jobs": [job]}

    packlora.train(tree("first", r=2, target_modules=["q_proj"], target_parameters=EXPERTS), max_steps=1)
    start = str(tmp_path / "first" / "job")
    for name, first, other, said in (
        ("left out", {}, {"lora_dropout": 0.05}, r"0\.0, and .* now say 0\.05"),
        ("written", {"lora_dropout": 0.05}, {}, r"0\.05, and .* now say 0\.0"),
    ):
        packlora.train(tree(name, init_from=start, **first), max_steps=1)
        with pytest.raises(InputError, match=r"^job 'job': .*checkpoint-1 was trained with lora_dropout " + said):
            packlora.train(tree(name, init_from=start, **other), resume=True)
        assert packlora.train(tree(name, init_from=start, **first), resume=True).status == "done"


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(family, marks=pytest.mark.soak) for family in ("qwen3_moe", "llama4"))]
)
def test_a_run_trains_experts_and_routers_as_peft_does_and_peft_reads_what_it_wrote(
    family: str, tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    """In float64: a folder that PEFT wrote is continued for six steps beside a DoRA job with dropout. Several samples share a
    row, also where a part of the layers is linear attention."""
    tiny_experts(family).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with in_float64():
        torch.manual_seed(3)
        by_name: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "router.weight"]}
        wanted = config(**{"target_modules": "all-linear"} if family != "llama4" else by_name, r=2)
        model = get_peft_model(tiny_experts(family), wanted)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.03 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "start")
        job = like_peft(write_rows("rows"), tmp_path / "start")
        neighbour = {
            "name": "dora", "data": {"path": write_rows("others", seed=5)}, "train": {"max_steps": 3},
            "adapter": {"r": 3, "use_dora": True, "lora_dropout": 0.1, "target_modules": [], "target_parameters": EXPERTS},
        }  # fmt: skip
        tree = {
            "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "max_tokens_per_microbatch": 96,
            "device": "cpu", "dtype": "float64", "jobs": [job, neighbour],
        }  # fmt: skip
        run = Run.model_validate(tree)
        losses = train_by_peft(model.eval(), prepare(run).jobs[0].data)
        model.save_pretrained(tmp_path / "peft")
        assert packlora.train(run).status == "done"
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for ours, theirs in zip([line for line in lines if line["job"] == "job"], losses, strict=True):
        assert abs(ours["loss"] - theirs) < 1e-10 * max(1, theirs)
    ours, theirs = (load_file(tmp_path / of / "adapter_model.safetensors") for of in ("out/job", "peft"))
    assert ours.keys() == theirs.keys()
    assert max(relative(ours[key], theirs[key]) for key in theirs) < 1e-7  # written in float32
    again = PeftModel.from_pretrained(tiny_experts(family), tmp_path / "out" / "job").eval()
    ids = tokens()[None]
    assert relative(again(ids).logits, model(ids).logits) < 1e-6
    dora = load_file(tmp_path / "out" / "dora" / "adapter_model.safetensors")
    experts = f"base_model.model.model.layers.1.{'feed_forward' if family == 'llama4' else 'mlp'}.experts"
    assert dora[f"{experts}.lora_magnitude_vector.weight"].shape == (4 if family == "llama4" else 6, 64)


# --- what is made of an adapter ----------------------------------------------------------------------------------------


def saved(tmp_path: Path, base: str, family: str = "qwen3_moe", **settings: Any) -> tuple[Path, Any]:
    """A folder that is written here, far from its first values, and its model, which gives its logits."""
    wanted = config(base_model_name_or_path=base, **settings)
    model, attached, (adapter,), _ = with_adapters(family, {"job": wanted})
    model.set_attn_implementation("eager")
    save_adapter(tmp_path / "job", adapter)
    with torch.no_grad(), attached.active(TokenOwners(T, ((0, 0, T),))):
        return tmp_path / "job", model(input_ids=tokens()[None]).logits[0]


MERGED: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_parameters": [*EXPERTS, "gate.weight"], "use_dora": True, "use_rslora": True},
    "others beside": {
        "target_parameters": [*EXPERTS, "gate.weight"], "target_modules": ["embed_tokens"], "modules_to_save": ["model.norm"],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "original"),
    [
        ("qwen3_moe", "lora", True), ("qwen3_moe", "dora", True), ("qwen3_moe", "dora", False),
        ("qwen3_moe", "others beside", False), ("qwen3_next", "lora", True),
        pytest.param("llama4", "dora", False, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_a_merged_model_has_the_logits_of_the_adapter(
    family: str, kind: str, original: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """Of files in which each expert has weights of its own, as they are published, and of those that hold all in one."""
    tiny_experts(family).save_pretrained(tmp_path / "base", save_original_format=original)
    tokenizer.save_pretrained(tmp_path / "base")
    keys = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert any("experts.3.up_proj" in key for key in keys) is original
    settings = MERGED[kind] | ({"target_parameters": [*EXPERTS, "router.weight"]} if family == "llama4" else {})
    folder, want = saved(tmp_path, str(tmp_path / "base"), family, **settings)
    merge_adapter(folder, tmp_path / "merged", dtype="auto")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, experts_implementation="eager"
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        assert relative(merged(tokens()[None]).logits[0], want) < 1e-5
        assert relative(plain(tokens()[None]).logits[0], want) > 1e-2


def as_vllm(folder: Path, model: Any) -> None:
    """Add to a model's weights what vLLM reads of a folder: one rank and alpha for all; A of experts expert by expert, B with
    the expert running fastest; gate and up under base_layer."""
    said = json.loads((folder / "adapter_config.json").read_text())
    assert not said["use_dora"] and said["bias"] == "none" and not said["rank_pattern"] and not said["alpha_pattern"]
    scaling, own = said["lora_alpha"] / said["r"], factors(folder)
    with torch.no_grad():
        for path, pair in own.items():
            A, B = pair["A"].double(), pair["B"].double()
            if not path.endswith((".experts", ".experts.base_layer")):
                model.get_submodule(path).weight += scaling * B @ A
                continue
            assert {path, f"{path.removesuffix('.base_layer')}.base_layer"} <= own.keys()
            experts = model.get_submodule(path.removesuffix(".base_layer"))
            weight = experts.gate_up_proj if path.endswith(".base_layer") else experts.down_proj
            E, r = len(weight), said["r"]
            assert A.shape == (E * r, weight.shape[2]) and B.shape == (weight.shape[1], r * E)
            for e in range(E):
                weight[e] += scaling * B[:, e::E] @ A[e * r : (e + 1) * r]


def test_llama_4_with_its_vision_tower_is_trained_on_texts_and_peft_reads_what_it_wrote(
    tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    """The files are of the whole model, and so are the adapter's names. Images are refused by name."""
    model = whole_llama_4(torch.float32)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    own = {"target_modules": ["o_proj"], "target_parameters": [*EXPERTS, "router.weight"], "init_lora_weights": False}
    job = {"name": "job", "data": {"path": write_rows("rows")}, "train": {"max_steps": 2}, "adapter": own}
    packlora.train({
        "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu", "dtype": "float32",
        "jobs": [job],
    })  # fmt: skip
    merge_adapter(tmp_path / "out" / "job", tmp_path / "merged")
    kind, ids = Llama4ForConditionalGeneration, tokens()[None]
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
        want = PeftModel.from_pretrained(model, tmp_path / "out" / "job").eval()(input_ids=ids).logits
        got = kind.from_pretrained(tmp_path / "merged", dtype=torch.float32)(input_ids=ids).logits
    assert relative(got, want) < 1e-5 and relative(before, want) > 1e-2
    with pytest.raises(InputError, match="puts images into its texts in one forward with its output layer"):
        check_images(whole_llama_4(), None, "base", None)  # type: ignore[arg-type]


def test_adapters_of_llama_4_s_experts_are_not_exported_for_vllm(tmp_path: Path) -> None:
    tiny_experts("llama4").save_pretrained(tmp_path / "base")
    folder, _ = saved(tmp_path, str(tmp_path / "base"), "llama4", target_parameters=EXPERTS)
    with pytest.raises(InputError, match="has A and B the other way round than vLLM reads them; `packlora merge"):
        export_adapter(folder, tmp_path / "out", "vllm")


def test_what_vllm_reads_of_an_exported_folder_is_the_adapter(base: str, tmp_path: Path) -> None:
    ranks = {"experts.down_proj": 5}
    folder, want = saved(tmp_path, base, target_parameters=EXPERTS, use_rslora=True, rank_pattern=ranks)
    (note,) = export_adapter(folder, tmp_path / "vllm", "vllm")
    assert "experts of qwen3_moe: start vLLM with --enable-mixed-moe-lora-format" in note
    model = tiny_experts("qwen3_moe")
    as_vllm(tmp_path / "vllm", model)
    with torch.no_grad():
        assert relative(model(tokens()[None]).logits[0], want) < 1e-5


@pytest.mark.parametrize(
    ("settings", "target", "message"),
    [
        ({"target_parameters": EXPERTS}, "sglang", "gate_up_proj: SGLang reads no adapters of it"),
        ({"target_parameters": EXPERTS}, "gguf", "gate_up_proj: llama.cpp reads no adapters of it"),
        ({"target_parameters": EXPERTS[1:]}, "vllm", "down_proj alone: vLLM reads adapters of all weights of"),
        ({"target_parameters": ["gate.weight"]}, "vllm", "whether vLLM reads adapters of routers is not known"),
        ({"target_parameters": EXPERTS, "use_dora": True}, "vllm", "is a DoRA adapter"),
    ],
)
def test_what_a_program_does_not_read_of_experts_is_not_exported_for_it(
    settings: dict[str, Any], target: str, message: str, base: str, tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path, base, **settings)
    with pytest.raises(InputError, match=message):
        export_adapter(folder, tmp_path / "out", target)


def test_peft_loads_an_adapter_of_experts_that_was_trained_with_dropout(base: str, tmp_path: Path) -> None:
    """PEFT refuses a configuration with dropout for parameters; what it says is of training alone."""
    folder, want = saved(tmp_path, base, target_parameters=EXPERTS, lora_dropout=0.3)
    again = PeftModel.from_pretrained(tiny_experts("qwen3_moe"), folder).eval()
    assert relative(again(tokens()[None]).logits[0], want) < 1e-5


def two_jobs(base: str, write_rows: Any, out: Path, **changes: Any) -> dict[str, Any]:
    """LoRA with dropout as PEFT's all-linear, and DoRA on experts."""
    return {
        "base_model": base, "output_dir": str(out), "max_tokens_per_microbatch": 96, "device": "cpu", "dtype": "float64",
        "save_every": 2, "jobs": [
            {"name": "lora", "data": {"path": write_rows("a")}, "adapter": {"r": 2, "lora_dropout": 0.1},
             "train": {"max_steps": 4, "learning_rate": 1e-2, "global_batch_size": 4}},
            {"name": "dora", "data": {"path": write_rows("b", seed=4)}, "train": {"max_steps": 3, "learning_rate": 1e-2},
             "adapter": {"r": 3, "use_dora": True, "target_modules": ["v_proj"], "target_parameters": EXPERTS}},
        ],
    } | changes  # fmt: skip


def same_adapters(one: Path, two: Path, bound: float) -> None:
    for job in ("lora", "dora"):
        ours, theirs = (load_file(out / job / "adapter_model.safetensors") for out in (one, two))
        assert ours.keys() == theirs.keys()
        assert max(relative(ours[key], theirs[key]) for key in theirs) <= bound, job


@pytest.mark.soak
def test_a_run_goes_on_with_the_same_bits_and_on_replicas_with_the_same_numbers(
    base: str, write_rows: Any, ranks: Any, tmp_path: Path
) -> None:
    whole = two_jobs(base, write_rows, tmp_path / "whole")
    assert packlora.train(Run.model_validate(whole)).status == "done"
    parts = Run.model_validate(whole | {"output_dir": str(tmp_path / "parts")})
    packlora.train(parts, max_steps=2)
    packlora.train(parts, resume=True)
    same_adapters(tmp_path / "parts", tmp_path / "whole", 0.0)
    for each in (1, 2):
        out = tmp_path / f"replicas-{each}"
        asked = whole | {"output_dir": str(out), "parallel": {"devices_per_job": each}}
        assert [status for status, *_ in ranks(2).run(on_ranks, asked, {})] == ["done", "done"]
        same_adapters(out, tmp_path / "whole", 1e-7)


def test_an_adapter_that_comes_later_is_the_one_that_was_there_at_first_and_leaves_nothing_behind() -> None:
    ids, owners = tokens(), [TokenOwners(T, ((number, 0, T),)) for number in (0, 1)]
    model, attached, (_, second), specs = with_adapters("qwen3_moe", {"lora": THREE["lora"], "job2": THREE["dora job"]})
    later, others, _, _ = with_adapters("qwen3_moe", {"lora": THREE["lora"]})
    with torch.no_grad():
        with others.active(owners[0]):
            before = later(input_ids=ids[None], sample_lengths=(T,)).logits
        chooser = dict.fromkeys(specs["job2"].modules, others.choosers[0])
        joined = attach_one(later, others, "job2", 1, specs["job2"], 4, chooser)
        for name, parameter in joined.named_parameters().items():
            parameter.copy_(second.named_parameters()[name])
        with attached.active(owners[1]), others.active(owners[1]):
            want, got = (one(input_ids=ids[None], sample_lengths=(T,)).logits for one in (model, later))
        assert torch.equal(got, want) and not torch.allclose(got, before)
        detach_one(later, joined.number)
        with others.active(owners[0]):
            assert torch.equal(later(input_ids=ids[None], sample_lengths=(T,)).logits, before)
    experts = later.model.layers[0].mlp.experts
    with others.active(TokenOwners(T, ((1, 0, T),))):
        assert Owned.of(experts, T, ids.device).numbers == []


def test_the_owners_of_experts_tokens_follow_segments_that_move() -> None:
    """As in a CUDA graph: in one tensor, whose values the next microbatch replaces. The second job has nothing on experts."""
    model, attached, _, _ = with_adapters("qwen3_moe", {"lora": THREE["lora"]})
    moving = MovingSegments(T, (0, 1))
    with attached.active(TokenOwners(T, moving.nominal, boundaries=moving)):
        owned = Owned.of(model.model.layers[0].mlp.experts, T, torch.device("cpu"))
    assert list(owned.numbers) == [0] and owned.count == 2 and owned.owner is not None
    for own in ([(0, 2, 9)], [(0, 0, 3), (1, 3, T)], [(1, 0, T)]):
        moving.write(own)
        assert owned.owner.tolist() == [0 if any(n == 0 and a <= t < b for n, a, b in own) else 1 for t in range(T)]


def test_a_run_plans_and_answers_with_adapters_of_experts(base: str, write_rows: Any, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    tree = two_jobs(base, write_rows, tmp_path / "out", dtype="float32")
    run.write_text(json.dumps(tree))
    planned = CliRunner().invoke(app, ["plan", str(run)])
    assert planned.exit_code == 0, planned.output
    # 6 experts, two layers; LoRA of rank 4 on gate and up together, 2 on the others: attention, experts, routers
    lora = 2 * (2 * (64 * 2 + 64 * 2) + 2 * (64 + 32) * 2 + 6 * (4 * (64 + 64) + 2 * (32 + 64)) + 2 * (64 + 6))
    assert f"{lora / 1e6:.2f} M" in planned.output
    assert packlora.train(Run.model_validate(tree)).status == "done"
    for job in ("lora", "dora"):
        answer = CliRunner().invoke(
            app, ["generate", str(tmp_path / "out" / job), "--prompt", "the quick", "--max-new-tokens", "3"]
        )
        assert answer.exit_code == 0, answer.output


def test_a_model_with_attention_sinks_and_windows_trains_and_answers(
    tokenizer: Any, write_rows: Any, tmp_path: Path
) -> None:
    """Also where a sample is longer than the windows, and recomputed; the base model has no attention of torch."""
    kinds = ["sliding_attention", "full_attention"]
    tiny_experts("gpt_oss", torch.float32, sliding_window=5, layer_types=kinds).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    tree = two_jobs(str(tmp_path / "base"), write_rows, tmp_path / "out", gradient_checkpointing=True, save_every=0)
    for job in tree["jobs"]:
        job["train"]["max_steps"] = 1
    assert packlora.train(Run.model_validate(tree)).status == "done"
    asked = ["generate", str(tmp_path / "out" / "dora"), "--prompt", "the quick", "--max-new-tokens", "3"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
