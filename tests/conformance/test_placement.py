"""Every layout with every kind of job: begun there and ended on the next layout of the table, a run gives the numbers, the
checkpoints and the answers of one device. Each planted fault of a layout is seen by that comparison.

A new layout is a row of LAYOUTS, a new kind of job an entry of `text_jobs` or `expert_jobs`.
"""

from __future__ import annotations

import contextlib
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import rows_into, tiny_model
from expert_models import in_float64, tiny_experts
from golden import job, pairs
from ranks import Ranks
from safetensors.torch import load_file
from test_training import adapter, distance

import packlora

Groups = Callable[[int], Ranks]
Tree = dict[str, Any]
BOUND = 1e-10
"""Relative, in float64: adapters, losses and norms."""
NEVER_ZERO = ("loss", "grad_norm", "lr", "eval_loss")
METRICS = (*NEVER_ZERO[:3], "aux_loss", "rewards/margins", "logps/chosen", "kl")
"""Numbers of steps that are compared, where a job has them. Those that may be 0 are compared to 1e-12, too."""

REFUSED = {
    "pipeline": {"fact"}, "tensor": {"fact", "head", "saved", "ends"}, "shard_base": {"head", "saved", "ends"},
}  # fmt: skip
"""Jobs that a key of `parallel` does not take, see docs/several-gpus.md: an optimizer that is not elementwise where a job's
parameters lie in parts, and what is trained of the embedding or the output layer where these are cut."""
LAYOUTS: dict[str, tuple[int, Tree]] = {
    "one": (1, {}),
    "pipeline": (2, {"pipeline": 2}),
    "tensor": (2, {"tensor": 2, "sequence_parallel": True}),
    "shared jobs": (2, {"devices_per_job": 2}),
    "sharded": (2, {"shard_base": True}),
    "three stages": (3, {"pipeline": 3}),
}
LARGER: dict[str, tuple[int, Tree]] = {
    "cut replicas": (4, {"tensor": 2, "sequence_parallel": True, "devices_per_job": 4}),
    "cut rows": (4, {"tensor": 2, "shard_base": True, "offload_base": True}),
    "own jobs": (2, {"devices_per_job": 1}),
    "four own jobs": (4, {"devices_per_job": 1}),
    "four shared jobs": (4, {"devices_per_job": 4}),
    "offloaded": (2, {"shard_base": True, "offload_base": True}),
    "tensor without sequence": (2, {"tensor": 2}),
    "a key-value head on two": (4, {"tensor": 4, "sequence_parallel": True}),
    "two pipelines": (4, {"pipeline": 2, "devices_per_job": 4}),
    "pipelines of own jobs": (4, {"pipeline": 2, "devices_per_job": 2}),
    "cut stages": (4, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}),
    "cut stages without sequence": (4, {"pipeline": 2, "tensor": 2}),
    "cut rows of two": (4, {"tensor": 2, "shard_base": 2}),
    "cut rows with sequence": (4, {"tensor": 2, "shard_base": True, "sequence_parallel": True}),
    "two sharded": (4, {"shard_base": 2, "devices_per_job": 4}),
    "sharded with own jobs": (4, {"shard_base": 2, "devices_per_job": 2}),
    "cut replicas without sequence": (4, {"tensor": 2, "devices_per_job": 4}),
    "cut with own jobs": (4, {"tensor": 2, "devices_per_job": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, Tree]] = {
    "experts": (2, {"expert": 2}),
    "exchanged": (2, {"expert": 2, "ep_implementation": "all_to_all"}),
    "staged": (2, {"pipeline": 2}),
    "cut": (2, {"tensor": 2}),
    "rows": (2, {"shard_base": True}),
}
EXCHANGE = {"ep_implementation": "all_to_all"}
LARGER_EXPERTS: dict[str, tuple[int, Tree]] = {
    "staged experts": (4, {"pipeline": 2, "expert": 2}),
    "sharded experts": (4, {"shard_base": 2, "expert": 2, **EXCHANGE}),
    "three of experts": (3, {"expert": 3}),
    "experts of shared jobs": (4, {"expert": 2, "devices_per_job": 4}),
    "experts of own jobs": (4, {"expert": 2, "devices_per_job": 2}),
    "exchanged, shared jobs": (4, {"expert": 2, "devices_per_job": 4, **EXCHANGE}),
    "exchanged, own jobs": (4, {"expert": 2, "devices_per_job": 2, **EXCHANGE}),
    "three stages": (3, {"pipeline": 3}),
    "two pipelines": (4, {"pipeline": 2, "devices_per_job": 4}),
    "offloaded rows": (2, {"shard_base": True, "offload_base": True}),
    "rows of own jobs": (4, {"shard_base": 2, "devices_per_job": 2}),
    "rows and experts": (4, {"shard_base": True, "expert": 2}),
    "cut replicas": (4, {"tensor": 2, "devices_per_job": 4}),
    "cut rows": (4, {"tensor": 2, "shard_base": 2}),
    "cut stages": (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    "cut stages of experts": (8, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "cut and exchanged": (4, {"tensor": 2, "expert": 2, **EXCHANGE}),
    "cut and exchanged, shared jobs": (8, {"tensor": 2, "expert": 2, "devices_per_job": 8, **EXCHANGE}),
    "cut rows and experts": (8, {"tensor": 2, "expert": 2, "shard_base": 2}),
}


BEST: Tree = {"load_best_model_at_end": True, "eval_steps": 1, "learning_rate": 0.25}
"""A job whose result is the adapter of its best evaluation, not the last one. Larger steps would magnify roundings."""
EARLY: Tree = {"early_stopping_patience": 2, "early_stopping_threshold": 10.0, "eval_steps": 1, "max_steps": 5}
"""A job that ends after its third step, since no evaluation is better by so much than the first one."""
LAYER_0, LAYER_2 = {"layers_to_transform": [0]}, {"layers_to_transform": [2]}
"""Adapters that stages without these layers have nothing of."""


def text_jobs(folder: Path) -> list[Tree]:
    """Jobs of every kind for a dense model."""
    rows = rows_into(folder)
    texts, more = rows("texts", 14, 3), rows("more", 9, 5)
    ours, said = pairs(folder / "pairs.jsonl", 9, 1), pairs(folder / "said.jsonl", 8, 2, judged=True)
    head = {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.1}
    return [
        job("lora", texts, {"lora_dropout": 0.2, "lora_alpha": 8}, neftune_noise_alpha=5.0, weight_decay=0.1, **BEST),
        job(
            "dora", more, {"use_dora": True, "target_modules": "all-linear", "bias": "all"}, max_grad_norm=0.5, **EARLY
        ),
        job(
            "smooth",
            more,
            {"use_rslora": True, "r": 5, **LAYER_0},
            label_smoothing_factor=0.2,
            lr_scheduler_type="cosine",
        ),
        job("dpo", ours, {"lora_dropout": 0.2}, trainer="dpo", loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.6]),
        job("kto", said, {"use_dora": True}, trainer="kto", beta=0.3, desirable_weight=3.0),
        job("sgd", texts, LAYER_2, optim="sgd", learning_rate=0.3, loraplus_lr_ratio=4.0),
        job("fact", more, {"target_modules": ["up_proj"]}, optim="adafactor"),
        job("head", more, head, trainer="sft"),
        stream(rows),
        job("saved", texts, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    ]


def stream(rows: Callable[..., str]) -> Tree:
    """Job that reads its rows as it goes."""
    own = job("stream", rows("stream", 5, 3), {"lora_dropout": 0.1}, global_batch_size=2, max_steps=4)
    return own | {"data": {"path": own["data"]["path"], "streaming": True, "truncate": "drop", "on_bad_row": "skip"}}


def changing_base(folder: Path) -> Tree:
    """Job that begins by changing the base; a job that goes on from it has the half that was trained."""
    return job(
        "half", rows_into(folder)("half", 9, 7), {"init_lora_weights": "olora", "lora_dropout": 0.0}, weight_decay=0.2
    )


def expert_jobs(folder: Path) -> list[Tree]:
    """Jobs of every kind for a model with experts."""
    rows = rows_into(folder)
    texts, more = rows("texts", 12, 3), rows("more", 9, 5)
    ours = pairs(folder / "pairs.jsonl", 8, 1)
    inside = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ends = {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["norm"], "use_rslora": True}
    return [
        job("routed", texts, {"target_modules": "all-linear", "lora_dropout": 0.1}, router_aux_loss_coef=0.5),
        job("inside", more, {"target_modules": ["q_proj"], "target_parameters": inside}, router_aux_loss_coef=2.0),
        job("dora", texts, {"target_modules": ["o_proj"], "target_parameters": inside[:1], "use_dora": True}),
        job("router", more, {"target_modules": ["k_proj"], "target_parameters": [*inside, "gate.weight"]}),
        job("dpo", ours, {"target_modules": ["v_proj"], "target_parameters": inside[1:]}, trainer="dpo"),
        job("ends", more, ends | {"target_parameters": [inside[1], "gate.weight"]}, global_batch_size=2),
    ]


def tree_of(base: str, folder: Path, jobs: list[Tree], device: str = "cpu") -> Tree:
    """Run file of these jobs. Adam's epsilon is large: with 1e-8 it magnifies the rounding of a gradient that is nearly 0."""
    jobs[0]["sample_prompts"] = ["why?", "ab"]
    for at, one in enumerate(jobs):
        if "optim" not in one["train"]:
            one["train"]["adam_epsilon"] = 1e-5
        if at > 1:
            one["data"].pop("eval_path", None)
    return {
        "base_model": base, "output_dir": str(folder / "whole"), "jobs": jobs, "device": device, "dtype": "float64",
        "max_tokens_per_microbatch": 120, "save_every": 1, "eval_every": 2, "sample_max_new_tokens": 3,
    }  # fmt: skip


def dense_run(folder: Path, tokenizer: Any, device: str = "cpu") -> Tree:
    """Run file of a run that one device has ended."""
    model = tiny_model("llama", attention_bias=True, mlp_bias=True, num_hidden_layers=3)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    base = str(folder / "base")
    first = tree_of(base, folder, [changing_base(folder)], device) | {"output_dir": str(folder / "first")}
    packlora.train(first, max_steps=1)
    half = changing_base(folder) | {"adapter": {"init_from": str(folder / "first" / "half")}}
    tree = tree_of(base, folder, [*text_jobs(folder), half], device)
    packlora.train(tree)
    return tree


def routed_run(folder: Path, tokenizer: Any, device: str = "cpu") -> Tree:
    """The same of a model with experts."""
    tiny_experts("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0], num_experts=12).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tree = tree_of(str(folder / "base"), folder, expert_jobs(folder), device)
    assert part_of(0, tree, {}) == "done"
    return tree


@pytest.fixture(scope="module")
def dense(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return dense_run(tmp_path_factory.mktemp("dense"), tokenizer)


@pytest.fixture(scope="module")
def routed(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return routed_run(tmp_path_factory.mktemp("routed"), tokenizer)


def broken_by(target: str, broken: Callable[[Any], Any]) -> Any:
    """What `target` names, replaced by what `broken` makes of it."""
    return mock.patch(target, broken(pkgutil.resolve_name(target)))


def part_of(rank: int, tree: Tree, options: Tree, fault: tuple[str, Any] | None = None) -> str:
    """A run, or a part of it, on this process: its status, or what is wrong with it."""
    planted = contextlib.nullcontext() if fault is None else broken_by(*fault)
    wide = in_float64() if "routed" in tree["base_model"] else contextlib.nullcontext()
    try:
        with planted, wide:
            return str(packlora.train(tree, **options).status)
    except packlora.InputError as error:
        return str(error)


def part(layout: tuple[int, Tree], tree: Tree, ranks: Groups, **options: Any) -> None:
    size, parallel = layout
    asked = tree | ({"parallel": parallel} if parallel else {})
    statuses = ranks(size).run(part_of, asked, options) if size > 1 else [part_of(0, asked, options)]
    assert len({*statuses}) == 1 and statuses[0] in ("interrupted", "done"), statuses


def errors(out: Path, whole: Path, names: list[str]) -> dict[str, float]:
    """Largest relative differences: of adapters, of the losses and norms of steps, of held-out losses."""
    found = {f"{name} adapter": distance(adapter(out, name), adapter(whole, name)) for name in names}
    for log, keys in (("metrics", METRICS), ("evals", ("eval_loss",))):
        ours, theirs = (
            {(line["job"], line["step"], key): line[key] for line in lines(folder, log) for key in keys if key in line}
            for folder in (out, whole)
        )
        wanted = {place: value for place, value in theirs.items() if place[0] in names}
        assert ours.keys() >= wanted.keys()
        for place, value in wanted.items():
            least = 1e-12 if place[-1] in NEVER_ZERO else 1e-2
            found[" ".join(map(str, place))] = abs(ours[place] - value) / max(abs(value), least)
    return found


def lines(folder: Path, log: str) -> list[Tree]:
    return [json.loads(line) for line in (folder / f"{log}.jsonl").read_text().splitlines()]


def taken(tree: Tree, *layouts: tuple[int, Tree]) -> list[Tree]:
    """Jobs that all of these layouts take."""
    refused = set[str]().union(*(REFUSED.get(key, ()) for _, parallel in layouts for key in parallel))
    return [own for own in tree["jobs"] if own["name"] not in refused]


ENDS = ("global_step", "best_global_step", "stopped", "untrained")
"""Keys of trainer_state.json that do not depend on how sums are rounded."""


def same_files(out: Path, whole: Path, names: list[str]) -> None:
    """The answers, the description of jobs and model, and the tensors of checkpoints are those of one device."""
    answers, wanted = (
        {(line["job"], line["step"]): line["samples"] for line in lines(one, "samples")} for one in (out, whole)
    )
    assert wanted.keys() and all(answers[place] == said for place, said in wanted.items())
    record, single = (json.loads((one / "run.json").read_text()) for one in (out, whole))
    assert record["jobs"] == {name: own for name, own in single["jobs"].items() if name in names}
    assert record["model"]["fingerprint"] == single["model"]["fingerprint"]
    for name in names:
        there = [sorted(file.relative_to(one) for file in (one / name).glob("checkpoint-*/*")) for one in (out, whole)]
        assert there[0] == there[1] and len({file.parent for file in there[0]}) >= 2, "the last two are kept"
        ends = [json.loads((one / name / "trainer_state.json").read_text()) for one in (out, whole)]
        assert [ends[0].get(key) for key in ENDS] == [ends[1].get(key) for key in ENDS]
        for file in (file for file in there[0] if file.suffix == ".safetensors"):
            ours, theirs = load_file(out / file), load_file(whole / file)
            assert {key: (t.dtype, t.shape) for key, t in ours.items()} == {
                key: (t.dtype, t.shape) for key, t in theirs.items()
            }
            for key, tensor in theirs.items():
                assert torch.allclose(ours[key], tensor, rtol=1e-7, atol=1e-10), (file, key)


def check(route: list[tuple[int, Tree]], tree: Tree, ranks: Groups, out: Path) -> dict[str, float]:
    """Errors of a run that takes a step on each layout, every other one with recomputed layers, and all others on the last."""
    own = tree | {"output_dir": str(out), "jobs": taken(tree, *route)}
    for at, layout in enumerate(route):
        steps = {"max_steps": at + 1} if at < len(route) - 1 else {}
        part(layout, own | ({"gradient_checkpointing": True} if at % 2 else {}), ranks, resume=at > 0, **steps)
    names = [one["name"] for one in own["jobs"]]
    same_files(out, Path(tree["output_dir"]), names)
    return errors(out, Path(tree["output_dir"]), names)


def routes(short: list[list[str]], layouts: dict[str, Any], larger: dict[str, Any]) -> list[Any]:
    """Routes of runs by names of layouts: short ones. Under `make soak` also from every layout to the one after it and back,
    and from larger ones to the first and back."""
    names = [name for name in layouts if name != "one"]
    found = [[one, other, one] for one, other in zip(names, names[1:] + names[:1], strict=True)]
    found += [[name, next(iter(layouts)), name] for name in larger]
    marks = [([], short), ([pytest.mark.soak], found)]
    return [pytest.param(route, marks=own, id=" to ".join(route)) for own, some in marks for route in some]


@pytest.mark.parametrize("route", routes([["shared jobs", "tensor"], ["three stages", "one"]], LAYOUTS, LARGER))
def test_a_layout_gives_the_numbers_of_one_device(route: list[str], dense: Tree, ranks: Groups, tmp_path: Path) -> None:
    every = LAYOUTS | LARGER
    found = check([every[name] for name in route], dense, ranks, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


def test_four_processes_give_the_numbers_of_one_device(dense: Tree, ranks: Groups, tmp_path: Path) -> None:
    """Jobs of three kinds; under `make soak` those of all kinds are in the table."""
    few = dense | {"jobs": [own for own in dense["jobs"] if own["name"] in ("lora", "dora", "dpo")]}
    found = check([LARGER["cut replicas"], LARGER["cut rows"]], few, ranks, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


@pytest.mark.parametrize("route", routes([["rows", "exchanged"], ["staged", "cut"]], EXPERT_LAYOUTS, LARGER_EXPERTS))
def test_a_layout_of_experts_gives_the_numbers_of_one_device(
    route: list[str], routed: Tree, ranks: Groups, tmp_path: Path
) -> None:
    every = EXPERT_LAYOUTS | LARGER_EXPERTS
    found = check([every[name] for name in route], routed, ranks, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


@pytest.mark.parametrize("key", [key for key, names in REFUSED.items() if "fact" in names])
def test_an_optimizer_that_takes_no_slices_is_refused(key: str, dense: Tree) -> None:
    said = part_of(0, dense | {"parallel": {key: 2}}, {})
    assert f"job 'fact' has train.optim: adafactor, which parallel.{key} does not take; use one of adamw_torch" in said


# --- planted faults: what the comparison must see ------------------------------------------------------------------------


def nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def itself(original: Any) -> Any:
    return lambda x, *args, **kwargs: x


def halved(original: Any) -> Any:
    """Half of the gradient of hidden states."""

    def sends(self: Any, pending: Any) -> None:
        if not self.stage.links.is_first:
            pending.gradient = pending.gradient / 2
        original(self, pending)

    return sends


def by_process(original: Any) -> Any:
    """Keys that differ from process to process."""
    return lambda keys, *args: original([key + dist.get_rank() for key in keys], *args)


def without_parts(original: Any) -> Any:
    """The norm of what this process has."""
    return lambda self, gradient: gradient.double().square().sum().sqrt()


def of_the_first(original: Any) -> Any:
    """Rows of the first slice, whichever is this process's."""
    return lambda part, rows: (rows, *part[1:])


def by_own_norm(original: Any) -> Any:
    """A step that is clipped by the norm of what this stage has."""
    return lambda self, lr, norm: original(self, lr, self.square().sqrt())


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("pipeline", "packlora.pipeline.passes.StageDevice._send_down", halved),
    ("exchanged", "packlora.experts.replicas.SharedGradient._added", nothing),
]
MORE_FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("shared jobs", "packlora.parallel.replicas.Replicas.add", nothing),
    ("tensor", "packlora.parallel.adapter.WholeGradient.norm", without_parts),
    ("pipeline", "packlora.runtime.restoring._restore_optimizer", nothing),
    ("tensor", "packlora.parallel.sequence.summed_tokens", itself),
    ("shared jobs", "packlora.engine.collate.packed_token_keys", by_process),
    ("sharded", "packlora.parallel.replicas.Replicas.add", nothing),
    ("experts", "packlora.experts.cut.summed", itself),
    ("cut rows", "packlora.parallel.sharded.rows_of", of_the_first),
    ("pipeline", "packlora.engine.adapters.AdapterState.step", by_own_norm),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "target", "broken"),
    [*FAULTS, *(pytest.param(*one, marks=pytest.mark.soak) for one in MORE_FAULTS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_of_a_layout_is_seen(
    layout: str, target: str, broken: Callable[[Any], Any], dense: Tree, routed: Tree, ranks: Groups, tmp_path: Path
) -> None:
    """Of the first two jobs, whose numbers do not depend on the others."""
    tree = routed if layout in EXPERT_LAYOUTS else dense
    size, parallel = (LAYOUTS | LARGER | EXPERT_LAYOUTS)[layout]
    asked = tree | {"output_dir": str(tmp_path / "out"), "jobs": tree["jobs"][:2], "parallel": parallel}
    ranks(size).run(part_of, asked, {"max_steps": 1}, (target, broken))
    told = ranks(size).run(part_of, asked, {"resume": True}, (target, broken))
    if told != ["done"] * size:  # the proof before training saw it
        assert all("cannot be packed: " in text or "its own logits differ" in text for text in told), told
        return
    found = errors(
        tmp_path / "out", Path(tree["output_dir"]), ["lora", "dora"] if tree is dense else ["routed", "inside"]
    )
    assert max(found.values()) > 1e-4
