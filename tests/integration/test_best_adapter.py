"""The best adapter as the result, early ends, evaluations by job: what is written is what an evaluation saw."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import packlora
from packlora.config import TrainConfig
from packlora.errors import InputError
from packlora.runtime import evaluate, history
from packlora.runtime.evaluate import HeldOut
from packlora.runtime.job import Job, Judged, judged, take_best


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = adapter(one), adapter(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def evals(folder: Path, job: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    return [line for line in lines if line["job"] == job]


def best_of(folder: Path, job: str) -> Judged:
    train = {"best": TrainConfig(eval_steps=2), "early": TrainConfig(eval_steps=1)}[job]
    return judged(evals(folder, job), train, 9)


@pytest.fixture
def tree(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Jobs with the best adapter, with an early end, and a plain one."""
    held = write_rows("held", 5, 9)

    def make(out: str, on_start: bool = True, **train: Any) -> dict[str, Any]:
        def job(name: str, seed: int, **own: Any) -> dict[str, Any]:
            data = {"path": write_rows(name, 8, seed), "eval_path": held}
            common = {"max_steps": 9, "learning_rate": 1.0, "global_batch_size": 3}
            return {"name": name, "data": data, "adapter": {"r": 3}, "train": common | own}

        return {
            "base_model": tiny_base("shallow"), "output_dir": str(tmp_path / out), "save_every": 1, "save_total_limit": None,
            "max_tokens_per_microbatch": 64, "eval_every": 4,
            "jobs": [
                job("best", 1, load_best_model_at_end=True, **{"eval_steps": 2} | train),
                job("early", 2, load_best_model_at_end=True, early_stopping_patience=2, eval_steps=1, learning_rate=0.3),
                job("plain", 3, eval_on_start=on_start),
            ],
        }  # fmt: skip

    return make


BEST = {"best": 4, "early": 3}
"""Steps of the lowest losses."""


