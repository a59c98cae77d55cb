"""The process of rewards.py that trains policies: packlora all at once, or TRL's GRPOTrainer one after the other.

`python -m benchmarks.policy_trainer FOLDER packlora|trl` reads FOLDER/case.json and prints a line for each step when it ends:
{"policy": its number, "step": 1, ..., "end": seconds of a clock, "rollout": seconds of the step that are generation, "gib":
peak of memory}. The stacks of all threads go to stderr where no step has ended for STUCK seconds, so that the log of a run that
hangs says where.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from benchmarks.trainer import DEVICE, Ends

ROWS = 16
"""Completions of a microbatch of TRL."""
STUCK = 40
_ended: SimpleQueue[bool] = SimpleQueue()
"""True for each step that has ended, False at the end of all."""


def watch() -> None:
    """Print the stacks of all threads where no step has ended for STUCK seconds, and again after as many. Python's own thread
    prints them: `faulthandler`, which does not wait for the interpreter's lock, reads stacks that are changing, and such a read
    has ended the process that it watched."""
    while True:
        try:
            if not _ended.get(timeout=STUCK):
                return
        except Empty:
            for number, frame in sys._current_frames().items():
                print(f"thread {number}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr, flush=True)


def tell(policy: int, step: int, rollout: float) -> None:
    """Print the line of a step that has ended."""
    _ended.put(True)
    gib = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    line = {"policy": policy, "step": step, "end": time.perf_counter(), "rollout": rollout, "gib": gib}
    print(json.dumps(line), flush=True)


def train_packlora(folder: Path, case: dict[str, Any]) -> None:
    """All policies at once, as `packlora train` trains them. Raises RuntimeError where weights moved between trainer and
    sampler."""
    import packlora
    from benchmarks.unmoved import watched
    from packlora.events import Stepped

    def subscriber(event: Any) -> None:
        if isinstance(event, Stepped):
            tell(int(event.job.removeprefix("p")), event.step, event.metrics["rollout/seconds"] or 0.0)

    with watched() as seen:
        packlora.train(folder / "run.yaml", subscribers=[subscriber])
    if seen.moved or not seen.samplers:
        raise RuntimeError(f"weights moved between trainer and sampler: {seen.moved[:3]}; samplers: {seen.samplers}")


def train_trl(folder: Path, case: dict[str, Any]) -> None:
    """The steps of one policy after another's, each from a model that was loaded for it."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Timed(GRPOTrainer):
        """GRPOTrainer that keeps the seconds of each generation."""

        def _generate_single_turn(self, *args: Any, **words: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_single_turn(*args, **words)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
            return found

    class Told(Ends):
        """Tells of each step when it has ended."""

        def on_step_end(self, *args: Any, **words: Any) -> None:
            super().on_step_end()
            tell(policy, len(self.times), took[-1])

    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts")
    base, count, took = str(folder / "base"), case["prompts"] * case["generations"], list[float]()
    rows = min(ROWS, count)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    for policy in range(case["policies"]):
        args = GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=rows, gradient_accumulation_steps=count // rows,
            num_generations=case["generations"], max_completion_length=case["new"], max_steps=case["steps"], beta=0.0,
            loss_type="dapo", learning_rate=1e-5, bf16=DEVICE.type == "cuda", use_cpu=DEVICE.type == "cpu", report_to=[],
            save_strategy="no", logging_steps=1, gradient_checkpointing=False, disable_tqdm=True, seed=policy,
        )  # fmt: skip
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(DEVICE), args=args, reward_funcs=length,
            train_dataset=dataset, processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(**case["adapter"], task_type="CAUSAL_LM"), callbacks=[Told()],
        )  # fmt: skip
        trainer.train()
        del trainer
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def length(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(sum(map(ord, text[:8])) % 17) for text in completions]


if __name__ == "__main__":
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    where, what = Path(sys.argv[1]), {"packlora": train_packlora, "trl": train_trl}[sys.argv[2]]
    what(where, json.loads((where / "case.json").read_text()))
    _ended.put(False)
    watcher.join()
