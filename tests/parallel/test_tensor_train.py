"""`packlora.train` with `parallel: {tensor: N}`: processes that hold the model together train what one device trains, and leave
what one device leaves."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import FAMILIES, rows_into, tiny_model
from ranks import RankFailed, Ranks
from steps import change_steps
from tensor_runs import MORE_FAMILIES
from test_replicas import heard, refused_on_all, same_run, whole
from test_training import JOBS, adapter, config, distance
from torch.distributed.tensor import DTensor

import packlora
from packlora.base.load import read_model
from packlora.commands.plan import make_plan
from packlora.config import Run
from packlora.parallel import cut
from packlora.parallel.alone import Alone
from packlora.parallel.sharded import Shards
from packlora.parallel.tensor import shard
from packlora.runtime import choose as choosing
from packlora.runtime import estimate, profiles
from packlora.runtime.choose import base_bytes
from packlora.runtime.folder import OutputFolder
from packlora.runtime.job import Job

__all__ = ["whole"]

Groups = Callable[[int], Ranks]
BIASED = {
    "name": "dora", "adapter": {"r": 4, "use_dora": True, "bias": "all", "lora_dropout": 0.2, "target_modules": "all-linear"},
    "train": {"global_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.5},
}  # fmt: skip
"""What JOBS do not have: biases, and DoRA on layers of both kinds."""


def saved_base(folder: Path, tokenizer: Any, family: str = "llama", **changes: Any) -> str:
    tiny_model(family, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def five_jobs(folder: Path, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """Different jobs of different lengths, two of them with held-out data, on a changed base."""
    base = saved_base(folder / "base", tokenizer, attention_bias=True, mlp_bias=True, **changes)
    jobs = [BIASED, *JOBS]
    out = config(base, folder / "whole", rows_into(folder), jobs, dtype="float64", max_tokens_per_microbatch=120)
    for job in out["jobs"][:2]:
        job["data"]["eval_path"] = job["data"]["path"]
    return out | {"eval_every": 2}


@pytest.fixture(scope="module")
def tree(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return five_jobs(tmp_path_factory.mktemp("tensor"), tokenizer)


def same(out: Path, whole: Path) -> None:
    """What same_run compares, and the fifth job's adapter."""
    same_run(out, whole, 1e-10)
    assert distance(adapter(out, "dora"), adapter(whole, "dora")) <= 1e-10


def one_job(tree: dict[str, Any], out: Path, **parallel: Any) -> dict[str, Any]:
    return {**tree, "jobs": tree["jobs"][:1], "output_dir": str(out), "parallel": parallel}


# --- stopping, resuming ------------------------------------------------------------------------------------------------


def blind(rank: int, tree: dict[str, Any]) -> str:
    """A run that is stopped at a checkpoint which the second process does not see yet."""
    if rank == 0:
        return heard(rank, tree, "", 2, {})[0]
    with mock.patch.object(OutputFolder, "_checkpoint", lambda self, job, step: self.path / "none"):
        return heard(rank, tree, "", 2, {})[0]


