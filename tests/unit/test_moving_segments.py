"""Segments whose boundaries are on the device: the same numbers for any of them, from the same addresses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from group_cases import KINDS, GroupCase, group_is_as_exact, make_case, run_moving
from seeds import SEED, some

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.moving import MovingSegments
from packlora.ops.lora_linear.plan import CHAIN, PLANS, ROUTED, Plan
from packlora.ops.lora_linear.tables import SegmentTables
from packlora.ops.lora_linear.types import Segment
from packlora.plans.case import Case
from packlora.plans.select import PlanChooser
from packlora.plans.space import legal_plans

FUSED = Plan("routed", "fused", "one-pass", "fused")
EPILOGUE = Plan("routed", "epilogue", "one-pass", "routed")
MANY = ["four adapters", "six adapters, siblings, some absent", "DoRA and LoRA, siblings, some absent, biases"]
ONE = [
    "one adapter",
    "dropout",
    "siblings",
    "rank over K",
    "DoRA",
    "DoRA, dropout on the low-rank branch",
    "bias alone",
]
CASES = [
    *((kind, plan, torch.float16) for plan in (ROUTED, FUSED, EPILOGUE) for kind in MANY),
    *((kind, ROUTED, torch.float32) for kind in (*MANY, *ONE)),
    *((kind, FUSED, torch.float16) for kind in ONE),
]


@pytest.mark.parametrize(
    ("kind", "plan", "dtype"),
    some(CASES, 9),
    ids=[f"{kind}-{plan.name}-{dtype}" for kind, plan, dtype in some(CASES, 9)],
)
def test_calls_over_moving_segments_are_as_exact_as_torch(kind: str, plan: Plan, dtype: torch.dtype) -> None:
    """Interpreted, with poisoned buffers; the tables were of other segments before."""

    def case(trial: int) -> GroupCase:
        K, sizes = (50, [37, 20, 66]) if trial % 2 and plan != FUSED else (64, [32, 16, 80])
        return make_case(
            71 + trial, K, sizes[: len(KINDS[kind]["ranks"][0])], with_bias=trial % 4 < 3, seed=SEED + trial, dtype=dtype,
            keep_output=trial % 4 > 1, **KINDS[kind],
        )  # fmt: skip

    group_is_as_exact(case, 2, dtype, plan, SEED, run_moving)


def test_tables_that_are_written_again_are_those_of_the_new_segments_at_the_same_addresses() -> None:
    rng, device, sizes = random.Random(SEED), torch.device("cpu"), (16, 32, 128, 16)
    for _ in range(50):
        T = rng.randint(20, 300)
        cuts = sorted(rng.sample(range(T + 1), 2 * rng.randint(1, 4)))
        owners = rng.sample(range(5), len(cuts) // 2)
        segments = [
            Segment(n, a, b, rng.choice([0, 0.1])) for n, a, b in zip(owners, cuts[::2], cuts[1::2], strict=True)
        ]
        fresh = SegmentTables(segments, T, device, sizes, range(5), 128)
        own = SegmentTables([Segment(0, 0, T)], T, device, sizes, range(5), 128, most=11)
        before = {size: (blocks.data_ptr(), len(blocks)) for size, blocks in own.blocks.items()}
        own.write(segments)
        for size in sizes:
            blocks, known = own.blocks[size], fresh.counts[size]
            assert (blocks.data_ptr(), len(blocks)) == before[size] and own.counts[size] == len(blocks)
            assert torch.equal(blocks[:known], fresh.blocks[size]) and torch.equal(own.ranges[size], fresh.ranges[size])
            assert (blocks[known:] == torch.tensor([-1, T, T, 0])).all()
        assert torch.equal(own.uncut[: len(fresh.uncut)], fresh.uncut) and torch.equal(own.spans, fresh.spans)


def test_plans_that_slice_segments_do_not_compute_segments_that_move() -> None:
    case = make_case(64, 32, [32], [[4], [8]], [0.0, 0.0], False, SEED, torch.float32)
    moving = MovingSegments(64, (0, 1))
    nominal = [Segment(*each) for each in moving.nominal]
    x = case.x.float()
    layers = tuple(type(layer)(type(layer.frozen)(layer.frozen.dense().float()), None, {
        number: type(low)(low.A.float(), low.B.float(), low.scaling) for number, low in layer.adapters.items()
    }) for layer in case.layers)  # fmt: skip
    for _, plan, _ in PLANS:
        if not plan.reads_tables:
            with pytest.raises(ValueError, match="boundaries on the host"):
                lora_group(x, layers, nominal, plan=plan, boundaries=moving)
    known = Case.of_call(x, layers, nominal, moving=True)
    assert CHAIN not in legal_plans(known) and "moving" in known.key
    assert all(plan.reads_tables for plan in legal_plans(known))


def test_segments_that_no_plan_moves_are_refused() -> None:
    case = make_case(64, 32, [32], [[4]], [0.0], False, SEED)
    with pytest.raises(ValueError, match="no plan computes"):
        PlanChooser(torch.device("cpu")).plan_of(case.x, case.layers, [Segment(0, 0, 64)], known=False)


class Copied:
    """Operands of some adapters, all of them copies."""

    def __init__(self, adapters: int) -> None:
        self.sources = [torch.randn(3, 4) for _ in range(adapters)]
        self.places = [torch.full((3, 4), torch.nan, dtype=torch.float16) for _ in range(adapters)]

    def refresh(self) -> None:
        for place, source in zip(self.places, self.sources, strict=True):
            place.copy_(source)

    def refresh_scales(self) -> None:
        pass

    def copies(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        return list(zip(range(len(self.sources)), self.places, self.sources, strict=True))

    def current(self) -> list[int]:
        """Adapters whose copies are those of the present sources."""
        pairs = zip(self.places, self.sources, strict=True)
        return [at for at, (place, source) in enumerate(pairs) if torch.equal(place, source.half())]


def test_recorded_copies_of_all_adapters_are_replayed_where_enough_of_those_with_tokens_have_changed() -> None:
    own, moving, replays = Copied(8), MovingSegments(16, range(8)), list[int]()
    moving.ready(own)

    def record(function: Callable[[], None]) -> Callable[[], None]:
        return lambda: (replays.append(1), function())[1]

    def changed(*adapters: int) -> list[int]:
        """Current copies after a refresh, of whose tokens adapters 0 to 5 own some."""
        for at in adapters:
            own.sources[at].add_(1)
        moving.write([(at, 2 * at, 2 * at + 2) for at in range(6)])
        moving.refresh()
        return own.current()

    everyone = list(range(8))
    assert changed(*everyone) == everyone[:6] and not replays, "nothing is recorded"
    moving.record(record)
    assert changed(0, 7) == everyone[:6] and not replays, "one of eight is due"
    assert changed(1, 2) == everyone and len(replays) == 1, "and what is due without tokens is copied beside"
    assert changed() == everyone and len(replays) == 1
    moving.ready(more := Copied(1))
    assert changed(*everyone) == everyone[:6] and len(replays) == 1, "what was recorded lacks the new operands"
    more.sources[0].add_(1)
    moving.record(record)
    assert changed(3) == everyone and more.current() == [0] and len(replays) == 2, "adapters 0 and 3 are due"


def test_copies_that_fail_are_made_again() -> None:
    own, moving = Copied(2), MovingSegments(16, range(2))
    moving.ready(own)
    failing = [True]

    def replay() -> None:
        if failing.pop():
            raise torch.OutOfMemoryError("once")
        own.refresh()

    moving.record(lambda function: replay)
    own.sources[1].add_(1)
    with pytest.raises(torch.OutOfMemoryError):
        moving.refresh()
    assert own.current() == [0]
    failing.append(False)
    moving.refresh()
    assert own.current() == [0, 1]
