"""Preferences: losses, rewards and gradients are those of plain formulas over PEFT's model, and of TRL where it is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from peft import PeftModel
from safetensors.torch import load_file, save_file
from seeds import SOAK
from steps import change_steps
from test_training import adapter, config, distance, steps, train
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from packlora.config import BUILT_IN, Run, TrainConfig
from packlora.data.encode import Sample
from packlora.data.preference import ComparedSample, mismatched
from packlora.engine.objectives.configured import objective_of
from packlora.engine.objectives.preference import PreferenceObjective, Scores
from packlora.errors import InputError
from packlora.events import RunBegan, Stop
from packlora.runtime.job import Job, Judged
from packlora.runtime.job import judged as judged_by
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
        head = ["lm_head"] if name in ("nca", "orpo", "robust") else []
        adapter = {"r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj", *head]}
        return {"name": name, "data": data, "adapter": adapter, "train": TRAIN | own}

    return [
        job("sft", write_rows("rows"), max_grad_norm=0.0),
        *(job(name, ours, trainer="dpo", **own) for name, own in DPO.items()),
        job("orpo", ours, trainer="orpo", beta=0.4),
        job("apo", said, trainer="kto", loss_type="apo_zero_unpaired", desirable_weight=1.5, undesirable_weight=0.7),
        job("kto", said, trainer="kto", beta=0.3, desirable_weight=3.0, undesirable_weight=0.2),
    ]


# --- the oracle: one part to a forward, PEFT's model, plain formulas -----------------------------------------------------


def parts_of(sample: Sample) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each part: tokens, which are of the completion, which are of the cross entropy of a whole chosen part."""
    assert isinstance(sample, ComparedSample)
    context = sample.is_context
    of_completion = sample.is_label if context is None else sample.is_label & ~context
    out, start = [], 0
    for length in sample.lengths:
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


def rotated(batch: list[Sample]) -> list[Sample]:
    """Each prompt with the completion of the sample before."""
    cut = [(sample.ids.tolist(), sample.is_label.tolist().index(True)) for sample in batch]
    out = []
    for number, (ids, start) in enumerate(cut):
        other, begin = cut[number - 1]
        both = np.array(ids[:start] + other[begin:], np.int32)
        out.append(ComparedSample(both, np.arange(len(both)) >= start, lengths=(len(both),)))
    return out