def test_the_result_is_the_adapter_of_the_best_evaluation_and_an_interruption_changes_no_bit(
    tree: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = evaluate._held_out

    def rising(job: Job, *given: Any) -> HeldOut:
        """Losses that fall to a step and rise from there, whatever the processor makes of such learning rates."""
        own = held_out(job, *given)
        return HeldOut(own.loss + 1e3 * abs(job.step - BEST.get(job.config.name, 0)), own.metrics)

    monkeypatch.setattr(evaluate, "_held_out", rising)
    whole = tmp_path / "whole"
    result = packlora.train(tree(whole.name))
    assert [line["step"] for line in evals(whole, "best")] == [0, 2, 4, 6, 8, 9]
    assert [line["step"] for line in evals(whole, "plain")] == [0, 4, 8, 9]
    for name in ("best", "early"):
        found = best_of(whole, name)
        last = evals(whole, name)[-1]["step"]
        assert found.step == BEST[name] < last
        assert same(whole / name, whole / name / f"checkpoint-{found.step}")
        assert not same(whole / name, whole / name / f"checkpoint-{last}")
        assert result.jobs[name].eval_after == found.loss
        state = json.loads((whole / name / "trainer_state.json").read_text())
        assert (state["best_global_step"], state["best_metric"]) == (found.step, found.loss)
    early = best_of(whole, "early")
    assert result.jobs["early"].step == early.step + 2 < 9 and early.worse == 2
    warned = json.loads((whole / "run.json").read_text())["warnings"]
    assert any("'early' ends at step" in text and "early_stopping_patience 2 (best: step" in text for text in warned)
    assert any("'best': its result is the adapter of step" in text for text in warned)
    assert same(whole / "plain", whole / "plain" / "checkpoint-9")

    packlora.train(tree("parts", on_start=False), max_steps=7)  # which evaluates where the whole run does not
    packlora.train(tree("parts"), resume=True)
    parts = tmp_path / "parts"
    assert [line["step"] for line in evals(parts, "plain")] == [4, 7, 8, 9]  # without the loss before the first step
    for name in ("best", "early", "plain"):
        assert same(whole / name, parts / name), name
        assert [line["eval_loss"] for line in evals(parts, name)][-1] == evals(whole, name)[-1]["eval_loss"]
    assert {line["step"] for line in evals(parts, "best")} - {line["step"] for line in evals(whole, "best")} == {7}
    shutil.rmtree(parts / "best" / "checkpoint-1")  # a result that is lost is made again from the last checkpoint
    (parts / "best" / "adapter_model.safetensors").unlink()
    again = packlora.train(tree("parts"), resume=True)
    assert same(whole / "best", parts / "best")
    assert again.jobs["best"].eval_after == result.jobs["best"].eval_after
    with pytest.raises(InputError, match=r"job 'best' train\.eval_steps"):
        packlora.train(tree("parts", eval_steps=3), resume=True)


# --- broken off ----------------------------------------------------------------------------------------------------------

LOSSES = (5.0, 4.0, 3.0, 3.5, 2.0, 2.5, 2.4, 2.2, 2.1, 1.0)
"""By step. With a patience of 3 the run ends after step 7, and its best step is 4."""


def test_patience_and_the_best_adapter_are_the_same_wherever_a_run_is_broken_off(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the checkpoint of the best evaluation, while no better one comes, and after the last. The
    evaluations that decide are in pieces of the log history by then."""
    monkeypatch.setattr(history, "PIECE", 2)
    monkeypatch.setattr(evaluate, "_held_out", lambda job, *_: HeldOut(LOSSES[job.step], {}))
    rows = write_rows("rows", 6)
    train = {"max_steps": 9, "global_batch_size": 2, "learning_rate": 1e-2, "eval_steps": 1}
    train |= {"load_best_model_at_end": True, "early_stopping_patience": 3}
    tree = {
        "base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "whole"), "save_every": 1, "save_total_limit": None,
        "jobs": [{"name": "a", "data": {"path": rows, "eval_path": rows}, "adapter": {"r": 2}, "train": train}],
    }  # fmt: skip
    result, whole = packlora.train(tree), tmp_path / "whole"
    assert (result.jobs["a"].step, result.jobs["a"].eval_after) == (7, 2.0)
    assert same(whole / "a", whole / "a" / "checkpoint-4") and not same(whole / "a", whole / "a" / "checkpoint-7")
    for step in (6, 7):  # after the step that no patience outlasts, a session that was to end there has ended the job
        parts = {**tree, "output_dir": str(tmp_path / f"max_steps-{step}")}
        assert packlora.train(parts, max_steps=step).jobs["a"].step == step
        again, out = packlora.train(parts, resume=True).jobs["a"], tmp_path / f"max_steps-{step}"
        assert (again.status, again.step, again.eval_after) == ("done", 7, 2.0), step
        assert same(out / "a", whole / "a") and not (out / "a" / "checkpoint-8").exists()
        assert json.loads((out / "a" / "checkpoint-7" / "trainer_state.json").read_text())["stopped"].startswith(
            "early"
        )
    for step in (4, 6, 7):
        out = tmp_path / str(step)
        shutil.copytree(whole, out)
        for path in (out / "a").iterdir():
            if path.is_file():
                path.unlink()
            elif path.name.startswith("checkpoint-") and int(path.name.partition("-")[2]) > step:
                shutil.rmtree(path)
        record = json.loads((out / "run.json").read_text())
        (out / "run.json").write_text(json.dumps({**record, "saved": {"a": step}, "result": None}))
        again = packlora.train({**tree, "output_dir": str(out)}, resume=True).jobs["a"]
        assert (again.status, again.step, again.eval_after) == ("done", 7, 2.0), step
        assert same(out / "a", whole / "a"), step
        ours, theirs = (json.loads((own / "a" / "trainer_state.json").read_text()) for own in (out, whole))
        for key in ("best_global_step", "best_metric", "stopped", "global_step"):
            assert ours[key] == theirs[key], (step, key)


@pytest.mark.parametrize("first", [6, 8])
def test_the_best_adapter_of_a_job_that_goes_on_for_longer_is_that_of_a_run_of_all_its_steps(
    first: int,
    tiny_base: Callable[[str], str],
    write_rows: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first session ends with its best evaluation, which is one of the longer run where eval_steps divides its step."""
    monkeypatch.setattr(evaluate, "_held_out", lambda job, *_: HeldOut(abs(job.step - first) + 1.0, {}))
    rows = write_rows("rows", 6)

    def tree(out: str, steps: int) -> dict[str, Any]:
        train = {"max_steps": steps, "global_batch_size": 2, "eval_steps": 4, "load_best_model_at_end": True}
        job = {"name": "a", "data": {"path": rows, "eval_path": rows}, "adapter": {"r": 2}, "train": train}
        return {
            "base_model": tiny_base("shallow"),
            "output_dir": str(tmp_path / out),
            "save_total_limit": 1,
            "jobs": [job],
        }

    assert packlora.train(tree("parts", first)).jobs["a"].eval_after == 1
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert same(parts / "a", parts / "a" / f"checkpoint-{first}")
    result = packlora.train(tree("parts", 11), resume=True)
    assert (
        result.jobs["a"].eval_after
        == packlora.train(tree("whole", 11)).jobs["a"].eval_after
        == (3 if first == 6 else 1)
    )
    assert same(parts / "a", whole / "a")
    states = [json.loads((out / "a" / "trainer_state.json").read_text()) for out in (parts, whole)]
    assert {state["best_global_step"] for state in states} == {4 if first == 6 else 8}


def test_a_job_that_ended_by_patience_says_that_it_takes_none_of_further_steps(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on by what the note says."""
    monkeypatch.setattr(evaluate, "_held_out", lambda job, *_: HeldOut(LOSSES[job.step], {}))
    rows = write_rows("rows", 6)
    train = {"max_steps": 8, "global_batch_size": 2, "eval_steps": 1, "early_stopping_patience": 3}
    job = {"name": "a", "data": {"path": rows, "eval_path": rows}, "adapter": {"r": 2}, "train": train}
    tree = {"base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"), "jobs": [job]}

    def notes() -> list[str]:
        warned = json.loads((tmp_path / "out" / "run.json").read_text())["warnings"]
        return [text for text in warned if "stays at step" in text]

    assert packlora.train(tree).jobs["a"].step == 7
    assert packlora.train(tree, resume=True).jobs["a"].step == 7 and not notes()
    train["max_steps"] = 9
    assert packlora.train(tree, resume=True).jobs["a"].step == 7
    assert notes() == [
        "job 'a' stays at step 7 of 9: it ended there, as asked by early_stopping_patience 3 (best: step 4, 2); --resume "
        "--from a=7 goes on until it is asked again, and changed settings take a new run"
    ]
    assert packlora.train(tree, resume=True, resume_from=["a=7"]).jobs["a"].step > 7


def test_a_job_without_a_copy_of_an_earlier_best_adapter_names_none_as_its_result() -> None:
    train = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="eval_loss")
    job: Any = SimpleNamespace(
        name="a", step=6, best=None, judged=Judged(4, 1.0, 0), config=SimpleNamespace(train=train)
    )
    assert take_best(job) is None
    job.judged = Judged(6, 1.0, 0)
    assert "the adapter of step 6" in str(take_best(job))
