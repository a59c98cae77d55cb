"""Jobs that learn from rewards on several processes: each on one of them, with the bits of one process."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from test_placement import part_of
from test_rollouts import REWARDS, WORDS, job, of_job, tree
from test_training import adapter, distance

import packlora
from packlora.commands.plan import make_plan, print_plan
from packlora.errors import InputError
from packlora.events import Stepped, Stop
from packlora.run_file import run_from
from packlora.runtime import estimate

Groups = Callable[[int], Ranks]


FAULTY = """
import time

def slow(prompts, completions, **columns):
    time.sleep(40)
    return [0.0] * len(prompts)

def faulty(prompts, completions, **columns):
    raise ValueError("no reward today")
"""


def four_jobs(base: str, folder: Path) -> dict[str, Any]:
    """A job with rewards, one that also has held-out prompts and draws ahead, one whose rewards fail, one with completions."""
    rewards, prompts, rows = folder / "rewards.py", folder / "prompts.jsonl", folder / "rows.jsonl"
    rewards.write_text(REWARDS + FAULTY)
    lines = [{"prompt": " ".join(WORDS[n : n + 2 + n % 3]), "word": WORDS[n % 4]} for n in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows.write_text("".join(json.dumps({"prompt": "the", "completion": f" {word}"}) + "\n" for word in WORDS[:6]))
    files = (str(rewards), str(prompts))
    ahead = job("ahead", files, "later", 2, loss_type="grpo", beta=0.1, max_staleness=2, eval_steps=2)
    ahead["data"]["eval_path"] = files[1]
    texts = {
        "name": "texts", "data": {"path": str(rows)}, "adapter": {"r": 4, "lora_dropout": 0.1},
        "train": {"global_batch_size": 2, "max_steps": 3},
    }  # fmt: skip
    return tree(base, folder / "one", job("brief", files), ahead, job("faulty", files, "faulty"), texts, eval_every=2)


def held_out(out: Path, name: str) -> list[Any]:
    """Held-out rewards and losses at every second step."""
    lines = map(json.loads, (out / "evals.jsonl").read_text().splitlines())
    keys = ("step", "eval_loss", "eval_reward")
    return [
        [line.get(key) for key in keys] for line in lines if line["job"] == name and line["step"] in (0, 2, 4)
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_jobs_with_rewards_on_processes_of_their_own_have_the_bits_of_one(
    processes: int, tiny_base: Callable[..., str], ranks: Groups, tmp_path: Path
) -> None:
    """Stopped after a step on several, gone on with on one for another, and on several to the end."""
    one, several = four_jobs(tiny_base("llama"), tmp_path), tmp_path / "several"
    assert part_of(0, one, {}) == "done"
    parts = one | {"output_dir": str(several)}
    assert {*ranks(processes).run(part_of, parts, {"max_steps": 1})} == {"done"}
    assert part_of(0, parts, {"resume": True, "max_steps": 2}) == "done"
    assert {*ranks(processes).run(part_of, parts, {"resume": True})} == {"done"}
    for name in ("brief", "ahead", "faulty", "texts"):
        assert distance(adapter(tmp_path / "one", name), adapter(several, name)) == 0
        assert held_out(several, name) == held_out(tmp_path / "one", name)
        ours, theirs = (of_job(folder, name) for folder in (several, tmp_path / "one"))
        for line in (*ours, *theirs):
            line.pop("rollout/seconds", None)
        assert ours == theirs and len(ours) == (3 if name == "texts" else 4)
    lines = (several / "microbatches.jsonl").read_text().splitlines()
    assert {json.loads(line)["rank"] for line in lines} == set(range(processes))
    drawn = [
        sorted(path.relative_to(folder) for path in folder.rglob("rollouts/step-*"))
        for folder in (several, tmp_path / "one")
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) > 8
    for path in drawn[0]:
        assert (several / path).read_bytes() == (tmp_path / "one" / path).read_bytes()


def stopped(rank: int, asked: dict[str, Any]) -> tuple[str, float]:
    """A run that is stopped at the first step of any job: its status, and its seconds."""
    began = time.monotonic()
    result = packlora.train(asked, subscribers=[lambda event: Stop() if isinstance(event, Stepped) else None])
    return result.status, time.monotonic() - began


@pytest.mark.parametrize("order", [("brief", "slow"), ("slow", "brief")])
def test_a_stop_reaches_a_process_that_waits_for_a_reward(
    order: tuple[str, str], tiny_base: Callable[..., str], ranks: Groups, tmp_path: Path
) -> None:
    """The first process hears another one's step while it waits, and one that waits hears what the first one asks for."""
    jobs = {own["name"]: own for own in four_jobs(tiny_base("llama"), tmp_path)["jobs"]}
    files = (str(tmp_path / "rewards.py"), str(tmp_path / "prompts.jsonl"))
    jobs["slow"] = job("slow", files, "slow")
    asked = tree(tiny_base("llama"), tmp_path / "out", *(jobs[name] for name in order))
    for status, seconds in ranks(2).run(stopped, asked):
        assert status == "interrupted" and seconds < 30


@pytest.mark.parametrize("processes", [1, 2])
def test_a_teacher_that_cannot_be_loaded_is_refused_on_every_process_before_anything_is_written(
    processes: int, tiny_base: Callable[..., str], ranks: Groups, tmp_path: Path
) -> None:
    """Its configuration and its tokens are there, which are checked before, and its weights are not."""
    base, teacher = tiny_base("llama"), tmp_path / "teacher"
    shutil.copytree(base, teacher, ignore=shutil.ignore_patterns("*.safetensors"))
    own = {one["name"]: one for one in four_jobs(base, tmp_path)["jobs"]}
    own["brief"]["rollout"]["teacher"] = str(teacher)
    asked = tree(base, tmp_path / "out", own["texts"], own["brief"])
    told = ranks(2).run(part_of, asked, {}) if processes > 1 else [part_of(0, asked, {})]
    said = f"job 'brief': rollout.teacher {str(teacher)!r}: base_model {str(teacher)!r}: the folder holds no weights"
    assert len(told) == processes and all(said in one for one in told), told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["tensor", "shard_base", "pipeline", "expert", "devices_per_job"])
def test_what_would_divide_a_job_with_rewards_is_refused(
    key: str, tiny_base: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = four_jobs(tiny_base("llama"), tmp_path)
    with pytest.raises(InputError, match=f"job 'brief': rollout takes each job whole .* parallel.{key} divides jobs"):
        print_plan(run_from(asked | {"parallel": {key: 2}}), gpus=2)


def test_plan_spreads_jobs_with_rewards_over_devices(
    tiny_base: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole on one each, also where no device has room for it."""
    run = run_from(four_jobs(tiny_base("llama"), tmp_path))
    print_plan(run, gpus=2)
    said = capsys.readouterr().out
    assert "each job is whole on one device: parallel.devices_per_job is 1" in said
    assert "groups: ahead + texts, brief + faulty" in said
    monkeypatch.setattr(estimate, "memory_room", lambda device: 2**20)
    layouts = make_plan(run, 2).layouts
    assert layouts is not None
    assert [row.layout.devices_per_job for row in layouts.rows] == [1] and not layouts.taken.layout.sharded
