"""Training over the scheduler's windows: same results under every method and budget, fewer microbatches, out of memory."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from seeds import SEED, SOAK
from steps import after_microbatch, crash, terminate
from test_training import JOBS, adapter, config, distance, same_bits, steps, train

from packlora.config import Run
from packlora.data.reader import Reader
from packlora.engine import passes
from packlora.parallel.alone import OneProcess
from packlora.runtime import measure, profiler, short
from packlora.runtime.profiles import MEASURES, ProfileCache
from packlora.runtime.session import Session

Rows = Callable[..., str]
Base = Callable[..., str]

LONG: list[dict[str, Any]] = [
    {"name": "often", "adapter": {"r": 4}, "train": {"global_batch_size": 2, "num_train_epochs": 4, "learning_rate": 3e-3}},
    {
        "name": "large", "adapter": {"r": 2, "lora_dropout": 0.2},
        "train": {"global_batch_size": 5, "num_train_epochs": 2, "learning_rate": 3e-3},
    },
    {"name": "once", "adapter": {"r": 3, "use_dora": True}, "train": {"global_batch_size": 12, "learning_rate": 3e-3}},
]  # fmt: skip
"""24, 6 and 1 optimizer steps of 12 samples: more than one window."""


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two windows, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    tree = config(
        tiny_base("shallow"), folder / "whole", rows_into(folder), LONG, max_tokens_per_microbatch=150, eval_every=5
    )
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKLORA_CACHE", str(folder / "cache"))
        train(tree)
    return tree, folder / "whole"


@pytest.fixture
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """most -> the tokens of every microbatch that was tried; those of more than `most` tokens run out of memory, as a GPU
    does: in the middle of the backward, with gradients half made."""

    def install(most: int) -> list[int]:
        tried: list[int] = []
        original = passes.SingleDevice.backward

        def limited(executor: Any, pending: Any) -> Any:
            tried.append(sum(pending.batch.num_tokens.values()))
            ran = original(executor, pending)
            if tried[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return ran

        monkeypatch.setattr(passes.SingleDevice, "backward", limited)
        return tried

    return install


# --- the same results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "milp", "auto"] if SOAK else ["auto"])
def test_jobs_of_different_batches_and_epochs_give_under_every_method_what_they_give_alone(
    method: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    plain = config(
        tiny_base("shallow"), tmp_path / "solo", write_rows, LONG, dtype="float64", max_tokens_per_microbatch=150
    )
    train({**plain, "schedule": {"method": "solo"}})
    train({**plain, "output_dir": str(tmp_path / method), "schedule": {"method": method, "time_limit_s": 5}})
    for job in LONG:
        assert distance(adapter(tmp_path / method, job["name"]), adapter(tmp_path / "solo", job["name"])) < 1e-10
    assert {line["step"] for line in steps(tmp_path / method) if line["job"] == "often"} == set(range(1, 25))
    ran = lines(tmp_path / method, "microbatches")
    assert any(len(set(line["batches"].values())) > 1 for line in ran)  # batches of different rounds shared one
    assert {line["window"] for line in ran} == {0, 16}
    assert len(ran) < len(lines(tmp_path / "solo", "microbatches"))


def test_every_sample_is_run_once_in_its_own_batch_and_lines_say_so(whole: tuple[dict[str, Any], Path]) -> None:
    _, out = whole
    ran = lines(out, "microbatches")
    assert [line["index"] for line in ran] == list(range(len(ran)))
    tokens: dict[tuple[str, int], int] = {}
    for line in ran:
        assert line["batches"].keys() == line["tokens"].keys() == line["samples"].keys()
        assert line["round"] == min(line["batches"].values())
        assert sum(line["tokens"].values()) <= line["capacity"] == 150
        assert line["predicted"] > 0
        for name, batch in line["batches"].items():
            tokens[name, batch] = tokens.get((name, batch), 0) + line["tokens"][name]
    assert tokens == {(line["job"], line["step"] - 1): line["tokens"] for line in steps(out)}
    windows = lines(out, "windows")
    assert [line["window"] for line in windows] == [0, 16]
    assert sum(line["microbatches"] for line in windows) == len(ran) >= sum(line["bound"] for line in windows)
    html = (out / "report.html").read_text()
    assert "Time of a microbatch" in html
    assert "the lower bound is" in html


def test_short_jobs_need_fewer_microbatches_than_they_have_steps(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    jobs = [
        {
            "name": f"job{n}", "data": {"path": write_rows(f"short{n}", 8, n, 4)}, "adapter": {"r": 2},
            "train": {"global_batch_size": 2},
        }
        for n in range(4)
    ]  # fmt: skip
    train(config(tiny_base("shallow"), tmp_path / "out", write_rows, jobs, max_tokens_per_microbatch=192))
    assert len(steps(tmp_path / "out")) == 16
    ran = lines(tmp_path / "out", "microbatches")
    assert len(ran) < 8
    assert len(ran) == lines(tmp_path / "out", "windows")[0]["bound"]


# --- resume ------------------------------------------------------------------------------------------------------------


def test_interrupted_inside_a_window_and_at_its_border_a_run_goes_on_to_the_same_bits(
    whole: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, reference = whole
    ran = lines(reference, "microbatches")
    border = next(number for number, line in enumerate(ran) if line["window"] == 16)
    draw = random.Random(SEED)
    stops = [border, draw.randrange(2, border - 1), border + 1, border - 1, draw.randrange(border + 2, len(ran))]
    for stop_at in stops if SOAK else stops[1:2]:
        out = tmp_path / f"stop-{stop_at}"
        with monkeypatch.context() as patch:
            if stop_at % 2:
                after_microbatch(patch, stop_at, terminate)
                assert train({**tree, "output_dir": str(out)}).signal == signal.SIGTERM
            else:
                after_microbatch(patch, stop_at, crash)
                with pytest.raises(RuntimeError, match="crash"):
                    train({**tree, "output_dir": str(out)})
        train({**tree, "output_dir": str(out)}, resume=True)
        same_bits(reference, out, LONG)
        assert (out / "evals.jsonl").read_text() == (reference / "evals.jsonl").read_text()
        again = lines(out, "microbatches")
        places = [(line["window"], line["slot"]) for line in again]
        assert sorted(places) == [(line["window"], line["slot"]) for line in ran]  # each once
        assert len({line["index"] for line in again}) == len(again)
        assert [line["window"] for line in lines(out, "windows")] == [0, 16]


def test_a_resumed_run_does_not_repeat_microbatches_that_nobody_needs(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    tree, reference = whole
    out = tmp_path / "again"
    first = train({**tree, "output_dir": str(out), "save_every": 1}, max_steps=6)
    second = train({**tree, "output_dir": str(out), "save_every": 1}, resume=True)
    same_bits(reference, out, LONG)
    tokens = sum(line["tokens"] for line in steps(reference))
    assert first.tokens + second.tokens < 1.25 * tokens  # what is shared with microbatches still to do is run twice


# --- out of memory -----------------------------------------------------------------------------------------------------


def test_out_of_memory_with_an_automatic_budget_plans_again_with_less_and_gives_the_same_adapters(
    out_of_memory: Callable[[int], list[int]], tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    auto = config(
        tiny_base("shallow"), tmp_path / "plenty", write_rows, LONG, dtype="float64", max_tokens_per_microbatch="auto"
    )
    train(auto)
    assert json.loads((tmp_path / "plenty" / "run.json").read_text())["schedule"]["budget"] == 2048
    tried = out_of_memory(300)
    result = train({**auto, "output_dir": str(tmp_path / "little")})
    assert result.status == "done"
    assert max(tried) > 300
    for job in LONG:
        assert distance(adapter(tmp_path / "little", job["name"]), adapter(tmp_path / "plenty", job["name"])) < 1e-10
    record = json.loads((tmp_path / "little" / "run.json").read_text())
    budget = record["schedule"]["budget"]
    assert budget <= tried[tried.index(max(tried))] * 3 // 4
    assert any("out of memory in a microbatch of" in text for text in record["warnings"])
    assert "out of memory in a microbatch of" in (tmp_path / "little" / "report.html").read_text()
    assert all(sum(line["tokens"].values()) <= 300 for line in lines(tmp_path / "little", "microbatches"))
    assert lines(tmp_path / "little", "microbatches")[-1]["capacity"] == budget


def test_a_lowered_budget_is_kept_when_the_run_is_resumed(
    out_of_memory: Callable[[int], list[int]], tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    auto = config(
        tiny_base("shallow"), tmp_path / "out", write_rows, LONG, max_tokens_per_microbatch="auto", save_every=1
    )
    out_of_memory(300)
    train(auto, max_steps=2)
    budget = json.loads((tmp_path / "out" / "run.json").read_text())["schedule"]["budget"]
    tried = out_of_memory(300)
    train(auto, resume=True)
    assert max(tried) <= budget < 300 * 2


def test_out_of_memory_with_the_users_budget_or_with_a_single_sample_is_an_error_that_says_what_to_do(
    out_of_memory: Callable[[int], list[int]], tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Gradient checkpointing is written, too; test_fit.py has what is not."""
    remedies = "lower max_tokens_per_microbatch or set gradient_checkpointing", "set gradient_checkpointing"
    for budget, most, remedy in ((2048, 150, remedies[0]), ("auto", 20, remedies[1])):
        tried = out_of_memory(most)
        keys = {"max_tokens_per_microbatch": budget, "gradient_checkpointing": False}
        tree = config(tiny_base("shallow"), tmp_path / str(budget), write_rows, LONG, **keys)
        with pytest.raises(MemoryError, match=rf"tokens; {remedy}: true\. .* --resume"):
            train(tree)
        assert budget == "auto" or len(tried) == 1


