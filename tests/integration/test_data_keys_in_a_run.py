"""Keys of a job's data in a whole run: held-out samples, columns and a chat template from training to answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import packlora
from packlora.answers.talk import Sampling, load_speakers
from packlora.cli import app
from packlora.commands.held_out import evaluate_adapter
from packlora.run_file import run_from
from packlora.runtime.prepare import prepare

COLUMNS = {"prompt": "question", "completion": "answer"}


@pytest.fixture(scope="module")
def bare(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model without a chat template."""
    folder = tmp_path_factory.mktemp("bare") / "base"
    shutil.copytree(tiny_base("shallow"), folder)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


def rows_under_other_names(folder: Path) -> list[dict[str, str]]:
    rows = [
        {"question": f"the fox {'lazy ' * n}", "answer": f"dog {'over ' * (n % 4)}", "text": "no"} for n in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def tree(base: str, folder: Path, out: str, **data: Any) -> dict[str, Any]:
    own = {"path": str(folder / "rows.jsonl"), "columns": COLUMNS, "chat_template": "zephyr"} | data
    train = {"max_steps": 4, "learning_rate": 0.02, "global_batch_size": 3}
    return {
        "base_model": base, "output_dir": str(folder / out), "max_tokens_per_microbatch": 96, "device": "cpu", "save_every": 2,
        "eval_every": 2, "dtype": "float64", "sample_prompts": ["the fox"], "sample_max_new_tokens": 3, "seed": 5,
        "jobs": [{"name": "one", "data": own, "adapter": {"r": 4, "lora_dropout": 0.1}, "train": train}],
    }  # fmt: skip


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    kept = ("job", "step", "loss", "eval_loss", "samples")
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: line[key] for key in kept if key in line} for line in found]


@pytest.mark.slow
def test_a_share_is_held_out_as_a_file_of_it_would_be_and_after_a_resume_too(bare: str, tmp_path: Path) -> None:
    rows = rows_under_other_names(tmp_path)
    split = tree(bare, tmp_path, "split", eval_split=0.25)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    drawn = [tokenizer.decode(sample.ids) for sample in prepare(run_from(split)).jobs[0].eval_encoded.samples]
    is_out = [any(f"{row['question']}</s>" in text for text in drawn) for row in rows]
    assert len(drawn) == sum(is_out) == 3
    packlora.train(split, max_steps=2)
    packlora.train(split, resume=True)
    for name, wanted in (("kept", False), ("out", True)):
        some = [json.dumps(row) for row, out in zip(rows, is_out, strict=True) if out is wanted]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    paths = {"path": str(tmp_path / "kept.jsonl"), "eval_path": str(tmp_path / "out.jsonl")}
    packlora.train(tree(bare, tmp_path, "files", **paths))
    weights = [load_file(tmp_path / name / "one" / "adapter_model.safetensors") for name in ("split", "files")]
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    for name in ("evals.jsonl", "metrics.jsonl", "samples.jsonl"):
        unlike = [line for line in lines(tmp_path / "split", name) if line not in lines(tmp_path / "files", name)]
        assert not unlike and len(lines(tmp_path / "files", name)) >= 2
    record = json.loads((tmp_path / "split" / "run.json").read_text())
    assert record["jobs"]["one"]["eval_samples"] == 3
    assert any("eval_split holds out 3 of 12 samples" in note for note in record["warnings"])
    with pytest.raises(packlora.InputError, match=r"data\.eval_split"):
        packlora.train(split, resume=True, overrides=["jobs.0.data.eval_split=0.5"])


def test_a_chat_template_of_a_job_is_that_of_its_answers_its_evaluations_and_its_merged_model(
    bare: str, tmp_path: Path
) -> None:
    rows_under_other_names(tmp_path)
    run = tree(bare, tmp_path, "out", eval_path=str(tmp_path / "rows.jsonl"))
    packlora.train(run)
    one = tmp_path / "out" / "one"
    folders = [one, *sorted(one.glob("checkpoint-*"))]
    assert len(folders) == 3 and all("<|assistant|>" in (each / "chat_template.jinja").read_text() for each in folders)

    tokenizer = AutoTokenizer.from_pretrained(bare)
    ids = torch.tensor([tokenizer("<|user|>\nthe fox</s>\n<|assistant|>\n", add_special_tokens=False)["input_ids"]])
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float64), one)
    out = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    wanted = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    speakers = load_speakers([one], None, "auto", "cpu")
    said = [{"role": "user", "content": "the fox"}]
    assert speakers.answer("one", said, Sampling(8)) == wanted
    asked = CliRunner().invoke(app, ["generate", str(one), "--prompt", "the fox", "--max-new-tokens", "8"])
    assert asked.exit_code == 0 and asked.stdout.rstrip("\n") == wanted.rstrip("\n"), asked.output
    assert speakers.tokenizer_of("base").chat_template is None

    last = lines(tmp_path / "out", "evals.jsonl")[-1]
    found = evaluate_adapter(one, str(tmp_path / "rows.jsonl"))
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-6)
    done = CliRunner().invoke(app, ["merge", str(one), str(tmp_path / "merged"), "--check", "never"])
    assert done.exit_code == 0, done.output
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == tokenizer.decode(ids[0])


def test_a_stream_has_the_samples_that_its_keys_give_without_streaming(bare: str, tmp_path: Path) -> None:
    rows_under_other_names(tmp_path)
    own: dict[str, Any] = {"max_samples": 7, "truncate": "drop", "on_bad_row": "skip"}
    whole = tree(bare, tmp_path, "whole", **own)
    stream = tree(bare, tmp_path, "stream", streaming=True, **own)
    for run in (whole, stream):
        run["jobs"][0]["train"] |= {"shuffle": False, "max_steps": 5}
    wanted = prepare(run_from(whole)).jobs[0].encoded.samples
    data = prepare(run_from(stream)).jobs[0].data
    assert len(wanted) == 7
    for number in range(21):  # three passes
        assert data.samples[number].ids.tolist() == wanted[number % 7].ids.tolist()
