"""Preferences: losses, rewards and gradients are those of plain formulas over PEFT's model, and of TRL where it is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from peft import PeftModel
from test_training import config, steps, train
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from packlora.config import Run
from packlora.data.encode import Sample
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
TRAIN: dict[str, Any] = {"global_batch_size": 5, "learning_rate": 2e-2, "max_steps": 3}
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo", "beta": 0.7},
    "exo": {"loss_type": "exo_pair", "label_smoothing": 0.05},
    "nca": {"loss_type": "nca_pair"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "bco": {"loss_type": "bco_pair"},
    "sppo": {"loss_type": "sppo_hard", "beta": 0.5},
    "zero": {"loss_type": "apo_zero"},
    "down": {"loss_type": "apo_down"},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.3},
    "normed": {"loss_type": "sigmoid_norm"},
    "mixed": {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [0.8, 0.6, 0.1]},
}


def pairs(path: Path, number: int = 12, seed: int = 0) -> str:
    """Rows of every form, of completions of different lengths."""
    draw = np.random.default_rng(seed)

    def text(least: int, most: int) -> str:
        return " ".join(WORDS[n] for n in draw.integers(0, len(WORDS), draw.integers(least, most)))

    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    rows: list[dict[str, Any]] = []
    for n in range(number):
        prompt, chosen, rejected = text(2, 6), text(1, 9), f"not {text(1, 9)}"
        ours, theirs, asked = turn("assistant", chosen), turn("assistant", rejected), turn("user", prompt)
        if n % 3 == 0:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        elif n % 3 == 1:
            rows.append({"prompt": [asked], "chosen": [ours], "rejected": [theirs]})
        else:
            rows.append({"chosen": [asked, ours], "rejected": [asked, theirs]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def judged(path: Path, number: int = 12, seed: int = 5) -> str:
    draw = np.random.default_rng(seed)
    rows = [
        {"prompt": WORDS[n], "completion": " ".join(WORDS[: draw.integers(1, 9)]), "label": bool(n % 3)}
        for n in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def jobs(write_rows: Rows, tmp_path: Path) -> list[dict[str, Any]]:
    """Of every trainer."""
    ours, held, said = (
        pairs(tmp_path / "pairs.jsonl"),
        pairs(tmp_path / "held.jsonl", 4, 1),
        judged(tmp_path / "said.jsonl"),
    )

    def job(name: str, path: str, **own: Any) -> dict[str, Any]:
        data = {"path": path} | ({"eval_path": held} if path == ours else {"eval_path": path})
        adapter = {"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}
        return {"name": name, "data": data, "adapter": adapter, "train": TRAIN | own}

    return [
        job("sft", write_rows("rows"), max_grad_norm=0.0),
        *(job(name, ours, trainer="dpo", **own) for name, own in DPO.items()),
        job("orpo", ours, trainer="orpo", beta=0.4),
        job("kto", said, trainer="kto", loss_type="apo_zero_unpaired", desirable_weight=1.5, undesirable_weight=0.7),
    ]


# --- the oracle: one part to a forward, PEFT's model, plain formulas -----------------------------------------------------


def parts_of(sample: Sample) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each part: tokens, which are of the completion, which are of the cross entropy of a whole chosen part."""
    assert sample.preference is not None
    context = sample.preference.is_context
    of_completion = sample.is_label if context is None else sample.is_label & ~context
    out, start = [], 0
    for length in sample.preference.lengths:
        own = slice(start, start + length)
        out.append(tuple(torch.from_numpy(part[own]) for part in (sample.ids, of_completion, sample.is_label)))
        start += length
    return out  # type: ignore[return-value]


def logps(model: Any, sample: Sample) -> tuple[list[torch.Tensor], list[int], torch.Tensor, int]:
    """Log-probabilities of completions, their tokens, cross entropy and tokens of the chosen part."""
    found, counts, nll, nll_tokens = [], [], torch.zeros(()), 0
    for number, (ids, completion, label) in enumerate(parts_of(sample)):
        logits = model(input_ids=ids.long()[None], use_cache=False).logits[0, :-1]
        each = logits.log_softmax(-1).gather(1, ids[1:].long()[:, None])[:, 0]
        found.append(each[completion[1:]].sum())
        counts.append(int(completion[1:].sum()))
        if number == 0:
            nll, nll_tokens = -each[label[1:]].sum(), int(label[1:].sum())
    return found, counts, nll, nll_tokens


def pair_loss(name: str, train: dict[str, Any], c: Any, r: Any, counts: list[int]) -> Any:
    b, e = train.get("beta", 0.1), train.get("label_smoothing", 0.0)
    h = b * (c - r)
    match name:
        case "sigmoid":
            return torch.log(1 + torch.exp(-h))
        case "hinge":
            return torch.clamp(1 - h, min=0)
        case "ipo":
            return (c / counts[0] - r / counts[1] - 0.5 / b).pow(2)
        case "exo_pair":
            p = torch.sigmoid(h)
            return p * torch.log(p / (1 - e)) + (1 - p) * torch.log((1 - p) / e)
        case "nca_pair":
            return -logsigmoid(b * c) - (logsigmoid(-b * c) + logsigmoid(-b * r)) / 2
        case "robust":
            return (-(1 - e) * torch.log(torch.sigmoid(h)) + e * torch.log(torch.sigmoid(-h))) / (1 - 2 * e)
        case "bco_pair":
            return -logsigmoid(b * c) - logsigmoid(-b * r)
        case "sppo_hard":
            return (c - 1 / (2 * b)).pow(2) + (r + 1 / (2 * b)).pow(2)
        case "apo_zero":
            return torch.sigmoid(-b * c) + torch.sigmoid(b * r)
        case "apo_down":
            return torch.sigmoid(b * c) + torch.sigmoid(-h)
        case "discopop":
            m = torch.sigmoid(h / train["discopop_tau"])
            return -logsigmoid(h) * (1 - m) + torch.exp(-h) * m
    assert name == "sigmoid_norm"
    return -logsigmoid(b * (c / counts[0] - r / counts[1]))


