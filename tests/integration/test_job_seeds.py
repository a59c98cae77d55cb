"""What a job draws depends on its own seed, the model and its data: never on its name, nor on the jobs beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import packlora
from packlora.data.order import SampleOrder
from packlora.errors import InputError
from packlora.result import Result

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> Make:
    """(output folder, jobs by name: their seed or None, changes of the top level) -> a run of two epochs with dropout."""
    path = write_rows("rows", 8)

    def make(folder: str, seeds: dict[str, int | None], **top: Any) -> dict[str, Any]:
        jobs = [
            {"name": name, "data": {"path": path}, "adapter": {"r": 4, "lora_dropout": 0.3, "target_modules": ["q_proj"]},
             "train": {"global_batch_size": 4, "num_train_epochs": 2}} | ({} if seed is None else {"seed": seed})
            for name, seed in seeds.items()
        ]  # fmt: skip
        return {"base_model": tiny_base("shallow"), "output_dir": str(tmp_path / folder), "jobs": jobs} | top

    return make


def train(tree: dict[str, Any], **options: Any) -> Result:
    return packlora.train(packlora.Run.model_validate(tree), **options)


def losses(tree: dict[str, Any], job: str) -> list[float]:
    lines = (Path(tree["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["job"] == job]


def adapter(tree: dict[str, Any], job: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(Path(tree["output_dir"]) / job / "adapter_model.safetensors")
    return tensors


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_two_names_with_one_seed_and_one_data_give_the_same_adapter_to_the_bit(make: Make) -> None:
    tree = make("out", {"one": None, "another": None, "third": 1}, max_tokens_per_microbatch=4096)
    train(tree)
    assert losses(tree, "one") == losses(tree, "another") != losses(tree, "third")
    assert same(adapter(tree, "one"), adapter(tree, "another"))
    assert not same(adapter(tree, "one"), adapter(tree, "third"))


def test_a_renamed_job_trains_as_before_and_its_own_seed_is_what_the_runs_seed_would_be(make: Make) -> None:
    by_run, by_job = make("a", {"x": None}, seed=7), make("b", {"y": 7}, seed=3)
    train(by_run)
    train(by_job)
    assert losses(by_run, "x") == losses(by_job, "y")
    assert same(adapter(by_run, "x"), adapter(by_job, "y"))


def test_order_depends_on_the_seed_and_the_epoch_and_not_on_the_name() -> None:
    lengths = np.full(50, 3, np.int32)

    def epoch(name: str, seed: int, number: int) -> list[int]:
        order: list[int] = SampleOrder(name, lengths, 5, seed, 20).epoch(number).tolist()
        return order

    assert epoch("a", 0, 0) == epoch("b", 0, 0)
    assert len({tuple(epoch("a", seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_the_seed_of_every_job_is_recorded(make: Make) -> None:
    tree = make("out", {"one": None, "another": 5}, seed=3)
    train(tree, max_steps=1)
    record = json.loads((Path(tree["output_dir"]) / "run.json").read_text())
    assert {name: job["seed"] for name, job in record["jobs"].items()} == {"one": 3, "another": 5}


def test_a_resume_with_another_seed_of_a_job_is_refused(make: Make) -> None:
    train(make("out", {"one": None, "another": 5}), max_steps=1)
    with pytest.raises(InputError, match="job 'another' seed changed"):
        train(make("out", {"one": None, "another": 6}), resume=True)
    assert train(make("out", {"one": 0, "another": 5}), resume=True).status == "done"  # the same seed, said aloud


def test_a_run_of_an_older_version_which_drew_by_name_is_not_resumed(make: Make) -> None:
    tree = make("out", {"one": None})
    train(tree, max_steps=1)
    file = Path(tree["output_dir"]) / "run.json"
    record = json.loads(file.read_text())
    del record["jobs"]["one"]["seed"]
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"jobs\.one\.seed: Field required; an earlier packlora"):
        train(tree, resume=True)
    assert json.loads(file.read_text()) == record
