"""How a user wants layers to be computed: what is accepted, for which layers, and which plan is chosen for it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from seeds import SEED
from test_plans import BACKWARD_TABLE, FORWARD_TABLE, LARGE, counted_in_the_group, one

from packlora.errors import InputError
from packlora.ops.lora_linear.plan import CHAIN, PLANS, RUNLORA, NamedPlan, Plan, named_plan
from packlora.plans.ask import MEASURED, Ask, asks_of
from packlora.plans.cache import PlanCache, Record
from packlora.plans.case import Case
from packlora.plans.cost import flops, machine, s_bytes, seconds
from packlora.plans.select import LITTLE, PlanChooser
from packlora.plans.space import legal_plans
from packlora.tune.measure import candidates

CPU = torch.device("cpu")
PATHS = [f"model.layers.{number}.{name}" for number in (1, 11) for name in ("q_proj", "k_proj", "xq_proj")]
LOSSY = {named.name for named in PLANS if named.plan.lossy}


def chooser(tmp_path: Path, ask: Ask, case: Case | None = None, ms: dict[str, float] | None = None) -> PlanChooser:
    cache = PlanCache(CPU, tmp_path / "plans.json")
    if case is not None and ms is not None:
        cache.put({case.key: Record(ms)})
    return PlanChooser(CPU, cache, ask)


# --- what is accepted --------------------------------------------------------------------------------------------------


def test_one_value_is_for_all_layers() -> None:
    assert asks_of(None, paths=PATHS) == asks_of("measured", paths=PATHS) == dict.fromkeys(PATHS, MEASURED)
    assert asks_of("flops", True, "memory", PATHS) == dict.fromkeys(PATHS, Ask("flops", True, "memory"))
    given = Plan(up="merged", keep_s=False)
    assert asks_of(given, paths=PATHS)[PATHS[0]].given == given  # by its parts: as exact as whoever gives it wants it
    for named in PLANS:
        assert asks_of(named.name, lossy=True, paths=["x"])["x"].given == named.plan
        as_reports_write_it = dataclasses.replace(named.plan, keep_s=False).name
        assert asks_of(as_reports_write_it, lossy=True, paths=["x"])["x"].given == dataclasses.replace(
            named.plan, keep_s=False
        )


def test_patterns_match_as_peft_s_do_and_the_first_one_counts() -> None:
    asks = asks_of({r"layers\.1\..*": "chain", "q_proj": "flops", "k_proj": CHAIN}, prefer="memory", paths=PATHS)
    assert [asks[path].plan for path in PATHS] == ["chain", "chain", "chain", "flops", CHAIN, "measured"]
    assert {ask.prefer for ask in asks.values()} == {"memory"}


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        ("fuse", {}, "plan is 'fuse'; accepted are measured, flops, chain, base-added, "),
        ("mm/after-mm/often", {}, "plan is 'mm/after-mm/often'; accepted are measured, flops, chain, base-added, "),
        ("mm/merged-mm/after", {}, "plan is 'mm/merged-mm/after', which merges weights"),
        (3, {}, "plan is 3; accepted are measured, flops, chain"),
        (["chain"], {}, r"plan is \['chain'\]; accepted are"),
        ({"q_proj": "chian"}, {}, "plan of 'q_proj' is 'chian'; accepted are measured, flops"),
        ({"q_proj": {"k_proj": "chain"}}, {}, "plan of 'q_proj' is .*; accepted are"),
        ({"v_proj": "chain", "q_proj": "flops"}, {}, "plan has 'v_proj', which matches no adapted linear layer"),
        ({"(": "chain"}, {}, r"plan has '\(', which is not a valid regular expression"),
        ("chain", {"prefer": "speed"}, "prefer is 'speed'; accepted are time, memory"),
        ("flops", {"lossy": "yes"}, "lossy is 'yes'; accepted are true and false"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(plan: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asks_of(plan, paths=PATHS, **changes)


@pytest.mark.parametrize(
    ("part", "value"), [("dA", "ds"), ("dB", "s"), ("up", "Merged"), ("keep_s", "no"), ("down", None)]
)
def test_a_plan_has_no_other_parts_than_those_that_are_computed(part: str, value: Any) -> None:
    """Another dA would leave A without a gradient."""
    with pytest.raises(ValueError, match=f"plan part {part}: {value!r} is not one of "):
        Plan(**{part: value})
    with pytest.raises(ValueError, match=f"a plan has no part '{part}s'; it has down, up"):
        Plan.from_dict({f"{part}s": "mm"})


@pytest.mark.parametrize("name", sorted(LOSSY))
def test_a_plan_that_merges_weights_is_named_only_with_lossy(name: str) -> None:
    for plan in (name, {"q_proj": name}):
        with pytest.raises(ValueError, match=f"'{name}', which merges weights .* only where lossy is true"):
            asks_of(plan, paths=PATHS)
        assert asks_of(plan, lossy=True, paths=PATHS)


# --- which plan is chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossy", [False, True])
def test_flops_takes_the_fewest_by_runlora_s_formulas_and_as_they_are_counted(tmp_path: Path, lossy: bool) -> None:
    """The chain keeps S: it has forward1-backward1's operations but for those of making it again."""
    rng, seen = random.Random(SEED), set()
    for _ in range(60):
        T, (K, N), r = rng.choice((4, 16, 64, 256)), rng.sample(range(2, 40), 2), rng.randint(1, 20)
        own = chooser(tmp_path, Ask("flops", lossy))
        plan, table = own.plan_for(one(T, K, N, r)), {}
        for named in RUNLORA:
            forward, _, number = named.name.partition("-backward")
            table[named.name] = FORWARD_TABLE[forward](T, K, N, r) + BACKWARD_TABLE[f"b{number}"](T, K, N, r)
            assert flops(named.plan, one(T, K, N, r)) == table[named.name]
        fewest = min(count for name, count in table.items() if lossy or name not in LOSSY)
        fewest = min(fewest, table["forward1-backward1"] - 2 * T * K * r)
        assert flops(plan, one(T, K, N, r)) == fewest == counted_in_the_group(one(T, K, N, r), plan), (T, K, N, r)
        seen.add(plan.lossy)
    assert seen == ({True, False} if lossy else {False})


