"""Whole runs on tiny models: a job trains as if it were alone, like PEFT, through crashes, and beside a failing job."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ranks import fresh
from safetensors.torch import load_file
from seeds import SEED, SOAK, some
from steps import after_microbatch, crash, terminate
from transformers import AutoModelForCausalLM, get_scheduler
from waiting import SECONDS, wait_for

import packlora
from packlora.cli import app
from packlora.config import Run
from packlora.runtime.job import Job
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
Base = Callable[..., str]

JOBS: list[dict[str, Any]] = [
    {"name": "lora", "adapter": {"r": 4, "lora_alpha": 8}, "train": {"global_batch_size": 3, "learning_rate": 3e-3}},
    {
        "name": "dropped",
        "adapter": {"r": 6, "lora_alpha": 3, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"]},
        "train": {
            "global_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "neftune_noise_alpha": 5.0,
        },
    },
    {
        "name": "rs",
        "adapter": {"r": 16, "use_rslora": True, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"gate_proj": 2}},
        "train": {
            "global_batch_size": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "num_train_epochs": 0.5,
            "label_smoothing_factor": 0.2,
        },
    },
    {
        "name": "dora.drop",
        "adapter": {"r": 3, "use_dora": True, "lora_dropout": 0.1, "target_modules": r".*\.(up|down)_proj"},
        "train": {"global_batch_size": 5, "shuffle": False, "num_train_epochs": 2, "learning_rate": 5e-3},
    },
]


def config(
    base: str, out: Path, rows: Rows, jobs: list[dict[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    picked = json.loads(json.dumps(JOBS if jobs is None else jobs))
    for index, job in enumerate(picked):
        job.setdefault("data", {"path": rows(job["name"], 12, seed=len(job["name"]) + index * (jobs is None))})
    tree = {
        "base_model": base,
        "output_dir": str(out),
        "max_tokens_per_microbatch": 96,
        "save_every": 2,
        "device": "cpu",
    }
    return tree | changes | {"jobs": picked}


def train(tree: dict[str, Any], **kwargs: Any) -> Any:
    return packlora.train(Run.model_validate(tree), **kwargs)


def adapter(out: Path, job: str) -> dict[str, torch.Tensor]:
    """By the keys that PEFT writes."""
    tensors = load_file(out / job / "adapter_model.safetensors")
    return {key.replace("magnitude_vector.weight", "magnitude_vector"): tensor for key, tensor in tensors.items()}


def steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    top = sum(float((a[key].double() - b[key].double()).square().sum()) for key in a)
    return (top / sum(float(value.double().square().sum()) for value in b.values())) ** 0.5


# --- a job trains as if it were alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float64", 1e-10), pytest.param("float32", 1e-5, marks=pytest.mark.soak)]
)
def test_every_job_gives_alone_the_adapter_that_it_gives_beside_others(
    dtype: str, bound: float, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Different ranks, targets, dropout, schedules, batch sizes and lengths; shared microbatches against each job alone."""
    together = config(tiny_base(), tmp_path / "together", write_rows, dtype=dtype, max_tokens_per_microbatch=150)
    train(together)
    shared = [json.loads(line) for line in (tmp_path / "together" / "microbatches.jsonl").read_text().splitlines()]
    assert sum(len(line["tokens"]) > 1 for line in shared) > len(shared) / 2  # they did share
    for job in together["jobs"]:
        alone = tmp_path / f"alone-{job['name']}"
        budget = 64 if job["name"] == "lora" else 300  # nor does the microbatch size matter
        train({**together, "output_dir": str(alone), "jobs": [job], "max_tokens_per_microbatch": budget})
        assert distance(adapter(tmp_path / "together", job["name"]), adapter(alone, job["name"])) < bound, job["name"]
        for a, b in zip(
            [line for line in steps(tmp_path / "together") if line["job"] == job["name"]], steps(alone), strict=True
        ):
            assert abs(a["loss"] - b["loss"]) < bound
            assert a["lr"] == b["lr"]
            assert a["tokens"] == b["tokens"]


