"""Runs of jobs that train modules of every kind: resumed, merged, continued and answered for as any other job."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import packlora
from packlora.answers.talk import Sampling, load_speakers
from packlora.commands.held_out import evaluate_adapter
from packlora.config import Run
from packlora.errors import InputError
from packlora.export.export import export_adapter
from packlora.export.merge import merge_adapter
from packlora.runtime.prepare import prepare

JOBS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj"], "lora_dropout": 0.1, "init_lora_weights": "gaussian"},
    "head": {"target_modules": ["lm_head", "v_proj"], "lora_dropout": 0.2, "init_lora_weights": "orthogonal"},
    "embedding": {"target_modules": ["embed_tokens"], "use_dora": True, "lora_dropout": 0.0, "init_lora_weights": False},
    "copies": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "norm"], "layers_to_transform": 1},
    "tokens": {"target_modules": "all-linear", "exclude_modules": ["up_proj"], "trainable_token_indices": [7, 250, 31]},
}  # fmt: skip
IDS = torch.tensor([[1, 7, 250, 31, 9, 8, 200, 44]])


def tree(base: str, out: Path, rows: Callable[..., str], names: list[str], **changes: Any) -> dict[str, Any]:
    train = {"global_batch_size": 3, "max_steps": 4, "learning_rate": 5e-3, "weight_decay": 0.1}
    jobs = [
        {"name": name, "data": {"path": rows(name, 12, seed=index)}, "train": train, "adapter": JOBS[name] | {"r": 4}}
        for index, name in enumerate(JOBS)
    ]
    return {
        "base_model": base, "output_dir": str(out), "max_tokens_per_microbatch": 120, "save_every": 2, "device": "cpu",
        "jobs": [job for job in jobs if job["name"] in names],
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def trained(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """The base, which ties its output layer to its embedding, the folder of a run of all jobs, and its run file."""
    folder = tmp_path_factory.mktemp("run")
    base = str(folder / "base")
    tiny_model("qwen3", tie_word_embeddings=True).save_pretrained(base)
    tokenizer.save_pretrained(base)
    asked = tree(base, folder / "run", rows_into(folder), list(JOBS), dtype="float64")
    packlora.train(Run.model_validate(asked), max_steps=2)
    packlora.train(Run.model_validate(asked), resume=True)
    return base, folder / "run", asked


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("job", JOBS)
def test_a_job_alone_and_never_interrupted_gives_what_it_gave_beside_others_and_resumed(
    job: str, trained: Any, tmp_path: Path
) -> None:
    _, run, asked = trained
    alone = asked | {
        "output_dir": str(tmp_path / "alone"),
        "jobs": [one for one in asked["jobs"] if one["name"] == job],
    }
    packlora.train(Run.model_validate(alone))
    mine, other = tensors(run / job), tensors(tmp_path / "alone" / job)
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        assert float((tensor - other[key]).abs().max()) < 1e-10, key
    first = json.loads((run / "run.json").read_text())["jobs"][job]
    assert first["trainable_parameters"] == sum(tensor.numel() for tensor in mine.values())


@pytest.mark.parametrize("job", JOBS)
def test_merged_it_answers_as_peft_does_with_its_folder(job: str, trained: Any, tmp_path: Path) -> None:
    base, run, _ = trained
    merge_adapter(run / job, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(run / job)
    ).eval()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(IDS).logits
    with torch.no_grad():
        wanted = theirs(IDS).logits
        assert float((merged(IDS).logits - wanted).abs().max()) < 2e-5 * float(wanted.abs().max())
        assert float((plain - wanted).abs().max()) > 1e-3  # training has changed it
        spoken = load_speakers([run / job], None, "float32", "cpu")
        with spoken.attached.only(0):
            assert float((spoken.model(IDS).logits - wanted).abs().max()) < 2e-5 * float(wanted.abs().max())
    assert isinstance(spoken.answer(job, "the quick", Sampling(max_new_tokens=3, temperature=0.0)), str)


STARTS: dict[str, dict[str, Any]] = {
    "both ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True},
    "copies and rows": {"target_modules": ["v_proj"], "modules_to_save": ["norm"], "trainable_token_indices": [7, 31, 9]},
    "a copied embedding": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", STARTS)
def test_from_a_folder_of_peft_three_steps_are_those_of_peft_and_adamw(kind: str, trained: Any, tmp_path: Path) -> None:
    """Whatever PEFT writes beside its tensors; with weight decay, which is not for norms, and clipping."""
    base, _, asked = trained
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="sdpa")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # of the parameters that PEFT makes
    try:
        peft = get_peft_model(loaded, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **STARTS[kind]))
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = {name: parameter for name, parameter in peft.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    peft.save_pretrained(tmp_path / "start")
    job = asked["jobs"][0] | {"name": "job", "adapter": {"init_from": str(tmp_path / "start")}}
    job["train"] = job["train"] | {"max_steps": 3, "max_grad_norm": 0.5}
    run = Run.model_validate(asked | {"output_dir": str(tmp_path / "out"), "jobs": [job]})
    data = prepare(run).jobs[0].data
    plain = [name for name in parameters if "norm" in name]
    groups = [
        {"params": [p for name, p in parameters.items() if name not in plain]},
        {"params": [parameters[name] for name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.1)
    for step in range(3):
        batch = [data.samples[number] for number in data.global_batch(step)]
        for sample in batch:
            ids = torch.from_numpy(sample.ids).long()[None]
            labels = torch.where(torch.from_numpy(sample.is_label), ids[0], -100)[1:]
            logits = peft(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (loss / sum(one.num_labels for one in batch)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match="is a copy of a base weight") if kind == "both ends" else nullcontext():
        packlora.train(run)
    theirs = get_peft_model_state_dict(peft, save_embedding_layers=False)
    mine = {key.replace("vector.weight", "vector"): tensor for key, tensor in tensors(tmp_path / "out" / "job").items()}
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert float((mine[key] - tensor).abs().max()) < 1e-10, key


def test_a_run_continues_such_adapters_and_evaluates_them(trained: Any, tmp_path: Path) -> None:
    _, run, asked = trained
    jobs = [one | {"adapter": {"init_from": str(run / one["name"])}} for one in asked["jobs"]]
    again = asked | {"output_dir": str(tmp_path / "again"), "jobs": jobs}
    packlora.train(Run.model_validate(again), max_steps=1)
    for job in JOBS:
        before, after = tensors(run / job), tensors(tmp_path / "again" / job)
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[key], after[key]) for key in before)
        loss = evaluate_adapter(run / job, asked["jobs"][0]["data"]["path"], device="cpu")
        assert 0 < loss.loss < 20


def test_programs_that_do_not_read_such_adapters_are_named(trained: Any, tmp_path: Path) -> None:
    _, run, _ = trained
    for job, path in (("copies", "q_norm"), ("tokens", "embed_tokens")):
        with pytest.raises(InputError, match=f"{path} .*vLLM does not read; `packlora merge"):
            export_adapter(run / job, tmp_path / "out", "vllm")
    with pytest.raises(InputError, match=r"adapts lm_head, which llama\.cpp does not read"):
        export_adapter(run / "head", tmp_path / "out.gguf", "gguf")
    (note,) = export_adapter(run / "head", tmp_path / "head", "vllm")
    assert note.startswith("it adapts lm_head: vLLM takes that for some families")
    assert "base_model.model.lm_head.lora_A.weight" in tensors(tmp_path / "head")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jobs_beside_each_other_on_a_quantised_base_are_what_they_are_alone(trained: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    _, _, asked = trained
    both = asked | {"output_dir": str(tmp_path / "both"), "quantization": "nf4", "jobs": asked["jobs"][1:]}
    packlora.train(Run.model_validate(both), max_steps=2)
    for job in both["jobs"][::2]:
        alone = both | {"output_dir": str(tmp_path / job["name"]), "jobs": [job]}
        packlora.train(Run.model_validate(alone), max_steps=2)
        mine, other = tensors(tmp_path / "both" / job["name"]), tensors(tmp_path / job["name"] / job["name"])
        assert all(float((mine[key] - other[key]).abs().max()) < 1e-10 for key in other)