def test_of_plans_with_as_few_operations_flops_takes_the_fastest_measured(tmp_path: Path) -> None:
    ms = {CHAIN.name: 10.0, "mm/before-mm/before": 8.0, "mm/merged-mm/merged+dA:xd+dB:xd+again": 20.0}
    own = chooser(tmp_path, Ask("flops"), LARGE, ms)
    assert own.plan_for(LARGE) == named_plan("base-added")
    assert own.choices[LARGE].described(LARGE) == "flops, 8 ms, the chain 10 ms, S 8 MiB"
    own = chooser(tmp_path, Ask("flops", lossy=True), LARGE, ms)
    assert own.plan_for(LARGE) == named_plan("forward2-backward4")  # slower, and with fewer
    assert own.choices[LARGE].described(LARGE) == "flops, 20 ms, the chain 10 ms, S not kept"


def test_what_was_measured_of_lossy_plans_counts_only_where_they_are_allowed(tmp_path: Path) -> None:
    ms = {CHAIN.name: 10.0, "mm/after-mm/merged+again": 5.0, "mm/before-mm/before": 8.0}
    assert chooser(tmp_path, Ask(), LARGE, ms).plan_for(LARGE) == named_plan("base-added")
    own = chooser(tmp_path, Ask(lossy=True), LARGE, ms)
    assert own.plan_for(LARGE) == named_plan("forward1-backward5")
    assert own.choices[LARGE].origin == "measured"
    assert not {plan for plan in legal_plans(LARGE) if plan.lossy}
    assert {plan for plan in legal_plans(LARGE, lossy=True) if plan.lossy} == {named_plan(name) for name in LOSSY}


def test_tune_measures_lossy_plans_beside_those_that_it_measures_anyway() -> None:
    exact, both = candidates(LARGE, CPU), candidates(LARGE, CPU, lossy=True)
    assert not any(plan.lossy for plan in exact) and any(plan.lossy for plan in both)
    assert both[: len(exact)] == exact and all(plan.lossy for plan in both[len(exact) :])


