"""The order of actions of a pipeline's stages: what each does, that no order of messages waits for itself, and that steps come
in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from packlora.parallel.pipeline import Action, Kind, Slot, actions
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.simulate import end_times

UP = {Kind.SEND_HIDDEN: Kind.RECEIVE_HIDDEN, Kind.SEND_TOTALS: Kind.RECEIVE_TOTALS}
DOWN = {Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT, Kind.SEND_SUMS: Kind.RECEIVE_SUMS}


def entering(slots: Sequence[Slot]) -> Callable[[int], Slot | None]:
    return lambda number: slots[number] if number < len(slots) else None


def of_all(slots: Sequence[Slot], stages: int) -> list[list[Action]]:
    return [list(actions(stage, stages, entering(slots))) for stage in range(stages)]


def random_slots(seed: int) -> tuple[list[Slot], int]:
    """No-ops, slots in which jobs step, and pipelines longer than what passes through them."""
    draw = random.Random(seed)
    slots = [Slot(runs := draw.random() < 0.8, runs and draw.random() < 0.5) for _ in range(draw.randint(0, 9))]
    return slots, draw.randint(2, 5)


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
    slots = [Slot(True, False), Slot(True, True), Slot(False, False), Slot(True, True)]
    told = [" ".join(f"{action.kind.value}:{action.slot}" for action in own) for own in of_all(slots, 2)]
    assert told[0] == (
        "forward:0 send hidden states:0 forward:1 send hidden states:1 receive gradient:0 backward:0 no-op:2 "
        "receive gradient:1 backward:1 receive sums:1 add sums:1 send totals:1 step:1 forward:3 send hidden states:3 "
        "receive gradient:3 backward:3 receive sums:3 add sums:3 send totals:3 step:3"
    )
    assert told[1] == (
        "receive hidden states:0 forward:0 backward:0 send gradient:0 receive hidden states:1 forward:1 backward:1 "
        "send gradient:1 add sums:1 send sums:1 no-op:2 receive totals:1 step:1 receive hidden states:3 forward:3 backward:3 "
        "send gradient:3 add sums:3 send sums:3 receive totals:3 step:3"
    )


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 7), (3, 5), (4, 9)])
def test_without_steps_it_is_the_order_of_torch_s_1f1b(stages: int, count: int) -> None:
    """What torch's own schedule says of equal microbatches: forwards and backwards of each stage, which are both in order."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order = getattr(schedules.Schedule1F1B, "_get_pipeline_order", None)
    if order is None:
        pytest.skip("this version of torch does not tell the order of its schedule")
    theirs = order(SimpleNamespace(_num_stages=stages, _n_microbatches=count))
    names = {"FORWARD": Kind.FORWARD, "FULL_BACKWARD": Kind.BACKWARD}
    for stage, own in enumerate(of_all([Slot(True, False)] * count, stages)):
        computed = [action for action in own if action.kind in names.values()]
        told = [one.computation_type.name for one in theirs[stage] if one is not None]
        assert [action.kind for action in computed] == [names[kind] for kind in told if kind in names]
        for kind in names.values():
            assert [action.slot for action in computed if action.kind is kind] == list(range(count))


def test_no_order_of_messages_waits_for_itself() -> None:
    for seed in range(300):
        slots, stages = random_slots(seed)
        assert channels_pass(of_all(slots, stages)), seed
    slots = [Slot(True, True)] * 5
    lists = of_all(slots, 3)
    at = [number for number, action in enumerate(lists[1]) if action.kind in (Kind.SEND_GRADIENT, Kind.SEND_SUMS)]
    lists[1][at[0]], lists[1][at[1]] = lists[1][at[1]], lists[1][at[0]]
    with pytest.raises(AssertionError, match="another message comes first"):
        channels_pass(lists)


def test_few_microbatches_are_inside_and_steps_come_before_the_slot_in_which_the_next_batch_may_be() -> None:
    for seed in range(300):
        slots, stages = random_slots(seed)
        for stage, own in enumerate(of_all(slots, stages)):
            inside, entered = 0, -1
            for action in own:
                if action.kind in (Kind.FORWARD, Kind.NOOP):
                    entered = action.slot
                inside += (action.kind == Kind.FORWARD) - (action.kind == Kind.BACKWARD)
                assert inside <= stages - stage
                assert action.kind != Kind.STEP or entered < action.slot + stages
            steps = [action.slot for action in own if action.kind == Kind.STEP]
            assert steps == [number for number, slot in enumerate(slots) if slot.steps]
            assert inside == 0


def test_a_pipeline_that_ends_early_ends_before_the_same_slot_on_all_stages() -> None:
    """Where the totals of a slot say so: no stage has begun what comes S slots later."""
    slots = [Slot(True, True)] * 20
    for stages in (2, 3, 4):
        lists = []
        for stage in range(stages):
            stopped: list[int] = []
            own = []
            for action in actions(stage, stages, lambda n, stopped=stopped: None if stopped else slots[n]):  # type: ignore[misc]
                own.append(action)
                if action == Action(Kind.STEP, 3):
                    stopped.append(3)
            lists.append(own)
        assert channels_pass(lists)
        assert {max(action.slot for action in own) for own in lists} == {3 + stages - 1}


def test_the_simulator_s_order_is_that_of_the_actions() -> None:
    """Ends of forwards and backwards, computed from the lists of actions by whoever waits for whom."""
    jobs = [_Job(name, 3) for name in "ab"]
    window = Planner(jobs, 300, stages=3, method="greedy").window(0)
    cost = CostModel(per_token=1.0, head_per_token=0.2, stage_shares=(0.4, 0.3, 0.3))
    times = [[cost.both(microbatch, stage) for microbatch in window.microbatches] for stage in range(3)]
    assert any(microbatch.is_noop for microbatch in window.microbatches)
    forward, backward = end_times(times)
    found = _ends([Slot(not m.is_noop, bool(m.completes)) for m in window.microbatches], times)
    for stage in range(3):
        for slot, microbatch in enumerate(window.microbatches):
            if not microbatch.is_noop:
                assert found[Kind.FORWARD, stage, slot] == pytest.approx(forward[stage][slot])
                assert found[Kind.BACKWARD, stage, slot] == pytest.approx(backward[stage][slot])


class _Job:
    def __init__(self, name: str, num_batches: int) -> None:
        self.name, self.num_batches = name, num_batches

    def batch(self, n: int) -> list[tuple[int, int]]:
        return [(4 * n + k, 20 + (7 * n + 5 * k + ord(self.name)) % 40) for k in range(4)]


def _ends(slots: list[Slot], times: Sequence[Sequence[tuple[float, float]]]) -> dict[tuple[Kind, int, int], float]:
    lists, ends, clock = of_all(slots, len(times)), dict[tuple[Kind, int, int], float](), [0.0] * len(times)
    at = [0] * len(times)
    while any(at[stage] < len(own) for stage, own in enumerate(lists)):
        for stage, own in enumerate(lists):
            while at[stage] < len(own):
                action = own[at[stage]]
                needs = {
                    Kind.RECEIVE_HIDDEN: (Kind.FORWARD, stage - 1, action.slot),
                    Kind.RECEIVE_GRADIENT: (Kind.BACKWARD, stage + 1, action.slot),
                }.get(action.kind)
                if needs is not None:
                    if needs not in ends:
                        break
                    clock[stage] = max(clock[stage], ends[needs])
                if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    clock[stage] += times[stage][action.slot][action.kind == Kind.BACKWARD]
                    ends[action.kind, stage, action.slot] = clock[stage]
                at[stage] += 1
    return ends
