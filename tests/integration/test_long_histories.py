"""Jobs of many steps: what a checkpoint costs does not grow, and the log history is whole all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packlora
from packlora.runtime import history, job

STEPS = 40
PIECE = 4


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in ("seconds", "elapsed")} for line in lines]


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "trainer_state.json").read_text())
    return found


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PIECE", PIECE)


@pytest.fixture(scope="module")
def whole(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one job of forty steps with a checkpoint at every second, evaluated at every fifth."""
    folder = tmp_path_factory.mktemp("long")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} the fox", "completion": "a dog"}) + "\n" for n in range(8)))
    tree = {
        "base_model": tiny_base("shallow"), "output_dir": str(folder / "out"), "max_tokens_per_microbatch": 96, "device": "cpu",
        "save_every": 2, "save_total_limit": None, "eval_every": 5,
        "jobs": [
            {
                "name": "a", "data": {"path": str(rows), "eval_path": str(rows)},
                "adapter": {"r": 2, "target_modules": ["q_proj"]},
                "train": {"global_batch_size": 1, "max_steps": STEPS, "learning_rate": 1e-3},
            }
        ],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "PIECE", PIECE)
        assert packlora.train(tree).status == "done"
    return tree


def broken_off(whole: dict[str, Any], tmp_path: Path, step: int = 30) -> tuple[dict[str, Any], Path]:
    """A copy of the run as if it had been killed after a checkpoint."""
    out = tmp_path / "out"
    shutil.copytree(whole["output_dir"], out)
    for path in (out / "a").iterdir():
        if path.is_file():
            path.unlink()
        elif path.name.startswith("checkpoint-") and int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "saved": {"a": step}, "result": None}))
    return {**whole, "output_dir": str(out)}, out


def test_a_checkpoint_holds_as_many_bytes_at_any_step_and_its_pieces_hold_the_rest(whole: dict[str, Any]) -> None:
    folder = Path(whole["output_dir"]) / "a"
    sizes = {}
    for step in range(10, STEPS + 1, 2):
        own = folder / f"checkpoint-{step}"
        sizes[step] = sum(file.stat().st_size for file in own.iterdir())
        found = state(own)
        assert PIECE <= len(found["log_history"]) < 2 * PIECE
        lines, lost = history.read(folder, found["earlier_log_history"])
        assert lost is None
        upto = [line for line in state(folder)["log_history"] if line["step"] <= step]
        assert lines + found["log_history"] == upto[: len(lines) + len(found["log_history"])]
        assert len(upto) - len(lines) - len(found["log_history"]) <= 1  # the evaluation after it
    assert max(sizes.values()) < 1.5 * min(sizes.values())
    pieces = list((folder / "history").iterdir())
    held = [len(file.read_text().splitlines()) - 1 for file in pieces]
    assert sum(held) <= STEPS + STEPS // 5 + 1  # each line once


def test_a_run_that_goes_on_has_the_history_of_one_that_was_let_alone(whole: dict[str, Any], tmp_path: Path) -> None:
    tree, out = broken_off(whole, tmp_path)
    assert packlora.train(tree, resume=True).status == "done"
    wanted = Path(whole["output_dir"])
    assert timeless(state(out / "a")["log_history"]) == timeless(state(wanted / "a")["log_history"])
    for name in ("metrics.jsonl", "evals.jsonl"):
        ours, theirs = ([json.loads(line) for line in (one / name).read_text().splitlines()] for one in (out, wanted))
        assert timeless(ours) == timeless(theirs)
    weights = "a/adapter_model.safetensors"
    assert (out / weights).read_bytes() == (wanted / weights).read_bytes()


@pytest.mark.parametrize("how", ["gone", "flipped", "a pipe"])
def test_a_piece_that_is_not_what_was_written_costs_lines_of_a_log_and_no_bit(
    how: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    tree, out = broken_off(whole, tmp_path)
    first = min((out / "a" / "history").iterdir(), key=lambda file: int(file.name.partition("-")[0]))
    text = bytearray(first.read_bytes())
    first.unlink()
    if how == "flipped":
        text[-9] ^= 1
        first.write_bytes(text)
    elif how == "a pipe":
        import os

        os.mkfifo(first)
    assert packlora.train(tree, resume=True).status == "done"
    wanted, upto = Path(whole["output_dir"]), int(first.name.partition("-")[0])
    weights = "a/adapter_model.safetensors"
    assert (out / weights).read_bytes() == (wanted / weights).read_bytes()
    assert min(line["step"] for line in state(out / "a")["log_history"]) >= upto
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, STEPS + 1))  # the log keeps what it had
    (said,) = [text for text in json.loads((out / "run.json").read_text())["warnings"] if "log history" in text]
    assert said.startswith(f"job 'a': {first} is not what was written: the log history lacks the steps up to {upto}")


def test_a_checkpoint_that_was_copied_alone_is_an_adapter_and_goes_on_without_its_earlier_lines(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    tree, out = broken_off(whole, tmp_path)
    copy = tmp_path / "elsewhere" / "mine"
    shutil.copytree(out / "a" / "checkpoint-30", copy)
    job = {**tree["jobs"][0], "adapter": {"init_from": str(copy)}}
    other = {**tree, "output_dir": str(tmp_path / "other"), "jobs": [job]}
    first = packlora.train(other, max_steps=1).jobs["a"].eval_before
    assert first == next(line["eval_loss"] for line in lines_of(out / "evals.jsonl") if line["step"] == 30)

    shutil.rmtree(out / "a")
    shutil.copytree(copy, out / "a" / "checkpoint-30")
    assert packlora.train(tree, resume=True).status == "done"
    weights = "a/adapter_model.safetensors"
    assert (out / weights).read_bytes() == (Path(whole["output_dir"]) / weights).read_bytes()
    assert [line["step"] for line in lines_of(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    (said,) = [text for text in json.loads((out / "run.json").read_text())["warnings"] if "log history" in text]
    assert said.startswith(f"job 'a': {out / 'a' / 'history'}/") and "which no number depends on" in said


def test_a_piece_whose_evaluations_decide_something_is_not_gone_without_a_refusal(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    tree, out = broken_off(whole, tmp_path)
    train = {**tree["jobs"][0]["train"], "load_best_model_at_end": True, "eval_steps": 5}
    tree = {**tree, "jobs": [{**tree["jobs"][0], "train": train}]}
    record = json.loads((out / "run.json").read_text())
    record["config"]["jobs"][0]["train"] |= {"load_best_model_at_end": True, "eval_steps": 5}
    (out / "run.json").write_text(json.dumps(record))
    first = min((out / "a" / "history").iterdir(), key=lambda file: int(file.name.partition("-")[0]))
    first.unlink()
    with pytest.raises(packlora.InputError, match="is not what was written, and evaluations that it holds decide"):
        packlora.train(tree, resume=True)


def test_a_job_is_judged_by_each_line_of_its_history_once(
    whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, original = 0, job.judged

    def counted(lines: Any, *args: Any) -> Any:
        nonlocal looked
        lines = list(lines)
        looked += len(lines)
        return original(lines, *args)

    monkeypatch.setattr(job, "judged", counted)
    packlora.train({**whole, "output_dir": str(tmp_path / "out")})
    assert looked <= STEPS + STEPS // 5 + 1
