"""SmolLM2-135M-Instruct with its real tokenizer and real data: labels, training, PEFT, the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from seeds import some
from transformers import AutoModelForCausalLM, AutoTokenizer

import packlora
from packlora.base.demo_model import demo_model_folder
from packlora.commands.plan import figures
from packlora.config import DataConfig, Run
from packlora.data.prompts import answer_ends, prompt_ids
from packlora.data.readers import read_rows
from packlora.data.rows import check_row
from packlora.data.samples import encode_rows
from packlora.errors import InputError
from packlora.run_file import load_run
from packlora.runtime.prepare import prepare
from packlora.runtime.profiler import profile

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = ("debian_synopsis", "py_docstrings", "manpages")


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model_folder()


@pytest.mark.parametrize("name", SETS)
def test_labels_of_the_demo_data_are_exactly_the_completion_and_its_end_token(name: str, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for part in ("train", "eval"):
        rows = read_rows(str(EXAMPLES / "data" / name / f"{part}.jsonl"), name)
        rows = some(rows, one_in=5)
        encoded = encode_rows(rows, tokenizer, DataConfig(path="x", max_length=1000), 1000, name)
        assert len(encoded.samples) == len(rows)
        for row, sample in zip(rows, encoded.samples, strict=True):
            assert tokenizer.decode(sample.ids[sample.is_label]) == f"{row.completion}<|im_end|>"
            assert str(row.prompt) in tokenizer.decode(sample.ids[~sample.is_label])


def test_rows_of_every_kind_are_what_the_real_tokenizer_writes_once(folder: Path) -> None:
    """Rendered before, flagged, compared, with what the template does not show; answers end where turns do."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def samples(row: dict[str, Any], trainer: str = "sft") -> list[Any]:
        rows = [check_row(row, "row 1", "j")]
        given = (rows, tokenizer, DataConfig(path="-"), 9999, "j", 9999)
        return encode_rows(*given, trainer=trainer).samples

    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "one", "loss": False}]
    turns += [{"role": "user", "content": "v"}, {"role": "assistant", "content": "two"}]
    (chat,) = samples({"messages": turns})
    assert tokenizer.decode(chat.ids[chat.is_label]) == "two<|im_end|>"
    text = tokenizer.decode(chat.ids) + "\n"
    (again,) = samples({"text": text})
    assert again.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"], (
        "no token is put before or behind"
    )
    (pair,) = samples({"prompt": "u", "chosen": "one", "rejected": "two"}, "dpo")
    assert [tokenizer.decode(part.ids[part.is_label]) for part in pair.parts()] == ["one<|im_end|>", "two<|im_end|>"]
    assert pair.parts()[0].ids[: -int(pair.parts()[0].num_labels)].tolist() == prompt_ids(turns[:1], tokenizer)
    with pytest.raises(
        InputError, match=r"the prompt begins with '<\|im_start\|>', as a text that was rendered before"
    ):
        samples({"prompt": text, "completion": "a"})
    call = {"function": {"name": "dog", "arguments": "{}"}}
    with pytest.raises(InputError, match=r"message 2 \(assistant\): the chat template does not show its tool_calls"):
        samples({"messages": [turns[0], {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert answer_ends(tokenizer, None) == [int(chat.ids[-1])]


def test_demo_run_file_is_valid_and_its_jobs_share_microbatches(folder: Path) -> None:
    run = load_run(EXAMPLES / "demo.yaml")
    prepared = prepare(run)
    assert {job.name for job in run.jobs} == {
        "synopsis-lora", "docstrings-dropout", "manpages-rslora", "synopsis-dora"
    }  # fmt: skip
    assert prepared.shape.parameters == 134_515_008
    (together, _), (alone, _) = (figures(prepared, profile(run, prepared), method) for method in ("auto", "solo"))
    assert together.bound <= together.microbatches < alone.microbatches
    assert together.tokens == alone.tokens


def test_two_steps_on_the_real_model_lower_the_loss_and_peft_gives_the_held_out_loss_that_packlora_reports(
    folder: Path, tmp_path: Path
) -> None:
    """PEFT on the unpacked held-out samples, after training, against the last held-out loss of the run. The loss is made of its
    logits in float64: torch adds up 49152 exponentials in float32 as wide as the processor's registers are.
    """
    short = [json.loads(line) for line in (EXAMPLES / "data/debian_synopsis/train.jsonl").read_text().splitlines()]
    short.sort(key=lambda row: len(row["prompt"]))
    paths = [tmp_path / "train.jsonl", tmp_path / "eval.jsonl"]
    for path, rows in zip(paths, (short[:2], short[2:3]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(paths[0]), "eval_path": str(paths[1])}
    jobs: list[dict[str, Any]] = [
        {"name": "lora", "data": data, "adapter": {"r": 8, "lora_alpha": 16}, "train": {"learning_rate": 1e-3}},
        {
            "name": "dora", "data": data, "adapter": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
            "train": {"learning_rate": 1e-3},
        },
    ]  # fmt: skip
    for job in jobs:
        job["train"] |= {"global_batch_size": 1, "max_steps": 2}
    result = packlora.train(
        Run.model_validate(
            {"base_model": "smollm2-135m", "output_dir": str(tmp_path / "out"), "device": "cpu", "jobs": jobs}
        )
    )
    assert result.status == "done"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = encode_rows(read_rows(str(paths[1]), "x"), tokenizer, DataConfig(path="x"), 4096, "x").samples
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, job in result.jobs.items():
        assert job.eval_before is not None
        assert job.eval_after is not None
        assert job.eval_after < job.eval_before - 0.01
        model = PeftModel.from_pretrained(base, tmp_path / "out" / name)
        total, count = 0.0, 0
        for sample in samples:
            ids = torch.from_numpy(sample.ids).long()
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")
            total += float(losses[torch.from_numpy(sample.is_label[1:])].sum())
            count += sample.num_labels
        assert abs(total / count - job.eval_after) < 1e-5
        base = model.unload()
