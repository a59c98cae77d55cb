"""`rl`: jobs that learn from rewards.

On a CPU two jobs on SmolLM2-135M: whether their rewards rise, and whether each gives the bits that it gives alone. On a GPU
four policies at once on one model, beside TRL's GRPOTrainer, which trains one after the other.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

import packlora
from benchmarks.commands import run_packlora, run_trainer, shape_of, words_of, write_tokenizer
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.shapes import TARGETS
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
    if options.tiny:
        return [case(f"seed {seed}", seed=seed) for seed in range(1 if options.quick else 3)] + (
            [_loop("tiny", prompts=2, generations=4, new=8, policies=2)] if options.quick else []
        )
    return [_loop("Qwen3-1.7B", prompts=8, generations=8, new=256, policies=4)]


def _loop(label: str, **values: Any) -> Case:
    return case(label, shape="Qwen3-1.7B", steps=4, **values)


def _job(name: str, rewards: Path, seed: int, steps: int) -> dict[str, Any]:
    return {
        "name": name, "seed": seed, "data": {"path": str(PROMPTS)}, "adapter": {"r": 16},
        "rollout": {"reward": f"{rewards}:{name}", "num_generations": 8, "max_new_tokens": 16},
        "train": {"loss_type": "dapo", "learning_rate": 1e-3, "global_batch_size": 32, "max_steps": steps},
    }  # fmt: skip


def measure_rl(one: Case, names: list[str], options: Options) -> Row:
    if "policies" in one.values:
        return measure_loop(one, names, options)
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


# --- the whole loop, beside TRL --------------------------------------------------------------------------------------------

WORDS, PROMPT = 5000, 32
"""Of the tokenizer, and of a prompt."""
WARM = 2
"""Steps that are not counted: kernels are compiled and graphs recorded in them."""
LENGTH = """
def length(prompts, completions, **columns):
    return [float(sum(map(ord, text[:8])) % 17) for text in completions]
"""


def measure_loop(one: Case, names: list[str], options: Options) -> Row:
    """Completions a second of whole steps, and seconds of a step of all policies: in all, and of what is drawing."""
    adapter = {"r": 16, "lora_alpha": 32, "target_modules": TARGETS}
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), np.random.default_rng(0)
        write_tokenizer(folder / "base", WORDS)
        values = {**one.values, "shape": shape_of(one.shape, WORDS, options.tiny), "adapter": adapter, "trained": False}
        (folder / "case.json").write_text(json.dumps(values))
        (folder / "rewards.py").write_text(LENGTH)
        prompts = [words_of(draw, PROMPT, WORDS) for _ in range(one.prompts * one.steps)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        run_trainer(folder, "base")
        count = one.prompts * one.generations
        jobs = [
            {
                "name": f"p{policy}", "seed": policy, "data": {"path": "prompts.jsonl"}, "adapter": adapter,
                "rollout": {"reward": "rewards.py:length", "num_generations": one.generations, "max_new_tokens": one.new},
                "train": {
                    "loss_type": "dapo", "learning_rate": 1e-5, "global_batch_size": count, "max_steps": one.steps,
                },
            }
            for policy in range(one.policies)
        ]  # fmt: skip
        run = {"base_model": str(folder / "base"), "output_dir": "out", "jobs": jobs}
        (folder / "run.yaml").write_text(yaml.safe_dump(run))
        result, lines, _ = run_packlora(folder / "run.yaml", folder / "out")
        ends = [max(line["elapsed"] for line in lines if line.get("step") == step) for step in range(1, one.steps + 1)]
        drawn = [line["rollout/seconds"] for line in lines if line.get("step", 0) > WARM and "rollout/seconds" in line]
        row = _rates("packlora", statistics.median(np.diff(ends)[WARM - 1 :]), statistics.median(drawn), one)
        row["gib"] = (result["peak_memory_bytes"] or 0) / 2**30
        if "trl" not in names:
            return row
        words = [sys.executable, "-m", "benchmarks.policy_trainer", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            return row | {"error": done.stderr.strip().splitlines()[-1]}
        theirs = json.loads(done.stdout.strip().splitlines()[-1])
        step = sum(statistics.median(np.diff(own)[WARM - 1 :]) for own in theirs["ends"])
        return row | _rates("trl", step, sum(statistics.median(own[WARM:]) for own in theirs["rollout"]), one)


def _rates(who: str, step: float, rollout: float, one: Case) -> Row:
    count = one.policies * one.prompts * one.generations
    return {f"{who}_completions_per_s": count / step, f"{who}_step_s": step, f"{who}_rollout_s": rollout}


def loop_summary(row: Row) -> Row:
    """TRL's seconds over packlora's; train: all but drawing."""
    if "trl_step_s" not in row:
        return {}
    train = {who: row[f"{who}_step_s"] - row[f"{who}_rollout_s"] for who in ("packlora", "trl")}
    return {
        "loop_vs_trl": row["trl_step_s"] / row["packlora_step_s"],
        "rollout_vs_trl": row["trl_rollout_s"] / row["packlora_rollout_s"], "train_vs_trl": train["trl"] / train["packlora"],
    }  # fmt: skip


def rl_summary(rows: list[Row]) -> Row:
    loops, rows = [row for row in rows if "policies" in row], [row for row in rows if "policies" not in row]
    if not rows:
        return loop_summary(loops[0]) if loops else {}
    return {
        "reward_gain_over_stderr_min": min(
            row[f"{name}_gain_over_stderr"] for row in rows for name in ("spaces", "vowels")
        ),
        "bits_equal_alone": all(row["bits_equal_alone"] for row in rows if "bits_equal_alone" in row),
    }


RL = Benchmark(
    rl_cases, measure_rl, rl_summary,
    "On a CPU: SmolLM2-135M-Instruct in float32; two jobs at once learn by dapo from rewards, share of spaces and of vowels "
    f"in a completion of 16 tokens: {STEPS} steps of 32 completions, 8 of a prompt, LoRA r 16, learning rate 1e-3. Rewards of "
    f"the first {EDGE} and of the last {EDGE} steps: their difference over its standard error, over completions; the least of "
    "both jobs and three seeds. bits_equal_alone: with seed 0 each job alone gives the adapter of the run of both, bit for "
    f"bit. On a GPU: Qwen3-1.7B's shape (random bfloat16 weights), four policies x 8 prompts of {PROMPT} tokens x 8 "
    "completions of 256 tokens a step, dapo, LoRA r 16, beta 0, a reward that costs nothing. packlora: `packlora train` of "
    "four jobs by its command; trl: GRPOTrainer with PEFT and transformers' generation, bfloat16, microbatches of 16 "
    "completions, no checkpointing, one policy after the other. Seconds of a step of all policies, medians, the first "
    f"{WARM} steps left out; rollout: of it, drawing.",
    ["packlora", "trl"], where="any",
)  # fmt: skip