def plain(model: Any, batch: list[Sample], train: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a global batch, and rewards by TRL's names."""
    trainer, beta = train["trainer"], train.get("beta", 0.1)
    losses, nlls, tokens, chosen, rejected, own_logps = [], [], 0, [], [], []
    for sample in batch:
        own, counts, nll, nll_tokens = logps(model, sample)
        with torch.no_grad(), model.disable_adapter():
            base = logps(model, sample)[0]
        nlls.append(nll)
        tokens += nll_tokens
        if trainer == "orpo":
            a, b = (logp / count for logp, count in zip(own, counts, strict=True))
            odds = torch.log(torch.exp(a) / (1 - torch.exp(a))) - torch.log(torch.exp(b) / (1 - torch.exp(b)))
            losses.append(-beta * torch.log(torch.sigmoid(odds)))
            chosen.append(beta * a), rejected.append(beta * b), own_logps.append((a, b))
            continue
        ratios = [a - b for a, b in zip(own, base, strict=True)]
        if trainer == "kto":
            assert sample.preference is not None
            good, (ratio,) = sample.preference.desirable, ratios
            shared = torch.sigmoid(-beta * ratio) if good else torch.sigmoid(beta * ratio)
            losses.append(shared * train["desirable_weight" if good else "undesirable_weight"])
            (chosen if good else rejected).append(beta * ratio)
            continue
        names = train.get("loss_type", "sigmoid")
        names = [names] if isinstance(names, str) else names
        weights = train.get("loss_weights", [1.0] * len(names))
        losses.append(
            sum(w * pair_loss(n, train, *ratios, counts) for n, w in zip(names, weights, strict=True) if n != "sft")
        )
        chosen.append(beta * ratios[0]), rejected.append(beta * ratios[1]), own_logps.append(tuple(own))
    loss = torch.stack(losses).mean()
    if trainer == "orpo":
        loss = loss + torch.stack(nlls).sum() / tokens
    if "sft" in train.get("loss_type", []):
        loss = loss + train["loss_weights"][1] * torch.stack(nlls).sum() / tokens
    told = {"rewards/chosen": torch.stack(chosen).mean(), "rewards/rejected": torch.stack(rejected).mean()}
    told["rewards/margins"] = told["rewards/chosen"] - told["rewards/rejected"]
    if trainer != "kto":
        told["rewards/accuracies"] = (torch.stack(chosen) > torch.stack(rejected)).double().mean()
        told["logps/chosen"], told["logps/rejected"] = (torch.stack(one).mean() for one in zip(*own_logps, strict=True))
    return loss, {name: float(value) for name, value in told.items()}


def peft_of(base: str, folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    return PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).double()


def grad_norm(model: Any, loss: torch.Tensor) -> float:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return float(torch.stack([g.norm() for g in torch.autograd.grad(loss, parameters)]).norm())


def evals(out: Path, job: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]
    return [line for line in lines if line["job"] == job]


def test_every_loss_has_the_value_the_gradient_and_the_rewards_of_plain_formulas_over_peft(
    tiny_base: Callable[..., str], write_rows: Rows, jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Seventeen jobs in shared microbatches, smaller than a global batch; in float64, from adapters that have learnt."""
    out, base = tmp_path / "out", tiny_base("llama")
    tree = config(
        base, out, write_rows, jobs, dtype="float64", max_tokens_per_microbatch=300, save_every=1, save_total_limit=None
    )
    train(tree)
    shared = [json.loads(line) for line in (out / "microbatches.jsonl").read_text().splitlines()]
    assert any("sft" in line["tokens"] and len(line["tokens"]) > 1 for line in shared)
    prepared = {job.config.name: job for job in prepare(Run.model_validate(tree)).jobs}
    for job in jobs[1:]:
        name = job["name"]
        model = peft_of(base, out / name / "checkpoint-2")
        data = prepared[name].data
        loss, _ = plain(model, [data.samples[n] for n in data.global_batch(2)], job["train"])
        (line,) = [line for line in steps(out) if line["job"] == name and line["step"] == 3]
        assert line["loss"] == pytest.approx(float(loss), rel=1e-10), name
        assert line["grad_norm"] == pytest.approx(grad_norm(model, loss), rel=1e-10), name
        with torch.no_grad():
            held, told = plain(peft_of(base, out / name), prepared[name].eval_encoded.samples, job["train"])
        found = evals(out, name)[-1]
        assert found["eval_loss"] == pytest.approx(float(held), rel=1e-10), name
        for key, value in told.items():
            assert found[f"eval_{key}"] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)
