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
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

import packlora
from benchmarks.commands import run_trainer, shape_of, words_of, write_tokenizer
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
    """Each contender of the loop is a case of its own, with a row of its own."""
    if options.tiny:
        return [case(f"seed {seed}", seed=seed) for seed in range(1 if options.quick else 3)] + (
            _loops(prompts=2, generations=4, new=8, policies=2) if options.quick else []
        )
    return _loops(prompts=8, generations=8, new=256, policies=4)


def _loops(**values: Any) -> list[Case]:
    shared = {"shape": "Qwen3-1.7B", "steps": 4, **values}
    return [case(f"loop {who}", contender=who, seconds=limit, **shared) for who, limit in LIMITS.items()]


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
"""Steps of a policy that are not counted, where there are more: kernels are compiled and graphs recorded in them."""
LIMITS = {"packlora": 80.0, "trl": 180.0}
"""Seconds after which a contender is ended; its figures are then of the steps that it has taken."""
LENGTH = """
def length(prompts, completions, **columns):
    return [float(sum(map(ord, text[:8])) % 17) for text in completions]
"""


def measure_loop(one: Case, names: list[str], options: Options) -> Row:
    """Completions a second of whole steps, and seconds of a step of all policies: in all, of generation, and of the rest."""
    folder = options.shared("loop", tempfile.TemporaryDirectory)
    path = Path(folder.name)
    if not (path / "run.yaml").exists():
        write_loop(path, one, options.tiny)
    lines: list[Row] = []
    error = None
    try:
        for line in lines_of(
            [sys.executable, "-m", "benchmarks.policy_trainer", str(path), one.contender], one.seconds
        ):
            lines.append(line)
            print(f"{one.label}: {json.dumps(line)}", flush=True)
    except RuntimeError as failure:
        error = str(failure)
    row = loop_row(lines, one)
    return row | ({} if error is None else {"error": error})


def write_loop(folder: Path, one: Case, tiny: bool) -> None:
    """The base model, its tokenizer, prompts, and the run file of all policies."""
    adapter, draw = {"r": 16, "lora_alpha": 32, "target_modules": TARGETS}, np.random.default_rng(0)
    write_tokenizer(folder / "base", WORDS)
    values = {**one.values, "shape": shape_of(one.shape, WORDS, tiny), "adapter": adapter, "trained": False}
    (folder / "case.json").write_text(json.dumps(values))
    (folder / "rewards.py").write_text(LENGTH)
    prompts = [words_of(draw, PROMPT, WORDS) for _ in range(one.prompts * (one.steps + 1))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    run_trainer(folder, "base")
    count = one.prompts * one.generations
    jobs = [
        {
            "name": f"p{policy}", "seed": policy, "data": {"path": "prompts.jsonl"}, "adapter": adapter,
            "rollout": {"reward": "rewards.py:length", "num_generations": one.generations, "max_new_tokens": one.new},
            "train": {"loss_type": "dapo", "learning_rate": 1e-5, "global_batch_size": count, "max_steps": one.steps + 1},
        }
        for policy in range(one.policies)
    ]  # fmt: skip
    run = {"base_model": str(folder / "base"), "output_dir": str(folder / "out"), "jobs": jobs}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def lines_of(words: list[str], seconds: float) -> Iterator[Row]:
    """JSON lines that a process prints, as they come; what it says on stderr goes to this process's.

    Raises:
        RuntimeError: it failed, or was ended after so many seconds.
    """
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"policy"'):
                yield json.loads(line)
        code, was_ended = process.wait(), not limit.is_alive()
    finally:
        limit.cancel()
        process.kill()
        process.wait()
    if code:
        raise RuntimeError(f"ended after {seconds:g} s" if was_ended else f"exit code {code}")


def loop_row(lines: list[Row], one: Case) -> Row:
    """Figures of the steps that were taken: medians by step of all policies where these train at once, else of one policy times
    their number. packlora's last step is not counted, as adapters are written in it."""
    at_once = one.contender == "packlora"
    runs: dict[int, list[Row]] = {}
    for line in lines:
        runs.setdefault(0 if at_once else line["policy"], []).append(line)
    took, drawn = [], []
    for own in runs.values():
        steps = sorted({line["step"] for line in own if line["step"] <= one.steps})
        ends = {step: [line for line in own if line["step"] == step] for step in steps}
        whole = [step for step in steps if len(ends[step]) == (one.policies if at_once else 1)]
        for step in [step for step in whole[1:] if step > WARM or step == whole[-1]]:
            before, after = (max(line["end"] for line in ends[number]) for number in (step - 1, step))
            took.append(after - before)
            drawn.append(max(line["rollout"] for line in ends[step]))
    row: Row = {"counted_steps": len(took), "policies_begun": len({line["policy"] for line in lines})}
    if not took:
        return row
    times, count = 1 if at_once else one.policies, one.policies * one.prompts * one.generations
    step, rollout = times * statistics.median(took), times * statistics.median(drawn)
    return row | {
        "completions_per_s": count / step, "step_s": step, "rollout_s": rollout, "train_s": step - rollout,
        "gib": max(line["gib"] for line in lines),
    }  # fmt: skip


def loop_summary(rows: list[Row]) -> Row:
    """TRL's seconds over packlora's; train: all but drawing."""
    by_name: Row = {str(row.get("contender")): row for row in rows if "step_s" in row}
    own, theirs = by_name.get("packlora"), by_name.get("trl")
    keys = {"loop": "step_s", "rollout": "rollout_s", "train": "train_s"}
    out: Row = {f"{name}_vs_trl": theirs[key] / own[key] for name, key in keys.items() if own and theirs}
    return out | {f"{row['contender']}_{key}": row[key] for row in by_name.values() for key in keys.values()}


def rl_summary(rows: list[Row]) -> Row:
    loops, rows = [row for row in rows if "policies" in row], [row for row in rows if "policies" not in row]
    if not rows:
        return loop_summary(loops)
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
    "completions of 256 tokens a step, dapo, LoRA r 16, beta 0, a reward that costs nothing. packlora: `packlora.train` of "
    "four jobs; trl: GRPOTrainer with PEFT and transformers' generation, bfloat16, microbatches of 16 completions, no "
    f"checkpointing, one policy after the other, ended after {LIMITS['trl']:g} s. Seconds of a step of all policies: of "
    "packlora the median of steps, of trl that of a policy's steps times four; the first "
    f"{WARM} steps of a policy are left out where there are more; rollout: of it, drawing; train: the rest.",
    ["train"], where="any",
)  # fmt: skip
