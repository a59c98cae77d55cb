"""train.optim, logging_steps, neftune_noise_alpha and label_smoothing_factor from a run file: what a job learns is its own,
broken off or not, and is what a plain loop over a PEFT model learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_members import base, job, tree_of
from test_training import adapter, distance
from typer.testing import CliRunner

import packlora
from packlora.cli import app

assert callable(base)  # a fixture

KEYS: dict[str, dict[str, Any]] = {
    "a": {"optim": "adafactor", "weight_decay": 0.1, "loraplus_lr_ratio": 2.0},
    "b": {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0, "logging_steps": 2},
    "c": {"optim": "adamw_bnb_8bit", "neftune_noise_alpha": 5.0},
    "d": {"optim": "lion_32bit", "learning_rate": 1e-3, "label_smoothing_factor": 0.1, "logging_steps": 100},
}


def tree(base: str, folder: Path, names: str, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    out = tree_of(base, folder, "", dtype, jobs=[job(name, folder, **KEYS[name]) for name in names])
    return out | changes


def lines(out: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / log).read_text().splitlines()]


def test_jobs_of_several_optimizers_go_on_to_the_bit_and_learn_what_each_learns_alone(
    base: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    whole = tree(base, tmp_path, "abcd")
    assert packlora.train(whole).status == "done"
    broken = whole | {"output_dir": str(tmp_path / "broken")}
    packlora.train(broken, max_steps=3)
    packlora.train(broken, resume=True)
    for name in KEYS:
        ours, theirs = (adapter(tmp_path / folder, name) for folder in ("out", "broken"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
        alone = whole | {"jobs": [j for j in whole["jobs"] if j["name"] == name], "output_dir": str(tmp_path / name)}
        packlora.train(alone)
        bound = (
            1e-5 if KEYS[name]["optim"] not in ("lion_32bit", "adamw_bnb_8bit") else 1e-2
        )  # signs and codes are steps
        assert distance(ours, adapter(tmp_path / name, name)) < bound, name
    told = {folder: lines(tmp_path / folder, "metrics.jsonl") for folder in ("out", "broken")}
    for found in told.values():
        steps = {name: [line["step"] for line in found if line["job"] == name] for name in KEYS}
        assert steps == {"a": [1, 2, 3, 4, 5, 6], "b": [2, 4, 6], "c": [1, 2, 3, 4, 5, 6], "d": []}
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    kept = json.loads((tmp_path / "out" / "d" / "trainer_state.json").read_text())["log_history"]
    assert sum("loss" in line for line in kept) == 6, "the history has every step"


def test_moments_of_8_bits_are_a_job_s_own_to_the_bit(base: str, tmp_path: Path) -> None:
    """Apart from rounding in shared microbatches nothing passes from job to job: no block of codes is of two."""
    pytest.importorskip("bitsandbytes")
    wide = {"r": 128, "target_modules": ["q_proj", "down_proj"]}
    jobs = [job(name, tmp_path, optim="adamw_8bit", max_steps=3) | {"adapter": wide} for name in "ab"]
    packlora.train(tree_of(base, tmp_path, "", "float32", jobs=jobs, schedule={"method": "solo"}))
    packlora.train(tree_of(base, tmp_path, "", "float32", jobs=jobs[1:], output_dir=str(tmp_path / "alone")))
    ours, alone = (adapter(tmp_path / folder, "b") for folder in ("out", "alone"))
    assert all(torch.equal(ours[key], alone[key]) for key in alone)
    assert len(alone) == 4 and all(value.numel() >= 4096 for value in alone.values())


def test_a_terminal_that_is_none_has_a_line_for_each_step_that_is_logged(base: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree(base, tmp_path, "b", "float32")))
    said = CliRunner().invoke(app, ["train", str(path)])
    assert said.exit_code == 0, said.output
    assert [f"step {n}/6" in said.output for n in range(1, 7)] == [False, True] * 3


def test_what_is_learnt_is_what_a_plain_loop_over_a_peft_model_learns(base: str, tmp_path: Path) -> None:
    """Adafactor, NEFTune and label smoothing together, in float64: transformers' optimizer and torch's loss."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from packlora.config import Run
    from packlora.engine.objectives.neftune import SALT
    from packlora.ops.dropout.keys import token_keys, uniform
    from packlora.runtime.prepare import prepare
    from packlora.seeding import stable_hash

    keys = {"optim": "adafactor", "neftune_noise_alpha": 7.0, "label_smoothing_factor": 0.2, "max_grad_norm": 0}
    own = job("d", tmp_path, **keys, max_steps=4)
    run = tree_of(base, tmp_path, "", "float64", jobs=[own], save_every=0)
    packlora.train(run, max_steps=1)  # a first step, after which PEFT begins
    start = tmp_path / "out" / "d"
    run["jobs"] = [own | {"adapter": {"init_from": str(start)}}, job("a", tmp_path)]
    run["output_dir"] = str(tmp_path / "ours")
    packlora.train(run)
    data = prepare(Run.model_validate(run)).jobs[0].data
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    peft = PeftModel.from_pretrained(model, start, is_trainable=True, autocast_adapter_dtype=False).double()
    made, settings = Trainer.get_optimizer_cls_and_kwargs(
        TrainingArguments(str(tmp_path / "t"), optim="adafactor", learning_rate=1e-2, use_cpu=True, report_to=[])
    )
    optimizer = made([p for p in peft.parameters() if p.requires_grad], **settings)
    table = model.get_input_embeddings().weight
    for step in range(4):
        batch = data.global_batch(step)
        total = sum(data.samples[number].num_labels for number in batch)
        for number in batch:
            sample = data.samples[number]
            ids, n = torch.from_numpy(sample.ids).long(), sample.num_tokens
            words = torch.from_numpy(token_keys(stable_hash("neftune", 7), step, number, n))
            noise = uniform(words, SALT, table.shape[1]).double() * 7.0 / (n * table.shape[1]) ** 0.5
            logits = peft(inputs_embeds=(table[ids] + noise)[None]).logits[0, :-1]
            labels = torch.where(torch.from_numpy(sample.is_label), ids, -100)[1:]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.2) / total
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peft.save_pretrained(tmp_path / "theirs" / "d")
    assert distance(adapter(tmp_path / "ours", "d"), adapter(tmp_path / "theirs", "d")) < 1e-6, "files are float32"
    assert distance(adapter(tmp_path / "ours", "d"), adapter(tmp_path / "out", "d")) > 1e-2
