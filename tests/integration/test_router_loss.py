"""The load-balancing loss of routers: what transformers and PEFT give for a sample by itself, whoever shares its microbatch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from expert_models import in_float64, tiny_experts
from packed import PackedSample, parts
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_experts import EXPERTS, config, relative, with_adapters

import packlora
from packlora.adapters.files import keyed
from packlora.base.model import Base
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.engine.objectives import balance
from packlora.engine.passes import SingleDevice, run_microbatch
from packlora.runtime.prepare import prepare

LENGTHS = ((5, 9), (7, 3))
"""Of each job's samples."""
SHARES = (3.0, 11.0)
WEIGHTS = np.array([0.5, 0.125])


def samples() -> list[PackedSample]:
    draw = np.random.default_rng(3)
    return [
        PackedSample(owner, Sample(draw.integers(3, 300, n), np.arange(n) > 1), number, 0, None, balance=SHARES[owner])
        for owner, lengths in enumerate(LENGTHS)
        for number, n in enumerate(lengths)
    ]


def by_transformers(model: Any, packed: Sequence[PackedSample], owner: int) -> tuple[float, float]:
    """Gradients of a job's samples, a forward each. Returns the sums of its losses and of those of its routers."""
    losses = aux = 0.0
    model.get_base_model().router_aux_loss_coef = SHARES[owner]
    for item in (item for item in packed if item.owner == owner):
        ids = torch.from_numpy(item.sample.ids).long()[None]
        labels = torch.where(torch.from_numpy(item.sample.is_label), ids, -100)
        out = model(input_ids=ids, labels=labels, num_items_in_batch=1, output_router_logits=True)
        (out.loss * WEIGHTS[owner]).backward()
        losses, aux = losses + out.loss.item(), aux + out.aux_loss.item()
    return losses, aux


def errors(family: str, checkpointing: bool = False) -> dict[str, float]:
    """Of two jobs in one microbatch, beside transformers with PEFT."""
    router = "router.weight" if family in ("granitemoe", "phimoe") else "gate.weight"
    both = {
        "first": config(target_modules=["q_proj", "o_proj"], target_parameters=[*EXPERTS, router]),
        "another": config(target_modules=["v_proj"], target_parameters=EXPERTS[1:], r=2, use_rslora=True),
    }
    found: dict[str, float] = {}
    with in_float64():
        model, attached, adapters, specs = with_adapters(family, both, checkpointing)
        fused = family != "granitemoe"  # whose logits are scaled
        device = SingleDevice(Base(model, None, torch.device("cpu"), "", [], fused), attached)
        result = run_microbatch(device, parts(samples(), WEIGHTS))
        for adapter in adapters:
            owner = adapter.number
            peft = get_peft_model(tiny_experts(family), specs[adapter.name].peft).eval()
            theirs = {name.replace(".default", ""): p for name, p in peft.named_parameters() if p.requires_grad}
            mine = keyed(adapter, adapter.named_parameters())
            with torch.no_grad():
                for name, parameter in theirs.items():
                    parameter.copy_(mine[name])
            losses, aux = by_transformers(peft, samples(), owner)
            found[f"{owner} loss"] = abs(float(result.sums[owner][0]) - losses) / losses
            found[f"{owner} aux"] = abs(float(result.sums[owner][1]) - aux) / aux
            found |= {f"{owner} {name}": relative(mine[name].grad, p.grad) for name, p in theirs.items()}
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe"])
def test_every_family_gives_the_losses_and_gradients_of_transformers(family: str) -> None:
    assert max(errors(family, checkpointing=family in ("qwen3_moe", "granitemoe")).values()) < 1e-10


def over_all(routed: Any, spans: Any, top_k: int) -> tuple[torch.Tensor, ...]:
    whole = by_span(routed, [(min(a for a, _ in spans), max(b for _, b in spans))], top_k)
    return tuple(own.expand(len(spans), -1) for own in whole)


by_span = balance.router_sums


def test_a_loss_over_the_whole_microbatch_is_another_one() -> None:
    with mock.patch.object(balance, "router_sums", over_all):
        found = errors("mixtral")
    assert found["0 aux"] > 1e-3 and found["0 loss"] > 1e-4 and found["1 loss"] > 1e-4
    assert max(value for name, value in found.items() if "lora" in name) > 1e-2


# --- by a run file -----------------------------------------------------------------------------------------------------

