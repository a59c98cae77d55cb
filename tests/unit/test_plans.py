"""Plans: what they cost against RunLoRA's table, which are legal, what is measured, remembered and chosen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeds import SEED
from test_products import flops_of
from torch.utils.flop_counter import FlopCounterMode

from packlora.config import Run
from packlora.ops.lora_linear.plan import CHAIN, PLANS, ROUTED, RUNLORA, Plan, named_plan, why_not
from packlora.plans import select
from packlora.plans.cache import PlanCache, Record, fastest
from packlora.plans.case import Case, token_bucket
from packlora.plans.cost import HIDDEN, Machine, flops, machine, seconds, steps
from packlora.plans.select import PlanChooser
from packlora.plans.space import carried_out, legal_plans
from packlora.tune import measure as measuring
from packlora.tune.measure import FAR, candidates, group_maker, measure, summarised, with_earlier
from packlora.tune.plans import cases_of_run, standard_cases, tune

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of a GPU are costed as where the triton package is installed, whether or not it is here."""
    monkeypatch.setattr("packlora.ops.gpu.HAS_TRITON", True)


def one(T: int, K: int, N: int, r: int, device: str = "cpu", dtype: str = "float32", **changes: Any) -> Case:
    """One adapter without dropout on one layer, T as it is."""
    return dataclasses.replace(Case(device, dtype, T, K, (N,), ((r,),), (False,), (False,)), **changes)


def sizes(rng: random.Random, most: int = 9000) -> tuple[int, int, int, int]:
    """T, i, o and r, r at most the smaller of i and o."""
    T, i, o = rng.randint(1, most), rng.randint(2, 6000), rng.randint(2, 6000)
    return T, i, o, rng.randint(1, min(i, o))


# --- FLOPs -------------------------------------------------------------------------------------------------------------

FORWARD_TABLE: dict[str, Callable[..., int]] = {  # from the paper, with its letters
    "forward1": lambda T, i, o, r: 2 * T * (i * o + i * r + r * o),
    "forward2": lambda T, i, o, r: 2 * (i * o * r + T * i * o),
    "forward3": lambda T, i, o, r: 2 * T * (i * o + i * r + r * o),
    "forward4": lambda T, i, o, r: 2 * (i * o * r + T * i * o),
}
BACKWARD_TABLE: dict[str, Callable[..., int]] = {
    "b1": lambda T, i, o, r: 2 * T * (2 * o * r + 3 * i * r + o * i),
    "b2": lambda T, i, o, r: 2 * T * (o * r + 2 * i * r + 2 * i * o) + 2 * i * o * r,
    "b3": lambda T, i, o, r: 2 * T * (2 * i * o + o * r + i * r) + 4 * i * o * r,
    "b4": lambda T, i, o, r: 2 * (2 * T * i * o + 3 * i * o * r),
    "b5": lambda T, i, o, r: 2 * T * (2 * o * r + 2 * i * r + o * i) + 2 * i * o * r,
    "b6": lambda T, i, o, r: 2 * T * (2 * o * r + 2 * i * r + 2 * o * i) + 2 * i * o * r,
    "b7": lambda T, i, o, r: 2 * T * (o * r + i * r + 2 * o * i) + 4 * i * o * r,
    "b8": lambda T, i, o, r: 2 * T * (o * r + i * r + 2 * o * i) + 4 * i * o * r,
}


GRAPHS = {**{name: {"up": "after"} for name in ("forward1", "forward3")},
          **{name: {"up": "merged"} for name in ("forward2", "forward4")}}  # fmt: skip
"""forward3 and forward4 differ from the first two in the order of steps alone."""
RETURNS: dict[str, dict[str, Any]] = {
    "b1": {}, "b2": {"dB": "xd"}, "b3": {"dA": "xd", "dB": "xd"}, "b4": {"dA": "xd", "dB": "xd", "dx": "merged"},
    "b5": {"dx": "merged"}, "b6": {"dA": "xd"}, "b7": {"dA": "xd", "dx": "merged"}, "b8": {"dB": "xd", "dx": "merged"},
}  # fmt: skip


def runlora(forward: str, backward: str) -> Plan:
    """Any graph of RunLoRA's code, S not kept."""
    return Plan(keep_s=False, **GRAPHS[forward], **RETURNS[backward])


def bytes_moved(plan: Plan, case: Case, *phases: str) -> int:
    """Of forward and backward, or of one of them."""
    return sum(step.bytes for step in steps(plan, case) if step.phase in (phases or ("forward", "backward")))


