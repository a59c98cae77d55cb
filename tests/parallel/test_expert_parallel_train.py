"""`packlora.train` with `parallel: {expert: N}`: processes that hold some of the experts each train what one device trains, and
leave what one device leaves. In float64, routers and norms too."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import rows_into
from expert_models import in_float64, tiny_experts, whole_llama_4
from ranks import Ranks
from safetensors.torch import load_file, save_file
from seeds import SOAK
from test_preference import pairs
from test_replicas import lines, on_ranks
from test_training import adapter, config, distance

import packlora
from packlora.base.weight_files import WeightFiles
from packlora.commands.plan import make_plan
from packlora.commands.plan_layouts import LayoutFigures, sentences
from packlora.config import Run
from packlora.errors import InputError
from packlora.experts import rows as expert_rows
from packlora.experts.replicas import ExchangingReplicas, SharedGradient
from packlora.parallel.alone import Alone
from packlora.parallel.cut import load_cut
from packlora.pipeline.estimate import largest_stage, planning_cost, stage_layers
from packlora.runtime.prepare import prepare

Groups = Callable[[int], Ranks]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
JOBS = [
    {
        "name": "lora",
        "train": {
            "max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.3, "router_aux_loss_coef": 3.0,
        },
        "adapter": {"r": 3, "lora_dropout": 0.2, "target_modules": "all-linear"},
    },
    {
        "name": "dora",
        "train": {
            "max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "router_aux_loss_coef": 0.5,
        },
        "adapter": {
            "r": 5, "lora_dropout": 0.1, "use_dora": True, "target_modules": ["v_proj"],
            "target_parameters": [*BOTH, "gate.weight"], "init_lora_weights": False,
        },
    },
    {
        "name": "others", "train": {"max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2},
        "adapter": {
            "r": 2, "lora_dropout": 0.0, "use_rslora": True, "target_modules": ["embed_tokens", "o_proj"],
            "target_parameters": ["experts.down_proj", "gate.weight"], "modules_to_save": ["norm"],
        },
    },
]  # fmt: skip

NAMES = {"lora", "dora", "others", "dpo"}


def saved(folder: Path, tokenizer: Any, one_rank: bool = False, **changes: Any) -> str:
    """A tiny Qwen3-MoE whose files have each expert apart. one_rank: all tokens go to one of the first two experts."""
    model = tiny_experts("qwen3_moe", **changes)
    with torch.no_grad():
        for layer in model.model.layers if one_rank else ():
            layer.mlp.gate.weight[1] = -layer.mlp.gate.weight[0]
            layer.mlp.gate.weight[2:] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tree(base: str, out: Path, rows: Any, jobs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    found = config(base, out, rows, jobs, dtype="float64", max_tokens_per_microbatch=90, **more)
    for job in found["jobs"][:2]:
        job["data"]["eval_path"] = job["data"]["path"]
    found["jobs"][0]["sample_prompts"] = ["why?", "ab"]
    return found | {"eval_every": 2, "save_every": 1, "save_total_limit": None, "sample_max_new_tokens": 4}


def in_wide(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    with in_float64():
        return function(rank, *args)


@pytest.fixture(scope="module")
def asked(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("experts")
    preferred = {
        "name": "dpo", "data": {"path": pairs(folder / "pairs.jsonl")},
        "train": {
            "max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2, "trainer": "dpo", "router_aux_loss_coef": 1.0,
        },
        "adapter": {"r": 2, "lora_dropout": 0.1, "target_parameters": BOTH, "target_modules": []},
    }  # fmt: skip
    return tree(saved(folder / "base", tokenizer), folder / "whole", rows_into(folder), [*JOBS, preferred])


# --- tokens that go to the experts and back ------------------------------------------------------------------------------


def few(asked: dict[str, Any], out: Path, base: str | None = None, **parallel: Any) -> dict[str, Any]:
    """Two jobs of one sample a step, so one of two processes often has none."""
    jobs = []
    for name, use_dora in (("one", True), ("two", False)):
        adapter = {"r": 3, "use_dora": use_dora, "lora_dropout": 0.2, "target_modules": ["o_proj"]}
        jobs.append({
            "name": name, "data": asked["jobs"][0]["data"], "seed": len(jobs),
            "train": {
                "max_steps": 3, "global_batch_size": 1 + use_dora, "learning_rate": 1e-2, "max_grad_norm": 0.2,
                "router_aux_loss_coef": 2.0 * use_dora,
            },
            "adapter": adapter | {"target_parameters": [*BOTH, "gate.weight"], "init_lora_weights": False},
        })  # fmt: skip
    changes = {
        "output_dir": str(out),
        "jobs": jobs,
        "parallel": parallel,
        "save_every": 0,
        "max_tokens_per_microbatch": 40,
    }
    return {**asked, **changes, "base_model": base or asked["base_model"], "gradient_checkpointing": base is not None}


def layouts_of_llama_4() -> list[Any]:
    """By number of processes. Each has what it reads of weights that hold all experts, and experts that are given rows."""
    exchange = {"ep_implementation": "all_to_all"}
    more = [
        (2, {"expert": 2, **exchange}), (2, {"expert": 2}), (2, {"shard_base": True}), (2, {"pipeline": 2}),
        (2, {"tensor": 2, "sequence_parallel": True}), (4, {"expert": 2, "pipeline": 2}),
        (4, {"expert": 2, "shard_base": True, **exchange}), (4, {"tensor": 2, "expert": 2, **exchange}),
        (4, {"tensor": 2, "pipeline": 2}), (4, {"tensor": 2, "shard_base": 2}),
    ]  # fmt: skip
    return [(2, {"tensor": 2}), *(pytest.param(*one, marks=pytest.mark.soak) for one in more)]


@pytest.fixture(scope="module")
def llama_4(asked: dict[str, Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on one device, on texts, of a model with a vision tower whose second layer is dense."""
    folder = tmp_path_factory.mktemp("llama4")
    whole_llama_4(moe_layers=[0]).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tree = few(asked, folder / "whole", str(folder / "base"))
    for job in tree["jobs"]:
        del job["train"]["router_aux_loss_coef"]
        job["adapter"]["target_parameters"] = [*BOTH, "router.weight"]
        job["adapter"]["target_modules"] = r".*language_model.*\.(o_proj|down_proj)"
    in_wide(0, on_ranks, tree, {})
    return tree


