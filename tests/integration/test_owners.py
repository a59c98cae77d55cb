"""Owners of tokens go with their microbatch: forwards, backwards and jobs' steps in any order that a pipeline may choose give
the bits of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_model
from packed import PackedSample, parts
from peft import LoraConfig
from torch.utils.checkpoint import CheckpointError

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.linear import Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import resolve
from packlora.base.model import Base, prepare_model
from packlora.data.encode import Sample
from packlora.engine.parts import Part
from packlora.engine.passes import MicrobatchResult, SingleDevice
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.plans.select import PlanChooser

JOBS: list[dict[str, Any]] = [
    {"r": 4, "lora_dropout": 0.2},
    {"r": 3, "lora_dropout": 0.1, "use_dora": True},
    {"r": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]},
]
MICROBATCHES = [[(0, 13), (0, 4), (1, 19)], [(2, 21), (2, 9)], [(0, 20), (2, 10)], [(1, 17), (1, 6)]]
"""Owner and length of each sample. The second and the third have equally many tokens."""
SEQUENTIAL = "F0 B0 S0 S1 E0 F1 B1 F2 B2 S0 S2 F3 B3 S1"
"""F, B and E (evaluation) of microbatches, S of jobs: two global batches of jobs 0 and 1, one of job 2."""
ORDERS = {
    "two in flight": "F0 F1 B0 S0 S1 E0 B1 F2 F3 B2 S2 S0 B3 S1",
    "as in a pipeline": "F0 F1 B0 S0 S1 F2 E0 B1 F3 B2 S2 S0 B3 S1",
    "all that may be": "F0 F1 B0 S1 S0 F2 F3 E0 B1 B2 S0 S2 B3 S1",
}
CHECKPOINTING = {"kept": None, "checkpointed": False, "reentrant": True}


class Fixed(PlanChooser):
    """Always the same plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(torch.device("cpu"))
        self.plan = plan

    def plan_of(self, *_: Any) -> Plan:
        return self.plan


class Trained:
    """A model with three jobs on it, and what their microbatches gave."""

    def __init__(self, reentrant: bool | None, plan: Plan = CHAIN, layers: int = 2, device: str = "cpu") -> None:
        model = tiny_model("llama", num_hidden_layers=layers).to(device)
        prepare_model(model, reentrant is False)
        if reentrant:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
            model.train()
        configs = [LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | job) for job in JOBS]
        specs = {f"job{number}": resolve(config, model, f"job{number}") for number, config in enumerate(configs)}
        self.attached: Attached
        self.adapters: list[Adapter]
        self.attached, self.adapters = attach(model, specs, 0, Fixed(plan))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).to(device) / 8
                )
        self.optimizers = [torch.optim.AdamW(a.named_parameters().values(), lr=1e-2) for a in self.adapters]
        self.executor = SingleDevice(
            Base(model, Any, torch.device(device), "random", [], fused_loss=True), self.attached
        )
        self.pending: dict[int, Any] = {}
        self.results: dict[int, MicrobatchResult] = {}
        self.evaluated: list[torch.Tensor] = []

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for adapter in self.adapters for parameter in adapter.named_parameters().values()]

    def samples(self, number: int, dropped: bool) -> list[Part]:
        generator, packed = np.random.default_rng(number), []
        for index, (owner, length) in enumerate(MICROBATCHES[number]):
            sample = Sample(generator.integers(3, TINY["vocab_size"], length).astype(np.int32), np.arange(length) > 2)
            packed.append(PackedSample(owner, sample, index, number, 11 + owner if dropped and owner < 2 else None))
        return parts(packed, np.array([0.1, 0.2, 0.3]))

    def forward(self, number: int) -> None:
        self.pending[number] = self.executor.forward(self.samples(number, True))

    def evaluate(self, number: int) -> None:
        self.evaluated += self.executor.evaluate(self.samples(number, False)).sums.values()

    def backward(self, number: int) -> None:
        self.results[number] = self.executor.backward(self.pending.pop(number))

    def step(self, job: int) -> None:
        self.optimizers[job].step()
        self.optimizers[job].zero_grad()

    def run(self, order: str) -> list[torch.Tensor]:
        """What the jobs have become, and the losses."""
        calls: dict[str, Callable[[int], None]] = {
            "F": self.forward, "B": self.backward, "S": self.step, "E": self.evaluate,
        }  # fmt: skip
        for action in order.split():
            calls[action[0]](int(action[1:]))
        assert not self.pending
        return [
            *self.parameters(),
            *(own for number in sorted(self.results) for own in self.results[number].sums.values()),
            *self.evaluated,
        ]


