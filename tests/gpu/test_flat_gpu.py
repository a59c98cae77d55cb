"""The optimizer over the parameters of a job as one tensor, on a GPU: torch's fused kernel.

make gpu
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from waits import no_waiting

from packlora.adapters.attach import attach
from packlora.adapters.flat import FlatLayout, total_norm
from packlora.adapters.spec import resolve
from packlora.config import JobConfig, TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.engine.engine import StepDone
from packlora.engine.memory import on_their_way
from packlora.engine.optimizer import FlatAdamW
from packlora.runtime.job import Job
from packlora.runtime.run import deterministic

SHAPES: dict[str, tuple[int, ...]] = {
    "q/A": (8, 1000),
    "q/B": (3001, 8),
    "v/A": (3, 37),
    "v/B": (5, 3),
    "q/bias": (77,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torchs_fused_adamw_move_versions_and_wait_for_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = FlatLayout(SHAPES)
    flat = torch.zeros(layout.size, dtype=dtype, device="cuda")
    for view in layout.views(flat).values():
        view.normal_()
    ours = {name: torch.nn.Parameter(view) for name, view in layout.views(flat).items()}
    theirs = {name: torch.nn.Parameter(view.clone()) for name, view in layout.views(flat).items()}
    optimizer = FlatAdamW(flat, layout, TrainConfig(weight_decay=0.1))
    groups = [{"params": [theirs[name] for name in SHAPES if "bias" not in name]}]
    groups.append({"params": [theirs["q/bias"]], "weight_decay": 0.0})  # type: ignore[dict-item]
    torchs = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(5):
        without = {"v/A", "q/bias"} if number == 2 else set[str]()
        gradient = torch.zeros_like(flat)
        for name, view in layout.views(gradient).items():
            theirs[name].grad = None if name in without else view.normal_()
        versions = [parameter._version for parameter in ours.values()]
        with no_waiting():
            optimizer.ready(gradient, without, 1e-2)()
        torchs.step()
        assert all(p._version > old for p, old in zip(ours.values(), versions, strict=True))
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES), number


def test_the_norm_of_many_elements_is_that_of_float64() -> None:
    flat = torch.randn(2**24, device="cuda")
    torch.testing.assert_close(total_norm(flat).double(), flat.double().norm(), rtol=2e-6, atol=0)


def test_a_job_collects_and_begins_its_step_without_waiting_and_waits_once() -> None:
    model = tiny_model("llama").to("cuda")
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    _, (adapter,) = attach(model, {"job": resolve(config, model, "job")}, 0)
    job_config = JobConfig.model_validate({"name": "job", "data": {"path": "rows"}, "train": {"max_steps": 9}})
    samples = [Sample(np.arange(5, dtype=np.int32), np.arange(5) > 0)] * 8
    job = Job(job_config, JobData("job", samples, job_config.train, 0), [], adapter)
    loss = torch.tensor([3.0], dtype=torch.float64, device="cuda")
    with deterministic():
        for _ in range(3):
            for _ in range(2):
                for parameter in job.state.parameters.values():
                    parameter.grad = torch.randn_like(parameter)
                with no_waiting():
                    job.state.collect(loss)
                    job.count(7)
            with no_waiting():
                numbers = job.state.step(1e-3)
            sums, (_, norm, *_) = job.state.sums, numbers.tolist()
            assert sums is not None
            with no_waiting():
                job.state.accept()
                job.state.discard()
                job.stepped(StepDone(job.adapter.number, 6.0, norm, sums), 0.0, 0.0)
            assert job.log_history[-1]["loss"] == 6.0 / job.loss_units(job.step - 1)
            assert norm > 0


def test_numbers_on_their_way_to_the_host_wait_for_nothing_that_is_launched_later() -> None:
    numbers = 2 * torch.arange(4, device="cuda", dtype=torch.float64)
    torch.cuda._sleep(1)
    on_their_way(numbers)()  # what first calls load is loaded
    read = on_their_way(numbers)
    torch.cuda._sleep(10_000_000_000)  # five seconds
    numbers.zero_()
    later = torch.cuda.Event()
    later.record()
    assert read() == [0.0, 2.0, 4.0, 6.0] and not later.query()
    torch.cuda.synchronize()
