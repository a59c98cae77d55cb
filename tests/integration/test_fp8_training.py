"""Runs with compute: fp8 on a CPU, which computes what the hardware's products would give: PEFT over layers whose rounding is
spelt out says what is right, in float64, where no rounding of a code hangs on the order of a sum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fp8_cases import spelt_model
from safetensors.torch import load_file
from test_training import JOBS, adapter, config, distance, like_peft, perturbed_peft, steps, train, train_by_peft
from transformers import AutoModelForCausalLM

import packlora
from packlora.base.load import read_skeleton
from packlora.base.model import load_base
from packlora.commands.held_out import evaluate_adapter
from packlora.config import Run
from packlora.errors import InputError
from packlora.fp8 import plugin
from packlora.fp8.weight import Fp8Linear
from packlora.runtime.estimate import memory_parts
from packlora.runtime.prepare import prepare

Rows = Callable[..., str]
Base = Callable[..., str]
FP8 = {"compute": "fp8", "dtype": "float64"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", pytest.param("patterns", marks=pytest.mark.soak)])
def test_losses_and_adapters_are_those_of_peft_over_layers_that_round_so(
    kind: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Beside other jobs that share microbatches."""
    base = tiny_base("qwen2")
    loaded = spelt_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64))
    model = perturbed_peft(base, kind, tmp_path / "start", loaded).double()
    tree = config(
        base, tmp_path / "out", write_rows, [like_peft(write_rows("rows"), tmp_path / "start"), JOBS[1]], **FP8
    )
    data = prepare(Run.model_validate(tree)).jobs[0].data
    losses = train_by_peft(model, data)
    model.save_pretrained(tmp_path / "peft")
    train(tree)
    ours = [line["loss"] for line in steps(tmp_path / "out") if line["job"] == "job"]
    assert ours == pytest.approx(losses, rel=1e-6)
    assert distance(adapter(tmp_path / "out", "job"), load_file(tmp_path / "peft" / "adapter_model.safetensors")) < 1e-5
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["compute"] == "fp8"


def test_a_run_is_the_same_together_alone_checkpointed_and_after_a_stop(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    jobs = [{**job, "train": {**job["train"], "max_steps": 2}} for job in JOBS]
    tree = config(tiny_base("shallow"), tmp_path / "whole", write_rows, jobs, **FP8)
    train(tree)
    stopped = {**tree, "output_dir": str(tmp_path / "stopped")}
    train(stopped, max_steps=1)
    train({**stopped, "gradient_checkpointing": True}, resume=True)
    alone = {**tree, "output_dir": str(tmp_path / "alone"), "jobs": tree["jobs"][3:], "max_tokens_per_microbatch": 64}
    train(alone)
    plain = {**tree, "output_dir": str(tmp_path / "plain"), "compute": "dtype"}
    train(plain)
    for job in jobs:
        own = adapter(tmp_path / "whole", job["name"])
        assert distance(adapter(tmp_path / "stopped", job["name"]), own) < 1e-10
        assert distance(adapter(tmp_path / "plain", job["name"]), own) > 1e-4  # it does round
    assert distance(adapter(tmp_path / "alone", jobs[3]["name"]), adapter(tmp_path / "whole", jobs[3]["name"])) < 1e-10
    with pytest.raises(InputError, match="compute changed"):
        train({**stopped, "compute": "dtype"}, resume=True)


def test_eval_takes_the_base_s_own_weights_and_says_that_the_run_s_loss_is_in_fp8(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    held_out = write_rows("held-out", 6, 3)
    data = {"path": write_rows("rows"), "eval_path": held_out}
    job = {**JOBS[0], "train": {**JOBS[0]["train"], "max_steps": 1}, "data": data}
    found = {}
    for compute in ("fp8", "dora_fp8", "dtype"):
        out = tmp_path / compute
        tree = config(tiny_base("shallow"), out, write_rows, [job], compute=compute, dtype="float64")
        train(tree)
        evaluated = json.loads((out / "evals.jsonl").read_text().splitlines()[-1])["eval_loss"]
        found[compute] = evaluate_adapter(out / job["name"], held_out), evaluated
    for compute in ("dora_fp8", "dtype"):
        assert found[compute][0].loss == pytest.approx(found[compute][1], rel=1e-6) and not found[compute][0].notes
    own, evaluated = found["fp8"]
    assert own.loss != pytest.approx(evaluated, rel=1e-5)
    (note,) = own.notes
    assert note.endswith(
        f"{tmp_path / 'fp8' / job['name']} was trained with compute: fp8, in which the held-out loss of its run is"
    )


def test_layers_hold_two_bytes_a_number_and_the_estimate_knows(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    base = tiny_base("qwen2")
    tree = config(base, tmp_path / "out", write_rows, JOBS[:1], compute="fp8")
    run = Run.model_validate(tree)
    prepared, plain = prepare(run), prepare(run.model_copy(update={"compute": "dtype"}))
    loaded = load_base(run, prepared.tokenizer)
    layers = [layer for layer in loaded.model.modules() if isinstance(layer, Fp8Linear)]
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    codes = [own for layer in layers for own in (layer.frozen.codes.stored, layer.frozen.codes.turned)]
    assert sum(own.nbytes for own in codes) == 2 * numbers
    assert prepared.in_codes[0] == numbers and 2 * numbers < prepared.in_codes[1] < 2.3 * numbers
    assert not any(
        layer.weight is own for layer in layers for own in loaded.model.parameters() if own.dtype.is_floating_point
    )
    held = [memory_parts(run, one, 1)["frozen weights"] for one in (plain, prepared)]
    assert held[0] - held[1] == 4 * numbers - prepared.in_codes[1]


def test_the_output_layer_and_layers_of_odd_sizes_stay_as_they_are(tiny_base: Base) -> None:
    skeleton = read_skeleton(tiny_base("qwen2"), None, False)
    paths = plugin._paths(skeleton)
    assert len(paths) == 7 * skeleton.config.num_hidden_layers and not any("lm_head" in path for path in paths)
    skeleton.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 24, device="meta")
    assert "model.layers.0.mlp.up_proj" not in plugin._paths(skeleton)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "nf4"}, "compute: fp8 takes a base model that is saved as floats or in FP8"),
        ({"compute": "fp4"}, "compute"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused_by_name(
    changes: dict[str, Any], said: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = config(tiny_base("qwen2"), tmp_path / "out", write_rows, JOBS[:1], **{"compute": "fp8", **changes})
    with pytest.raises(InputError, match=said):
        packlora.train(tree)
    assert not (tmp_path / "out").exists()


def test_a_base_in_parts_is_refused_by_name(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    base = tiny_base("qwen2")
    tree = config(base, tmp_path / "out", write_rows, JOBS[:1], compute="fp8", parallel={"tensor": 2})
    with pytest.raises(InputError, match=r"parallel.tensor does not take quantised layers apart \(compute: fp8\)"):
        plugin.prepared_form(None, Run.model_validate(tree), read_skeleton(base, None, False), base)


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((8, 6), "bfloat16", "compute capability 8.9 or newer, this one has 8.6"),
        ((9, 0), "float16", "dtype is float16"),
    ],
)
def test_a_gpu_that_has_no_fp8_is_refused_by_name(
    capability: tuple[int, int], dtype: str, said: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    run = Run.model_validate(config(tiny_base(), tmp_path / "out", write_rows, JOBS[:1], compute="fp8", dtype=dtype))
    with mock.patch("packlora.fp8.weight.capability", return_value=capability), pytest.raises(InputError, match=said):
        plugin.check_asked(run, torch.device("cuda"))
