"""compute: dora_fp8, in a run and under accelerate(), on a CPU, which computes what the hardware's products would give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import tiny_model
from test_accelerate_fp8 import adapted, results
from test_training import JOBS, adapter, config, distance, steps, train

import packlora
from packlora.base.model import load_base
from packlora.config import Run
from packlora.errors import InputError
from packlora.fp8 import change
from packlora.fp8.change import CodedBesideLinear
from packlora.live import layers
from packlora.runtime.estimate import memory_parts
from packlora.runtime.prepare import prepare
from packlora.tune.plans import cases_of_run

Rows = Callable[..., str]
Base = Callable[..., str]
DORA8 = {"compute": "dora_fp8", "dtype": "float64"}
LORA, DORA = ({**JOBS[at], "train": {**JOBS[at]["train"], "max_steps": 3}} for at in (0, 3))


def test_a_run_is_near_that_of_two_products_the_same_alone_and_lora_beside_it_is_untouched(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = config(tiny_base("shallow"), tmp_path / "eight", write_rows, [LORA, DORA], **DORA8)
    train(tree)
    train({**tree, "output_dir": str(tmp_path / "plain"), "compute": "dtype"})
    train({**tree, "output_dir": str(tmp_path / "alone"), "jobs": tree["jobs"][1:], "gradient_checkpointing": True})
    name = DORA["name"]
    own, plain = (adapter(tmp_path / folder, name) for folder in ("eight", "plain"))
    assert 1e-6 < distance(own, plain) < 2e-2
    assert distance(adapter(tmp_path / "alone", name), own) < 1e-10
    assert distance(adapter(tmp_path / "eight", "lora"), adapter(tmp_path / "plain", "lora")) < 1e-12
    losses = [
        [line["loss"] for line in steps(tmp_path / folder) if line["job"] == name] for folder in ("eight", "plain")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] != losses[1]
    with pytest.raises(InputError, match="compute changed"):
        train({**tree, "compute": "dtype"}, resume=True)


def test_the_estimate_knows_of_codes_beside_the_weights_and_tune_of_one_base_product(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = config(tiny_base("qwen2"), tmp_path / "out", write_rows, [DORA], compute="dora_fp8")
    run = Run.model_validate(tree)
    dtype = run.model_copy(update={"compute": "dtype"})
    prepared, plain = prepare(run), prepare(dtype)
    beside = [own for own in load_base(run, prepared.tokenizer).model.modules() if isinstance(own, CodedBesideLinear)]
    codes = [own.frozen.make() for own in beside]
    held = sum(own.weight.nbytes for own in beside)
    held += sum(t.nbytes for own in codes for t in (own.stored, own.turned, own.scales_N, own.ones_K))
    assert prepared.in_codes == (sum(own.weight.numel() for own in beside), held)
    assert [any(case.base_dropped for case in cases_of_run(own, torch.device("cpu"))[0]) for own in (run, dtype)] == [
        False, True,
    ]  # fmt: skip
    more = [memory_parts(run, one, 1)["frozen weights"] for one in (prepared, plain)]
    assert more[0] - more[1] == held - sum(own.weight.nbytes for own in beside)


def test_what_does_not_go_with_it_is_refused_by_name(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    tree = config(tiny_base("qwen2"), tmp_path / "out", write_rows, [DORA], compute="dora_fp8")
    with pytest.raises(
        InputError, match="compute: dora_fp8 takes a base model that is saved as floats, and of base_model"
    ):
        packlora.train({**tree, "quantization": "nf4"})
    with pytest.raises(ValueError, match=r"compute='dora_fp8' cannot be met: .*, with DoRA"):
        packlora.accelerate(adapted(tiny_model("qwen2", torch.float64)), compute="dora_fp8")


def test_a_model_of_peft_is_near_its_two_products_and_has_its_own_bits_without_dropout() -> None:
    ours = adapted(tiny_model("qwen2", torch.float64), use_dora=True, lora_dropout=0.1)

    def outcome(**keys: Any) -> dict[str, torch.Tensor]:
        with mock.patch.object(layers, "choose_plan", wraps=layers.choose_plan) as choose:
            report = packlora.accelerate(ours, **keys)
            torch.manual_seed(3)
            found = results(ours)
        cases = [layers.choose_plan(*call.args)[1] for call in choose.call_args_list]
        assert {case.base_dropped for case in cases if any(case.drops)} <= {"compute" not in keys}
        packlora.restore(ours)
        return found | {"report": report}

    want = outcome()
    with mock.patch.object(change, "changed_rows_of", wraps=change.changed_rows_of) as made:
        got = outcome(compute="dora_fp8")
    assert made.call_count == 2 * 4  # siblings share what is made of their input
    said = str(got.pop("report"))
    assert "what dropout changes of DoRA's base products of 14 of 14 linear layers in FP8" in said
    want.pop("report")
    for name, exact in want.items():
        assert 0 < (got[name] - exact).norm() < 0.1 * exact.norm(), name
    for layer in ours.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    plain, eight = outcome(), outcome(compute="dora_fp8")
    assert all(torch.equal(eight[name], plain[name]) for name in want)