def test_what_is_saved_is_decided_by_one_process(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    asked = one_job(tree, tmp_path / "out", tensor=2) | {"save_every": 1}
    assert ranks(2).run(blind, asked) == ["interrupted"] * 2


# --- one decision ------------------------------------------------------------------------------------------------------


def odd_on_one(rank: int, tree: dict[str, Any], number: float) -> tuple[str, str | None, int]:
    """A run in which the slice of one process has a parameter that is not finite after its job's second step."""

    def spoilt(job: Job, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        numbers = step()
        if rank == 1 and job.step == 1:
            numbers[2] = number
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        change_steps(patch, spoilt)
        result = packlora.train(tree).jobs["dora"]
    return result.status, result.failure, result.step


@pytest.mark.parametrize("number", [pytest.param(math.inf, marks=pytest.mark.soak), math.nan])
def test_a_slice_that_is_not_finite_ends_its_job_on_all_processes(
    number: float, tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    for status, failure, step in ranks(2).run(odd_on_one, one_job(tree, tmp_path / "out", tensor=2), number):
        assert (status, step) == ("failed", 1)
        assert "the update made parameters infinite" in str(failure)


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_refused_on_every_process(
    tree: dict[str, Any], tokenizer: Any, ranks: Groups, tmp_path: Path
) -> None:
    fresh = {**tree, "jobs": tree["jobs"][1:], "output_dir": str(tmp_path / "out"), "parallel": {"tensor": 2}}
    heads = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    odd = fresh | {"base_model": saved_base(tmp_path / "odd", tokenizer, **heads)}
    with mock.patch.dict("conftest.FAMILIES", {"hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16})}):
        other = saved_base(tmp_path / "other", tokenizer, "hunyuan")
    refused_on_all(ranks, odd, "q_proj has 3 heads of 16, which 2 does not divide")
    with pytest.raises(packlora.InputError, match=r"3 heads of 16, which 2 does not divide"):
        make_plan(Run.model_validate(odd))
    refused_on_all(ranks, fresh | {"base_model": other}, "transformers has no plan for hunyuan_v1_dense models")


def held(rank: int, tree: dict[str, Any]) -> float:
    """Part of the base model that this process holds of its weights in a run."""
    parts, filled = list[int](), Shards._fill

    def fill(self: Shards, *args: Any) -> None:
        filled(self, *args)
        own = {id(p): p.to_local().numel() for p in self.model.parameters() if isinstance(p, DTensor)}
        parts.append(sum(own.values()))

    with mock.patch.object(Shards, "_fill", fill):
        packlora.train(tree, max_steps=1)
    return parts[-1] / sum(p.numel() for p in read_model(tree["base_model"], None, torch.float32).parameters())


def test_no_process_holds_more_than_its_part_where_layers_are_cut_and_rows_shared(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    asked = one_job(tree, tmp_path / "out", tensor=2, shard_base=True, offload_base=True)
    assert max(ranks(4).run(held, asked)) < 1.1 / 4


def test_the_plan_predicts_time_and_memory_of_devices_that_hold_a_layer_together(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.model_validate(tree | {"parallel": {"tensor": 2}})
    plan, two = make_plan(run, gpus=4), make_plan(run, gpus=2).layouts
    one = make_plan(Run.model_validate(tree), gpus=1).layouts
    assert any("--gpus shows those of the devices" in note for note in plan.to_json()["notes"])
    assert plan.layouts is not None and one is not None and two is not None
    assert [(row.layout.devices_per_job, row.layout.tensor, row.layout.shard) for row in plan.layouts.rows] == [
        (2, 2, 1),
        (4, 2, 1),
        (4, 2, 2),
    ]
    assert one.rows[0].bytes - two.rows[0].bytes == base_bytes(plan.prepared)[0] // 2
    before = [row.seconds for row in plan.layouts.rows]
    monkeypatch.setattr(estimate, "BYTES_PER_SECOND", 1e3)  # messages are what takes time then
    slow = make_plan(run, gpus=4).layouts
    assert slow is not None and all(row.seconds > 10 * was for row, was in zip(slow.rows, before, strict=True))
    assert slow.rows[2].seconds > slow.rows[1].seconds, "it gathers too"
    base = base_bytes(plan.prepared)[0]
    monkeypatch.setattr(choosing, "base_bytes", lambda prepared: (base, base // 8))  # as of a model of many layers
    room = int((slow.rows[1].bytes - base // 8) / profiles.ROOM_SHARE)
    monkeypatch.setattr(estimate, "memory_room", lambda device: room)
    tight = make_plan(Run.model_validate(tree | {"parallel": {"tensor": 2, "devices_per_job": 4}}), gpus=4).layouts
    assert tight is not None and tight.taken.layout.shard == 2 and "(parallel.tensor) is estimated" in tight.reason
    with pytest.raises(packlora.InputError, match=r"parallel.tensor is 2, but 3 processes were started"):
        make_plan(run, gpus=3)


# --- loading -----------------------------------------------------------------------------------------------------------

LOADED: dict[str, tuple[str, dict[str, Any]]] = {
    "untied, biases, words that do not divide": ("qwen2", {"vocab_size": 323}),
    "tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 321}),
    "a head with a bias": ("phi", {}), "joined projections": ("phi3", {}),
}  # fmt: skip


def distributed_tensors() -> list[DTensor]:
    """All in this process, those included that wait to be collected."""
    return [held for held in gc.get_objects() if type(held) is DTensor]


def loaded(rank: int, folder: str, wrong: bool) -> tuple[list[str], float, bool]:
    """Names of parameters that are not the slices of the whole model; the part of its bytes that is here; whether tied."""
    jobs = [{"name": "a", "data": {"path": "unused"}}]
    run = Run(base_model=folder, device="cpu", output_dir="unused", jobs=jobs, parallel={"tensor": 2})
    own = cut._part

    def misread(model: Any, name: str) -> tuple[slice, ...]:
        found = own(model, name)
        return (slice(0, found[0].stop - found[0].start),) if name.endswith("gate_proj.weight") else found

    replica = Alone()
    replica.model = replica.base = dist.group.WORLD
    earlier = distributed_tensors()  # held until the end, so that no later one is at the place of one of these
    with mock.patch.object(cut, "_part", misread if wrong else own):
        base = cut.load_cut(run, None, {"a": 60}, replica)
    places = set(map(id, earlier))
    assert not [held for held in distributed_tensors() if id(held) not in places], "of the model that was looked at"
    whole = read_model(folder, None, torch.float32)
    total = sum(parameter.numel() for parameter in whole.parameters())
    shard(whole, dist.group.WORLD)
    want, got = dict(whole.named_parameters()), dict(base.model.named_parameters())
    assert got.keys() == want.keys()
    tied = base.model.get_output_embeddings().weight is base.model.get_input_embeddings().weight
    odd = [name for name, own in want.items() if not torch.equal(own, got[name])]
    return odd, sum(parameter.numel() for parameter in got.values()) / total, tied


@pytest.mark.parametrize("what", LOADED)
def test_a_process_reads_the_slices_that_it_holds(what: str, tokenizer: Any, ranks: Groups, tmp_path: Path) -> None:
    family, changes = LOADED[what]
    with mock.patch.dict(FAMILIES, MORE_FAMILIES):
        tiny_model(family, **changes).save_pretrained(tmp_path)
    for odd, part, tied in ranks(2).run(loaded, str(tmp_path), False):
        assert odd == [] and part < 0.53 and tied == (what == "tied")


def test_wrong_slices_are_refused_as_the_whole_model_has_other_logits(ranks: Groups, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(RankFailed, match="its own logits differ by"):
        ranks(2).run(loaded, str(tmp_path), True)
