"""Random runs, stopped, killed, broken off, shortened, sent back and resumed at random, with jobs that fail and budgets of few
tokens: in the end their jobs have the bits of a run that was let alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS
from ranks import SECONDS, fresh
from seeds import SEED, SOAK
from steps import before_steps
from test_members import base

import packlora
from packlora.events import Event, Stop
from packlora.runtime import checkpoint
from packlora.runtime.job import Job
from packlora.schedule.planner import Planner

assert callable(base)  # a fixture

TARGETS: list[Any] = ["all-linear", ["q_proj", "v_proj"], ["k_proj", "up_proj", "down_proj"], ["o_proj"]]


def drawn_run(draw: random.Random, base: str, folder: Path) -> dict[str, Any]:
    """One to three jobs of any kind."""
    jobs = []
    for name in "abc"[: draw.choice([1, 2, 2, 3])]:
        path = folder / f"{name}.jsonl"
        picks = [["fox"], *(draw.choices(WORDS, k=draw.randint(1, 7)) for _ in range(draw.randint(2, 11)))]
        path.write_text("".join(json.dumps({"prompt": " ".join(p), "completion": p[0]}) + "\n" for p in picks))
        dora, bias = draw.random() < 0.4, draw.choice(["none", "none", "all", "lora_only"])
        adapter = {
            "r": draw.choice([1, 2, 5, 16]), "use_dora": dora, "lora_dropout": draw.choice([0.0, 0.0, 0.2]), "bias": bias,
            "target_modules": draw.choice(TARGETS), "dora_dropout": draw.choice(["peft", "low_rank"]),
        }  # fmt: skip
        train = {
            "global_batch_size": draw.randint(1, 3), "num_train_epochs": draw.choice([1, 1.5, 3]),
            "learning_rate": draw.choice([1e-3, *[1e-2] * 6, 1e30]), "max_grad_norm": draw.choice([0, 1]),
            "lr_scheduler_type": draw.choice(["constant", "cosine", "linear"]), "shuffle": draw.random() < 0.7,
        }  # fmt: skip
        data = {"path": str(path), "truncate": "right"} | ({"eval_path": str(path)} if draw.random() < 0.5 else {})
        jobs.append({"name": name, "data": data, "adapter": adapter, "train": train})
    return {
        "base_model": base, "max_tokens_per_microbatch": draw.choice([20, 30, 60, 200]), "device": "cpu",
        "eval_every": draw.choice([0, 1, 2, 3]), "gradient_checkpointing": draw.random() < 0.2, "save_total_limit": None,
        "schedule": {"method": draw.choice(["auto", "greedy", "solo"])}, "jobs": jobs,
    }  # fmt: skip


@dataclass
class Circumstances:
    """What a run is changed to, in every process that it goes on in. spoiled: the loss of this job is NaN at this step."""

    window_rounds: int
    spoiled: tuple[str, int] | None

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def spoil(job: Job) -> None:
            if (job.name, job.step) == self.spoiled and job.state.sums is not None:
                job.state.sums = job.state.sums * torch.nan

        monkeypatch.setattr("packlora.runtime.windows.Planner", partial(Planner, window_rounds=self.window_rounds))
        before_steps(monkeypatch, spoil)


def at_event(number: int, answer: Callable[[], Any]) -> Callable[[Event], Any]:
    """A subscriber that answers the number-th event."""
    heard = itertools.count(1)
    return lambda event: answer() if next(heard) == number else None


def trained_until(number: int, tree: dict[str, Any], circumstances: Circumstances) -> None:
    """A run that gets SIGKILL at the number-th event."""
    circumstances.apply(pytest.MonkeyPatch())
    kill = at_event(number, lambda: signal.raise_signal(signal.SIGKILL))
    packlora.train(tree, resume=True, subscribers=[kill])


def killed(number: int, tree: dict[str, Any], circumstances: Circumstances) -> int | None:
    """trained_until, in a process that has run nothing before: its exit code, or None if it did not end."""
    process = fresh.Process(target=trained_until, args=(number, tree, circumstances))
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def session(
    draw: random.Random, tree: dict[str, Any], life: list[str], steps: int, circumstances: Circumstances
) -> None:
    """One call of packlora.train that comes to no good end, or to one that is too early."""
    kind = draw.choice(["stop", "stop job", "kill", "kill", "break off", "shorten", "send back"])
    number, job = draw.randint(1, draw.choice([8, 20, 60])), draw.choice(tree["jobs"])["name"]
    tree = {**tree, "save_every": draw.choice([0, 1, 2, 3])}
    life.append(f"{kind} {job} at event {number}")
    options: dict[str, Any] = {"resume": True, "subscribers": [at_event(number, Stop)]}
    if kind == "stop job":
        options["subscribers"] = [at_event(number, lambda: Stop(job))]
    elif kind == "break off":
        options["subscribers"] = [at_event(number, lambda: signal.default_int_handler(signal.SIGINT, None))]
    elif kind == "shorten":
        options = {"resume": True, "max_steps": draw.randint(1, steps)}
    elif kind == "send back":
        options["resume_from"] = [f"{job}={draw.choice([0, *checkpoint.steps(Path(tree['output_dir'], job))])}"]
        life[-1] += f", {options['resume_from']}"
    if kind == "kill":
        assert killed(number, tree, circumstances) in (0, -signal.SIGKILL), ", ".join(life)
        return
    with contextlib.suppress(KeyboardInterrupt):
        packlora.train(tree, **options)


def numbers(out: Path, log: str) -> dict[tuple[str, int], Any]:
    lines = map(json.loads, (out / log).read_text().splitlines() if (out / log).exists() else [])
    keys = ("loss", "grad_norm", "lr", "tokens") if log == "metrics.jsonl" else ("eval_loss",)
    found = [((line["job"], line["step"]), [line[key] for key in keys]) for line in lines]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


@pytest.mark.parametrize("number", range(300 if SOAK else 1))
def test_whatever_became_of_a_run_its_jobs_have_the_bits_of_one_that_was_let_alone(
    number: int, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(SEED + number)
    tree, whole, out = drawn_run(draw, base, tmp_path), tmp_path / "whole", tmp_path / "out"
    circumstances = Circumstances(draw.choice([1, 1, 2]), None)
    if draw.random() < 0.4:
        circumstances.spoiled = draw.choice(tree["jobs"])["name"], draw.randint(0, 5)
    circumstances.apply(monkeypatch)
    want = packlora.train({**tree, "output_dir": str(whole), "save_every": 1})
    life, steps = [f"seed {SEED + number}"], max(job.step for job in want.jobs.values())
    for _ in range(draw.randint(1, 11)):
        session(draw, {**tree, "output_dir": str(out)}, life, steps + 1, circumstances)
    got = packlora.train({**tree, "output_dir": str(out)}, resume=True)
    told = ", ".join(life)
    for name, job in got.jobs.items():
        alike = (job.status, job.step) == (want.jobs[name].status, want.jobs[name].step)
        assert alike or (job.status == "done" and any(one.startswith(f"stop job {name}") for one in life)), told
        same = whole / name if alike else whole / name / f"checkpoint-{job.step}"
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (out / name / file).read_bytes() == (same / file).read_bytes(), told
    for log in ("metrics.jsonl", "evals.jsonl"):  # a job that was shortened was also evaluated where it ended
        ours, theirs = numbers(out, log), numbers(whole, log)
        taken = {key: value for key, value in theirs.items() if key[1] <= got.jobs[key[0]].step}
        assert {key: ours.get(key) for key in taken} == taken, told
    assert not list(out.glob("**/.tmp-*")), told


@pytest.mark.parametrize("behind", ["sent back", "left out"])
def test_jobs_in_different_windows_go_on_from_the_window_of_the_slowest(
    behind: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packlora.runtime.windows.Planner", partial(Planner, window_rounds=1))
    jobs: list[dict[str, Any]] = []
    for name, rows in (("a", 8), ("b", 6)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": word, "completion": name}) + "\n" for word in WORDS[:rows]))
        jobs.append({"name": name, "data": {"path": str(path)}, "train": {"global_batch_size": 2}})
    tree = {"base_model": base, "device": "cpu", "max_tokens_per_microbatch": 40, "save_every": 1, "jobs": jobs}
    whole, out = tmp_path / "whole", {**tree, "output_dir": str(tmp_path / "out")}
    packlora.train({**tree, "output_dir": str(whole)})
    packlora.train(out, max_steps=2)
    if behind == "sent back":
        got = packlora.train(out, resume=True, resume_from=["b=0"])
    else:  # for a while; the others then share other microbatches
        (tmp_path / "b.jsonl").rename(tmp_path / "gone")
        packlora.train(out, resume=True, max_steps=3)
        (tmp_path / "gone").rename(tmp_path / "b.jsonl")
        got = packlora.train(out, resume=True)
    assert {name: job.step for name, job in got.jobs.items()} == {"a": 4, "b": 3}
    for name in "ab":
        file = Path(name, "adapter_model.safetensors")
        assert behind == "left out" or (tmp_path / "out" / file).read_bytes() == (whole / file).read_bytes()