@pytest.mark.parametrize(("processes", "parallel"), layouts_of_llama_4())
def test_llama_4_learns_in_other_layouts_what_it_learns_on_one_device(
    processes: int, parallel: dict[str, Any], llama_4: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    told = ranks(processes).run(in_wide, on_ranks, {**llama_4, "output_dir": str(tmp_path), "parallel": parallel}, {})
    assert [status for status, *_ in told] == ["done"] * processes, told
    for job in ("one", "two"):
        assert distance(adapter(tmp_path, job), adapter(Path(llama_4["output_dir"]), job)) <= 1e-10


def experts_over_all_replicas() -> Any:
    """Gradients of experts are added up over processes that have other experts."""
    return mock.patch.object(SharedGradient, "add_up", lambda self, gradient, add: add([gradient]))


def keys_of_no_token() -> Any:
    told = expert_rows._told
    return mock.patch.object(expert_rows, "_told", lambda owner, _: told(owner, None))


def one_owner_for_all() -> Any:
    told = expert_rows._told
    return mock.patch.object(expert_rows, "_told", lambda owner, keys: told(torch.zeros_like(owner), keys))


def gradients_of_own_jobs_alone() -> Any:
    return mock.patch.object(ExchangingReplicas, "reached", Alone.reached)


FAULTS = {
    "groups": experts_over_all_replicas, "keys": keys_of_no_token, "owners": one_owner_for_all,
    "others": gradients_of_own_jobs_alone,
}  # fmt: skip


def with_faults(rank: int, asked: dict[str, Any], folder: Path) -> None:
    for name, breaking in FAULTS.items():
        with breaking():
            packlora.train(few(asked, folder / name, expert=2, ep_implementation="all_to_all"))


def test_tokens_that_go_to_experts_and_back_learn_what_they_learn_on_one_device(
    asked: dict[str, Any], ranks: Groups, tokenizer: Any, tmp_path: Path
) -> None:
    """With recomputed layers, where a process has no token for its experts. In a soak also where one has no microbatch, and
    what goes wrong with owners, keys or groups is seen."""
    exchange = {"expert": 2, "ep_implementation": "all_to_all"}
    alone = saved(tmp_path / "base", tokenizer, one_rank=True, num_experts_per_tok=1)
    for name, base in (("plain", None), ("one side", alone)) if SOAK else (("one side", alone),):
        in_wide(0, on_ranks, few(asked, tmp_path / f"{name} whole", base), {})
        told = ranks(2).run(in_wide, on_ranks, few(asked, tmp_path / name, base, **exchange), {})
        assert [status for status, *_ in told] == ["done"] * 2, told
        for job in ("one", "two"):
            assert distance(adapter(tmp_path / name, job), adapter(tmp_path / f"{name} whole", job)) <= 1e-10
        assert {line["rank"] for line in lines(tmp_path / name, "microbatches")} == {0, 1}
        said = "expert parallelism over 2 processes: each has 3 of the experts of 2 layers, and all else whole"
        assert said in json.loads((tmp_path / name / "run.json").read_text())["warnings"]
    if SOAK:
        ranks(2).run(in_wide, with_faults, asked, tmp_path)
    for name in FAULTS if SOAK else ():
        wrong = [
            distance(adapter(tmp_path / name, job), adapter(tmp_path / "plain whole", job)) for job in ("one", "two")
        ]
        assert max(wrong) > 1e-4, (name, wrong)


# --- reading -----------------------------------------------------------------------------------------------------------


def read_by(rank: int, tree: dict[str, Any]) -> tuple[set[str], int, list[list[int]], str]:
    """Numbers of the experts that a process reads, how often it reads a weight at most, the shapes of those that it holds; or
    what is wrong."""
    taken, read = Counter[str](), WeightFiles.read

    def noted(self: WeightFiles, key: str, *part: slice) -> torch.Tensor:
        taken[key] += 1
        return read(self, key, *part)

    with mock.patch.object(WeightFiles, "read", noted):
        try:
            replica = Alone()
            replica.model = replica.base = dist.group.WORLD
            base = load_cut(Run.model_validate(tree), None, {}, replica)
        except InputError as error:
            return set(), 0, [], str(error)
    shapes = [list(p.shape) for name, p in base.model.named_parameters() if name.endswith("experts.down_proj")]
    experts = {found[1] for key in taken if (found := re.search(r"experts\.(\d+)\.", key))}
    return experts, max(taken.values()), shapes, ""


def test_a_process_reads_its_own_experts_alone(
    asked: dict[str, Any], ranks: Groups, tokenizer: Any, tmp_path: Path
) -> None:
    """Each once for the proof and once to hold it. Files that lack some are refused on every process."""
    wide = {**asked, "dtype": "float32", "parallel": {"expert": 2}}
    found = ranks(2).run(read_by, wide)
    assert [own[0] for own in found] == [{"0", "1", "2"}, {"3", "4", "5"}]
    assert all(own[1:] == (2, [[3, 64, 32]] * 2, "") for own in found), found
    shutil.copytree(asked["base_model"], tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if ".1.mlp.experts.5.up" not in name}, file, {"format": "pt"})
    for *_, said in ranks(2).run(read_by, {**wide, "base_model": str(tmp_path / "base")}):
        assert (
            "hold experts that do not make up model.layers.1.mlp.experts.gate_up_proj [6, 64, 64]: of each part 6, 5"
            in said
        )