# --- like PEFT ---------------------------------------------------------------------------------------------------------

PEFT_KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 7}, "alpha_pattern": {"q_proj": 32},
    },
    "bias lora_only": {"r": 2, "lora_alpha": 8, "bias": "lora_only", "target_modules": ["q_proj", "o_proj"]},
    "bias all": {"r": 2, "lora_alpha": 8, "bias": "all", "target_modules": ["k_proj"], "use_dora": True},
}  # fmt: skip


def perturbed_peft(base: str, kind: str, folder: Path, loaded: Any = None) -> Any:
    """A PEFT adapter far from its initial values (B and biases not zero, m not the norm), saved by PEFT. loaded: the base."""
    torch.manual_seed(3)
    model = get_peft_model(
        loaded or AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", **PEFT_KINDS[kind]),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter)).add_(0.03 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def like_peft(data: str, start: Path) -> dict[str, Any]:
    """A job that goes on from an adapter with every setting of the optimizer away from its default, as in train_by_peft."""
    return {
        "name": "job", "data": {"path": data}, "adapter": {"init_from": str(start)},
        "train": {
            "global_batch_size": 4, "learning_rate": 2e-3, "max_steps": 6, "weight_decay": 0.2, "max_grad_norm": 0.7,
            "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        },
    }  # fmt: skip


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.2, betas=(0.8, 0.95), eps=1e-5)


def train_by_peft(model: Any, data: Any, optimizer_of: Callable[..., torch.optim.Optimizer] = adamw) -> list[float]:
    """Losses of six steps with real PEFT, torch.optim.AdamW or another optimizer, transformers' schedule and one sample per
    forward."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    biases = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith(".bias")]
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith(".bias")]
    optimizer = optimizer_of([{"params": decayed}] + [{"params": biases, "weight_decay": 0.0}] * bool(biases))
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=6)
    losses = []
    for step in range(6):
        batch = [data.samples[number] for number in data.global_batch(step)]
        total = 0.0
        for sample in batch:
            ids = torch.from_numpy(sample.ids).long()[None]
            labels = torch.where(torch.from_numpy(sample.is_label), ids[0], -100)[1:]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (loss / sum(s.num_labels for s in batch)).backward()
            total += loss.item() / sum(s.num_labels for s in batch)
        torch.nn.utils.clip_grad_norm_(trainable, 0.7)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_training_on_from_a_peft_adapter_gives_the_losses_and_the_adapter_that_peft_gives(
    kind: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Real PEFT, torch.optim.AdamW, transformers' schedule and one sample per forward against packlora's packed microbatches;
    float32, with every setting of the optimizer away from its default."""
    base = tiny_base("qwen2")
    model = perturbed_peft(base, kind, tmp_path / "start")
    job = like_peft(write_rows("rows"), tmp_path / "start")
    tree = config(base, tmp_path / "out", write_rows, [job])
    data = prepare(Run.model_validate(tree)).jobs[0].data
    losses = train_by_peft(model, data)
    model.save_pretrained(tmp_path / "peft")
    train(tree)
    for ours, theirs in zip(steps(tmp_path / "out"), losses, strict=True):
        assert abs(ours["loss"] - theirs) < 1e-5 * max(1, theirs)
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert distance(adapter(tmp_path / "out", "job"), theirs) < 1e-5
    moved = distance(load_file(tmp_path / "start" / "adapter_model.safetensors"), theirs)
    assert moved > 1e-3  # training did move it


def test_a_continued_adapter_keeps_the_files_settings_and_may_change_only_dropout(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base = tiny_base("qwen2")
    perturbed_peft(base, "patterns", tmp_path / "start")
    job = {
        "name": "job",
        "adapter": {"init_from": str(tmp_path / "start"), "lora_dropout": 0.1},
        "train": {"max_steps": 1},
    }
    train(config(base, tmp_path / "out", write_rows, [job]))
    saved = json.loads((tmp_path / "out" / "job" / "adapter_config.json").read_text())
    kind = PEFT_KINDS["patterns"]
    assert saved["rank_pattern"] == kind["rank_pattern"]
    assert saved["alpha_pattern"] == kind["alpha_pattern"]
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"]) == (4, 8, 0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_merged_model_gives_the_logits_of_the_adapter_and_equals_pefts_merge(
    kind: str, tiny_base: Base, tmp_path: Path
) -> None:
    from packlora.export.merge import merge_adapter

    base = tiny_base("qwen2")
    model = perturbed_peft(base, kind, tmp_path / "start")
    ids = torch.arange(3, 40)[None]
    want = model(ids).logits.detach()
    merge_adapter(tmp_path / "start", tmp_path / "merged", base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, want, rtol=2e-5, atol=2e-5)
    theirs = model.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


# --- crash and resume --------------------------------------------------------------------------------------------------


def same_bits(one: Path, two: Path, jobs: list[dict[str, Any]] = JOBS) -> None:
    for job in jobs:
        a, b = adapter(one, job["name"]), adapter(two, job["name"])
        assert all(torch.equal(a[key], b[key]) for key in a), job["name"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A finished run with its run file tree, to compare interrupted ones with."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    def rows(name: str, number: int, seed: int) -> str:
        from conftest import WORDS

        generator = random.Random(seed)
        path = folder / f"{name}.jsonl"
        picks = [[generator.choice(WORDS) for _ in range(generator.randrange(2, 12))] for _ in range(number)]
        lines = [{"prompt": " ".join(words), "completion": words[0]} for words in picks]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    tree = config(tiny_base(), folder / "out", rows, max_tokens_per_microbatch=64)
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    train(tree)
    return tree, folder / "out"


def test_stopping_at_any_microbatch_and_resuming_gives_the_same_bits_and_the_same_metrics(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is broken off after a microbatch, one of eighteen, every second one under `make soak`, by a signal or by a
    crash. Evaluations too are the same."""
    tree, whole = uninterrupted
    count = len((whole / "microbatches.jsonl").read_text().splitlines())

    for stop_at in some(range(1, count, 2), 9):
        out = tmp_path / f"stopped-{stop_at}"
        with monkeypatch.context() as patch:
            if stop_at % 4 == 1:
                after_microbatch(patch, stop_at, terminate)
                assert train({**tree, "output_dir": str(out)}).exit_code == 128 + signal.SIGTERM
            else:
                after_microbatch(patch, stop_at, crash)
                with pytest.raises(RuntimeError, match="crash"):
                    train({**tree, "output_dir": str(out)})
        result = train({**tree, "output_dir": str(out)}, resume=True)
        assert result.exit_code == 0
        same_bits(whole, out)
        assert (out / "evals.jsonl").read_text() == (whole / "evals.jsonl").read_text()
        for line, again in zip(
            sorted(steps(whole), key=lambda x: (x["job"], x["step"])),
            sorted(steps(out), key=lambda x: (x["job"], x["step"])),
            strict=True,
        ):
            assert {k: line[k] for k in ("job", "step", "loss", "grad_norm", "lr", "tokens")} == {
                k: again[k] for k in ("job", "step", "loss", "grad_norm", "lr", "tokens")
            }


def stay() -> None:
    time.sleep(SECONDS)


def command(arguments: list[str], output: Path, at: int = 0, do: Callable[[], None] = stay) -> None:
    """`packlora` with these arguments; what it says goes to a file. do: called after the at-th microbatch."""
    after_microbatch(pytest.MonkeyPatch(), at, do)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["packlora", *arguments]
    app()


def test_killed_with_sigkill_at_random_moments_and_resumed_gives_the_same_bits(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """A real process and a real SIGKILL, several times in a row, until the run is through. The processes that are killed go no
    further than ten microbatches."""
    tree, whole = uninterrupted
    out = tmp_path / "out"
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps({**tree, "output_dir": str(out), "save_every": 1, "save_total_limit": None}))
    kills, most, generator = 0, 3 if SOAK else 2, random.Random(None if SOAK else SEED)
    while True:
        before = len(list(out.glob("*/checkpoint-*")))
        process = fresh.Process(
            target=command,
            args=(["train", str(run_file), "--resume"], tmp_path / "output", 10 * (kills < most)),
            daemon=True,
        )
        process.start()
        if kills < most:
            has_begun = lambda before=before: len(list(out.glob("*/*checkpoint-*"))) > before  # noqa: E731
            wait_for(lambda process=process, has_begun=has_begun: not process.is_alive() or has_begun())  # type: ignore[misc]
            time.sleep(generator.random() * 0.05)
            process.kill()
        process.join(SECONDS)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
        kills += 1
    assert kills == most
    same_bits(whole, out)
    assert not list(out.glob("**/.tmp-*"))


@pytest.mark.soak
def test_sigterm_saves_says_how_to_go_on_and_exits_with_143(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    tree, whole = uninterrupted
    out = tmp_path / "out"
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps({**tree, "output_dir": str(out), "save_every": 0}))
    asked = (["train", str(run_file)], tmp_path / "output", 3, terminate)
    process = fresh.Process(target=command, args=asked, daemon=True)
    process.start()
    process.join(SECONDS)
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 128 + signal.SIGTERM, output
    assert "--resume" in output
    assert list(out.glob("*/checkpoint-*"))
    assert json.loads((out / "run.json").read_text())["result"]["status"] == "interrupted"
    assert (out / "report.html").exists()
    train({**tree, "output_dir": str(out), "save_every": 0}, resume=True)
    same_bits(whole, out)


def test_resuming_a_finished_run_trains_nothing_and_a_longer_one_goes_on(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    tree, whole = uninterrupted
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    kept = ["lora/adapter_model.safetensors", "metrics.jsonl", "evals.jsonl", "microbatches.jsonl"]
    before = [(out / name).read_bytes() for name in kept]
    result = json.loads((out / "run.json").read_text())["result"]
    assert train({**tree, "output_dir": str(out)}, resume=True).tokens == 0
    assert [(out / name).read_bytes() for name in kept] == before
    again = json.loads((out / "run.json").read_text())["result"]
    assert again["tokens"] == result["tokens"]
    assert again["jobs"] == result["jobs"]
    longer = json.loads(json.dumps({**tree, "output_dir": str(out)}))
    longer["jobs"][0]["train"]["num_train_epochs"] = 2
    assert train(longer, resume=True).jobs["lora"].step == 2 * len([s for s in steps(whole) if s["job"] == "lora"])


def test_a_held_out_loss_that_was_not_finite_does_not_keep_a_run_from_being_resumed(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packlora.runtime.evaluate import Evaluator

    tree, _ = uninterrupted
    tree = {**tree, "output_dir": str(tmp_path / "out")}
    original = Evaluator.evaluate

    def spoilt(self: Any, jobs: Any) -> Any:
        first, told = all(job.step == 0 for job in jobs), original(self, jobs)
        if first:
            told = {name: replace(own, loss=float("nan")) for name, own in told.items()}
            self.losses |= {(name, 0): own.loss for name, own in told.items()}
        return told

    monkeypatch.setattr(Evaluator, "evaluate", spoilt)
    train(tree, max_steps=2)
    monkeypatch.undo()
    result = train(tree, resume=True)
    assert result.status == "done"
    assert result.jobs["lora"].eval_before is None
    assert result.jobs["lora"].eval_after is not None


def test_a_run_with_other_settings_is_not_continued(uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    tree, whole = uninterrupted
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    changed = json.loads(json.dumps({**tree, "output_dir": str(out), "seed": 9}))
    changed["jobs"][1]["train"]["learning_rate"] = 1.0
    with pytest.raises(packlora.InputError, match=r"seed, job 'dropped' train\.learning_rate changed"):
        train(changed, resume=True)
    with pytest.raises(packlora.InputError, match="--resume"):
        train({**tree, "output_dir": str(out)})


# --- a failing job -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.soak), 1], ids=["bad job first", "bad job last"])
def test_a_job_that_diverges_is_stopped_with_its_last_good_adapter_and_the_others_keep_their_bits(
    place: int, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """The same run with a harmless and with an absurd learning rate for one job: the other job must not notice."""
    out = {}
    for name, rate in (("healthy", 1e-3), ("diverging", 1e25)):
        good = {"name": "good", "adapter": {"r": 4, "lora_dropout": 0.1}, "train": {"global_batch_size": 2}}
        bad = {
            "name": "bad", "adapter": {"r": 4},
            "train": {"global_batch_size": 3, "learning_rate": rate, "num_train_epochs": 2, "max_grad_norm": 0.0},
        }  # fmt: skip
        jobs = [bad, good] if place == 0 else [good, bad]
        out[name] = train(config(tiny_base(), tmp_path / name, write_rows, jobs))
    assert out["healthy"].exit_code == 0
    assert out["diverging"].exit_code == 1
    assert out["diverging"].jobs["bad"].status == "failed"
    assert out["diverging"].jobs["good"].status == "done"
    same_bits(tmp_path / "healthy", tmp_path / "diverging", [{"name": "good"}])
    kept = adapter(tmp_path / "diverging", "bad")
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert all(tensor.abs().max() < 10 for tensor in kept.values())  # from before the step that ruined it
    state = json.loads((tmp_path / "diverging" / "bad" / "trainer_state.json").read_text())
    assert state["status"] == "failed"
    assert "loss" in state["failure"]
    again = train(config(tiny_base(), tmp_path / "diverging", write_rows, jobs), resume=True)
    assert again.exit_code == 1
    assert again.tokens == 0


def test_dropout_is_drawn_anew_at_every_step_and_not_in_evaluation(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """One sample in every batch and a learning rate of nearly nothing: losses differ by the masks alone."""
    rows = write_rows("one", 1)
    job = {
        "name": "job", "data": {"path": rows, "eval_path": rows}, "adapter": {"r": 8, "lora_alpha": 400, "lora_dropout": 0.5},
        "train": {"max_steps": 4, "global_batch_size": 1, "learning_rate": 1e-12},
    }  # fmt: skip
    start = perturbed_peft(tiny_base("qwen2"), "lora", tmp_path / "start")
    del start
    job["adapter"] = {"init_from": str(tmp_path / "start"), "lora_dropout": 0.5}
    train(config(tiny_base("qwen2"), tmp_path / "out", write_rows, [job], eval_every=1))
    losses = [line["loss"] for line in steps(tmp_path / "out")]
    assert len(set(losses)) == 4
    evals = [json.loads(line)["eval_loss"] for line in (tmp_path / "out" / "evals.jsonl").read_text().splitlines()]
    assert len(evals) == 5
    assert max(evals) - min(evals) < 1e-6
    assert min(abs(loss - evals[0]) for loss in losses) > 1e-4


# --- what must not be lost or passed over in silence -------------------------------------------------------------------


def test_a_defect_between_a_step_and_its_count_saves_nothing_of_the_step(
    uninterrupted: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter has stepped, the job does not know it: no checkpoint says that the one is of the other's step."""
    tree, whole = uninterrupted
    original = Job.stepped

    def broken(self: Job, *args: Any) -> None:
        if self.step == 1:
            crash()
        original(self, *args)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Job, "stepped", broken)
        with pytest.raises(RuntimeError, match="crash"):
            train({**tree, "output_dir": str(out), "save_every": 0})
    assert train({**tree, "output_dir": str(out), "save_every": 0}, resume=True).exit_code == 0
    same_bits(whole, out)


@pytest.mark.parametrize("how", ["crash", "signal"])
def test_a_job_that_is_interrupted_between_its_ruin_and_its_failure_still_keeps_the_adapter_from_before(
    how: str, tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {
        "name": "bad",
        "adapter": {"r": 4},
        "train": {"global_batch_size": 3, "learning_rate": 1e25, "max_grad_norm": 0.0},
    }
    tree = config(tiny_base(), tmp_path / "whole", write_rows, [bad], save_every=1)
    train(tree)
    from packlora.runtime import trainer as module

    original = module.Trainer._after_steps

    def broken(self: Any, stepped: Any) -> None:
        if how == "signal":
            self.team.stop.ask(signal.SIGTERM)
        original(self, stepped)
        if how == "crash":
            raise RuntimeError("crash")

    monkeypatch.setattr(module.Trainer, "_after_steps", broken)
    if how == "crash":
        with pytest.raises(RuntimeError, match="crash"):
            train({**tree, "output_dir": str(tmp_path / "out")})
    else:
        assert train({**tree, "output_dir": str(tmp_path / "out")}).status == "interrupted"
    monkeypatch.setattr(module.Trainer, "_after_steps", original)
    assert train({**tree, "output_dir": str(tmp_path / "out")}, resume=True).exit_code == 1
    same_bits(tmp_path / "whole", tmp_path / "out", [bad])
    assert all(tensor.abs().max() < 10 for tensor in adapter(tmp_path / "out", "bad").values())


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("rate", [1e25, 1e30])
def test_a_job_that_its_very_last_step_ruins_has_failed(
    rate: float, held_out: bool, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    rows = write_rows("rows")
    bad = {
        "name": "bad", "data": {"path": rows, "eval_path": rows if held_out else None}, "adapter": {"r": 4},
        "train": {"learning_rate": rate, "max_steps": 1, "max_grad_norm": 0.0},
    }  # fmt: skip
    result = train(config(tiny_base(), tmp_path / "out", write_rows, [bad]))
    assert result.exit_code == 1
    assert (result.jobs["bad"].status, result.jobs["bad"].step) == ("failed", 0)
    assert all(tensor.abs().max() < 10 for tensor in adapter(tmp_path / "out", "bad").values())
    for name in ("run.json", "evals.jsonl", "metrics.jsonl"):
        assert "NaN" not in (tmp_path / "out" / name).read_text()


def test_a_run_whose_data_changed_is_not_continued(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    job = {"name": "job", "data": {"path": write_rows("rows")}, "adapter": {"r": 4}, "train": {"global_batch_size": 3}}
    tree = config(tiny_base(), tmp_path / "out", write_rows, [job])
    train(tree, max_steps=2)
    path = Path(job["data"]["path"])  # type: ignore[index]
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    with pytest.raises(packlora.InputError, match="'job': its data has changed"):
        train(tree, resume=True)


def test_an_output_folder_that_another_run_holds_is_refused(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    from packlora.files import lock_folder

    (tmp_path / "out").mkdir()
    tree = config(tiny_base(), tmp_path / "out", write_rows, JOBS[:1])
    with lock_folder(tmp_path / "out"), pytest.raises(packlora.InputError, match="in use by another run"):
        train(tree)
    assert train(tree).status == "done"
    assert not (tmp_path / "out" / ".lock").exists()


def test_a_sample_longer_than_the_models_context_is_refused(tiny_base: Base, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "the quick brown fox " * 200}) + "\n")
    job = {"name": "job", "data": {"path": str(path)}}
    with pytest.raises(packlora.InputError, match=r"line 1: .* over the model's context of 256"):
        train(config(tiny_base(), tmp_path / "out", lambda *args, **kwargs: "", [job], max_tokens_per_microbatch=4096))


def test_an_adapted_layer_that_takes_no_part_is_named_in_the_warnings(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that skips one of its layers; and one job that adapts nothing but that layer fails."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def skipping(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.self_attn.layer_idx == 1 else original(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", skipping)
    jobs = [
        {"name": "part", "adapter": {"r": 4, "target_modules": ["q_proj"]}, "train": {"max_steps": 2}},
        {"name": "nothing", "adapter": {"r": 4, "target_modules": r".*layers\.1\..*q_proj"}, "train": {"max_steps": 2}},
    ]
    result = train(config(tiny_base(), tmp_path / "out", write_rows, jobs))
    assert (result.jobs["part"].status, result.jobs["nothing"].status) == ("done", "failed")
    warnings = json.loads((tmp_path / "out" / "run.json").read_text())["warnings"]
    assert any("'part': model.layers.1.self_attn.q_proj took no part" in text for text in warnings)
    assert "no parameter got a gradient" in str(result.jobs["nothing"].failure)