@pytest.mark.parametrize(("forward", "backward"), itertools.product(FORWARD_TABLE, BACKWARD_TABLE))
def test_flops_are_those_of_runloras_table(forward: str, backward: str) -> None:
    rng = random.Random(SEED)
    plan = runlora(forward, backward)
    for _ in range(20):
        T, i, o, r = sizes(rng)
        case = one(T, i, o, r)
        assert flops_of(plan, case, "forward") == FORWARD_TABLE[forward](T, i, o, r), (T, i, o, r)
        assert flops_of(plan, case, "backward") == BACKWARD_TABLE[backward](T, i, o, r), (T, i, o, r)
        assert flops(plan, case) == FORWARD_TABLE[forward](T, i, o, r) + BACKWARD_TABLE[backward](T, i, o, r)


def test_the_plans_of_the_paper_are_its_graphs_by_its_names() -> None:
    names = itertools.product(("forward1", "forward2"), ("b1", "b2", "b3", "b4", "b5"))
    want = {f"{forward}-{backward.replace('b', 'backward')}": runlora(forward, backward) for forward, backward in names}
    assert {named.name: named.plan for named in RUNLORA} == want
    assert named_plan("forward2-backward5") == runlora("forward2", "b5")
    assert all(("lossy" in named.use) == named.plan.lossy for named in PLANS)
    with pytest.raises(ValueError, match="no plan is named 'b9'; there are chain, "):
        named_plan("b9")


def test_bytes_of_the_plain_chain_by_hand() -> None:
    """bfloat16, no dropout: every product reads its operands and writes its result; y and dx are read again to be added to."""
    T, K, N, r = 64, 32, 48, 4
    forward = (T * K + K * N + T * N) + (T * K + K * r + T * r) + (T * r + r * N + 2 * T * N)
    dS_dB = 2 * (T * N + N * r + T * r)
    backward = dS_dB + (T * r + T * K + r * K) + (T * N + N * K + T * K) + (T * r + r * K + 2 * T * K)
    case = one(T, K, N, r, dtype="bfloat16")
    assert bytes_moved(CHAIN, case, "forward") == 2 * forward
    assert bytes_moved(CHAIN, case, "backward") == 2 * backward
    assert bytes_moved(CHAIN, dataclasses.replace(case, dtype="float32")) == 4 * (forward + backward)


def test_of_plans_with_as_many_launches_the_one_with_less_work_is_taken_where_launches_take_longest() -> None:
    roof = Machine(flops=1e15, bandwidth=4e12, launch=1e-4)
    case = dataclasses.replace(
        one(4096, 1024, 3072, 16, "cuda", "bfloat16"), Ns=(3072, 3072), ranks=((16, 16),), biases=(False,) * 2
    )
    by_launches = sorted(legal_plans(case), key=lambda plan: _launches(plan, case))
    fewest = [plan for plan in by_launches if _launches(plan, case) == _launches(by_launches[0], case)]
    work = {plan: seconds(plan, dataclasses.replace(case, moving=True), roof) for plan in fewest}
    assert len(fewest) > 1 and max(work.values()) < _launches(fewest[0], case) * roof.launch
    assert min(legal_plans(case), key=lambda plan: seconds(plan, case, roof)) == min(fewest, key=work.__getitem__)


def _launches(plan: Plan, case: Case) -> int:
    return sum(step.launches for step in steps(plan, case))


def test_the_roofline_takes_the_longer_of_arithmetic_and_traffic_and_adds_launches() -> None:
    case = one(64, 32, 48, 4)
    parts, roof = steps(CHAIN, case), Machine(flops=1e9, bandwidth=2e8, launch=1e-5)
    sides = [(step.flops / 1e9, step.bytes / 2e8) for step in parts]
    want = sum(max(side) + HIDDEN * min(side) + 1e-5 for side in sides)
    assert seconds(CHAIN, case, roof) == pytest.approx(want)
    assert {step.flops / 1e9 > step.bytes / 2e8 for step in parts} == {True, False}  # both sides were taken


# --- which are legal ---------------------------------------------------------------------------------------------------


def test_names_of_the_list_are_unique_and_its_parts_differ() -> None:
    for every in (
        [named.name for named in PLANS],
        [named.plan for named in PLANS],
        [named.plan.name for named in PLANS],
    ):
        assert len(set(every)) == len(PLANS)
    assert PLANS[0].plan == CHAIN