# --- what is predicted -------------------------------------------------------------------------------------------------


def test_the_plan_shows_what_sharing_the_experts_saves_and_costs(asked: dict[str, Any]) -> None:
    """On one device, and on two that hold the experts together: half of the experts and of what is trained on them."""

    def rows(gpus: int, **parallel: Any) -> tuple[list[LayoutFigures], list[str]]:
        found = make_plan(Run.model_validate({**asked, "parallel": parallel}), gpus=gpus).layouts
        assert found is not None
        return found.rows, sentences(found, 4)

    def experts(row: LayoutFigures) -> int:
        return row.layout.expert

    (alone,), _ = rows(1)
    (shared,), said = rows(2, expert=2)
    model = tiny_experts("qwen3_moe")
    of_experts = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    with in_float64():
        packlora.train(asked, max_steps=1)
    trained = [adapter(Path(asked["output_dir"]), f"{name}/checkpoint-1") for name in NAMES]
    on_experts = sum(tensor.numel() for own in trained for name, tensor in own.items() if ".experts." in name)
    inside = 2 * 2 * (64 + 64 + 32 + 64)  # layers, experts a token, what goes into and comes out of both weights
    tokens = 90
    saved = (8 * of_experts + 20 * on_experts + 8 * inside * tokens) / 2
    assert (shared.layout.expert, shared.layout.devices_per_job, shared.taken) == (2, 2, True)
    assert alone.bytes - shared.bytes == pytest.approx(saved, rel=0.02)
    assert 0.3 * alone.seconds < shared.seconds < alone.seconds
    assert said[0].startswith("training takes 2 with experts on 2, so each job is shared by 2 devices")
    more, _ = rows(6)
    assert sorted(map(experts, more))[-6:] == [2, 2, 3, 3, 6, 6], "as what could be asked for, in both ways"
    (exchanged,), _ = rows(2, expert=2, ep_implementation="all_to_all")
    assert exchanged.taken and exchanged.status == "taken, experts on 2, all_to_all"
    assert exchanged.waves < shared.waves and exchanged.bytes > shared.bytes
    assert not any(row.taken for row in more if row.layout.expert > 1)


