"""What else a run and its adapters go through, on a base in codes: sweeps, jobs that join, answers, held-out losses. The oracle
is the same on the dense weights that the codes stand for, in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from stored_codes import save_dense, save_stored
from test_members import InThreads, at_window, base, job, losses, tree_of
from test_training import adapter, distance
from transformers import AutoModelForCausalLM

import packlora
from packlora.answers.talk import Sampling, load_speakers
from packlora.codes.weight import QuantizedLinear
from packlora.commands.control import add_jobs
from packlora.commands.held_out import evaluate_adapter
from packlora.schedule.planner import Planner

assert callable(base)  # a fixture


@pytest.fixture
def both(base: str, tmp_path: Path) -> tuple[str, str]:
    """A base in FP8 codes, and the same in float32."""
    dense = save_stored("fp8", base, tmp_path / "codes")
    save_dense(base, tmp_path / "dense", dense)
    return str(tmp_path / "codes"), str(tmp_path / "dense")


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.runtime.windows.Planner", partial(Planner, window_rounds=2))


def test_a_job_that_joins_has_the_numbers_of_one_on_dense_weights(both: tuple[str, str], tmp_path: Path) -> None:
    """On layers that had no adapter, DoRA with biases and dropout."""
    codes, dense = both
    tree, more = tree_of(codes, tmp_path, "ab"), tmp_path / "more.yaml"
    c = job("c", tmp_path, global_batch_size=3)
    more.write_text(json.dumps({"jobs": [c]}))
    calls = InThreads(tmp_path / "out")
    packlora.train(tree, subscribers=[at_window(2, lambda: calls.call("c", add_jobs, more))])
    calls.join()
    assert "c" in calls.answers and (tmp_path / "out" / "c").is_dir(), calls.answers
    alone = tmp_path / "alone"
    packlora.train({**tree, "base_model": dense, "jobs": [*tree["jobs"], c], "output_dir": str(alone)})
    for name in "abc":
        assert distance(adapter(tmp_path / "out", name), adapter(alone, name)) < 1e-10, name


@pytest.mark.soak
def test_a_sweep_ranks_as_on_dense_weights(both: tuple[str, str], tmp_path: Path) -> None:
    template = job("a", tmp_path, rows=8)
    found = []
    for path in both:
        out = tmp_path / f"out of {Path(path).name}"
        packlora.train(
            {
                "base_model": path, "device": "cpu", "dtype": "float64", "max_tokens_per_microbatch": 60, "eval_every": 2,
                "output_dir": str(out), "jobs": [template],
                "sweep": {
                    "job": "a", "parameters": {"train.learning_rate": [1e-4, 3e-2], "adapter.use_dora": [False, True]},
                    "concurrent": 2,
                    "stopping": {"method": "successive_halving", "min_resource": 2, "reduction_factor": 2},
                },
            }
        )  # fmt: skip
        ranked = json.loads((out / "sweep.json").read_text())
        found.append([(one["name"], one["status"], one["step"], one["eval_loss"]) for one in ranked["candidates"]])
    assert [own[:3] for own in found[0]] == [own[:3] for own in found[1]]
    assert [own[3] for own in found[0]] == pytest.approx([own[3] for own in found[1]], abs=1e-10)
    folders = [tmp_path / f"out of {Path(path).name}" / "best" for path in both]
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert distance(one, other) < 1e-6


def test_answers_and_held_out_losses_are_those_on_the_codes(both: tuple[str, str], tmp_path: Path, capsys: Any) -> None:
    codes, dense = both
    packlora.train(tree_of(codes, tmp_path, "bd", dtype="float32"))
    names = [tmp_path / "out" / name for name in "bd"]
    speakers = load_speakers(names, None, "auto", "cpu")
    assert sum(isinstance(module, QuantizedLinear) for module in speakers.model.modules()) == 7
    ids = speakers.tokenizer("the quick", return_tensors="pt")["input_ids"]
    for folder in names:
        answer = speakers.answer(folder.name, "the quick", Sampling(max_new_tokens=8))
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), folder
        ).eval()
        theirs = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            eos_token_id=speakers.ends or None, pad_token_id=0,
        )  # fmt: skip
        assert answer == speakers.tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)
    assert "own weights" not in capsys.readouterr().err
    held = evaluate_adapter(names[0], str(tmp_path / "b.jsonl"))
    last = [json.loads(line) for line in (tmp_path / "out" / "evals.jsonl").read_text().splitlines()]
    want = [line["eval_loss"] for line in last if line["job"] == "b"][-1]
    assert held.loss == pytest.approx(want, abs=1e-5) and len(losses(tmp_path / "out", "b")) == 6


def test_an_adapter_of_codes_that_were_made_of_floats_answers_on_them(base: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("bitsandbytes")
    packlora.train(tree_of(base, tmp_path, "d", dtype="float32", quantization={"method": "nf4", "double_quant": True}))
    speakers = load_speakers([tmp_path / "out" / "d"], None, "auto", "cpu")
    kinds = [m.frozen.codes.settings for m in speakers.model.modules() if isinstance(m, QuantizedLinear)]
    assert kinds and all(own == {"method": "nf4", "double_quant": True} for own in kinds)
    assert "own weights" not in capsys.readouterr().err