def test_out_of_memory_in_an_evaluation_evaluates_in_smaller_parts(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = config(tiny_base("shallow"), tmp_path / "plenty", write_rows, JOBS[:1], max_tokens_per_microbatch="auto")
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    train(tree)
    original = passes.token_losses

    def limited(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and batch.owners.total > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(model, batch, *args, **kwargs)

    monkeypatch.setattr(passes, "token_losses", limited)
    train({**tree, "output_dir": str(tmp_path / "little")})
    for a, b in zip(lines(tmp_path / "plenty", "evals"), lines(tmp_path / "little", "evals"), strict=True):
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-5)
    same_bits(tmp_path / "plenty", tmp_path / "little", JOBS[:1])


# --- measuring ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> Any:
    tree = config(tiny_base("shallow"), tmp_path / "out", write_rows, LONG, max_tokens_per_microbatch="auto")
    (tmp_path / "out").mkdir()
    return Session(Run.model_validate(tree), OneProcess(), False, None, [], Reader()).set_up()


def test_measuring_finds_where_memory_ends_and_leaves_the_jobs_as_they_were(
    trainer: Any, out_of_memory: Callable[[int], list[int]]
) -> None:
    before = [p.clone() for job in trainer.jobs for p in job.state.parameters.values()]
    tried = out_of_memory(200)
    points = measure.measure(trainer.base, trainer.executor, trainer.jobs, (64, 128, 512, 1024))
    assert [point.seconds is None for point in points] == [False, False, True]
    assert points[0].tokens < points[1].tokens <= 128 < points[2].tokens
    assert tried == [point.tokens for point in points[:2] for _ in range(3)] + [points[2].tokens]
    after = [p for job in trainer.jobs for p in job.state.parameters.values()]
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))
    assert all(job.step == 0 for job in trainer.jobs)