TRAIN = {"max_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.7, "adam_epsilon": 1e-5}
OF_TWO: dict[str, tuple[LoraConfig, dict[str, Any]]] = {
    "whole": (config(target_modules="all-linear", r=2), TRAIN | {"global_batch_size": 4, "router_aux_loss_coef": 0.5}),
    "some": (
        config(target_modules=["v_proj", "o_proj"], target_parameters=EXPERTS[1:]),
        TRAIN | {"global_batch_size": 3, "router_aux_loss_coef": 2.0},
    ),
}
DROPPED: dict[str, Any] = {
    "name": "dropped", "train": TRAIN | {"global_batch_size": 2, "router_aux_loss_coef": 1.0},
    "adapter": {
        "r": 3, "use_dora": True, "lora_dropout": 0.2, "target_modules": ["q_proj"],
        "target_parameters": [*EXPERTS, "gate.weight"],
    },
}  # fmt: skip


def saved(family: str, folder: Path, tokenizer: Any, **changes: Any) -> str:
    tiny_experts(family, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def started(family: str, name: str, folder: Path) -> Any:
    """PEFT's model of a job with an adapter that is far from its first values, which is written."""
    torch.manual_seed(len(name))
    model = get_peft_model(tiny_experts(family), OF_TWO[name][0])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def tree(base: str, out: Path, jobs: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "base_model": base, "output_dir": str(out), "max_tokens_per_microbatch": 96, "device": "cpu", "dtype": "float64",
        "jobs": jobs, **changes,
    }  # fmt: skip


def steps(out: Path, job: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["job"] == job]


def train_by_transformers(model: Any, data: Any, train: dict[str, Any]) -> list[dict[str, float]]:
    """Steps of transformers' own loss with PEFT and torch's AdamW, one sample a forward, whose load-balancing losses are
    averaged over the forwards of a step, as TRL does."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=train["learning_rate"], weight_decay=0.0, eps=train["adam_epsilon"])
    lines = []
    for step in range(3):
        batch = [data.samples[number] for number in data.global_batch(step)]
        model.get_base_model().router_aux_loss_coef = train["router_aux_loss_coef"] / len(batch)
        line = {"loss": 0.0, "aux_loss": 0.0}
        for sample in batch:
            ids = torch.from_numpy(sample.ids).long()[None]
            labels = torch.where(torch.from_numpy(sample.is_label), ids, -100)
            number = sum(s.num_labels for s in batch)
            out = model(input_ids=ids, labels=labels, num_items_in_batch=number, output_router_logits=True)
            out.loss.backward()
            line["loss"] += out.loss.item()
            line["aux_loss"] += out.aux_loss.item() / len(batch)
        line["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(trainable, train["max_grad_norm"]))
        optimizer.step()
        optimizer.zero_grad()
        lines.append(line)
    return lines


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.soak)])
def test_a_run_trains_as_transformers_peft_and_adamw_do_beside_others_alone_and_resumed(
    family: str, tokenizer: Any, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    """In float64: two jobs with coefficients of their own, a third one with dropout and DoRA, in one microbatch."""
    base, wanted, jobs = saved(family, tmp_path / "base", tokenizer), {}, [dict(DROPPED)]
    with in_float64():
        models = {name: started(family, name, tmp_path / f"start-{name}") for name in OF_TWO}
        for at, (name, (_, train)) in enumerate(OF_TWO.items()):
            start = {"init_from": str(tmp_path / f"start-{name}")}
            jobs.append({"name": name, "train": train, "adapter": start, "data": {"path": write_rows(name, seed=at)}})
        jobs[0]["data"] = {"path": write_rows("dropped", seed=9), "eval_path": write_rows("held out", 3, seed=8)}
        asked = tree(base, tmp_path / "out", jobs, gradient_checkpointing=family == "mixtral", save_every=1)
        for prepared in prepare(Run.model_validate(asked)).jobs[1:]:
            name = prepared.config.name
            wanted[name] = train_by_transformers(models[name], prepared.data, OF_TWO[name][1])
            models[name].save_pretrained(tmp_path / f"peft-{name}")
        assert packlora.train(asked).status == "done"
        if family == "qwen3_moe":
            parts = {**asked, "output_dir": str(tmp_path / "parts")}
            packlora.train(parts, max_steps=2)
            packlora.train(parts, resume=True)
            packlora.train(tree(base, tmp_path / "alone", jobs[:1]))
    mixed = [json.loads(line) for line in (tmp_path / "out" / "microbatches.jsonl").read_text().splitlines()]
    assert any(len(line["tokens"]) == 3 for line in mixed)
    for name, lines in wanted.items():
        for found, want in zip(steps(tmp_path / "out", name), lines, strict=True):
            for key, value in want.items():
                assert abs(found[key] - value) < 1e-10 * max(1, value), (name, key)
        ours, theirs = (
            load_file(tmp_path / of / "adapter_model.safetensors") for of in (f"out/{name}", f"peft-{name}")
        )
        assert ours.keys() == theirs.keys()
        assert max(relative(ours[key], theirs[key]) for key in theirs) < 1e-7, name  # written in float32
    if family != "qwen3_moe":
        return
    together, alone = steps(tmp_path / "out", "dropped"), steps(tmp_path / "alone", "dropped")
    for found, want in zip(together, alone, strict=True):
        for key in ("loss", "aux_loss", "grad_norm"):
            assert abs(found[key] - want[key]) < 1e-10 * max(1, want[key]), key
    for name in ("dropped", *OF_TWO):
        files = [load_file(tmp_path / of / name / "adapter_model.safetensors") for of in ("out", "parts")]
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
        assert [line["aux_loss"] for line in steps(tmp_path / "parts", name)] == [
            line["aux_loss"] for line in steps(tmp_path / "out", name)
        ]