@pytest.mark.parametrize("named", PLANS, ids=lambda named: named.name)
def test_a_named_plan_is_taken_or_gives_way_to_the_chain_with_the_reason(tmp_path: Path, named: NamedPlan) -> None:
    dropped = dataclasses.replace(LARGE, drops=(True,))
    two = dataclasses.replace(LARGE, ranks=((4,), (4,)), drops=(False, False))
    for case in (LARGE, dropped, two, dataclasses.replace(LARGE, composed=True, base_dropped=True, drops=(True,))):
        own = chooser(tmp_path, Ask(named.name, lossy=True))
        plan, choice = own.plan_for(case), own.choices[case]
        if named.plan.needs_triton:
            word = "DoRA" if case.base_dropped else "cpu has no Triton kernels"
        elif named.plan.rearranged and case.base_dropped:
            word = "DoRA"
        elif named.plan.lossy and case is dropped:
            word = "no place for dropout"
        elif named.plan.rearranged and case is two:
            word = "one adapter that owns all tokens"
        else:
            assert plan == named.plan and choice.origin == "asked for" and "why_not" not in own.record()[0]
            continue
        assert plan == Plan(keep_s=named.plan.keep_s) and choice.origin == "gave way"
        assert own.record()[0]["why_not"].startswith(f"{named.name}: ") and word in choice.described(case)


def test_a_named_plan_that_rounds_more_on_the_device_gives_way_without_lossy(tmp_path: Path) -> None:
    case, name = one(64, 32, 48, 4, "cuda", "bfloat16"), "epilogue-mm"
    own = chooser(tmp_path, Ask(name))
    assert own.plan_for(case).up == "before" and "lost where it is small" in (own.choices[case].why_not or "")
    assert chooser(tmp_path, Ask(name, lossy=True)).plan_for(case).up == "epilogue"


def test_where_segments_move_a_plan_that_reads_no_tables_gives_way_to_one_that_does(tmp_path: Path) -> None:
    case = dataclasses.replace(
        one(64, 32, 48, 4, "cuda", "float16"), ranks=((4,), (8,)), drops=(False,) * 2, moving=True
    )
    for name in ("chain", "kernels-mm-grad", "flops", "measured"):
        own = chooser(tmp_path, Ask(name))
        own.estimates = True
        assert own.plan_for(case).reads_tables
        (line,) = own.record()
        assert line["origin"] == (
            "flops" if name == "flops" else "only one" if len(legal_plans(case)) == 1 else "estimated"
        )
        assert ("boundaries" in line.get("why_not", "")) == (name not in ("flops", "measured"))
    own = chooser(tmp_path, Ask("kernels"))
    assert own.plan_for(case) == named_plan("kernels") and own.choices[case].origin == "asked for"


# --- memory ------------------------------------------------------------------------------------------------------------


def test_memory_does_without_s_where_making_it_again_costs_little(tmp_path: Path) -> None:
    roof, seen = machine(CPU, "float32"), set()
    for K, N, r in ((64, 4096, 1), (512, 512, 256), (4096, 64, 8), (512, 512, 8), (256, 2048, 16)):
        case = one(512, K, N, r)
        for rule in ("measured", "flops"):
            own, usual = chooser(tmp_path, Ask(rule, prefer="memory")), chooser(tmp_path, Ask(rule)).plan_for(case)
            plan = own.plan_for(case)
            again = dataclasses.replace(usual, keep_s=False)
            little = seconds(again, case, roof) <= (1 + LITTLE) * seconds(usual, case, roof)
            assert plan == (again if little else usual)
            assert ("S not kept" in own.choices[case].described(case)) == little
            assert s_bytes(usual, case) == 512 * r * 4 and s_bytes(again, case) == 0
            seen.add(little)
    assert seen == {True, False}


def test_a_plan_that_is_asked_for_keeps_s_as_it_says_whatever_is_preferred(tmp_path: Path) -> None:
    case = one(512, 64, 4096, 1)
    assert chooser(tmp_path, Ask("chain", prefer="memory")).plan_for(case) == CHAIN
    assert chooser(tmp_path, Ask("forward1-backward1")).plan_for(case) == Plan(keep_s=False)


def test_a_run_file_s_patterns_that_take_forever_are_refused() -> None:
    from packlora.adapters import targets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "MATCH_SECONDS", 0.5)
        with pytest.raises(InputError, match=r"plans: the regular expressions of plan .* take more than 0\.5 s"):
            targets.try_patterns(["(a+)+b"], ["a" * 60], "plans", "plan")
