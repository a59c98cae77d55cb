"""float16's loss scale: torch.amp.GradScaler's schedule, PEFT's steps, float64's gradients, and no bit of a neighbour."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from peft import PeftModel
from test_engine import SETTINGS, Trained, part, slot, stepped
from test_training import config, same_bits, steps, train

from packlora.adapters.files import save_adapter
from packlora.adapters.reading import load_adapter
from packlora.engine.adapters import AdapterState
from packlora.engine.loss_scale import FIRST, LossScale
from packlora.engine.passes import SingleDevice
from packlora.runtime import attach
from packlora.runtime.job import Job

Rows = Callable[..., str]
Base = Callable[..., str]


def test_the_scale_goes_as_grad_scaler_s() -> None:
    overflows = {0, 1, 3, 700, 2701, 4702, 4703}
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler, own = torch.optim.SGD([parameter], lr=0.0), torch.amp.GradScaler("cpu"), LossScale()
    for step in range(4710):
        assert own.value == scaler.get_scale(), step
        assert LossScale(**own.state()) == own  # type: ignore[arg-type]
        scaler.scale(parameter.sum())
        parameter.grad = torch.full((1,), math.inf if step in overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        own.skipped() if step in overflows else own.took()


class Scaled(Trained):
    """Two adapters, of which the first has a loss scale."""

    def __init__(self, scale: LossScale | None) -> None:
        super().__init__()
        self.states[0] = AdapterState(self.adapters[0], SETTINGS, 1, scale)
        self.engine.follow(self.states)

    def step(self, length: int, overflows: bool = False) -> Any:
        """A step of both, whose rows of the first are scaled as a door scales them."""
        weight = 0.1 * self.states[0].grad_scale
        if overflows:
            self.states[0].gradient_buffers()
            self.states[0].gradient[-1] = math.inf  # type: ignore[index]
        return self.run(slot(part(0, length, weight=weight), part(1, 9), steps=[0, 1]))


def test_an_overflow_skips_that_adapter_s_step_alone() -> None:
    """Against the same steps without the one that overflows, and without a scale: in float64 all sums are those, to the bit,
    since the scale is a power of two. Moments are as before the step too."""
    plain, scaled, other = Scaled(None), Scaled(LossScale()), Scaled(None)
    for length in (8, 7):
        plain.step(length)
    first, skipped, third = scaled.step(8), scaled.step(12, overflows=True), scaled.step(7)
    assert [(own.refused, own.scale) for done in (first, skipped, third) for own in stepped(done, 0)] == [
        (None, FIRST), ("overflow", FIRST), (None, FIRST / 2),
    ]  # fmt: skip
    torch.testing.assert_close(scaled.flats()[0], plain.flats()[0], rtol=0, atol=0)
    for length in (8, 12, 7):
        other.step(length)
    torch.testing.assert_close(scaled.flats()[1], other.flats()[1], rtol=0, atol=0)


def test_a_gradient_that_is_infinite_at_the_least_scale_is_refused() -> None:
    trained = Scaled(LossScale(value=2.0))
    trained.step(8)
    before = trained.flats()[0]
    found = [stepped(trained.step(8, overflows=True), 0)[0].refused for _ in range(2)]
    assert found == ["overflow", "norm"] and torch.equal(trained.flats()[0], before)


WEIGHT = 1 / 2e5
"""Of a label, in a global batch of so many."""
LENGTHS = (14, 9)
FEW = 1024.0


def gradient(dtype: torch.dtype, scale: float, folder: Path) -> dict[str, torch.Tensor]:
    """Gradient of the adapter in a folder on a model of a dtype, by parameter, divided by the scale."""
    trained = Trained(dtype)
    load_adapter(str(folder), trained.adapters[0])
    trained.run(slot(part(0, *LENGTHS, weight=scale * WEIGHT)))
    return {name: own.double() / scale for name, own in trained.states[0].gradients.items()}


def by_peft(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in float16 by PEFT and transformers, at GradScaler's first scale."""
    torch.manual_seed(0)
    model: Any = PeftModel.from_pretrained(tiny_model("llama").half(), str(folder), is_trainable=True)
    for row in part(0, *LENGTHS).rows:
        ids = torch.from_numpy(row.sample.ids).long()[None]
        labels = torch.where(torch.from_numpy(row.sample.is_label), ids[0], -100)[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") * WEIGHT * FIRST).backward()
    found = {name: own.grad.double() / FIRST for name, own in model.named_parameters() if own.requires_grad}
    ends = {"A": "lora_A.default.weight", "B": "lora_B.default.weight"}
    return {
        name: found[f"base_model.model.{name.rpartition('/')[0]}.{ends[name.rpartition('/')[2]]}"].view_as(own)
        for name, own in like.items()
    }


def test_scaled_gradients_of_float16_are_those_of_float64_up_to_rounding(tmp_path: Path) -> None:
    """As near as PEFT's. Without a scale many underflow. By a power of two those of float32 do not change by a bit."""
    save_adapter(tmp_path, Trained().adapters[0])
    want = gradient(torch.float64, 1.0, tmp_path)

    def error(found: dict[str, torch.Tensor]) -> float:
        missed = math.sqrt(sum(float((found[name] - own).square().sum()) for name, own in want.items()))
        return missed / math.sqrt(sum(float(own.square().sum()) for own in want.values()))

    theirs = error(by_peft(tmp_path, want))
    scaled, unscaled = (error(gradient(torch.float16, scale, tmp_path)) for scale in (FIRST, 1.0))
    assert scaled <= 2 * theirs < 0.1 < unscaled, (theirs, scaled, unscaled)
    one, other = (gradient(torch.float32, scale, tmp_path) for scale in (1.0, FIRST))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_job_that_overflows_is_told_of_and_goes_on_after_a_kill_with_its_scale(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour has the bits that it has beside a job that does not overflow."""
    original, spoilt = SingleDevice.backward, [False]

    def backward(executor: Any, pending: Any) -> Any:
        """The second global batch of job a overflows."""
        result = original(executor, pending)
        if spoilt[0] and (of := job.get("a")) is not None and of.step == 1:
            next(iter(of.state.parameters.values())).grad.fill_(math.inf)  # type: ignore[union-attr]
        return result

    job: dict[str, Any] = {}
    made = Job.__post_init__
    monkeypatch.setattr(Job, "__post_init__", lambda own: (made(own), job.update({own.config.name: own}))[0])
    monkeypatch.setattr(SingleDevice, "backward", backward)
    monkeypatch.setattr(attach, "_scale", lambda run: LossScale(FEW))  # so few labels overflow at the usual one
    jobs = [{"name": name, "adapter": {"r": 2}, "train": {"global_batch_size": 8, "max_steps": 4}} for name in "ab"]
    for job_ in jobs:
        job_["data"] = {"path": write_rows(job_["name"], 8, 1)}
    tree = config(
        tiny_base("shallow"),
        tmp_path / "healthy",
        write_rows,
        jobs,
        dtype="float16",
        save_every=1,
        max_tokens_per_microbatch=512,
    )
    assert train(tree)["a"].overflows == 0
    spoilt[0] = True
    for out in ("whole", "killed"):
        own = {**tree, "output_dir": str(tmp_path / out)}
        if out == "killed":
            train(own, max_steps=2)
        result = train(own, resume=out == "killed")
        assert (result["a"].overflows, result["b"].overflows, result["a"].step) == (1, 0, 4)
        lines = [line for line in steps(tmp_path / out) if line["job"] == "a"]
        assert [(line["overflow"], line["loss_scale"]) for line in lines] == [
            (0, FEW), (1, FEW), (0, FEW / 2), (0, FEW / 2),
        ]  # fmt: skip
        assert lines[1]["grad_norm"] is None
        same_bits(tmp_path / "healthy", tmp_path / out, [{"name": "b"}])
    same_bits(tmp_path / "whole", tmp_path / "killed", [{"name": "a"}])
    state = json.loads((tmp_path / "killed/a/trainer_state.json").read_text())
    assert state["loss_scale"] == {"value": FEW / 2, "good": 2}


def test_a_job_of_which_every_step_overflowed_is_not_said_to_have_modules_that_took_no_part(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_scale", lambda run: LossScale(2.0**30))
    job = {"name": "a", "adapter": {"r": 2}, "train": {"global_batch_size": 2, "max_steps": 2}}
    tree = config(tiny_base("shallow"), tmp_path / "out", write_rows, [job], dtype="float16")
    assert train(tree)["a"].overflows == 2
    told = json.loads((tmp_path / "out" / "run.json").read_text())["warnings"]
    assert ["was skipped" in text for text in told] == [True, True], told
