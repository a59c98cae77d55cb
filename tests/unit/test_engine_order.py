"""The order in which an engine runs slots on the stages of a pipeline: no order of messages waits for itself, results come with
the lag of the stages, and steps come in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from packlora.engine.engine import Done, Engine, Slot, Step
from packlora.engine.parts import Part
from packlora.engine.passes import MicrobatchResult
from packlora.parallel.alone import Alone
from packlora.pipeline.engine import StageEngine
from packlora.pipeline.timeline import end_times
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner

UP = {"send hidden": "receive hidden", "send totals": "receive totals"}
DOWN = {"send gradient": "receive gradient", "send sums": "receive sums"}


class Action(NamedTuple):
    """What a stage does for a slot, counted from 0."""

    kind: str
    slot: int


class Place(NamedTuple):
    """runs: whether the slot has a microbatch; else it is a no-op. steps: whether an adapter steps after it."""

    runs: bool
    steps: bool


class Recorded:
    """The actions of one stage of an engine on a list of places, in order.

    Args:
        enter: called before slot `number` is asked for; False: nothing enters any more.
    """

    def __init__(
        self, places: Sequence[Place], stage: int, stages: int, enter: Callable[[int], bool] = lambda number: True
    ) -> None:
        self.places, self.stage, self.stages, self.enter = places, stage, stages, enter
        self.actions: list[Action] = []
        self.done: list[Done] = []
        self.asked = 0
        self._forwards = iter([number for number, place in enumerate(places) if place.runs])
        self._backwards = iter([number for number, place in enumerate(places) if place.runs])
        self._summed = iter([number for number, place in enumerate(places) if place.steps])
        self._stepped = iter([number for number, place in enumerate(places) if place.steps])
        self._summing = self._stepping = -1

    def run(self) -> list[Action]:
        budget: Any = mock.MagicMock(attempt=lambda tokens, run, **how: run(), device=torch.device("cpu"))
        own: Any = self
        engine = StageEngine(own, Links(self), budget) if self.stages > 1 else Engine(own, Alone(), budget)
        engine.follow({0: State(self)})  # type: ignore[dict-item]
        for done in engine.run(self):
            self.done.append(done)
        return self.actions

    def act(self, kind: str, slot: int) -> None:
        self.actions.append(Action(kind, slot))

    # --- Slots ---------------------------------------------------------------------------------------------------------

    def next(self) -> Slot | None:
        number = self.asked
        if number >= len(self.places) or not self.enter(number):
            return None
        self.asked += 1
        place = self.places[number]
        if not place.runs:
            self.act("no-op", number)
            return Slot(tag=number)
        return Slot((Part(0, []),), frozenset({0}), (Step(0, 1.0),) if place.steps else (), number)

    def peek(self) -> tuple[()]:
        return ()

    def is_asked(self) -> bool:
        return False

    # --- Executor ------------------------------------------------------------------------------------------------------

    def forward(self, parts: Any) -> int:
        slot = next(self._forwards)
        if self.stage > 0:
            self.act("receive hidden", slot)
        self.act("forward", slot)
        if self.stage < self.stages - 1:
            self.act("send hidden", slot)
        return slot

    def backward(self, slot: int) -> MicrobatchResult:
        assert slot == next(self._backwards)
        if self.stage < self.stages - 1:
            self.act("receive gradient", slot)
        self.act("backward", slot)
        if self.stage > 0:
            self.act("send gradient", slot)
        return MicrobatchResult({0: torch.ones(1)}, {0: 1}, {0: 1}, torch.ones(1))

    # --- sums, totals and steps ----------------------------------------------------------------------------------------

    def receive_sums(self, shape: Any, dtype: Any) -> torch.Tensor:
        self._summing = next(self._summed)
        self.act("receive sums", self._summing)
        return torch.zeros(shape, dtype=dtype)

    def add_sums(self) -> torch.Tensor:
        if self.stage == self.stages - 1:
            self._summing = next(self._summed)
        self.act("add sums", self._summing)
        return torch.ones((), dtype=torch.float64)

    def send_sums(self, *_: Any) -> None:
        self.act("send sums", self._summing)

    def receive_totals(self, shape: Any, dtype: Any) -> torch.Tensor:
        self._stepping = next(self._stepped)
        self.act("receive totals", self._stepping)
        return torch.ones(shape, dtype=dtype)

    def send_totals(self, *_: Any) -> None:
        if self.stage == 0:
            self._stepping = next(self._stepped)
        self.act("send totals", self._stepping)

    def step(self, *_: Any) -> torch.Tensor:
        self.act("step", self._stepping)
        return torch.ones(4, dtype=torch.float64)


class Links(Alone):
    """The stage's neighbours, whose messages are noted."""

    processes = 2

    def __init__(self, own: Recorded) -> None:
        self.stage, self.stages = own.stage, own.stages
        self.is_last = own.stage == own.stages - 1
        self.up = SimpleNamespace(send=own.send_totals, receive=own.receive_totals)
        self.down = SimpleNamespace(send=own.send_sums, receive=own.receive_sums)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    def agreed(self, totals: torch.Tensor) -> torch.Tensor:
        return totals

    def drain(self) -> None:
        pass

    def largest_of(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


class State:
    """What an engine does with an adapter."""

    num_sums, has_gradient, without, found_elsewhere, grad_scale, scale = 1, True, (), 0, 1.0, None

    def __init__(self, own: Recorded) -> None:
        self.parameters, self.adapter, self.sums = {"A": None}, SimpleNamespace(number=0), torch.ones(1)
        self.square, self.step = own.add_sums, own.step

    def collect(self, sums: torch.Tensor) -> None:
        pass

    accept = close = discard = lambda self: None


def of_all(places: Sequence[Place], stages: int) -> list[list[Action]]:
    return [Recorded(places, stage, stages).run() for stage in range(stages)]


def random_places(seed: int) -> tuple[list[Place], int]:
    """No-ops, slots after which adapters step, and pipelines longer than what passes through them."""
    draw = random.Random(seed)
    places = [Place(runs := draw.random() < 0.8, runs and draw.random() < 0.5) for _ in range(draw.randint(0, 9))]
    return places, draw.randint(2, 5)


def channels_pass(lists: Sequence[Sequence[Action]]) -> bool:
    """Whether all actions are done where sends do not wait, and messages of a direction are received as they were sent."""
    at, sent = [0] * len(lists), {}
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(lists):
            while at[stage] < len(own):
                kind, slot = own[at[stage]].kind, own[at[stage]].slot
                for pairs, step in ((UP, 1), (DOWN, -1)):
                    if kind in pairs:
                        sent.setdefault((stage + step, step), []).append((pairs[kind], slot))
                    elif kind in pairs.values():
                        waiting = sent.get((stage, step), [])
                        if not waiting:
                            break
                        assert waiting.pop(0) == (kind, slot), "another message comes first"
                else:
                    at[stage] += 1
                    moved = True
                    continue
                break
    return all(at[stage] == len(own) for stage, own in enumerate(lists))


def test_two_stages_run_four_slots_in_this_order() -> None:
    places = [Place(True, False), Place(True, True), Place(False, False), Place(True, True)]
    told = [" ".join(f"{action.kind}:{action.slot}" for action in own) for own in of_all(places, 2)]
    assert told[0] == (
        "forward:0 send hidden:0 forward:1 send hidden:1 receive gradient:0 backward:0 no-op:2 receive gradient:1 backward:1 "
        "receive sums:1 add sums:1 send totals:1 step:1 forward:3 send hidden:3 receive gradient:3 backward:3 receive sums:3 "
        "add sums:3 send totals:3 step:3"
    )
    assert told[1] == (
        "receive hidden:0 forward:0 backward:0 send gradient:0 receive hidden:1 forward:1 backward:1 send gradient:1 "
        "add sums:1 send sums:1 no-op:2 receive totals:1 step:1 receive hidden:3 forward:3 backward:3 send gradient:3 "
        "add sums:3 send sums:3 receive totals:3 step:3"
    )


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 7), (3, 5), (4, 9)])
def test_without_steps_it_is_the_order_of_torch_s_1f1b(stages: int, count: int) -> None:
    """What torch's own schedule says of equal microbatches: forwards and backwards of each stage, which are both in order."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order = getattr(schedules.Schedule1F1B, "_get_pipeline_order", None)
    if order is None:
        pytest.skip("this version of torch does not tell the order of its schedule")
    theirs = order(SimpleNamespace(_num_stages=stages, _n_microbatches=count))
    names = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    for stage, own in enumerate(of_all([Place(True, False)] * count, stages)):
        computed = [action for action in own if action.kind in names.values()]
        told = [one.computation_type.name for one in theirs[stage] if one is not None]
        assert [action.kind for action in computed] == [names[kind] for kind in told if kind in names]
        for kind in names.values():
            assert [action.slot for action in computed if action.kind == kind] == list(range(count))


def test_no_order_of_messages_waits_for_itself() -> None:
    for seed in range(300):
        places, stages = random_places(seed)
        assert channels_pass(of_all(places, stages)), seed
    lists = of_all([Place(True, True)] * 5, 3)
    at = [number for number, action in enumerate(lists[1]) if action.kind in ("send gradient", "send sums")]
    lists[1][at[0]], lists[1][at[1]] = lists[1][at[1]], lists[1][at[0]]
    with pytest.raises(AssertionError, match="another message comes first"):
        channels_pass(lists)


def test_few_microbatches_are_inside_and_steps_come_before_the_slot_in_which_the_next_batch_may_be() -> None:
    for seed in range(300):
        places, stages = random_places(seed)
        for stage, own in enumerate(of_all(places, stages)):
            inside, entered = 0, -1
            for action in own:
                if action.kind in ("forward", "no-op"):
                    entered = action.slot
                inside += (action.kind == "forward") - (action.kind == "backward")
                assert inside <= stages - stage
                assert action.kind != "step" or entered < action.slot + stages
            steps = [action.slot for action in own if action.kind == "step"]
            assert steps == [number for number, place in enumerate(places) if place.steps]
            assert inside == 0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_results_are_handed_out_in_order_with_the_lag_of_the_stages(stages: int) -> None:
    """Before slot n is asked for, the results of all slots up to n - S are out, and of no later one; dry, all are."""
    for stage in range(stages):
        known: list[int] = []
        one = Recorded([Place(number % 3 > 0, number % 3 == 1) for number in range(9)], stage, stages)
        one.enter = lambda number, one=one, known=known: known.append(len(one.done)) or True  # type: ignore[misc]
        one.run()
        assert known == [max(0, number - stages + 1) for number in range(9)]
        tags = [done.slot.tag for done in one.done]
        assert tags == [*range(9)] + [None] * (stages > 1)


def test_a_pipeline_that_ends_early_ends_before_the_same_slot_on_all_stages() -> None:
    """Where the totals of a slot say so: no stage has begun what comes S slots later."""
    for stages in (2, 3, 4):
        lists = []
        for stage in range(stages):
            one = Recorded([Place(True, True)] * 20, stage, stages)
            one.enter = lambda number, one=one: Action("step", 3) not in one.actions  # type: ignore[misc]
            lists.append(one.run())
        assert channels_pass(lists)
        assert {max(action.slot for action in own) for own in lists} == {3 + stages - 1}


def test_the_simulator_s_order_is_that_of_the_actions() -> None:
    """Ends of forwards and backwards, computed from the lists of actions by whoever waits for whom."""
    jobs = [_Job(name, 3) for name in "ab"]
    window = Planner(jobs, 300, lag=3, method="greedy").window(0)
    cost = CostModel(per_token=1.0, head_per_token=0.2, stage_shares=(0.4, 0.3, 0.3))
    times = [[cost.both(microbatch, stage) for microbatch in window.microbatches] for stage in range(3)]
    assert any(microbatch.is_noop for microbatch in window.microbatches)
    forward, backward = end_times(times)
    found = _ends([Place(not m.is_noop, bool(m.completes)) for m in window.microbatches], times)
    for stage in range(3):
        for slot, microbatch in enumerate(window.microbatches):
            if not microbatch.is_noop:
                assert found["forward", stage, slot] == pytest.approx(forward[stage][slot])
                assert found["backward", stage, slot] == pytest.approx(backward[stage][slot])


class _Job:
    def __init__(self, name: str, num_batches: int) -> None:
        self.name, self.num_batches = name, num_batches

    def batch(self, n: int) -> list[tuple[int, int]]:
        return [(4 * n + k, 20 + (7 * n + 5 * k + ord(self.name)) % 40) for k in range(4)]


def _ends(places: list[Place], times: Sequence[Sequence[tuple[float, float]]]) -> dict[tuple[str, int, int], float]:
    lists, ends, clock = of_all(places, len(times)), dict[tuple[str, int, int], float](), [0.0] * len(times)
    at = [0] * len(times)
    while any(at[stage] < len(own) for stage, own in enumerate(lists)):
        for stage, own in enumerate(lists):
            while at[stage] < len(own):
                action = own[at[stage]]
                needs = {
                    "receive hidden": ("forward", stage - 1, action.slot),
                    "receive gradient": ("backward", stage + 1, action.slot),
                }.get(action.kind)
                if needs is not None:
                    if needs not in ends:
                        break
                    clock[stage] = max(clock[stage], ends[needs])
                if action.kind in ("forward", "backward"):
                    clock[stage] += times[stage][action.slot][action.kind == "backward"]
                    ends[action.kind, stage, action.slot] = clock[stage]
                at[stage] += 1
    return ends
