"""Memory that runs out wherever a run makes a tensor, once or for good: the run has the numbers of an undisturbed one, or it
ends, says what would fit, and goes on to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from seeds import SEED, SOAK
from short_memory import Short
from test_training import adapter, config, distance, same_bits, train

from packlora.engine.adapters import AdapterState
from packlora.engine.optimizer import FlatAdamW
from packlora.engine.passes import SingleDevice
from packlora.runtime import trainer

JOBS: list[dict[str, Any]] = [
    {"name": "a", "adapter": {"r": 3}, "train": {"global_batch_size": 4, "num_train_epochs": 1}},
    {
        "name": "b",
        "adapter": {"r": 2, "use_dora": True, "lora_dropout": 0.1},
        "train": {"global_batch_size": 3, "max_steps": 4},
    },
]


@pytest.fixture(scope="module")
def whole(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, int]:
    """A run that evaluates, keeps the best adapter, saves and writes texts; its folder, and the tensors that it makes."""
    folder = tmp_path_factory.mktemp("whole")
    tree = config(
        tiny_base("shallow"), folder / "whole", rows_into(folder), JOBS, eval_every=2, save_every=1, save_total_limit=None,
        dtype="float64", sample_prompts=["red green"], sample_max_new_tokens=2,
    )  # fmt: skip
    del tree["max_tokens_per_microbatch"]
    for job in tree["jobs"]:
        job["data"]["eval_path"] = job["data"]["path"]
        job["train"] |= {"optim": "adamw_torch_fused", "load_best_model_at_end": True, "eval_steps": 2}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PACKLORA_CACHE", str(folder / "cache"))
        short = shortened(patched, 0)
        assert train(tree).status == "done"
    return tree, folder / "whole", short.made


def shortened(patched: pytest.MonkeyPatch, at: int, lasts: bool = False) -> Short:
    """Let memory run out while a run trains, from its first evaluation to its last checkpoint."""
    short, original = Short(at, lasts), trainer.Trainer._train

    def shortly(self: Any) -> None:
        with short:
            original(self)

    patched.setattr(trainer.Trainer, "_train", shortly)
    return short


def places(made: int) -> list[tuple[int, bool]]:
    draw, count = random.Random(SEED), 300 if SOAK else 8
    return [(draw.randrange(made * at // count, made * (at + 1) // count) + 1, at % 2 > 0) for at in range(count)]


def test_wherever_memory_runs_out_the_run_comes_to_the_same_numbers(
    whole: tuple[dict[str, Any], Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, there, made = whole
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    ended = 0
    for at, lasts in places(made):
        out = tmp_path / f"{at}"
        own = tree | {"output_dir": str(out)}
        with monkeypatch.context() as patched:
            short = shortened(patched, at, lasts)
            said = error_of(own)
        assert short.made >= at
        if said:
            ended += 1
            assert said.startswith("out of memory on cpu") and "--resume" in said, said
            assert any(word in said for word in ("lower ", "set ", "shorten")), said
            assert all(f"{name}: step {step} of" in said for name, step in saved(out).items()), (said, saved(out))
            assert train(own, resume=True).status == "done"
        for job in JOBS:
            assert distance(adapter(out, job["name"]), adapter(there, job["name"])) < 1e-10, (at, lasts)
    assert 0 < ended < len(places(made))


@pytest.mark.parametrize(
    ("owner", "name"), [(AdapterState, "gradient_buffers"), (FlatAdamW, "_made"), (trainer, "keep_if_best")]
)
def test_a_lack_that_passes_outside_of_microbatches_changes_no_bit(
    owner: Any, name: str, whole: tuple[dict[str, Any], Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gradients are added up, as moments are made, and as the best adapter is kept."""
    tree, there, _ = whole
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    original, freed, lacked = getattr(owner, name), list[int](), list[int]()

    def once(*args: Any) -> Any:
        if not lacked:
            lacked.append(1)
            raise RuntimeError("CUDA error: out of memory")  # as drivers say it
        return original(*args)

    monkeypatch.setattr(owner, name, once)
    monkeypatch.setattr(SingleDevice, "free", lambda device: freed.append(1))
    assert train(tree | {"output_dir": str(tmp_path / "out")}).status == "done" and freed == lacked == [1]
    same_bits(tmp_path / "out", there, JOBS)


def error_of(tree: dict[str, Any]) -> str:
    """Message with which a run ends where memory runs out; empty where it does not end by that."""
    try:
        assert train(tree).status == "done"
    except MemoryError as error:
        return str(error)
    return ""


def saved(out: Path) -> dict[str, int]:
    """The newest checkpoint of each job that has not ended."""
    jobs = [job["name"] for job in JOBS if not (out / job["name"] / "trainer_state.json").exists()]
    return {
        name: max((int(path.name.partition("-")[2]) for path in (out / name).glob("checkpoint-*")), default=0)
        for name in jobs
    }
