"""Rollouts at a temperature: log-probabilities and gradients are those of logits that are divided by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from test_rollouts import four_prompts, job, of_job, tree
from test_training import adapter, distance, train

WIDE = {"global_batch_size": 8, "max_steps": 2, "beta": 0.1, "max_grad_norm": 1e9}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return four_prompts(tmp_path)


def gradient_norm(
    model: Any, tokenizer: Any, files: tuple[str, str], drawn: list[dict[str, Any]], heat: float
) -> float:
    """Norm of the gradient of the dapo loss of a step by PEFT, after logits are divided by the temperature, as TRL does."""
    prompts = [json.loads(line)["prompt"] for line in Path(files[1]).read_text().splitlines()]
    total = sum(len(one["ids"]) for one in drawn)
    for one in drawn:
        start = tokenizer(prompts[one["prompt"]])["input_ids"]
        ids = torch.tensor([start + one["ids"]])
        logp_TV = (model(ids).logits[0] / heat).log_softmax(-1)[len(start) - 1 : -1]
        logp = logp_TV.gather(1, ids[0, len(start) :, None])[:, 0]
        assert one["logprobs"] == pytest.approx(logp.tolist(), abs=1e-4)
        wide_TV = logp_TV.detach().double()
        assert one["entropy"] == pytest.approx(float(-(wide_TV.exp() * wide_TV).sum(-1).mean()), rel=1e-4)
        with torch.no_grad(), model.disable_adapter():
            known_TV = (model(ids).logits[0] / heat).log_softmax(-1)[len(start) - 1 : -1]
        away = known_TV.gather(1, ids[0, len(start) :, None])[:, 0] - logp
        assert one["reference"] == pytest.approx((away + logp).tolist(), abs=1e-4)
        ratio = (logp - logp.detach()).exp()
        ((-ratio * one["advantage"] + 0.1 * (away.exp() - away - 1)).sum() / total).backward()
    gradients = [own.grad for own in model.parameters() if own.grad is not None]
    return float(torch.stack([own.norm() for own in gradients]).norm())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_is_drawn_and_learnt_at_a_temperature_is_that_of_peft(
    family: str, files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """Gemma 2 changes its logits after the output layer; one job of Llama trains the layer itself."""
    base = tiny_base(family)
    jobs = [job("hot", files, **WIDE), job("cold", files, seed=2, **WIDE), job("plain", files, seed=3, **WIDE)]
    for own, heat in zip(jobs, (1.7, 0.6, 1.0), strict=True):
        own["rollout"]["temperature"] = heat
    if family == "llama":
        jobs[1]["adapter"]["target_modules"] = ["q_proj", "down_proj", "lm_head"]
    together = tree(base, tmp_path / "out", *jobs)
    train(together, max_steps=1)
    for own in jobs:
        shutil.copytree(tmp_path / "out" / own["name"], tmp_path / own["name"])
    train(together, resume=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for own in jobs:
        name, heat = own["name"], own["rollout"]["temperature"]
        line = of_job(tmp_path / "out", name)[-1]
        assert line["sampling/sampling_logp_difference/mean"] < 1e-4 and abs(line["sampling/kl"]) < 1e-5
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = PeftModel.from_pretrained(model, str(tmp_path / name), is_trainable=True)
        drawn = json.loads((tmp_path / "out" / name / "rollouts" / "step-2.json").read_text())["completions"]
        wanted = sum(one["entropy"] * len(one["ids"]) for one in drawn) / sum(len(one["ids"]) for one in drawn)
        assert line["entropy"] == pytest.approx(wanted, rel=1e-12)
        assert line["grad_norm"] == pytest.approx(gradient_norm(model, tokenizer, files, drawn, heat), rel=1e-3)
    train(tree(base, tmp_path / "alone", jobs[2]))
    assert distance(adapter(tmp_path / "alone", "plain"), adapter(tmp_path / "out", "plain")) == 0
