"""sample_prompts: what adapters write while they train, which changes nothing of what they learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import packlora
from packlora.errors import InputError
from packlora.events import Event, Sampled, Stop

PROMPTS = ["the quick brown", "dog", "some more of the same thing again and again"]
Tree = Callable[..., dict[str, Any]]


@pytest.fixture
def tree(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> Tree:
    return trees(tiny_base("llama"), write_rows, tmp_path)


def trees(base: str, write_rows: Callable[..., str], folder: Path) -> Tree:
    """Two jobs, one without held-out samples; learning rates at which they soon write other things than the base."""
    held = write_rows("held", 5, 9)

    def make(out: str, **changes: Any) -> dict[str, Any]:
        def job(name: str, seed: int, steps: int, **adapter: Any) -> dict[str, Any]:
            train = {"max_steps": steps, "learning_rate": 0.05, "global_batch_size": 3}
            return {"name": name, "data": {"path": write_rows(name, 8, seed)}, "adapter": adapter, "train": train}

        jobs = [
            job("lora", 1, 3, r=3, lora_dropout=0.2),
            job("dora", 2, 2, r=5, use_dora=True, lora_dropout=0.1),
        ]
        jobs[0]["data"]["eval_path"] = held
        jobs[1]["sample_prompts"] = PROMPTS[:1]
        return {
            "base_model": base, "output_dir": str(folder / out), "save_every": 2, "dtype": "float64",
            "max_tokens_per_microbatch": 64, "eval_every": 2, "sample_max_new_tokens": 7, "device": "cpu",
            "save_total_limit": None, "sample_prompts": PROMPTS, "jobs": jobs,
        } | changes  # fmt: skip

    return make


@pytest.fixture(scope="module")
def whole(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """The folder of such a run, and what it told."""
    folder, told = tmp_path_factory.mktemp("whole"), list[Event]()
    packlora.train(trees(tiny_base("llama"), rows_into(folder), folder)("out"), subscribers=[told.append])
    return folder / "out", told


def lines(out: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def texts(out: Path) -> dict[tuple[str, int], list[str]]:
    found = [((line["job"], line["step"]), [one["text"] for one in line["samples"]]) for line in lines(out)]
    assert len(dict(found)) == len(found)  # each of them once
    return dict(found)


def adapters(out: Path) -> dict[str, torch.Tensor]:
    files = sorted(path for path in out.rglob("*.safetensors"))
    return {f"{path.relative_to(out)} {key}": value for path in files for key, value in load_file(path).items()}


def written_by_peft(base: str, folder: Path | None, prompts: list[str]) -> list[str]:
    """transformers' own generate, with its cache, over PEFT's own layers."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if folder is not None:
        model = PeftModel.from_pretrained(model, str(folder)).to(torch.float64)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    found = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.no_grad():
            out = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False, eos_token_id=ends,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        found.append(str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return found


def test_texts_are_those_of_peft_at_every_evaluation(
    tiny_base: Callable[[str], str], whole: tuple[Path, list[Event]]
) -> None:
    out, told = whole
    found = texts(out)
    assert found.keys() == {("lora", 0), ("dora", 0), ("lora", 2), ("dora", 2), ("lora", 3)}
    assert [(event.job, event.step) for event in told if isinstance(event, Sampled)] == list(found)
    for (name, step), written in found.items():
        folder = None if step == 0 else out / name if step == 3 else out / name / f"checkpoint-{step}"
        prompts = PROMPTS if name == "lora" else PROMPTS[:1]
        assert written == written_by_peft(tiny_base("llama"), folder, prompts), (name, step)
    assert found["lora", 3] != found["lora", 0]


def test_training_has_the_bits_that_it_has_without(tree: Tree, tmp_path: Path, whole: tuple[Path, list[Event]]) -> None:
    out, plain = whole[0], tmp_path / "out"
    without = tree("out", sample_prompts=[])
    del without["jobs"][1]["sample_prompts"]
    packlora.train(without)
    bits, expected = adapters(out), adapters(plain)
    assert bits.keys() == expected.keys() and all(torch.equal(bits[key], expected[key]) for key in bits)
    timeless = [
        [{key: line[key] for key in ("job", "step", "loss", "grad_norm")} for line in lines(folder, "metrics.jsonl")]
        for folder in (out, plain)
    ]
    assert timeless[0] == timeless[1] and lines(out, "evals.jsonl") == lines(plain, "evals.jsonl")
    assert not (plain / "samples.jsonl").read_text()


def test_an_interrupted_run_has_each_text_once_and_none_of_steps_that_are_taken_again(
    tree: Tree, tmp_path: Path, whole: tuple[Path, list[Event]]
) -> None:
    def stop(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Sampled) and event.step == 2 else None

    out = tmp_path / "out"
    packlora.train(tree("out"), subscribers=[stop])
    first = texts(out)
    assert len([step for _, step in first if step == 2]) == 1 and len(first) < len(texts(whole[0]))
    with (out / "samples.jsonl").open("a") as file:
        file.write('{"job": "lora", "step": 3, "samples": []}\n{"job": "lora", "step": NaN, "samples": 3}\n{"job": "lo')
    packlora.train(tree("out"), resume=True)
    assert texts(out) == texts(whole[0])


def test_a_prompt_without_room_for_its_answer_is_refused_by_number(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"job 'lora': sample_prompts\.0: the prompt has \d+ tokens and its answer up to"
    ):
        packlora.train(tree("refused", sample_max_new_tokens=100_000))
    assert not (tmp_path / "refused").exists()
