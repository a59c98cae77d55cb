"""The engine against a plain loop in float64: PEFT's model of each adapter alone, torch's autograd, AdamW and clipping."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_model
from peft import LoraConfig, PeftModel

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.files import save_adapter
from packlora.adapters.spec import resolve
from packlora.base.model import Base
from packlora.base.packing import prepare_model
from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Confirmed, Done, Engine, Slot, Step, StepDone
from packlora.engine.memory import TokenBudget
from packlora.engine.parts import Part, Parts
from packlora.engine.passes import SingleDevice
from packlora.engine.rows import Row
from packlora.parallel.alone import ALONE

SETTINGS = TrainConfig(learning_rate=1e-2, max_grad_norm=0.5, max_steps=9, weight_decay=0.1)
KINDS: list[dict[str, Any]] = [{"r": 3}, {"r": 2, "use_dora": True}]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Listed:
    """Slots of a list. peeks: what `peek` says, by place; None: the truth."""

    def __init__(self, slots: Iterable[Slot], peeks: Parts | None = None) -> None:
        self.slots, self.peeks = list(slots), peeks

    def next(self) -> Slot | None:
        return self.slots.pop(0) if self.slots else None

    def peek(self) -> Parts:
        if self.peeks is not None:
            return self.peeks
        return self.slots[0].parts if self.slots else ()

    def is_asked(self) -> bool:
        return False


class Trained:
    """Two adapters with values of their own on a tiny model, and an engine that trains them."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.whole = tiny_model("llama").to(dtype)
        model = copy.deepcopy(self.whole)
        prepare_model(model, gradient_checkpointing=False)
        specs = {
            f"job-{number}": resolve(LoraConfig(target_modules="all-linear", lora_alpha=8, **own), model, "job")
            for number, own in enumerate(KINDS)
        }
        self.attached, self.adapters = attach(model, specs, 0)
        for adapter in self.adapters:
            with torch.no_grad():
                for name, parameter in adapter.named_parameters().items():
                    if name.endswith("/B"):
                        parameter.normal_(0, 0.02)
                    parameter.copy_(parameter.float())  # as files hold them
        base = Base(model, None, torch.device("cpu"), "tiny", [], fused_loss=True)
        self.budget = TokenBudget(100, 20, True, base.device)
        self.engine = Engine(SingleDevice(base, self.attached), ALONE, self.budget)
        self.states = {own.number: AdapterState(own, SETTINGS, 1) for own in self.adapters}
        self.engine.follow(self.states)

    def run(self, *slots: Slot, peeks: Parts | None = None) -> list[Done]:
        return list(self.engine.run(Listed(slots, peeks)))

    def flats(self) -> list[torch.Tensor]:
        return [own.flat.clone() for own in self.adapters]


def sample(seed: int, length: int) -> Sample:
    ids = np.random.default_rng(seed).integers(0, TINY["vocab_size"], length).astype(np.int32)
    return Sample(ids, np.arange(length) > 2)


def part(adapter: int, *lengths: int, weight: float = 0.1) -> Part:
    """Rows of so many tokens, other ones for each adapter and length."""
    rows = [Row(sample(100 * adapter + length, length), (None, 0, number)) for number, length in enumerate(lengths)]
    return Part(adapter, rows, weight=weight, facts={"units": 1, "samples": 1})


def slot(*parts: Part, steps: Iterable[int] = (), counted: Iterable[int] | None = None) -> Slot:
    own = frozenset(part.adapter for part in parts) if counted is None else frozenset(counted)
    return Slot(parts, own, tuple(Step(adapter, 1e-2) for adapter in steps))


def stepped(done: Iterable[Done], adapter: int) -> list[StepDone]:
    return [event for one in done for event in one.events if isinstance(event, StepDone) and event.adapter == adapter]