@pytest.mark.parametrize("key", MEASURES)
def test_what_is_remembered_is_not_of_a_run_that_needs_another_memory(key: str, trainer: Any) -> None:
    run, others = trainer.run, (trainer.prepared, trainer.base)
    keys = {profiler.profile_key(run.model_copy(update={key: value}), *others) for value in (False, True)}
    assert len(keys) == 2


def test_what_was_measured_is_remembered_and_a_failure_in_training_is_added_to_it(trainer: Any) -> None:
    run, prepared, base = trainer.run, trainer.prepared, trainer.base
    points = measure.measure(base, trainer.executor, trainer.jobs, (64, 128, 256))
    cache, key = ProfileCache(base.device), profiler.profile_key(run, prepared, base)
    cache.put(key, points)
    assert json.loads(cache.path.read_text())["profiles"][key][0]["tokens"] == points[0].tokens
    known = profiler.profile(run, prepared)
    assert known.origin == "remembered"
    assert known.fits(points[-1].tokens)
    short.remember_failure(run, prepared, base, points[-1].tokens)
    known = profiler.profile(run, prepared)
    assert known.failed == points[-1].tokens
    assert not known.fits(points[-1].tokens)
    assert known.fits(points[-2].tokens)
    cache.path.write_text("{")
    assert profiler.profile(run, prepared).origin == "estimated"
