"""Costs, layers per stage, grouping and timelines, against figures worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.planning import check_causality, cost_of_model
from packlora.pipeline.estimate import balance
from packlora.pipeline.rules import keeps_apart
from packlora.pipeline.timeline import simulate
from packlora.schedule.cost import CostModel
from packlora.schedule.rules import JobShape, pair_up, rules_of
from packlora.schedule.types import NOOP, Microbatch, Placed, ScheduleError


def microbatch(*lengths: int, job: str = "a", batch: int = 0, ends: bool = True) -> Microbatch:
    placed = tuple(Placed(job, batch, number, length) for number, length in enumerate(lengths))
    return Microbatch(placed, ((job, batch),) if ends else ())


def test_a_microbatch_costs_tokens_squares_and_a_fixed_part_and_the_last_stage_the_head() -> None:
    cost = CostModel(2.0, 0.5, 10.0, 3.0, 1.5, (0.75, 0.25), head_backward_ratio=2.0)
    body = 2.0 * 6 + 0.5 * (16 + 4) + 10
    assert cost.both(microbatch(4, 2), 0) == pytest.approx((0.75 * body, 1.5 * 0.75 * body))
    assert cost.both(microbatch(4, 2), 1) == pytest.approx((0.25 * body + 3 * 6, 1.5 * 0.25 * body + 2.0 * 18))
    assert cost.both(NOOP, 0) == cost.both(NOOP, 1) == (0, 0)
    with pytest.raises(ScheduleError, match=r"stage_shares \(0.5, 0.4\) must be 0 or more and sum to 1"):
        CostModel(stage_shares=(0.5, 0.4))


def test_layers_are_cut_so_that_the_slowest_stage_is_as_fast_as_can_be() -> None:
    draw = random.Random(0)
    for _ in range(300):
        stages = draw.randint(2, 4)
        layers = draw.randint(stages, 12)
        head = draw.choice([0.0, 0.8, 1.23, 2.4, 5.0])
        counts = balance(stages, layers, head)
        assert sum(counts) == layers and min(counts) >= 1
        slowest = min(
            max(*cut[:-1], cut[-1] + head)
            for cut in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(cut) == layers
        )
        assert max(*counts[:-1], counts[-1] + head) == slowest
    assert balance(1, 7, 3.0) == (7,)
    for _ in range(100):
        stages, costs, head = draw.randint(1, 4), [draw.choice([0.2, 0.5, 1.3, 3.0]) for _ in range(7)], draw.random()
        counts = balance(stages, 7, head, costs)
        cuts = [cut for cut in itertools.product(range(1, 8), repeat=stages) if sum(cut) == 7]
        times = {
            cut: [sum(costs[end - n : end]) for n, end in zip(cut, itertools.accumulate(cut), strict=True)]
            for cut in cuts
        }
        slowest = {cut: max([*own[:-1], own[-1] + head]) for cut, own in times.items()}
        assert slowest[counts] == pytest.approx(min(slowest.values())), (costs, head, counts)
    with pytest.raises(ScheduleError, match="3 layers cannot be cut into 4 stages"):
        balance(4, 3)


def test_the_model_of_a_70b_decoder_has_its_floating_point_operations() -> None:
    cost = cost_of_model(
        layers=80,
        hidden=8192,
        intermediate=28672,
        vocabulary=128256,
        key_value_width=1024,
        stages=4,
        checkpointing=True,
    )
    per_layer = 8192 * (8192 * 2 + 1024 * 2 + 3 * 28672)
    assert cost.per_token == 2 * 80 * per_layer
    assert cost.head_per_token == 2 * 8192 * 128256
    assert cost.backward_ratio == 2.0
    assert cost.stage_shares == (0.25, 0.25, 0.25, 0.25)  # the head is less than one layer with its recomputation
    heavier = cost_of_model(layers=32, hidden=4096, intermediate=14336, vocabulary=128256, key_value_width=1024,
                                   stages=4)  # fmt: skip
    assert heavier.stage_shares[-1] < 0.25


def test_pairs_are_head_with_tail_and_every_number_of_jobs_is_dealt_out() -> None:
    shapes = [JobShape(mean, 10.0, 0.0) for mean in (5, 1, 9, 3, 7, 2)]
    assert pair_up(shapes, 3) == [[1, 2], [4, 5], [0, 3]]
    for jobs in range(1, 12):
        shapes = [JobShape(float(n), 1.0, 0.0) for n in range(jobs)]
        for groups in range(1, jobs + 1):
            assert sorted(job for group in pair_up(shapes, groups) for job in group) == list(range(jobs))


def test_groups_must_fill_the_slots_between_two_batches_of_any_one_of_them() -> None:
    shapes = [JobShape(100.0, 400.0, 0.0)] * 4
    assert keeps_apart([[0, 1], [2, 3]], shapes, 400, 3)  # two slots of the others, two needed
    assert not keeps_apart([[0, 1], [2, 3]], shapes, 400, 4)
    assert keeps_apart([[0], [1], [2], [3]], shapes, 400, 4)
    assert not keeps_apart([[0], [1], [2], [3]], [JobShape(100.0, 400.0, 100.0)] * 4, 400, 4)
    assert rules_of(3, None).groups(shapes, 400) == [[0, 3], [1, 2]]
    assert rules_of(4, None).groups(shapes[:1], 400) == [[0]]


def test_a_pipeline_of_equal_microbatches_has_the_bubble_of_1f1b() -> None:
    cost = CostModel(1.0, stage_shares=(0.25,) * 4)
    plan = [microbatch(8, batch=0, ends=False) for _ in range(12)]
    timeline = simulate(plan, cost)
    assert timeline.makespan == pytest.approx((12 + 3) * 4.0)  # forward and backward of 2 each
    assert timeline.bubble == pytest.approx(3 / 15)
    assert timeline.busy == pytest.approx((48.0,) * 4)
    assert simulate([], cost).makespan == 0


def test_causality_is_refused_where_a_batch_comes_too_early() -> None:
    cost = CostModel(1.0, stage_shares=(0.5, 0.5))
    early = [microbatch(4, batch=0), microbatch(4, batch=1)]
    with pytest.raises(ScheduleError, match="job 'a': on stage 0 the forward of batch 1 begins at 2, before the step"):
        check_causality(simulate(early, cost), early, 2)
    spaced = [early[0], NOOP, early[1]]
    check_causality(simulate(spaced, cost), spaced, 2)


def test_on_one_device_microbatches_take_to_the_bit_what_the_simulator_says() -> None:
    draw = random.Random(3)
    for _ in range(50):
        cost = CostModel(draw.random(), 0.01 * draw.random(), draw.random(), draw.random(), 1 + draw.random())
        plan = [
            microbatch(*(draw.randint(1, 99) for _ in range(draw.randint(0, 4)))) for _ in range(draw.randint(0, 9))
        ]
        assert cost.makespan(plan) == simulate(plan, cost).makespan
