"""A chat template that writes the date writes the day on which the run began, in all that belongs to it, on any later day."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHAT, WORDS
from safetensors.torch import load_file

import packlora
from packlora.commands.held_out import evaluate_adapter
from packlora.config import Run
from packlora.data.template import clock_of
from packlora.runtime import encoder, resume, session
from packlora.runtime.prepare import prepare
from packlora.runtime.resume import check_output, moment_of

DATED = "<|im_start|>system\ntoday is {{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHAT
MONDAY = datetime(2026, 3, 2, 23, 59, 30)


class Clock(datetime):
    """What a session takes for now."""

    day = MONDAY

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls.day


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], None]:
    for module in (session, resume):
        monkeypatch.setattr(module, "datetime", Clock)
    return lambda day: monkeypatch.setattr(Clock, "day", day)


@pytest.fixture
def tree(tiny_base: Callable[[str], str], tmp_path: Path) -> dict[str, Any]:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("shallow"), base)
    (base / "chat_template.jinja").write_text(DATED)
    generator = random.Random(3)
    jobs = []
    for name in "abc":
        path = tmp_path / f"{name}.jsonl"
        lines = [{"prompt": generator.choice(WORDS), "completion": generator.choice(WORDS)} for _ in range(8)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {"path": str(path), "eval_path": str(path)}
        job = {
            "name": name,
            "data": data,
            "adapter": {"r": 2},
            "train": {"global_batch_size": 2, "learning_rate": 3e-3},
        }
        jobs.append(job)
    return {
        "base_model": str(base), "output_dir": str(tmp_path / "out"), "max_tokens_per_microbatch": 96, "device": "cpu",
        "dtype": "float32", "save_every": 2, "jobs": jobs[:2], "new": jobs[2],
    }  # fmt: skip


def run_of(tree: dict[str, Any]) -> Run:
    return Run.model_validate({key: value for key, value in tree.items() if key != "new"})


def train(tree: dict[str, Any], **kwargs: Any) -> Any:
    return packlora.train(run_of(tree), **kwargs)


def adapters(out: Path) -> dict[str, torch.Tensor]:
    return {
        f"{job} {key}": value
        for job in "ab"
        for key, value in load_file(out / job / "adapter_model.safetensors").items()
    }


def record_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "run.json").read_text()))


def test_a_run_is_resumed_joined_and_evaluated_on_a_later_day(
    tree: dict[str, Any], today: Callable[[datetime], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = []
    made = encoder.encode_rows
    monkeypatch.setattr(
        encoder, "encode_rows", lambda *given, **more: (tokenizers.append(given[1]), made(*given, **more))[1]
    )
    whole, out = {**tree, "output_dir": str(tmp_path / "whole")}, tmp_path / "out"
    assert train({**whole, "jobs": [*tree["jobs"], tree["new"]]}).status == "done"
    train(tree, max_steps=2)
    assert record_of(out)["clock"] == MONDAY.isoformat()
    today(MONDAY + timedelta(days=400))
    joined = {**tree, "jobs": [*tree["jobs"], tree["new"]], "sample_prompts": ["the fox"], "sample_max_new_tokens": 2}
    assert train(joined, resume=True).status == "done"
    first, second = adapters(tmp_path / "whole"), adapters(out)
    assert all(torch.equal(first[key], second[key]) for key in first)
    hashes = [
        {name: job["data_hash"] for name, job in record_of(folder)["jobs"].items()}
        for folder in (out, tmp_path / "whole")
    ]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 3, "also of a job that came on a later day"
    assert record_of(out)["clock"] == MONDAY.isoformat()
    assert {clock_of(tokenizer) for tokenizer in tokenizers} == {MONDAY}, "prompts are asked by it too"
    last = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines() if '"a"' in line][-1]
    found = evaluate_adapter(out / "a", tree["jobs"][0]["data"]["eval_path"])
    assert math.isclose(found.loss, last["eval_loss"], rel_tol=1e-6)
    record = record_of(out)
    assert record.pop("clock") == MONDAY.isoformat()
    (out / "run.json").write_text(json.dumps(record))
    saved = check_output(run_of(joined), True)
    assert saved is not None and saved.clock is None, "as earlier versions wrote it"


def test_a_new_run_has_a_day_of_its_own(tree: dict[str, Any]) -> None:
    run = run_of({**tree, "jobs": tree["jobs"][:1]})
    days = [MONDAY, MONDAY + timedelta(minutes=1), MONDAY + timedelta(minutes=2)]
    hashes = [prepare(run, moment=day).jobs[0].data.fingerprint([]) for day in days]
    assert hashes[0] != hashes[1] == hashes[2], "of which the second begins on another day"


def test_a_run_of_an_earlier_version_began_when_it_was_created() -> None:
    created = MONDAY.astimezone(UTC).isoformat()
    assert moment_of(None, created) == MONDAY, "in the time of this place"
    assert moment_of(MONDAY + timedelta(days=1), created) == MONDAY + timedelta(days=1)
    assert moment_of(None, "some day").year >= 2025
