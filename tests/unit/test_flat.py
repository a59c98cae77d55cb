"""The parameters of a job as one tensor: where they lie, and the optimizer over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig
from steps import take_steps

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.flat import FlatLayout, total_norm
from packlora.adapters.spec import resolve
from packlora.config import JobConfig, TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.engine.optimizer import FlatAdamW
from packlora.runtime.job import Job

SHAPES: dict[str, tuple[int, ...]] = {
    "q/A": (3, 37), "q/B": (65, 3), "q/magnitude": (65,), "v/A": (1, 1), "v/B": (32, 8), "q/bias": (65,), "v/bias": (33,),
}  # fmt: skip
SETTINGS = {"adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-7, "weight_decay": 0.1}
MISSING = [set(), {"v/A", "v/bias"}, {"q/magnitude"}, {"v/A"}, {"q/A", "q/B", "v/B", "v/bias"}, set(), set()]
"""By step, parameters without a gradient, as experts that no token was sent to."""


class Torch:
    """torch.optim.AdamW over parameters of their own."""

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self.parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
        biases = {name for name in start if name.endswith("/bias")}
        groups = [
            {"params": [p for name, p in self.parameters.items() if name not in biases]},
            {"params": [self.parameters[name] for name in start if name in biases], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(SETTINGS["adam_beta1"], SETTINGS["adam_beta2"]), eps=SETTINGS["adam_epsilon"],
            weight_decay=SETTINGS["weight_decay"], foreach=False,
        )  # fmt: skip

    def step(self, grads: dict[str, torch.Tensor], lr: float) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = grads.get(name)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(self.optimizer.state[p]) for name, p in self.parameters.items() if self.optimizer.state[p]}


class Flat:
    """FlatAdamW over the same."""

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self.layout = FlatLayout({name: tuple(value.shape) for name, value in start.items()})
        self.flat = torch.zeros(self.layout.size, dtype=next(iter(start.values())).dtype)
        self.parameters = self.layout.views(self.flat)
        for name, value in start.items():
            self.parameters[name].copy_(value)
        self.optimizer = FlatAdamW(self.flat, self.layout, TrainConfig.model_validate(SETTINGS))

    def step(self, grads: dict[str, torch.Tensor], lr: float) -> None:
        gradient = torch.zeros_like(self.flat)
        for name, view in self.layout.views(gradient).items():
            if name in grads:
                view.copy_(grads[name])
        self.optimizer.ready(gradient, self.parameters.keys() - grads.keys(), lr)()


def values(dtype: torch.dtype, missing: set[str] | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items() if name not in (missing or ())}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("missing", [[set()] * 5, MISSING], ids=["whole", "parts"])
def test_steps_and_state_are_those_of_torchs_adamw_to_the_bit(dtype: torch.dtype, missing: list[set[str]]) -> None:
    torch.manual_seed(0)
    start = values(dtype)
    ours, theirs = Flat(start), Torch(start)
    for number, lacking in enumerate(missing):
        grads = values(dtype, lacking)
        for one in (ours, theirs):
            one.step(grads, 1e-2 / (1 + number))
        assert same(ours.parameters, theirs.parameters), number
    got, want = ours.optimizer.state(), theirs.state()
    assert got.keys() == want.keys()
    assert all(same(got[name], want[name]) for name in want)
    if not any(missing):
        assert len(ours.optimizer._spans) == 2, "the decayed and the biases"


@pytest.mark.parametrize("cut", range(1, len(MISSING)))
def test_an_optimizer_goes_on_from_the_state_that_torchs_has_written(cut: int) -> None:
    torch.manual_seed(1)
    start = values(torch.float32)
    theirs = Torch(start)
    ours = None
    for number, lacking in enumerate(MISSING):
        if number == cut:
            ours = Flat({name: p.detach() for name, p in theirs.parameters.items()})
            ours.optimizer.load({name: {k: v.clone() for k, v in own.items()} for name, own in theirs.state().items()})
        grads = values(torch.float32, lacking)
        theirs.step(grads, 1e-2)
        if ours is not None:
            ours.step(grads, 1e-2)
    assert ours is not None
    assert same(ours.parameters, theirs.parameters)


def test_a_parameter_that_never_had_a_gradient_stays_as_it_began_under_weight_decay() -> None:
    torch.manual_seed(2)
    start = values(torch.float32)
    ours = Flat(start)
    for _ in range(4):
        ours.step(values(torch.float32, {"v/A", "q/magnitude"}), 0.1)
    still = {name for name in SHAPES if torch.equal(ours.parameters[name], start[name])}
    assert still == {"v/A", "q/magnitude"}
    assert ours.optimizer.state().keys() == SHAPES.keys() - still


def test_what_lies_between_parameters_is_zero_and_stays_zero() -> None:
    torch.manual_seed(3)
    ours = Flat(values(torch.float32))
    for lacking in MISSING:
        ours.step(values(torch.float32, lacking), 0.1)
    used = torch.zeros_like(ours.flat)
    for view in ours.layout.views(used).values():
        view.fill_(1)
    assert (used == 0).sum() > 100
    moments = ours.optimizer._moments
    assert moments is not None
    for tensor in (ours.flat, *moments):
        assert (tensor[used == 0] == 0).all()


def test_a_step_moves_the_version_of_every_parameter() -> None:
    ours = Flat(values(torch.float32))
    parameters = [torch.nn.Parameter(view) for view in ours.parameters.values()]
    before = [parameter._version for parameter in parameters]
    ours.step(values(torch.float32), 0.1)
    assert all(parameter._version > old for parameter, old in zip(parameters, before, strict=True))


def test_the_norm_of_many_elements_is_that_of_float64() -> None:
    flat = torch.full((2**22,), 1e-3)
    want = float(flat.double().norm())
    assert abs(float(total_norm(flat)) - want) < 2e-6 * want
    assert abs(float(torch.linalg.vector_norm(flat)) - want) > 1e-4 * want, "one sum in float32 would do"


def test_every_parameter_begins_at_128_bytes_and_the_whole_is_rows_of_the_norm() -> None:
    layout = FlatLayout(SHAPES)
    assert all(place.start % 32 == 0 for place in layout.places.values())
    assert layout.size % 1024 == 0


# --- attached adapters -----------------------------------------------------------------------------------------------------


def attached(**settings: object) -> list[Adapter]:
    model = tiny_model("qwen2")
    configs = [LoraConfig(r=r, target_modules=["q_proj", "down_proj"], **settings) for r in (3, 8)]  # type: ignore[arg-type]
    return attach(model, {str(config.r): resolve(config, model, "job") for config in configs}, 0)[1]


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"bias": "all"}], ids=["lora", "dora", "bias"])
def test_the_parameters_of_a_job_are_aligned_views_of_one_tensor_that_no_other_job_has(
    settings: dict[str, object],
) -> None:
    adapters = attached(**settings)
    storages = set()
    for adapter in adapters:
        flat = adapter.flat.data_ptr()
        covered = torch.zeros_like(adapter.flat)
        for name, view in adapter.layout.views(covered).items():
            parameter = adapter.named_parameters()[name]
            assert parameter.is_contiguous()
            assert parameter.is_leaf
            assert (parameter.data_ptr() - flat) % 128 == 0
            assert parameter.untyped_storage().data_ptr() == adapter.flat.untyped_storage().data_ptr()
            assert (view == 0).all(), "no two lie in one place"
            view.fill_(1)
        assert covered.sum() == adapter.num_parameters
        assert adapter.named_parameters().keys() == adapter.layout.places.keys()
        storages.add(adapter.flat.untyped_storage().data_ptr())
    assert len(storages) == len(adapters)


def test_writing_into_one_job_leaves_the_versions_of_another() -> None:
    one, other = attached()
    before = [parameter._version for parameter in other.named_parameters().values()]
    one.flat.add_(1)
    assert before == [parameter._version for parameter in other.named_parameters().values()]
    assert all(parameter._version for parameter in one.named_parameters().values())


# --- jobs ------------------------------------------------------------------------------------------------------------------


def made_job(**train: object) -> Job:
    (adapter, *_) = attached(bias="all")
    config = JobConfig.model_validate({"name": "job", "data": {"path": "rows"}, "train": {"max_steps": 9, **train}})
    samples = [Sample(np.arange(5, dtype=np.int32), np.arange(5) > 0)] * 8
    return Job(config, JobData("job", samples, config.train, 0), [], adapter)


def some_gradients(job: Job, missing: str) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(p) for name, p in job.state.parameters.items() if missing not in name}


def ran(job: Job, grads: dict[str, torch.Tensor], loss: float = 3.0) -> None:
    """A microbatch has left gradients in the parameters."""
    for name, grad in grads.items():
        job.state.parameters[name].grad = grad.clone()
    job.state.collect(torch.tensor([loss], dtype=torch.float64))
    job.count(7)
    assert all(parameter.grad is None for parameter in job.state.parameters.values())


def test_numbers_of_steps_leave_the_device_before_something_else_is_launched_and_are_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def on_their_way(numbers: torch.Tensor) -> Callable[[], list[Any]]:
        order.append("copied")
        return lambda: order.append("read") or numbers.tolist()  # type: ignore[func-returns-value]

    monkeypatch.setattr("packlora.engine.engine.on_their_way", on_their_way)
    job = made_job()
    ran(job, some_gradients(job, "nothing"))
    assert take_steps([job], lambda: order.append("launched"))[0].refused is None
    assert order == ["copied", "launched", "read"]
