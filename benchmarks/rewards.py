"""`rl`: two jobs that learn from rewards on SmolLM2-135M: whether their rewards rise, and whether each gives the bits that it
gives alone."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import packlora
from benchmarks.harness import Benchmark, Case, Options, Row, case
from packlora.base.demo_model import demo_model_folder

PROMPTS = Path(__file__).parents[1] / "examples" / "data" / "prompts.jsonl"
STEPS, EDGE = 10, 2
"""Optimizer steps, and those at the start and at the end that are compared."""
REWARDS = """
def spaces(prompts, completions, **columns):
    return [one[0]["content"].count(" ") / max(len(one[0]["content"]), 1) for one in completions]

def vowels(prompts, completions, **columns):
    texts = [one[0]["content"].lower() for one in completions]
    return [sum(text.count(letter) for letter in "aeiou") / max(len(text), 1) for text in texts]
"""


def rl_cases(options: Options) -> list[Case]:
    return [case(f"seed {seed}", seed=seed) for seed in range(1 if options.quick else 3)]


def _job(name: str, rewards: Path, seed: int, steps: int) -> dict[str, Any]:
    return {
        "name": name, "seed": seed, "data": {"path": str(PROMPTS)}, "adapter": {"r": 16},
        "rollout": {"reward": f"{rewards}:{name}", "num_generations": 8, "max_new_tokens": 16},
        "train": {"loss_type": "dapo", "learning_rate": 1e-3, "global_batch_size": 32, "max_steps": steps},
    }  # fmt: skip


def measure_rl(one: Case, names: list[str], options: Options) -> Row:
    steps = 2 * EDGE if options.quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        rewards = Path(folder) / "rewards.py"
        rewards.write_text(REWARDS)
        jobs = [_job(name, rewards, one.values["seed"], steps) for name in ("spaces", "vowels")]

        def trained(out: str, *own: dict[str, Any]) -> Path:
            tree = {"base_model": str(demo_model_folder()), "output_dir": str(Path(folder) / out), "device": "cpu"}
            assert packlora.train(tree | {"dtype": "float32", "jobs": list(own)}).status == "done"
            return Path(folder) / out

        together = trained("together", *jobs)
        found = {job["name"]: _gain(together / job["name"], steps) for job in jobs}
        row: Row = {f"{name}_{key}": value for name, own in found.items() for key, value in own.items()}
        if one.values["seed"] == 0:
            row["bits_equal_alone"] = all(
                _same(trained(job["name"], job) / job["name"], together / job["name"]) for job in jobs
            )
        return row


def _gain(folder: Path, steps: int) -> dict[str, float]:
    """Mean reward of the completions of the first and of the last steps, and their difference over its standard error."""

    def of(numbers: range) -> np.ndarray:
        trees = [json.loads((folder / "rollouts" / f"step-{number + 1}.json").read_text()) for number in numbers]
        return np.array([one["reward"] for tree in trees for one in tree["completions"]])

    first, last = of(range(EDGE)), of(range(steps - EDGE, steps))
    error = math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    gain = float(last.mean() - first.mean())
    return {"first": float(first.mean()), "last": float(last.mean()), "gain_over_stderr": gain / error}


def _same(one: Path, other: Path) -> bool:
    own, others = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    return own.keys() == others.keys() and all(np.array_equal(own[name], others[name]) for name in own)


def rl_summary(rows: list[Row]) -> Row:
    return {
        "reward_gain_over_stderr_min": min(
            row[f"{name}_gain_over_stderr"] for row in rows for name in ("spaces", "vowels")
        ),
        "bits_equal_alone": all(row["bits_equal_alone"] for row in rows if "bits_equal_alone" in row),
    }


RL = Benchmark(
    rl_cases, measure_rl, rl_summary,
    "SmolLM2-135M-Instruct in float32 on a CPU; two jobs at once learn by dapo from rewards, share of spaces and of vowels in "
    f"a completion of 16 tokens: {STEPS} steps of 32 completions, 8 of a prompt, LoRA r 16, learning rate 1e-3. Rewards of the "
    f"first {EDGE} and of the last {EDGE} steps: their difference over its standard error, over completions; the least of both "
    "jobs and three seeds. bits_equal_alone: with seed 0 each job alone gives the adapter of the run of both, bit for bit.",
    ["packlora"], where="cpu",
)  # fmt: skip