def plain_loop(
    trained: Trained, adapter: Adapter, folder: Path, batches: Iterable[Iterable[Part]]
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Global batches of an adapter by PEFT and torch: its tensors, and the loss and norm of each step."""
    save_adapter(folder, adapter)
    torch.set_default_dtype(torch.float64)
    try:
        model: Any = PeftModel.from_pretrained(
            copy.deepcopy(trained.whole), str(folder), is_trainable=True, autocast_adapter_dtype=False
        )
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("sdpa")  # the other one computes in float32
    own = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    optimizer, told = torch.optim.AdamW(own.values(), lr=1e-2, weight_decay=0.1), []
    for batch in batches:
        total = 0.0
        optimizer.zero_grad()
        for part in batch:
            for row in part.rows:
                ids = torch.from_numpy(row.sample.ids).long()[None]
                labels = torch.where(torch.from_numpy(row.sample.is_label), ids[0], -100)[1:]
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                (loss * part.weight).backward()
                total += loss.item()
        told.append((total, float(torch.nn.utils.clip_grad_norm_(own.values(), 0.5))))
        optimizer.step()
    return own, told


def same_as_peft(trained: Trained, number: int, theirs: dict[str, torch.Tensor]) -> None:
    """All of an adapter's tensors; PEFT's names end as these do."""
    ends = {
        "A": "lora_A.default.weight",
        "B": "lora_B.default.weight",
        "magnitude": "lora_magnitude_vector.default.weight",
    }
    own = trained.adapters[number].named_parameters()
    assert len(own) == len(theirs)
    for name, tensor in own.items():
        path, _, leaf = name.rpartition("/")
        torch.testing.assert_close(tensor, theirs[f"base_model.model.{path}.{ends[leaf]}"].view_as(tensor), **EXACT)


def test_slots_of_two_adapters_learn_what_each_learns_alone_with_peft(tmp_path: Path) -> None:
    """Global batches over several slots, side by side and not; a step in a slot without rows; empty slots between."""
    trained = Trained()
    first = [[part(0, 5, 9), part(0, 12)], [part(0, 7)], [part(0, 11, 6)]]
    second = [[part(1, 8), part(1, 13, 4)], [part(1, 10, 5)]]
    want = [
        plain_loop(trained, adapter, tmp_path / str(adapter.number), batches)
        for adapter, batches in zip(trained.adapters, (first, second), strict=True)
    ]
    done = trained.run(
        slot(first[0][0], second[0][0]),
        Slot(tag="empty"),
        slot(first[0][1], steps=[0]),
        slot(first[1][0], second[0][1]),
        slot(steps=[0, 1]),
        slot(first[2][0], second[1][0], steps=[0, 1]),
    )
    assert [one.slot.tag for one in done] == [None, "empty", None, None, None, None]
    for number, (theirs, told) in enumerate(want):
        same_as_peft(trained, number, theirs)
        found = [(event.loss, event.norm) for event in stepped(done, number)]
        np.testing.assert_allclose(found, told, rtol=1e-10)
        assert all(event.refused is None for event in stepped(done, number))
    confirmed = [event for one in done for event in one.events if isinstance(event, Confirmed)]
    assert len(confirmed) == 5 and all(event.changed and not event.reverted for event in confirmed)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_memory_that_is_short_leaves_accumulators_as_they_were(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows come again in smaller slots, and the steps are those of a run with room."""
    roomy, short = Trained(), Trained()
    begun, large = slot(part(0, 6), part(1, 9)), slot(part(0, 15), part(1, 16), steps=[0, 1])
    rest = [slot(part(0, 15)), slot(part(1, 16), steps=[0, 1])]
    roomy.run(begun, *rest)
    original = getattr(SingleDevice, fails)

    def limited(self: Any, given: Any) -> Any:
        result = original(self, given)
        batch = (result if fails == "forward" else given).batch
        if sum(batch.num_tokens.values()) > 20:
            raise torch.OutOfMemoryError("for this test")
        return result

    short.run(begun)
    before = {number: (state.gradient.clone(), state.sums.clone()) for number, state in short.states.items()}  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(SingleDevice, fails, limited)
        short.budget._longest = 16
        done = short.run(large, *rest)
    assert [one.lacking for one in done] == [31]
    for number, state in short.states.items():
        assert torch.equal(state.gradient, before[number][0]) and torch.equal(state.sums, before[number][1])  # type: ignore[arg-type]
        assert all(parameter.grad is None for parameter in state.parameters.values())
    short.run(*rest)
    for own, want in zip(short.flats(), roomy.flats(), strict=True):
        torch.testing.assert_close(own, want, **EXACT)


@pytest.mark.parametrize("spoil", ["loss", "norm"])
def test_a_step_that_is_refused_changes_nothing_of_the_adapter_and_no_bit_of_its_neighbour(spoil: str) -> None:
    """An adapter whose values are not finite, and one whose gradient is not; it goes on once it is loaded anew."""
    healthy, spoilt = Trained(), Trained()
    both = [slot(part(0, 8), part(1, 9), steps=[0, 1]), slot(part(0, 7), part(1, 12), steps=[0, 1])]
    healthy.run(*both)
    spoilt.run(both[0])
    before, state = spoilt.flats()[0], spoilt.states[0]
    if spoil == "loss":
        state.adapter.flat.fill_(float("nan"))  # of all, since attention of some processors drops a query that is NaN
    else:
        state.gradient_buffers()
        state.gradient[0] = float("inf")  # type: ignore[index]
    (event,) = stepped(spoilt.run(both[1]), 0)
    assert (event.refused, event.reverted) == (spoil, spoil == "loss")
    assert torch.equal(spoilt.adapters[1].flat, healthy.adapters[1].flat)
    if spoil == "norm":
        assert torch.equal(spoilt.adapters[0].flat, before)
    else:
        assert torch.equal(spoilt.adapters[0].flat, Trained().adapters[0].flat), "one step back: the newest finite loss"
    assert not stepped(spoilt.run(slot(part(0, 10), steps=[0])), 0)[0].refused


def test_an_update_that_makes_parameters_infinite_is_taken_back() -> None:
    trained = Trained()
    before = trained.flats()
    (done,) = trained.run(Slot((part(0, 8), part(1, 9)), frozenset({0, 1}), (Step(0, 1e308), Step(1, 1e-2))))
    taken, made, *_ = done.events
    assert isinstance(taken, StepDone) and taken.refused is None
    assert isinstance(made, Confirmed) and made.reverted
    assert torch.equal(trained.adapters[0].flat, before[0])
    assert not torch.equal(trained.adapters[1].flat, before[1])


def test_rows_that_do_not_count_change_no_bit_of_others_and_are_dropped() -> None:
    both, dropped = Trained(), Trained()
    both.run(slot(part(0, 8), part(1, 9)), slot(part(0, 7), part(1, 12), steps=[0, 1]))
    before = dropped.flats()[1]
    done = dropped.run(slot(part(0, 8), part(1, 9), counted=[0]), slot(part(0, 7), part(1, 12), counted=[0], steps=[0]))
    assert torch.equal(dropped.adapters[0].flat, both.adapters[0].flat)
    assert torch.equal(dropped.adapters[1].flat, before) and not stepped(done, 1)
    (event,) = stepped(dropped.run(slot(part(1, 9), steps=[1])), 1)
    alone = Trained()
    (want,) = stepped(alone.run(slot(part(1, 9), steps=[1])), 1)
    assert (event.loss, event.norm) == (want.loss, want.norm), "nothing is left of what was dropped"


def test_adapters_come_and_go_between_runs() -> None:
    trained, alone = Trained(), Trained()
    trained.engine.follow({0: trained.states[0]})
    trained.run(slot(part(0, 8), steps=[0]))
    trained.engine.follow(trained.states)
    trained.run(slot(part(1, 9), steps=[1]))
    alone.run(slot(part(0, 8), steps=[0]), slot(part(1, 9), steps=[1]))
    for own, want in zip(trained.flats(), alone.flats(), strict=True):
        assert torch.equal(own, want)


def test_a_peek_that_is_right_wrong_or_missing_changes_no_bit() -> None:
    slots = [slot(part(0, 8), part(1, 9), steps=[0]), slot(part(0, 7), part(1, 12), steps=[0, 1])]
    found = []
    for peeks in (None, (), (part(1, 14),)):
        trained = Trained()
        trained.run(*slots, peeks=peeks)
        found.append(trained.flats())
    for own in found[1:]:
        assert all(torch.equal(one, want) for one, want in zip(own, found[0], strict=True))
