"""Soft targets of data files: the plain formula over transformers' logits in float64, alone, beside others and resumed; and
what is refused before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import packlora
from packlora.commands.init import write_run_file
from packlora.config import Run
from packlora.data.targets import TargetSample
from packlora.errors import InputError
from packlora.run_file import load_run, run_from
from packlora.runtime.prepare import prepare

Row = dict[str, Any]
Base = Callable[..., str]


def row(length: int, as_logps: bool = False) -> Row:
    """Tokens with up to five targets each, weights that do not add up to 1, and some of 0; a third of the tokens have none."""
    draw = np.random.default_rng(length)
    tokens: list[Any] = [None]
    numbers: list[Any] = [None]
    for at in range(1, length):
        k = 0 if at % 3 == 0 else int(draw.integers(1, 6))
        tokens.append(draw.choice(np.arange(6, 320), k, replace=False).tolist())
        numbers.append((draw.random(k) * (np.arange(k) != 2)).tolist())
    key = "target_weights"
    if as_logps:
        key, numbers = "target_logprobs", [own and [math.log(w) if w else -math.inf for w in own] for own in numbers]
    return {"input_ids": draw.integers(6, 320, length).tolist(), "target_token_ids": tokens, key: numbers}


ROWS = [row(9), row(14, as_logps=True), row(11), row(23), row(7), row(17)]


def write(folder: Path, rows: list[Row], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(folder / name)


def job(path: str, name: str = "soft", **train: Any) -> Row:
    keys = {"trainer": "distillation", "global_batch_size": 3, "learning_rate": 1e-2, "shuffle": False, **train}
    return {"name": name, "data": {"path": path}, "adapter": {"r": 4, "lora_dropout": 0.0}, "train": keys}


def tree(base: str, out: Path, jobs: list[Row], **changes: Any) -> Row:
    return {
        "base_model": base, "output_dir": str(out), "device": "cpu", "max_tokens_per_microbatch": 40, "save_every": 1,
        "jobs": jobs,
    } | changes  # fmt: skip


def train(given: Row, **kwargs: Any) -> list[Row]:
    """Metrics of a run, in order of jobs and steps."""
    assert packlora.train(Run.model_validate(given), **kwargs).status in ("done", "stopped")
    lines = (Path(given["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda one: (one["job"], one["step"]))


def formula(model: Any, rows: list[Row]) -> torch.Tensor:
    """Mean, over the tokens with a target that weighs something, of the sum of -weight log p, in words of the definition."""
    total, places = torch.zeros((), dtype=torch.float64), 0
    for one in rows:
        logp = model(input_ids=torch.tensor([one["input_ids"]])).logits[0].log_softmax(-1)
        numbers = one.get("target_weights") or [own and [math.exp(n) for n in own] for own in one["target_logprobs"]]
        for at, (tokens, weights) in enumerate(zip(one["target_token_ids"], numbers, strict=True)):
            for token, weight in zip(tokens or [], weights or [], strict=True):
                total = total - weight * logp[at - 1, token]
            places += any(weights or [])
    return total / places


def test_losses_gradients_and_held_out_losses_are_those_of_the_formula(tiny_base: Base, tmp_path: Path) -> None:
    """An adapter that has learnt already, which PEFT reads."""
    base, path = tiny_base("shallow"), write(tmp_path, ROWS)
    train(tree(base, tmp_path / "begun", [job(path)]))
    start = tmp_path / "begun" / "soft"
    own = job(path, max_grad_norm=0.0, max_steps=1, eval_on_start=True) | {"adapter": {"init_from": str(start)}}
    own["data"]["eval_path"] = path
    (found,) = train(tree(base, tmp_path / "out", [own], dtype="float64"))
    evals = [json.loads(line) for line in (tmp_path / "out" / "evals.jsonl").read_text().splitlines()]
    torch.set_default_dtype(torch.float64)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    peft = PeftModel.from_pretrained(model, str(start), is_trainable=True, autocast_adapter_dtype=False)
    torch.set_default_dtype(torch.float32)
    assert evals[0]["step"] == 0
    assert evals[0]["eval_loss"] == pytest.approx(formula(peft, ROWS).item(), rel=1e-10)
    loss = formula(peft, ROWS[:3])
    grads = torch.autograd.grad(loss, [one for one in peft.parameters() if one.requires_grad])
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-10)
    norm = torch.stack([one.norm() for one in grads]).norm().item()
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-10) and norm > 0


def bits(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "soft" / "adapter_model.safetensors")


def test_beside_others_and_resumed_it_learns_what_it_learns_alone(tiny_base: Base, tmp_path: Path) -> None:
    """Beside a job of the same data as labels, whose rows may also stand among those with targets."""
    base = tiny_base("shallow")
    hard = [{"input_ids": one["input_ids"]} for one in ROWS]
    path, plain = write(tmp_path, [*ROWS[:4], hard[0], *ROWS[4:]]), write(tmp_path, hard, "hard.jsonl")
    soft, own = job(path), {"dtype": "float64"}
    alone = train(tree(base, tmp_path / "alone", [soft], **own))
    together = train(tree(base, tmp_path / "together", [soft, job(plain, "hard", trainer="sft")], **own))
    train(tree(base, tmp_path / "resumed", [soft], **own), max_steps=1)
    train(tree(base, tmp_path / "resumed", [soft], **own), resume=True)
    beside = [one for one in together if one["job"] == "soft"]
    for key in ("loss", "grad_norm"):
        assert [one[key] for one in beside] == pytest.approx([one[key] for one in alone], rel=1e-10)
    want, resumed = bits(tmp_path / "alone"), bits(tmp_path / "resumed")
    assert any(one.any() for name, one in want.items() if "lora_B" in name)
    assert all(torch.equal(one, resumed[name]) for name, one in want.items())


def test_a_target_of_weight_1_for_each_label_is_the_loss_of_sft(tiny_base: Base, tmp_path: Path) -> None:
    ids = [one["input_ids"] for one in ROWS]
    soft = [
        {"input_ids": own, "target_token_ids": [None, *([token] for token in own[1:])],
         "target_logprobs": [None, *[[0.0]] * (len(own) - 1)]}
        for own in ids
    ]  # fmt: skip
    paths = write(tmp_path, soft), write(tmp_path, [{"input_ids": own} for own in ids], "hard.jsonl")
    one, other = (
        train(tree(tiny_base("shallow"), tmp_path / "out", [job(paths[0], "a"), job(paths[1], "b", trainer="sft")])),
        None,
    )
    one, other = [own for own in one if own["job"] == "a"], [own for own in one if own["job"] == "b"]
    assert len(one) == len(other) == 2
    for mine, its in zip(one, other, strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-6)


GOOD = {"input_ids": [7, 8, 9], "target_token_ids": [None, [8, 9], [1]], "target_weights": [None, [0.7, 0.2], [1]]}
BAD: list[tuple[Row, str]] = [
    ({"target_weights": [None, [0.7, 0.2]]}, "'target_weights' must have a list, or null, for each of the 3 'input_ids'"),
    ({"target_token_ids": [None, [8, 9]]}, "'target_token_ids' must have a list, or null, for each of the 3"),
    ({"target_token_ids": "8"}, "'target_token_ids' must have a list, or null, for each of the 3 'input_ids'; found a text"),
    ({"target_weights": [None, [0.7], [1]]}, "'target_weights' at number 2 must have 2 numbers, one for each target; found 1"),
    ({"target_weights": [None, [0.7, 0.2], None]}, "'target_weights' at number 3 must have 1 numbers"),
    ({"target_token_ids": [None, [8, 9], []]}, "'target_token_ids' at number 3 must be a list of at least one"),
    ({"target_token_ids": [None, [8, -9], [1]]}, "'target_token_ids' at number 2 has -9 at number 2; only whole"),
    ({"target_token_ids": [None, [8, 8], [1]]}, "'target_token_ids' at number 2 has the token 8 twice"),
    ({"target_token_ids": [None, [8, 9], [320]]}, "'target_token_ids' has 320 at number 3; the model's tokens are 0 to 319"),
    ({"target_token_ids": [None, [8, 9], list(range(5000))]}, "at number 3 has 5000 tokens; at most 4096 are accepted"),
    ({"target_weights": [None, [0.7, -0.2], [1]]}, "'target_weights' at number 2 has -0.2; only finite numbers from 0"),
    ({"target_weights": [None, [0.7, math.nan], [1]]}, "'target_weights' at number 2 has nan; only finite numbers from 0"),
    ({"target_weights": [None, [0.7, math.inf], [1]]}, "at number 2 has inf"),
    ({"target_weights": [None, [0.7, "a"], [1]]}, "at number 2 has 'a'"),
    ({"target_weights": None, "target_logprobs": [None, [-0.7, 0.2], [0]]}, "has 0.2; only log-probabilities, of at most 0"),
    ({"target_weights": None, "target_logprobs": [None, [-0.7, math.nan], [0]]}, "'target_logprobs' at number 2 has nan"),
    ({"target_logprobs": [None, [-1, -2], [0]]}, "found target_token_ids, target_logprobs, target_weights"),
    ({"target_weights": None}, "soft targets are 'target_token_ids' and one of"),
    ({"labels": [7, 8, 9]}, "the row has 'labels' and 'target_token_ids'"),
    ({"completion_mask": [0, 1, 1]}, "the row has 'completion_mask' and 'target_token_ids'"),
    ({"target_token_ids": [[7], [8, 9], [1]], "target_weights": [[1], [0.7, 0.2], [1]]}, "targets for the first token"),
    ({"target_weights": [None, [0, 0], [0]]}, "the sample has no label tokens"),
    ({"input_ids": None, "text": "a"}, "'target_token_ids' goes with 'input_ids'"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), BAD)
def test_what_is_no_soft_target_is_refused_with_its_line_and_field(
    changed: Row, said: str, tiny_base: Base, tmp_path: Path
) -> None:
    path = write(tmp_path, [GOOD, GOOD | changed])
    with pytest.raises(InputError) as caught:
        prepare(run_from(tree(tiny_base("shallow"), tmp_path / "out", [job(path)])))
    assert f"{path}, line 2: " in str(caught.value) and said in str(caught.value)


def test_targets_go_with_their_trainer_and_a_cut_takes_them_along(tiny_base: Base, tmp_path: Path) -> None:
    path, base = write(tmp_path, [GOOD]), tiny_base("shallow")
    with pytest.raises(InputError, match=r"line 1: 'target_token_ids' are soft targets.*train\.trainer: distillation"):
        prepare(run_from(tree(base, tmp_path / "out", [job(path, trainer="sft", global_batch_size=1)])))
    with pytest.raises(InputError, match="label_smoothing_factor is for trainer sft"):
        prepare(run_from(tree(base, tmp_path / "out", [job(path, label_smoothing_factor=0.1)])))
    own = job(path)
    own["data"] |= {"max_length": 2, "truncate": "right"}
    (sample,) = prepare(run_from(tree(base, tmp_path / "out", [own]))).jobs[0].encoded.samples
    assert isinstance(sample, TargetSample)
    assert (sample.ids.tolist(), sample.labels.tolist(), sample.predicting.tolist()) == ([7, 8], [8, 9], [0, 0])
    assert (sample.columns["weights"].tolist(), sample.num_learnt) == ([0.7, 0.2], 1)


def test_a_new_run_file_has_the_trainer_of_soft_targets(tiny_base: Base, tmp_path: Path) -> None:
    said = write_run_file(Path(write(tmp_path, [GOOD])), tmp_path / "run.yaml", tiny_base("shallow"))
    assert said == "1 row: token ids with soft targets"
    (own,) = load_run(tmp_path / "run.yaml").jobs
    assert (own.train.trainer, own.train.learning_rate) == ("distillation", 2e-4)


def test_a_target_that_has_changed_is_other_data(tiny_base: Base, tmp_path: Path) -> None:
    """So that a run is not resumed with it."""
    others = [
        GOOD,
        GOOD | {"target_token_ids": [None, [8, 10], [1]]},
        GOOD | {"target_weights": [None, [0.7, 0.3], [1]]},
    ]
    found = set()
    for one in (GOOD, *others):
        own = job(write(tmp_path, [one]))
        found.add(prepare(run_from(tree(tiny_base("shallow"), tmp_path / "out", [own]))).jobs[0].data.fingerprint([]))
    assert len(found) == 3


def test_a_stream_and_a_table_give_the_samples_of_the_file(tiny_base: Base, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [one for one in ROWS if "target_weights" in one]
    path, base, found = write(tmp_path, rows), tiny_base("shallow"), []
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    stream = job(path, max_steps=1)
    stream["data"] |= {"streaming": True, "truncate": "drop", "on_bad_row": "skip", "shuffle_buffer_size": 1}
    for own in (job(path), stream, job(str(tmp_path / "rows.parquet"))):
        found.append(prepare(run_from(tree(base, tmp_path / "out", [own]))).jobs[0].encoded.samples[: len(rows)])
    for some in found[1:]:
        for one, other in zip(found[0], some, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and one.structure == other.structure
            assert np.array_equal(one.columns["weights"], other.columns["weights"])


def test_a_preview_marks_tokens_with_targets_and_shows_the_heaviest(tiny_base: Base, tmp_path: Path) -> None:
    own = {
        "input_ids": [70, 71, 72, 73],
        "target_token_ids": [[], None, [74, 75], [76]],
        "target_weights": [[], None, [0.2, 0.7], [1]],
    }
    (shown,) = packlora.preview(tree(tiny_base("shallow"), tmp_path / "out", [job(write(tmp_path, [own]))]))
    assert (shown.tokens, shown.labels, [piece.learnt for piece in shown.pieces]) == (4, 2, [False, True])
    (note,) = shown.notes
    assert note.startswith("3 soft targets, at most 2 of a token; of token 3: ") and note.index("0.7") < note.index(
        "0.2"
    )