def test_in_16_bits_nothing_is_added_to_a_rounded_product() -> None:
    """There `after` is carried out as `before`, so that one plan stands for both."""
    for dtype, both in (("bfloat16", False), ("float16", False), ("float32", True)):
        case = one(8, 8, 8, 2, "cpu", dtype)
        before = Plan(up="before", dx="before")
        assert (before in legal_plans(case)) == both
        assert (steps(CHAIN, case) == steps(before, case)) != both


def test_the_chain_is_first_for_every_case_and_no_two_plans_do_the_same() -> None:
    for device, drop, covered, composed, x in itertools.product(("cpu", "cuda"), *[(False, True)] * 4):
        changes: dict[str, Any] = {"drops": (drop,), "covered": covered, "composed": composed, "needs": (x, True, True)}
        case = one(8, 8, 8, 2, device, **changes)
        plans = legal_plans(case)
        assert plans[0] == CHAIN and set(plans) <= {named.plan for named in PLANS}
        assert len({carried_out(plan, case) for plan in plans}) == len(plans)
        assert not any(plan.lossy for plan in plans)


def why_left_out(plan: Plan, case: Case) -> str | None:
    reason = why_not(plan, case.situation())
    assert reason is None or plan not in legal_plans(case)
    return reason


@pytest.mark.parametrize(
    ("plan", "changes", "asked", "word"),
    [
        (Plan(dx="merged"), {}, False, "not asked for"),
        (Plan(dx="merged"), {"drops": (True,)}, True, "dropout"),
        (Plan(up="merged", keep_s=False), {"drops": (True,)}, True, "dropout"),
        (Plan(dx="merged"), {"covered": False}, True, "one adapter"),
        (Plan(dx="merged"), {"ranks": ((2,), (2,)), "drops": (False, False)}, True, "one adapter"),
        (Plan(dA="xd"), {"ranks": ((2,), (2,)), "drops": (False, False)}, True, "one adapter"),
        (Plan(dx="before"), {"composed": True, "base_dropped": True}, False, "DoRA"),
        (Plan(dA="xd"), {"composed": True}, True, "plain LoRA"),
        (ROUTED, {"ranks": (), "drops": ()}, True, "no adapter"),
        (ROUTED, {"device": "cpu"}, False, "Triton"),
        (ROUTED, {"dtype": "float64"}, True, "not for float64"),
        (Plan(up="fused"), {}, False, "TMA"),
        (Plan(dx="fused"), {"K": 64, "Ns": (64,)}, False, "TMA"),
        (Plan("routed", dx="merged"), {}, True, "plain products"),
        (dataclasses.replace(ROUTED, dA="xd"), {}, True, "plain products"),
        (Plan(up="merged"), {}, True, "not computed"),
        (Plan(dx="before"), {"dtype": "float32"}, False, "round more"),
        (Plan("routed", "epilogue", dx="before"), {}, False, "in 16 bits"),
    ],
)
def test_plans_that_do_not_compute_a_case_say_why(plan: Plan, changes: dict[str, Any], asked: bool, word: str) -> None:
    """asked: also where the plan was asked for, wherever it is to run."""
    case = dataclasses.replace(one(8, 8, 8, 2, "cuda", "bfloat16"), **changes)
    assert word in (why_left_out(plan, case) or "")
    assert (why_not(plan, case.situation()._replace(target=None)) is not None) == asked


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Lets this machine have a GPU of a compute capability."""

    def make(*found: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("packlora.ops.gpu.capability", lambda device: found)

    return make


def test_fused_plans_are_for_16_bits_and_divisible_sizes_on_a_gpu_with_tma(gpu_of: Callable[..., None]) -> None:
    plan, case = named_plan("fused"), one(64, 32, 48, 4, "cuda", "bfloat16", drops=(True,))
    assert "TMA" in (why_left_out(plan, case) or "")
    gpu_of(12, 0)
    assert "TMA" in (why_left_out(plan, case) or "")
    gpu_of(9, 0)
    assert why_left_out(plan, case) is None
    assert why_left_out(plan, dataclasses.replace(case, ranks=((4,), (8,)), drops=(True, False), covered=False)) is None
    for changes in ({"dtype": "float32"}, {"K": 40}, {"Ns": (40,)}):
        assert "TMA" in (why_left_out(plan, dataclasses.replace(case, **changes)) or "")  # type: ignore[arg-type]
    case = dataclasses.replace(case, Ns=(48, 96), ranks=((4, 2),), biases=(False, False))
    assert flops(plan, case) == flops(CHAIN, case)
    assert bytes_moved(plan, case) < bytes_moved(ROUTED, case)


def test_kernels_are_for_gpus_that_have_them_and_for_where_triton_is(
    gpu_of: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = one(64, 32, 48, 4, "cuda", "float16", composed=True)
    for found, word in (((7, 5), "8.0 or newer, this GPU has 7.5"), ((8, 0), None), ((9, 0), None), ((12, 0), None)):
        gpu_of(*found)
        reason = why_left_out(ROUTED, case)
        assert reason is None if word is None else word in (reason or "")
    monkeypatch.setattr("packlora.ops.gpu.HAS_TRITON", False)
    assert "not installed" in (why_left_out(ROUTED, case) or "")


def test_a_pass_over_a_rounded_product_is_for_composed_layers_in_16_bits() -> None:
    plan, case = named_plan("epilogue-mm"), one(64, 32, 48, 4, "cuda", "bfloat16")
    assert why_left_out(plan, case) is not None
    assert why_left_out(plan, dataclasses.replace(case, composed=True)) is None


def test_where_products_are_rounded_before_they_are_added_plain_outputs_are_in_float32(
    gpu_of: Callable[..., None],
) -> None:
    case = one(64, 32, 48, 4, "cuda", "bfloat16")
    before, before_routed = bytes_moved(CHAIN, case), bytes_moved(ROUTED, case)
    for found, first in (((8, 0), False), ((9, 0), True), ((10, 0), True)):
        gpu_of(*found)
        assert why_left_out(ROUTED, case) is None
        assert why_left_out(ROUTED, dataclasses.replace(case, composed=True)) is None
        assert (why_left_out(named_plan("fused-up"), case) is None) == first
        for plan, fewer in ((CHAIN, before), (ROUTED, before_routed)):
            assert (bytes_moved(plan, case) > fewer) == first


def test_everything_of_runlora_computes_what_runlora_is_for_and_nothing_lossy_is_chosen_unasked() -> None:
    case = one(8, 8, 8, 2)
    asked = case.situation()._replace(target=None)
    assert all(why_not(named.plan, asked) is None for named in RUNLORA)
    assert {named.plan for named in RUNLORA[1:] if not named.plan.lossy} <= set(legal_plans(case))


# --- cases -------------------------------------------------------------------------------------------------------------


def test_buckets_are_powers_of_two_and_one_and_a_half_times_them() -> None:
    assert [token_bucket(T) for T in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 25)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        12,
        16,
        24,
        32,
    ]
    for T in range(1, 3000):
        bucket = token_bucket(T)
        assert T <= bucket <= max(1.5 * T, 1) and token_bucket(bucket) == bucket
        assert (bucket & (bucket - 1)) == 0 or (bucket % 3 == 0 and (bucket // 3 & (bucket // 3 - 1)) == 0)
    with pytest.raises(ValueError, match="got 0"):
        token_bucket(0)


def test_normal_form_of_a_case() -> None:
    def of(ranks: Any, drops: Any, **rest: Any) -> Case:
        return Case.of(CUDA, torch.bfloat16, 2000, 64, [32, 16], ranks, drops, [True, False], **rest)

    case = of([[4, 0], [8, 8]], [True, False])
    assert case == of([[8, 8], [4, 0]], [False, True])  # order of the adapters
    assert case.tokens == 2048 and not case.single
    assert case.key == "cuda bfloat16 T2048 K64 N32+16 r8+8/4+0 drop0/1 grads:xAB bias1+0"
    alone = of([[4, 4], [0, 0]], [False, False])
    assert (
        alone.ranks == ((4, 4),) and not alone.covered and not alone.single
    )  # tokens of the second one have no adapter
    assert of([[4, 4]], [False]).single
    every = [
        of([[4, 4]], [False], **rest)
        for rest in ({}, {"covered": False}, {"needs": (False, True, True)}, {"composed": True})
    ] + [of([[4, 4]], [True]), of([[4, 2]], [False]), case, of([], [])]
    assert len({c.key for c in every}) == len(every)
    with pytest.raises(ValueError, match="2 layers"):
        of([[4]], [False])


# --- measuring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        one(12, 8, 6, 2),
        one(12, 8, 6, 2, needs=(False, True, True)),
        Case("cpu", "float32", 16, 8, (6, 4), ((2, 0), (3, 3)), (True, False), (True, False), covered=False),
        Case("cpu", "float64", 2, 8, (6,), ((2,), (3,), (1,)), (False, False, False), (False,)),
    ],
    ids=lambda case: case.key,
)
def test_every_candidate_of_a_case_can_be_measured(case: Case) -> None:
    plans = candidates(case, CPU)
    assert plans[0] == CHAIN and len(plans) > 1
    out = measure(case, plans, CPU, budget_s=0.02, rounds=(2, 3))
    assert not out.failed and set(out.ms) == {plan.name for plan in plans} and min(out.ms.values()) > 0


def test_a_plan_is_only_faster_if_it_is_so_round_by_round() -> None:
    """The machine slows down by 10 in the middle; noise hits each plan in its own rounds; one plan is 5 % faster throughout."""
    rng = random.Random(SEED)
    drift = [1.0] * 10 + [10.0] * 11
    jumpy = [rng.choice((1.0, 60.0)) for _ in range(20)] + [1.0]
    times = summarised({CHAIN.name: drift, "steady": [0.95 * ms for ms in drift], "same": drift})
    assert times == {CHAIN.name: 10.0, "steady": 9.5, "same": 10.0}
    mirrored = [61.0 - ms for ms in jumpy]  # slow where the chain is fast
    assert summarised({CHAIN.name: jumpy, "other": mirrored})["other"] >= statistics.median(jumpy)
    slower = summarised({CHAIN.name: [1.0] * 9, "slow": [1.3] * 9})
    assert slower == {CHAIN.name: 1.0, "slow": 1.3}


def counted_in_the_group(case: Case, plan: Plan) -> int:
    """FLOPs of one forward and backward by lora_group, as torch counts them."""

    def in_place(out: Any, a: Any, b: Any, **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    step = group_maker(CPU)(case, plan)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        step()
    return int(counter.get_total_flops())


SEVERAL = Case("cpu", "float32", 18, 8, (6, 4), ((2, 0), (3, 3)), (True, False), (True, False), covered=False)


@pytest.mark.parametrize("case", [one(12, 8, 6, 2), SEVERAL], ids=lambda case: case.key)
def test_the_group_runs_the_products_that_its_plan_costs(case: Case) -> None:
    plans = (CHAIN, Plan(up="before"), Plan(dx="before"), Plan(up="before", dx="before"))
    for plan in plans:
        assert counted_in_the_group(case, plan) == flops(plan, case), plan.name


def test_the_group_runs_the_other_associations_of_one_adapter() -> None:
    for case in (one(12, 8, 6, 2), Case("cpu", "float32", 12, 8, (6, 4), ((2, 0),), (False,), (True, False))):
        for _, plan, _ in RUNLORA:
            assert counted_in_the_group(case, plan) == flops(plan, case), plan.name


def test_random_operands_are_those_of_the_case() -> None:
    case = Case(
        "cpu", "bfloat16", 9, 8, (6, 4), ((2, 0), (3, 3)), (True, False), (True, False), False, (True, True, False)
    )
    operands = measuring._Operands(case, CPU)
    assert [(segment.adapter, segment.start, segment.stop, segment.dropout > 0) for segment in operands.segments] == [
        (0, 0, 3, True), (1, 3, 6, False),
    ]  # fmt: skip
    assert operands.x_TK.shape == (9, 8) and operands.x_TK.dtype == torch.bfloat16
    assert [sorted(layer.adapters) for layer in operands.layers] == [[0, 1], [1]]
    assert [layer.bias is not None for layer in operands.layers] == [True, False]
    low = operands.layers[0].adapters[1]
    assert low.A.shape == (3, 8) and low.B.shape == (6, 3) and low.A.dtype == torch.float32
    assert low.A.requires_grad and not low.B.requires_grad and low.B.abs().sum() > 0


def test_candidates_leave_out_what_is_only_slower() -> None:
    case, roof = one(4096, 512, 512, 8, "cuda"), Machine(flops=1e12, bandwidth=1e12, launch=1e-6)
    legal = legal_plans(case)
    assert why_not(Plan(keep_s=False), case.situation()) is None and Plan(keep_s=False) not in legal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packlora.tune.measure.machine", lambda *_: roof)
        plans, few = candidates(case, CPU, limit=99), candidates(case, CPU, limit=4)
    estimated = {plan: seconds(plan, case, roof) for plan in legal}
    near = {plan for plan in legal if estimated[plan] <= FAR * min(estimated.values())}
    fewest = min(flops(plan, case) for plan in legal)
    assert plans[:2] == (CHAIN, ROUTED) and flops(plans[2], case) == fewest
    assert set(plans) == {*plans[:3], *near} and len(near) < len(legal)
    assert few == plans[:4]


# --- the cache ---------------------------------------------------------------------------------------------------------


def record(**ms: float) -> Record:
    """Times by plan name, the chain's 10 ms."""
    times = {CHAIN.name: 10.0} | {name.replace("_", "/"): value for name, value in ms.items()}
    return Record(times)