def divergence(model: Any, batch: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        own = [logps(model, sample)[0][0] for sample in rotated(batch)]
        with model.disable_adapter():
            base = [logps(model, sample)[0][0] for sample in rotated(batch)]
    return (torch.stack(own) - torch.stack(base)).mean().clamp(min=0)


def plain(model: Any, batch: list[Sample], train: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a global batch, and rewards by TRL's names."""
    trainer, beta = train["trainer"], train.get("beta", 0.1)
    losses, nlls, tokens, chosen, rejected, own_logps = [], [], 0, [], [], []
    is_kto = trainer == "kto" and "loss_type" not in train
    kl = divergence(model, batch) if is_kto else torch.zeros(())
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
            assert isinstance(sample, ComparedSample)
            good, (ratio,) = sample.desirable, ratios
            shared = 1 - torch.sigmoid(beta * (ratio - kl)) if good else 1 - torch.sigmoid(beta * (kl - ratio))
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
    if is_kto:
        told["kl"] = kl
    if trainer != "kto":
        told["rewards/accuracies"] = (torch.stack(chosen) > torch.stack(rejected)).double().mean()
        told["logps/chosen"], told["logps/rejected"] = (torch.stack(one).mean() for one in zip(*own_logps, strict=True))
    return loss, {name: float(value.detach()) for name, value in told.items()}


def peft_of(base: Any, folder: Path) -> Any:
    """base: folder of a model, or one that has no adapters by now."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) if isinstance(base, str) else base
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
    """Eighteen jobs in shared microbatches, smaller than a global batch; in float64, from adapters that have learnt."""
    out, base = tmp_path / "out", tiny_base("shallow")
    tree = config(
        base, out, write_rows, jobs, dtype="float64", max_tokens_per_microbatch=300, save_every=1, save_total_limit=None
    )
    result = train(tree)
    shared = [json.loads(line) for line in (out / "microbatches.jsonl").read_text().splitlines()]
    assert any("sft" in line["tokens"] and len(line["tokens"]) > 1 for line in shared)
    prepared = {job.config.name: job for job in prepare(Run.model_validate(tree)).jobs}
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for job in jobs[1:]:
        name = job["name"]
        model = peft_of(bare, out / name / "checkpoint-2")
        data = prepared[name].data
        loss, told = plain(model, [data.samples[n] for n in data.global_batch(2)], job["train"])
        assert name != "kto" or told["kl"] > 1e-3, "the estimate takes part"
        (line,) = [line for line in steps(out) if line["job"] == name and line["step"] == 3]
        assert line["loss"] == pytest.approx(float(loss), rel=1e-10), name
        assert line["grad_norm"] == pytest.approx(grad_norm(model, loss), rel=1e-10), name
        for key, value in told.items():
            assert line[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)
        bare = model.unload()
        with torch.no_grad():
            model = peft_of(bare, out / name)
            held, told = plain(model, prepared[name].eval_encoded.samples, job["train"])
        bare = model.unload()
        found = evals(out, name)[-1]
        assert found["eval_loss"] == pytest.approx(float(held), rel=1e-10), name
        for key, value in told.items():
            assert found[f"eval_{key}"] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)
            assert result.jobs[name].metrics[f"eval_{key}"] == found[f"eval_{key}"]
    record = json.loads((out / "run.json").read_text())["result"]["jobs"]
    assert record["sigmoid"]["metrics"] == result.jobs["sigmoid"].metrics and record["sft"]["metrics"] == {}
    state = json.loads((out / "sigmoid" / "trainer_state.json").read_text())
    assert {"rewards/margins", "logps/chosen"} <= state["log_history"][-2].keys()


# --- beside others, after an interruption, on replicas, from an adapter --------------------------------------------------


def mixed(base: str, out: Path, jobs: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    chosen = [job for job in jobs if job["name"] in ("sft", "mixed", "apo", "kto")]
    dropped = [job | {"adapter": job["adapter"] | {"lora_dropout": 0.2}} for job in chosen]
    tree = {
        "base_model": base,
        "output_dir": str(out),
        "max_tokens_per_microbatch": 150,
        "save_every": 1,
        "device": "cpu",
    }
    return tree | {"eval_every": 2, "jobs": dropped} | changes


def same(one: Path, other: Path, names: Any) -> None:
    for name in names:
        a, b = adapter(one, name), adapter(other, name)
        assert all(torch.equal(a[key], b[key]) for key in a), name
        assert [{**line} for line in evals(one, name)] == [{**line} for line in evals(other, name)], name


def alike(one: Path, other: Path, name: str, bound: float = 1e-10) -> None:
    """Adapters and held-out metrics of a job in two runs."""
    assert distance(adapter(one, name), adapter(other, name)) < bound, name
    for ours, theirs in zip(evals(one, name), evals(other, name), strict=True):
        numbers, wanted = ({key: value for key, value in line.items() if key != "job"} for line in (ours, theirs))
        assert numbers == pytest.approx(wanted, rel=bound, abs=1e-12), name


def test_a_job_gives_alone_what_it_gives_beside_others_and_an_interruption_changes_no_bit(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    tree = mixed(tiny_base("shallow"), tmp_path / "together", jobs, dtype="float64", eval_every=1)
    train(tree)
    for job in tree["jobs"]:
        if job["name"] in ("mixed", "kto") or SOAK:
            own = {"output_dir": str(tmp_path / job["name"]), "jobs": [job], "max_tokens_per_microbatch": 120}
            train(tree | own)
            alike(tmp_path / "together", tmp_path / job["name"], job["name"])
    parts = tree | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=1)
    train(parts, max_steps=2, resume=True)
    train(parts, resume=True)
    same(tmp_path / "together", tmp_path / "parts", [job["name"] for job in tree["jobs"]])


@pytest.mark.soak
def test_a_stop_before_references_are_known_leaves_a_run_that_can_go_on(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    chosen = [job for job in jobs if job["name"] in ("sft", "mixed", "kto")]
    tree = mixed(tiny_base("shallow"), tmp_path / "whole", chosen)
    parts = tree | {"output_dir": str(tmp_path / "parts")}
    stopped = train(parts, subscribers=[lambda event: Stop() if isinstance(event, RunBegan) else None])
    assert stopped.status == "interrupted"
    assert train(parts, resume=True).status == train(tree).status == "done"
    same(tmp_path / "whole", tmp_path / "parts", [job["name"] for job in chosen])


def test_a_run_goes_on_after_an_interruption_beside_jobs_with_references_that_have_failed(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their samples are still in the microbatches, and nobody knows their references. The other job has the bits that it has
    beside healthy ones."""
    tree = mixed(
        tiny_base("shallow"), tmp_path / "healthy", [job for job in jobs if job["name"] in ("sft", "mixed", "kto")]
    )
    train(tree)

    def spoilt(job: Job, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        numbers = step()
        if job.name != "sft":
            numbers[0] = np.nan
        return numbers

    change_steps(monkeypatch, spoilt)
    parts = tree | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=1)
    resumed = train(parts, resume=True)
    assert {name: job.status for name, job in resumed.jobs.items()} == {
        "sft": "done",
        "mixed": "failed",
        "kto": "failed",
    }
    assert distance(adapter(tmp_path / "healthy", "sft"), adapter(tmp_path / "parts", "sft")) == 0


def test_a_completion_with_another_prompt_is_cut_as_in_trl_and_may_be_over_the_budget(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = [("the fox", "dog " * 20, True), ("the " * 20, "fox", False)]
    lines = [json.dumps({"prompt": p, "completion": c, "label": label}) for p, c, label in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (job,) = (job for job in jobs if job["name"] == "kto")
    job |= {"data": {"path": str(tmp_path / "rows.jsonl")}, "train": job["train"] | {"global_batch_size": 2}}

    def prepared(**data: Any) -> Any:
        tree = mixed(tiny_base("shallow"), tmp_path / "out", [job | {"data": job["data"] | data}])
        return prepare(Run.model_validate(tree)), tree

    samples = prepared()[0].jobs[0].encoded.samples
    most = max(sample.num_tokens for sample in samples)
    whole = {len(sample.ids): sample for sample in rotated(samples)}
    found, tree = prepared(max_length=most + 5)
    cut = {sample.num_tokens: sample for sample in mismatched(found.jobs[0].encoded.samples)}
    assert max(whole) > most + 5 == max(cut) == found.longest_run["kto"] and min(cut) == min(whole)
    assert np.array_equal(cut[max(cut)].ids, whole[max(whole)].ids[: most + 5])
    assert np.array_equal(cut[max(cut)].is_label, whole[max(whole)].is_label[: most + 5])
    assert train(tree | {"max_tokens_per_microbatch": most, "eval_every": 0}).status == "done"


def test_the_reference_of_a_job_that_continues_an_adapter_is_that_adapter_also_after_an_interruption(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    base = tiny_base("shallow")
    tree = mixed(base, tmp_path / "first", [job for job in jobs if job["name"] == "sft"])
    train(tree)
    (job,) = (job for job in jobs if job["name"] == "sigmoid")
    job["adapter"] = {"init_from": str(tmp_path / "first" / "sft")}
    tree = tree | {"jobs": [job], "output_dir": str(tmp_path / "second"), "eval_every": 1}
    train(tree)
    before = evals(tmp_path / "second", "sigmoid")[0]
    assert before["eval_loss"] == pytest.approx(np.log(2), rel=1e-12) and before["eval_rewards/chosen"] == 0
    assert evals(tmp_path / "second", "sigmoid")[-1]["eval_rewards/margins"] != 0
    train(tree | {"output_dir": str(tmp_path / "parts")}, max_steps=2)
    train(tree | {"output_dir": str(tmp_path / "parts")}, resume=True)
    same(tmp_path / "second", tmp_path / "parts", ["sigmoid"])


def test_the_reference_may_be_the_base_or_another_adapter(
    tiny_base: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path
) -> None:
    """An adapter held to the base is as much preferred as the base is less, held to the adapter; interrupted or not."""
    (first,) = (job for job in jobs if job["name"] == "sft")
    tree = mixed(tiny_base("shallow"), tmp_path / "first", [first])
    train(tree)
    folder = tmp_path / "first" / "sft"
    (job,) = (job for job in jobs if job["name"] == "sigmoid")
    to_base = job | {
        "name": "to-base",
        "adapter": {"init_from": str(folder)},
        "train": job["train"] | {"reference": "base"},
    }
    to_it = job | {"name": "to-it", "adapter": first["adapter"], "train": job["train"] | {"reference": str(folder)}}
    tree |= {"jobs": [to_base, to_it], "output_dir": str(tmp_path / "second")}
    train(tree)
    one, other = (evals(tmp_path / "second", name)[0] for name in ("to-base", "to-it"))
    for what in ("chosen", "rejected"):
        assert one[f"eval_rewards/{what}"] == pytest.approx(-other[f"eval_rewards/{what}"], rel=1e-9) != 0
    parts = tree | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=2)
    shutil.copytree(folder, tmp_path / "kept")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match=f"job 'to-it': {folder} is not the adapter that the run began with"):
        train(parts, resume=True)
    shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True)
    train(parts, resume=True)
    same(tmp_path / "second", tmp_path / "parts", ["to-base", "to-it"])
    for own, said in (
        ({"r": 9}, "is not like the job's adapter on model.layers.0.self_attn.q_proj"),
        ({}, "no such"),
    ):
        wrong = to_it | {"adapter": first["adapter"] | own}
        wrong["train"] = wrong["train"] | {"reference": str(folder if own else tmp_path / "nowhere")}
        with pytest.raises(InputError, match=f"(?i)job 'to-it': .*{said}"):
            prepare(Run.model_validate(tree | {"jobs": [wrong]}))


def test_the_best_adapter_may_be_that_of_the_highest_accuracy() -> None:
    lines = [{"step": n, "eval_loss": loss, "eval_rewards/accuracies": share} for n, loss, share in CURVE]
    keys = {"trainer": "dpo", "eval_steps": 1, "early_stopping_patience": 9}
    assert judged_by(lines, TrainConfig(**keys), 4) == Judged(4, 0.3, 0)
    named = TrainConfig(**keys, metric_for_best_model="eval_rewards/accuracies")
    assert judged_by(lines, named, 4) == Judged(2, 0.8, 2)


CURVE = [(1, 0.6, 0.5), (2, 0.5, 0.8), (3, 0.4, 0.7), (4, 0.3, 0.8)]


# --- at the ends of what a model can say --------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [0.0, -1e-17, -3e-8, -800.0])
@pytest.mark.parametrize("rejected", [0.0, -1e-17, -3e-8, -800.0])
def test_a_completion_that_is_learnt_or_unlearnt_to_the_last_bit_leaves_loss_and_gradient_finite(
    chosen: float, rejected: float
) -> None:
    """Of every loss; orpo's is that of the odds in 60 digits, up to p = 1."""

    def scores() -> tuple[torch.Tensor, Scores]:
        logps_N3 = torch.tensor([[0.0, chosen, rejected]], dtype=torch.float64, requires_grad=True)
        counts_N3, ones_N = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return logps_N3, Scores(logps_N3, torch.full_like(counts_N3, -7.0), counts_N3, ones_N, 1.0)

    smoothed = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
    pairs = [
        {"trainer": "dpo", "loss_type": name, "beta": 1.0} | smoothed.get(name, {}) for name in BUILT_IN["dpo"].losses
    ]
    objectives: list[dict[str, Any]] = [{"trainer": "orpo", "beta": 1.0}, {"trainer": "kto"}, *pairs]
    for keys in objectives:
        logps_N3, given = scores()
        objective = objective_of(TrainConfig.model_validate(keys))
        assert isinstance(objective, PreferenceObjective)
        loss = objective.losses_of(given).sum()
        (gradient,) = torch.autograd.grad(loss, logps_N3)
        assert loss.isfinite() and gradient.isfinite().all(), keys
        if keys["trainer"] == "orpo" and -800 < chosen < 0 and -800 < rejected < 0 and -1e-17 not in (chosen, rejected):
            with localcontext(prec=60):
                p, q = (Decimal(number).exp() for number in (chosen, rejected))
                exact = (1 + q * (1 - p) / (p * (1 - q))).ln() - Decimal(chosen)
            assert float(loss) == pytest.approx(float(exact), rel=1e-12)


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_keys", "row", "words"),
    [
        (
            {"trainer": "dpo"},
            {"prompt": "a", "completion": "b"},
            r"line 1: train\.trainer: dpo compares two completions",
        ),
        ({}, {"prompt": "a", "chosen": "b", "rejected": "c"}, r"line 1: 'chosen' and 'rejected' are compared by"),
        ({"trainer": "kto", "loss_type": "apo_zero_unpaired"}, {"prompt": "a", "completion": "b"}, "found label None"),
        ({"trainer": "orpo"}, {"chosen": "xb", "rejected": "yc"}, "do not begin alike; give the prompt"),
        ({"trainer": "orpo"}, {"prompt": "a", "chosen": "b", "rejected": ["c"]}, "all texts or all lists"),
        (
            {"trainer": "dpo"},
            {"prompt": "a", "chosen": "b", "rejected": ""},
            "line 1, rejected: the sample has no label",
        ),
    ],
)
def test_rows_that_are_not_what_the_trainer_takes_are_refused(
    train_keys: dict[str, Any], row: dict[str, Any], words: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    job = {"name": "a", "data": {"path": str(tmp_path / "rows.jsonl")}, "train": train_keys}
    tree = {"base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": [job]}
    with pytest.raises(InputError, match=words):
        prepare(Run.model_validate(tree))


def test_the_loss_kto_is_not_of_one_sample_alone(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    many, one = judged(tmp_path / "many.jsonl", 5), judged(tmp_path / "one.jsonl", 1)
    tree = {"base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"), "device": "cpu"}

    def notes(path: str, **keys: Any) -> list[str]:
        data = {key: keys.pop(key) for key in ("eval_path",) if key in keys}
        job = {"name": "a", "data": {"path": path} | data, "train": {"trainer": "kto", "global_batch_size": 4} | keys}
        return prepare(Run.model_validate(tree | {"jobs": [job]})).warnings

    for words, asked in (("training", {"path": one}), ("held-out", {"path": many, "eval_path": one})):
        with pytest.raises(InputError, match=f"'a': its {words} data is 1 sample; loss_type kto compares"):
            notes(**asked)
    assert not any("kto" in note for note in notes(one, loss_type="apo_zero_unpaired"))
    assert any("last global batch is one sample, which loss_type kto" in note for note in notes(many))
    for keys in ({"drop_last": True}, {"global_batch_size": 3}, {"loss_type": "apo_zero_unpaired"}):
        assert not any("kto" in note for note in notes(many, **keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"beta": 0.1}, "beta is for trainer dpo and kto and orpo and grpo; this job's trainer is sft"),
        (
            {"trainer": "kto", "global_batch_size": 1},
            "global_batch_size is 1; loss_type kto compares with the completions",
        ),
        ({"trainer": "kto", "loss_type": ["kto", "apo_zero_unpaired"]}, "2 losses; kto takes one"),
        ({"trainer": "kto", "loss_type": "sigmoid"}, "'sigmoid'; kto takes kto, apo_zero_unpaired"),
        ({"trainer": "dpo", "loss_type": ["sigmoid", "aot"]}, "sorts the whole global batch"),
        ({"reference": "base"}, "reference is for trainer dpo and kto; this job's trainer is sft"),
        ({"trainer": "dpo", "loss_type": "sigmoid", "label_smoothing": 0.1}, "goes with loss_type robust or exo_pair"),
        ({"trainer": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [1.0]}, "1 numbers for 2 losses"),
        ({"trainer": "dpo", "loss_type": "exo_pair"}, "needs label_smoothing above 0"),
        (
            {"trainer": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [1.0, -1.0]},
            "has -1.0; a weight is a number",
        ),
        ({"trainer": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 1e300]}, "weight is a number from 0 to"),
        ({"trainer": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [0.0, 0.0]}, "nothing would be learnt"),
        ({"trainer": "orpo", "beta": 1e-320}, "beta"),
        ({"trainer": "dpo", "loss_type": "discopop", "discopop_tau": 1e-320}, "discopop_tau"),
        ({"trainer": "kto", "desirable_weight": 1e-320}, "desirable_weight"),
        ({"trainer": "kto", "undesirable_weight": 1e-320}, "undesirable_weight"),
        ({"metric_for_best_model": "eval_rewards/margins"}, "is of pairs"),
        (
            {"trainer": "dpo", "metric_for_best_model": "eval_rewards/margins"},
            "goes with load_best_model_at_end or early_stopping_patience",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(**keys)


def test_too_long_a_part_is_cut_dropped_or_refused_and_a_pair_must_fit_a_microbatch(
    tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    row = {"prompt": "the fox", "chosen": "the dog " * 9, "rejected": "the"}
    short = {"prompt": "the fox", "chosen": "dog", "rejected": "the"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(short) + "\n")

    def prepared(budget: int | str = 4096, **data: Any) -> Any:
        job = {"name": "a", "data": {"path": str(tmp_path / "rows.jsonl")} | data, "train": {"trainer": "dpo"}}
        tree = {"base_model": tiny_base("shallow"), "output_dir": "-", "device": "cpu", "jobs": [job]}
        return prepare(Run.model_validate(tree | {"max_tokens_per_microbatch": budget})).jobs[0].encoded

    first, second = prepared().samples
    parts, least = first.lengths, max(second.lengths)
    with pytest.raises(
        InputError, match=f"line 1: a prompt with its completion has {parts[0]} tokens, over max_length"
    ):
        prepared(max_length=parts[0] - 1)
    assert len(prepared(max_length=parts[0] - 1, truncate="drop").samples) == 1
    cut = prepared(max_length=least + 2, truncate="right")
    assert cut.truncated == 1 and cut.samples[0].lengths == (least + 2, parts[1])
    with pytest.raises(InputError, match=f"the sample has {sum(parts)} tokens, over max_tokens_per_microbatch"):
        prepared(budget=sum(parts) - 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        InputError, match=f"left no sample of 1 .* and max_tokens_per_microbatch {sum(parts) - 1}, into"
    ):
        prepared(budget=sum(parts) - 1, truncate="right")
    with pytest.raises(InputError, match=r"left no sample of 1 within max_length 3$"):
        prepared(budget="auto", max_length=3, truncate="drop")