def test_the_plan_knows_layouts_of_models_with_experts(asked: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    """All that training may choose or be asked for; what sharing rows of the experts that a device has saves; layers that cost
    unlike much."""
    shape = {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 8}
    plain = {"name": "dense", "data": asked["jobs"][0]["data"], "train": {"global_batch_size": 2}}
    plain["adapter"] = {"r": 2, "use_rslora": True, "target_modules": ["o_proj"]}
    asked = asked | {"base_model": saved(tmp_path, tokenizer, **shape), "jobs": [*asked["jobs"][:2], plain]}

    def rows(**parallel: Any) -> list[LayoutFigures]:
        found = make_plan(Run.model_validate({**asked, "parallel": parallel}), gpus=4).layouts
        assert found is not None
        return found.rows

    found = {(row.layout.shard, row.layout.pipeline, row.layout.expert) for row in rows()}
    assert found >= {(1, 1, 1), (4, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)}
    (piped,), (staged, _) = rows(expert=2, pipeline=2), rows(pipeline=2)
    assert (piped.status, piped.layout.devices_per_job) == ("taken, pipeline of 2, experts on 2", 4)
    assert piped.bytes < staged.bytes and piped.seconds < 2 * staged.seconds
    (both,), (_, replicas) = rows(expert=2, shard_base=True), rows(expert=2)
    assert (both.status, both.taken, both.layout.devices_per_job) == ("taken, shard 2, experts on 2", True, 4)
    (cut,) = rows(tensor=2, expert=2)
    assert (cut.status, cut.layout.devices_per_job) == (
        "taken, tensor 2, experts on 2",
        4,
    ) and cut.bytes < replicas.bytes
    model = tiny_experts("qwen3_moe", **shape)
    in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1)
    held = 8 * (in_layers - sum(p.numel() for p in model.parameters() if p.ndim == 3) / 2)
    others = 8 * sum(p.numel() for p in model.parameters()) - 8 * in_layers
    spared = (held + others) / 2 - 2 * held / 3 - others
    assert replicas.bytes - both.bytes == pytest.approx(spared, abs=0.01 * both.bytes)
    prepared = prepare(Run.model_validate(asked))
    few_numbers = replace(
        prepared.shape, layers=4, vocabulary=1, layer_numbers=((100, 90), (100, 10), (100, 10), (100, 10))
    )
    unlike = replace(prepared, shape=few_numbers)
    assert stage_layers(prepared.run, unlike, 2) == (1, 3)
    assert planning_cost(prepared.run, unlike, 2).stage_shares == (0.75, 0.25)
    assert largest_stage(prepared.run, unlike, 2) == 0.75
    few = tiny_experts("qwen3_moe", **shape).model.layers
    numbers = [(sum(p.numel() for p in layer.parameters()), linear_of(layer)) for layer in few]
    assert prepared.shape.layer_numbers == tuple(numbers)


def linear_of(layer: torch.nn.Module) -> int:
    """Numbers of the weights of two or more dimensions that one token meets, without the router's: of experts two in eight."""
    own = {name: p for name, p in layer.named_parameters() if p.ndim > 1 and ".gate.weight" not in name}
    return sum(p.numel() * (2 if p.ndim == 3 else 8) // 8 for p in own.values())


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel": {"expert": 4}}, "mlp.experts has 6 experts, which it does not divide; give one of 2, 3, 6"),
        ({"quantization": "nf4"}, "parallel.expert does not take quantised layers apart"),
    ],
)
def test_what_expert_parallelism_does_not_go_with_is_refused(
    changes: dict[str, Any], says: str, asked: dict[str, Any]
) -> None:
    with pytest.raises((InputError, ValueError), match=says):
        prepare(Run.model_validate({**asked, "parallel": {"expert": 2}, **changes}))


def test_jobs_and_models_that_cannot_be_shared_out_are_refused(
    asked: dict[str, Any], tiny_base: Callable[[str], str]
) -> None:
    dense = {**asked, "base_model": tiny_base("llama"), "parallel": {"expert": 2}}
    plain = {**asked["jobs"][0]["train"]}
    plain.pop("router_aux_loss_coef")
    dense["jobs"] = [{**asked["jobs"][0], "adapter": {"r": 2}, "train": plain}]
    with pytest.raises(InputError, match=r"parallel.expert is 2, but a llama model has no experts; leave it out"):
        prepare(Run.model_validate(dense))
    factored = {**asked, "parallel": {"expert": 2}, "jobs": [{**asked["jobs"][0], "train": {"optim": "adafactor"}}]}
    with pytest.raises(ValueError, match=r"'lora' has train.optim: adafactor, which parallel.expert does not take"):
        Run.model_validate(factored)