def test_records_come_back_and_the_file_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plans.json"
    case = one(8, 8, 8, 2)
    PlanCache(CPU, path).put({case.key: record()})
    found = PlanCache(CPU, path).get(case.key)
    assert found == record() or (found is not None and found.ms == record().ms)
    content = json.loads(path.read_text())
    assert content["schema"] == 2 and content["versions"]["torch"] == torch.__version__
    assert content["cases"][case.key]["ms"] == {CHAIN.name: 10.0}
    assert PlanCache(CPU, path).get("another") is None


def test_the_file_is_named_after_the_device_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACKLORA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("packlora.plans.identity.device_name", lambda device: "NVIDIA H200 (80%)")
    assert PlanCache(CPU).path == tmp_path / "packlora" / "plans" / "nvidia-h200-80.json"
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "mine"))
    assert PlanCache(CPU).path == tmp_path / "mine" / "plans" / "nvidia-h200-80.json"


def write(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "not JSON": lambda path: path.write_text('{"schema": 1, "dev'),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: path.write_text("[]"),
    "no cases": lambda path: write(path, lambda c: c.pop("cases")),
    "other schema": lambda path: write(path, lambda c: c.update(schema=1)),
    "other device": lambda path: write(path, lambda c: c.update(device="another")),
    "other torch": lambda path: write(path, lambda c: c["versions"].update(torch="1.0")),
    "no times": lambda path: write(path, lambda c: c["cases"]["a"].pop("ms")),
    "no time for the chain": lambda path: write(path, lambda c: c["cases"]["a"]["ms"].clear()),
    "a negative time": lambda path: write(path, lambda c: c["cases"]["a"]["ms"].update({CHAIN.name: -1})),
    "a time that is not a number": lambda path: write(path, lambda c: c["cases"]["a"]["ms"].update(x="fast")),
    "NaN": lambda path: write(path, lambda c: c["cases"]["a"]["ms"].update(x=float("nan"))),
    "a number beyond all": lambda path: write(path, lambda c: c["cases"]["a"]["ms"].update(x=10**400)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_broken_or_foreign_file_is_ignored_with_one_warning_and_replaced(what: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    PlanCache(CPU, path).put({"a": record()})
    FOREIGN[what](path)
    cache = PlanCache(CPU, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get("a") is None
        assert cache.get("b") is None
        if what == "a folder":
            path.rmdir()
        cache.put({"b": record()})
        cache.put({"c": record()})
    assert len(caught) == 1 and "are not used" in str(caught[0].message) and str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PlanCache(CPU, path)
        assert again.get("a") is None and again.get("b") is not None and again.get("c") is not None


def test_what_others_wrote_in_the_meantime_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    mine, other = PlanCache(CPU, path), PlanCache(CPU, path)
    assert mine.get("a") is None and other.get("a") is None
    other.put({"a": record()})
    mine.put({"b": record()})
    assert PlanCache(CPU, path).get("a") is not None and mine.get("a") is not None


def test_a_case_measured_again_keeps_the_times_of_plans_that_were_not_measured_now() -> None:
    """Over the chain's time: plans that merge weights after `tune` without --lossy, and those for which there was no time."""
    merged, other = named_plan("forward2-backward1"), named_plan("base-added")
    before = Record({CHAIN.name: 10.0, merged.name: 5.0, other.name: 8.0}, {"x": "no memory"})
    now = with_earlier(Record({CHAIN.name: 20.0}, {other.name: "it fails"}), before)
    assert now.ms == {CHAIN.name: 20.0, merged.name: 10.0}
    assert now.failed == {"x": "no memory", other.name: "it fails"}
    again = with_earlier(Record({CHAIN.name: 20.0, other.name: 4.0, "x": 30.0}), now)
    assert again.ms == {CHAIN.name: 20.0, merged.name: 10.0, other.name: 4.0, "x": 30.0} and again.failed == {}


def test_the_chain_stays_unless_it_is_beaten_by_more_than_noise() -> None:
    other = named_plan("base-added")
    assert fastest([CHAIN, other], {CHAIN.name: 10.0, other.name: 9.95}) == CHAIN
    assert fastest([CHAIN, other], {CHAIN.name: 10.0, other.name: 9.8}) == other
    assert fastest([other], {CHAIN.name: 10.0, other.name: 11.0}) == CHAIN


# --- choosing ----------------------------------------------------------------------------------------------------------


def chooser_of(tmp_path: Path, case: Case, ms: dict[str, float] | None = None, estimates: bool = False) -> PlanChooser:
    """estimates: as on a GPU."""
    cache = PlanCache(CPU, tmp_path / "plans.json")
    if ms is not None:
        cache.put({case.key: Record(ms)})
    chooser = PlanChooser(CPU, cache=PlanCache(CPU, tmp_path / "plans.json"))
    chooser.estimates = estimates
    return chooser


LARGE = one(8192, 512, 512, 256)
"""Where backward4 with forward2 has by far the fewest FLOPs."""


@pytest.mark.parametrize("estimates", [False, True])
def test_a_plan_measured_slower_than_the_chain_or_not_at_all_is_never_chosen(tmp_path: Path, estimates: bool) -> None:
    case = dataclasses.replace(LARGE, needs=(False, True, True))
    estimated = chooser_of(tmp_path, case, estimates=True).plan_for(case)
    assert estimated == named_plan("forward1-backward3")
    for ms in ({estimated.name: 10.1}, {}):  # a plan that failed has no time
        assert chooser_of(tmp_path, case, {CHAIN.name: 10.0} | ms, estimates).plan_for(case) == CHAIN


def test_without_measurements_a_gpu_estimates_and_a_cpu_stays_with_the_chain(tmp_path: Path) -> None:
    cache = PlanCache(CPU, tmp_path / "plans.json")
    assert PlanChooser(torch.device("cuda"), cache).estimates and not PlanChooser(CPU, cache).estimates
    chooser = chooser_of(tmp_path, LARGE, estimates=True)
    roof = machine(CPU, "float32")
    chosen = chooser.plan_for(LARGE)
    assert seconds(chosen, LARGE, roof) == min(seconds(plan, LARGE, roof) for plan in legal_plans(LARGE))
    assert not chosen.lossy and chooser.choices[LARGE].origin == "estimated"
    chooser = chooser_of(tmp_path, LARGE)
    assert chooser.plan_for(LARGE) == CHAIN and chooser.choices[LARGE].origin == "not measured"
    dora = dataclasses.replace(LARGE, composed=True, base_dropped=True)
    assert chooser.plan_for(dora) == CHAIN and chooser.choices[dora].origin == "only one"


def test_the_file_is_read_once_and_a_known_case_costs_no_more_than_two_microseconds(tmp_path: Path) -> None:
    case = Case(
        "cpu",
        "bfloat16",
        2048,
        4096,
        (4096, 1024, 1024),
        ((16, 16, 16), (8, 0, 8)),
        (True, False),
        (False, False, False),
    )
    chooser = chooser_of(tmp_path, case, {CHAIN.name: 1.0})
    chooser.plan_for(case)
    (tmp_path / "plans.json").write_text("broken since")
    again = dataclasses.replace(case)
    assert again is not case
    chooser.plan_for(dataclasses.replace(case, tokens=64))
    best = min(timeit.repeat(lambda: chooser.plan_for(again), number=2000, repeat=20)) / 2000
    assert best < 2e-6
    assert len(chooser.choices) == 2


# --- tuning ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tiny_base: Callable[[str], str]) -> Callable[..., Run]:
    def make(*adapters: dict[str, Any], family: str = "qwen2", budget: Any = 64) -> Run:
        jobs = [
            {
                "name": f"job{index}",
                "data": {"path": "unused.jsonl"},
                "adapter": {"target_modules": "all-linear", **adapter},
            }
            for index, adapter in enumerate(adapters)
        ]
        return Run.model_validate(
            {"base_model": tiny_base(family), "output_dir": "unused", "max_tokens_per_microbatch": budget, "jobs": jobs}
        )

    return make


def test_cases_of_a_run_are_its_groups_its_jobs_alone_and_together_in_every_bucket(
    run_file: Callable[..., Run],
) -> None:
    """tiny qwen2: hidden 64, 4 heads and 2 key-value heads of 16, inner 96; q, k and v have biases."""
    run = run_file(
        {"r": 4, "lora_dropout": 0.1}, {"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}
    )
    cases, notes = cases_of_run(run, CPU)
    assert notes == []
    tokens = {8, 12, 16, 24, 32, 48, 64}
    assert {case.tokens for case in cases} == tokens
    found = {(case.K, case.Ns, case.ranks, case.drops, case.biases, case.covered, case.needs) for case in cases}
    qkv, o, gate_up, down = (64, 32, 32), (64,), (96, 96), (64,)
    yes, no, all3 = (True,) * 3, (False,) * 3, (True, True, True)
    want = set()
    for needs in (all3, (False, True, True)):  # the first block's q, k and v: nothing trained is before them
        want |= {
            (64, qkv, ((4, 4, 4),), (True,), yes, True, needs),
            (64, qkv, ((2, 0, 0),), (False,), yes, True, needs),
            (64, qkv, ((4, 4, 4), (2, 0, 0)), (True, False), yes, True, needs),
        }
    want |= {
        (64, o, ((4,),), (True,), no[:1], True, all3), (64, o, ((4,),), (True,), no[:1], False, all3),
        (64, gate_up, ((4, 4),), (True,), no[:2], True, all3), (64, gate_up, ((4, 4),), (True,), no[:2], False, all3),
        (96, down, ((4,),), (True,), no[:1], True, all3), (96, down, ((2,),), (False,), no[:1], True, all3),
        (96, down, ((4,), (2,)), (True, False), no[:1], True, all3),
    }  # fmt: skip
    assert found == want
    assert len(cases) == len(want) * len(tokens)


def test_tune_measures_stores_and_prints_and_a_planner_then_uses_it(
    run_file: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_file(
        {"r": 4, "target_modules": ["o_proj"]}, {"r": 2, "use_dora": True, "target_modules": ["o_proj"]}, budget=2
    )
    cache = PlanCache(CPU, tmp_path / "plans.json")
    tuned = tune(run, CPU, progress=False, budget_s=0.02, cache=cache)
    assert [item.case.key for item in tuned] == [
        f"cpu float32 T{tokens} K64 N64 r4 drop1 grads:{grads}" for tokens in (2, 1) for grads in ("xAB", "AB")
    ]  # nothing trained is before the first block's o_proj
    printed = capsys.readouterr().out
    assert "8 cases have one plan, the plain chain (DoRA)" in printed
    chooser = PlanChooser(CPU, cache=PlanCache(CPU, tmp_path / "plans.json"))
    for item in tuned:
        assert item.plan is not None and item.speedup is not None and item.speedup >= 1
        assert item.case.key in printed and item.plan.name in printed and f"{item.speedup:.2f}" in printed
        assert chooser.plan_for(item.case) == item.plan and chooser.choices[item.case].origin == "measured"


def test_tune_keeps_going_where_plans_fail_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = one(12, 8, 6, 2)
    real = measuring._Operands.work

    def work(self: Any, plan: Plan) -> Callable[[], None]:
        if plan != CHAIN:
            raise torch.OutOfMemoryError("no room")
        return real(self, plan)

    monkeypatch.setattr(measuring._Operands, "work", work)
    monkeypatch.setattr("packlora.tune.plans.standard_cases", lambda device: [case])
    (item,) = tune(None, CPU, progress=False, budget_s=0.02, cache=PlanCache(CPU, tmp_path / "plans.json"))
    assert item.plan == CHAIN and item.speedup == 1
    assert len(item.measured.failed) == len(candidates(case, CPU)) - 1
    assert "mm/before-mm/before: OutOfMemoryError: no room" in capsys.readouterr().out


def test_standard_cases_are_those_of_the_device() -> None:
    on_cpu, on_gpu = standard_cases(CPU), standard_cases(CUDA)
    assert {case.device for case in on_cpu} == {"cpu"} and {case.dtype for case in on_gpu} == {"bfloat16"}
    assert {case.tokens for case in on_gpu} == {2048, 8192}
    assert {(4096, (4096,)), (14336, (4096,)), (4096, (4096, 1024, 1024))} <= {(case.K, case.Ns) for case in on_gpu}
    assert len(set(on_gpu)) == len(on_gpu) and len(set(on_cpu)) == len(on_cpu)


@pytest.mark.gpu
def test_plans_are_measured_on_a_gpu() -> None:
    case = Case.of(CUDA, torch.bfloat16, 1024, 512, [512, 256], [[16, 16], [8, 0]], [True, False], [False, True])
    plans = candidates(case, CUDA)
    assert any(plan.needs_triton for plan in plans)
    out = measure(case, plans, CUDA, budget_s=0.2)
    assert not out.failed and set(out.ms) == {plan.name for plan in plans}


def test_a_chooser_remembers_so_many_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a service come in any mix of ranks."""
    monkeypatch.setattr(select, "MOST", 4)
    chooser = PlanChooser(CPU, cache=PlanCache(CPU, tmp_path / "plans.json"))
    cases = [
        Case.of(CPU, torch.float32, 64, 8, [8], [[rank] for rank in range(1, n)], [False] * (n - 1), [False])
        for n in range(2, 12)
    ]
    found = [chooser.plan_for(case) for case in cases]
    assert len(chooser.choices) == 2
    assert [chooser.choice(case).plan for case in cases] == found and len(chooser.choices) <= 4