def same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_any_order_of_forwards_backwards_and_steps_gives_the_bits_of_one_after_the_other(how: str, order: str) -> None:
    want = Trained(CHECKPOINTING[how]).run(SEQUENTIAL)
    assert same_bits(Trained(CHECKPOINTING[how]).run(ORDERS[order]), want)
    if how != "kept":
        assert same_bits(want, Trained(None).run(SEQUENTIAL))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(keep_s=False), pytest.param(Plan(up="before", dx="before"), marks=pytest.mark.soak),
        pytest.param(ROUTED, marks=pytest.mark.soak),
    ],
    ids=lambda plan: plan.name,
)  # fmt: skip
def test_so_it_does_under_other_plans(plan: Plan) -> None:
    want = Trained(None, plan, layers=1).run(SEQUENTIAL)
    assert same_bits(Trained(None, plan, layers=1).run(ORDERS["as in a pipeline"]), want)


@pytest.mark.parametrize("how", CHECKPOINTING)
def test_a_backward_sees_its_owners_in_whatever_thread_it_runs(how: str) -> None:
    """On a GPU autograd recomputes activations in threads of its own, not in the one that made the owners active."""
    one, other = (Trained(CHECKPOINTING[how]) for _ in range(2))
    for trained in (one, other):
        trained.forward(0)
        trained.forward(1)
    one.backward(0)
    pending = other.pending.pop(0)
    with other.attached.active(pending.batch.owners):
        thread = threading.Thread(target=pending.backward)
        thread.start()
        thread.join()
    for parameter, twin in zip(one.parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None)
        assert parameter.grad is None or twin.grad is None or torch.equal(parameter.grad, twin.grad)
    assert any(parameter.grad is not None for parameter in other.parameters())


@pytest.mark.parametrize("how", ["checkpointed", "reentrant"])
def test_a_backward_that_recomputes_without_its_owners_is_refused(how: str) -> None:
    trained = Trained(CHECKPOINTING[how])
    trained.forward(0)
    pending = trained.pending[0]
    with pytest.raises(RuntimeError, match=r"must run inside active\(owners\) of its microbatch"):
        pending.backward()


@pytest.mark.parametrize("how", ["checkpointed", "reentrant"])
def test_the_owners_of_another_microbatch_would_give_something_else(how: str) -> None:
    """So the tests above would notice."""
    want = Trained(CHECKPOINTING[how]).run(SEQUENTIAL)
    trained = Trained(CHECKPOINTING[how])
    backward = trained.backward

    def with_others(number: int) -> None:
        if number == 2:
            pending = trained.pending[2]
            trained.pending[2] = replace(pending, batch=replace(pending.batch, owners=trained.pending[1].batch.owners))
        backward(number)

    trained.backward = with_others  # type: ignore[method-assign]
    try:
        got = trained.run("F0 B0 S0 S1 E0 F1 F2 B2 B1 S0 S2 F3 B3 S1")
    except CheckpointError:  # which sees other tensors saved
        return
    assert not same_bits(got, want)


def test_a_job_may_not_step_between_the_forward_and_the_backward_of_its_own_tokens() -> None:
    trained = Trained(None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained.run("F1 B1 F2 S2 B2")


def test_a_model_runs_one_microbatch_at_a_time_of_as_many_tokens_as_it_has() -> None:
    trained = Trained(None)
    owners = TokenOwners(4, ((0, 0, 4),))
    with trained.attached.active(owners):
        with pytest.raises(RuntimeError, match="one at a time"), trained.attached.only(0):
            pass
        assert trained.attached.owners(4) is owners
        with pytest.raises(RuntimeError, match="the microbatch has 4 tokens, the layer was given 5"):
            trained.attached.owners(5)
    assert trained.attached.owners(5) is None
