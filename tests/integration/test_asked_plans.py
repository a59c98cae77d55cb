"""What users ask of the computation of layers, through both doors: packlora.accelerate and the key `plans` of a run file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import graph_runs
import pytest
import torch
from graph_runs import MICROBATCHES, Fixed, Pretended, Run, attention_by_starts
from seeds import SEED
from test_accelerate import assert_same, lora, outcome
from test_training import adapter, config, distance, steps, train
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.engine import recorded
from packlora.live import layers as peft_live
from packlora.ops.lora_linear.plan import CHAIN, PLANS, ROUTED, RUNLORA, NamedPlan, Plan, named_plan
from packlora.plans.cache import PlanCache, Record

Rows = Callable[..., str]
Base = Callable[..., str]
EXACT = [named for named in PLANS if not named.plan.lossy]
LOSSY = [named for named in PLANS if named.plan.lossy]
SIBLINGS = ["q_proj", "k_proj", "v_proj"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Plan]]:
    """Of each call of the operator under accelerate, how many layers it was for and its plan."""
    calls: list[tuple[int, Plan]] = []
    original = peft_live.lora_group

    def watched(*args: Any) -> Any:
        calls.append((len(args[1]), args[5]))
        return original(*args)

    monkeypatch.setattr(peft_live, "lora_group", watched)
    return calls


# --- accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", EXACT, ids=lambda named: named.name)
def test_every_exact_plan_asked_for_by_name_trains_with_peft_s_numbers(
    named: NamedPlan, seen: list[tuple[int, Plan]]
) -> None:
    """In train mode: logits, loss, gradients. Plans of kernels give way to the chain in float64, and the report says so."""
    model = lora()
    want = outcome(model)
    report = packlora.accelerate(model, plan=named.name)
    assert_same(outcome(model), want)
    gave_way = named.plan.needs_triton
    assert {plan for _, plan in seen} == {CHAIN if gave_way else named.plan}
    evidence = f"gave way: {named.name}: the kernels are not for float64" if gave_way else "asked for"
    assert all(module.evidence.startswith(evidence) for module in report.modules)


@pytest.mark.parametrize("named", LOSSY, ids=lambda named: named.name)
def test_a_plan_that_merges_weights_needs_lossy_and_then_computes_the_same_in_float64(
    named: NamedPlan, seen: list[tuple[int, Plan]]
) -> None:
    model = lora()
    want = outcome(model)
    with pytest.raises(ValueError, match="only where lossy is true"):
        packlora.accelerate(model, plan=named.name)
    packlora.accelerate(model, plan=named.name, lossy=True)
    assert_same(outcome(model), want, 1e-11)
    assert {plan for _, plan in seen} == {named.plan}


def test_a_refusal_changes_nothing() -> None:
    model = lora()
    packlora.accelerate(model)
    with pytest.raises(ValueError, match="plan is 'fastest'; accepted are measured, flops, chain, "):
        packlora.accelerate(model, plan="fastest")
    assert all("_packlora" in module.__dict__ for path, module in model.named_modules() if path.endswith("q_proj"))


@pytest.mark.parametrize(
    ("r", "lossy", "start"),
    [
        (4, False, "flops, S 0.125 MiB, at 4096 tokens"),
        (40, False, "flops, 4.0 % fewer FLOPs than the chain, S not kept, at 4096 tokens"),
        (40, True, "flops, 47.1 % fewer FLOPs than the chain, S not kept, at 4096 tokens"),
    ],
)
def test_flops_give_the_same_numbers_and_the_report_says_what_they_save(
    r: int, lossy: bool, start: str, seen: list[tuple[int, Plan]]
) -> None:
    """Layers of 64 x 64, on 256 tokens."""
    ids = torch.randint(3, 320, (8, 32), generator=torch.Generator().manual_seed(SEED))
    model = lora(target_modules=["o_proj"], r=r)
    want = outcome(model, input_ids=ids, labels=ids)
    report = packlora.accelerate(model, plan="flops", lossy=lossy)
    assert_same(outcome(model, input_ids=ids, labels=ids), want, 1e-11)
    assert {plan.lossy for _, plan in seen} == {lossy}
    assert {module.evidence for module in report.modules} == {start} and start in str(report)


def test_memory_is_preferred_without_another_number(seen: list[tuple[int, Plan]]) -> None:
    model = lora(r=1, target_modules=["gate_proj", "up_proj"])
    want = outcome(model)
    report = packlora.accelerate(model, prefer="memory")
    assert_same(outcome(model), want)
    assert {module.plan for module in report.modules} == {Plan(keep_s=False).name}
    assert all("S not kept" in module.evidence for module in report.modules)


def test_patterns_give_layers_their_plans_and_siblings_with_others_are_computed_apart(
    seen: list[tuple[int, Plan]],
) -> None:
    model = lora(lora_dropout=0.0)
    want = outcome(model)
    apart = named_plan("forward1-backward2")
    report = packlora.accelerate(model, plan={r"model\.layers\.0\..*k_proj": "forward1-backward2"})
    assert_same(outcome(model), want)
    first, second = (
        {
            module.path.rpartition(".")[2]: module
            for module in report.modules
            if f"layers.{number}.self_attn" in module.path
        }
        for number in (0, 1)
    )
    own = first["k_proj"]
    assert own.plan == apart.name and own.group == () and own.evidence.startswith("asked for")
    assert [path.rpartition(".")[2] for path in first["q_proj"].group] == ["q_proj", "v_proj"]
    assert [path.rpartition(".")[2] for path in second["k_proj"].group] == SIBLINGS
    assert (1, apart) in seen and {plan for _, plan in seen} == {apart, CHAIN}


def test_a_pattern_that_matches_no_layer_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="plan has 'lm_head', which matches no adapted linear layer"):
        packlora.accelerate(lora(), plan={"q_proj": "chain", "lm_head": "flops"})


def test_what_tune_measured_of_lossy_plans_is_used_only_with_lossy(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, Plan]]
) -> None:
    fast = named_plan("forward2-backward5")
    monkeypatch.setattr(PlanCache, "get", lambda self, key: Record({CHAIN.name: 4.0, fast.name: 1.0}))
    peft_live.choose_plan.cache_clear()
    peft_live._chooser.cache_clear()
    for lossy, plan in ((False, CHAIN), (True, fast)):
        seen.clear()
        model = lora(target_modules=["down_proj"])
        report = packlora.accelerate(model, plan="measured", lossy=lossy)
        outcome(model)
        assert {found for _, found in seen} == {plan}
        assert f"{1 if lossy else 4} ms, the chain 4 ms" in report.modules[0].evidence
    peft_live.choose_plan.cache_clear()
    peft_live._chooser.cache_clear()


# --- run files ---------------------------------------------------------------------------------------------------------

JOBS: list[dict[str, Any]] = [
    {"name": "plain", "adapter": {"r": 4, "lora_dropout": 0.0}, "train": {"global_batch_size": 3}},
    {"name": "large", "adapter": {"r": 40, "lora_dropout": 0.0}, "train": {"global_batch_size": 6}},
]


def chosen(out: Path) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = json.loads((out / "run.json").read_text())["plans"]
    return plans


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "float64"])
@pytest.mark.parametrize("method", [pytest.param("solo", marks=pytest.mark.soak), "auto"])
def test_a_run_by_fewest_operations_gives_the_losses_of_the_default(
    method: str, dtype: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    tree = config(tiny_base(), tmp_path / "default", write_rows, JOBS, dtype=dtype, schedule={"method": method})
    train(tree)
    for name, plans in (("flops", "flops"), ("lossy", {"plan": "flops", "lossy": True, "prefer": "memory"})):
        out = tmp_path / name
        train({**tree, "output_dir": str(out), "plans": plans})
        origins, names = ({line[key] for line in chosen(out)} for key in ("origin", "plan"))
        assert origins == {"flops"}
        assert any("merged" in plan for plan in names) == (name == "lossy")
        for got, want in zip(steps(out), steps(tmp_path / "default"), strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-10 if dtype == "float64" else 1e-5)
        for job in JOBS:
            found = distance(adapter(out, job["name"]), adapter(tmp_path / "default", job["name"]))
            assert found < (1e-10 if dtype == "float64" else 1e-4)


def test_patterns_of_a_run_give_layers_their_plans_with_the_same_numbers(
    tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    """Siblings with different values are computed apart, under one dropout mask all the same."""
    jobs = [{**JOBS[0], "adapter": {"r": 4, "lora_dropout": 0.2}}, JOBS[1]]
    tree = config(tiny_base(), tmp_path / "default", write_rows, jobs, dtype="float64")
    train(tree)
    plans = {"plan": {"k_proj": "forward1-backward3", ".*mlp.*": "base-added"}}
    train({**tree, "output_dir": str(tmp_path / "out"), "plans": plans})
    for job in jobs:
        assert distance(adapter(tmp_path / "out", job["name"]), adapter(tmp_path / "default", job["name"])) < 1e-10
    found = chosen(tmp_path / "out")
    assert {line["origin"] for line in found} == {"asked for", "gave way", "not measured"}
    assert all(
        line["why_not"].startswith("forward1-backward3: ") for line in found if line["origin"] == "gave way"
    )  # in microbatches of both jobs
    assert {line["plan"] for line in found if line["origin"] == "asked for"} == {
        named_plan("forward1-backward3").name, named_plan("base-added").name
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ("fastest", "plans: plan is 'fastest'; accepted are measured, flops, chain, "),
        ({"plan": {"q_proj": "fast"}}, "plans: plan of 'q_proj' is 'fast'; accepted are measured, flops, chain, "),
        ({"plan": {"z_proj": "flops"}}, "plans: plan has 'z_proj', which matches no adapted linear layer"),
        ({"plan": {"(": "flops"}}, "plans.plan.(: has '(', which is not a valid regular expression"),
        ({"plan": RUNLORA[-1].name}, "plans: plan is 'forward2-backward5', which merges weights"),
        ({"pln": "flops"}, "plans.pln: unknown key; did you mean 'plan'?"),
        ({"prefer": "speed"}, "plans.prefer: input should be 'time' or 'memory'; found 'speed'"),
        ({"lossy": "yes"}, "plans.lossy: input should be true or false; found 'yes'"),
        (3, "plans: input should be a mapping; found 3"),
        ({"q_proj": "chain"}, "known keys are plan, lossy, prefer; patterns of modules go into plans.plan"),
        ({"plan": 3}, "plans.plan: input should be a valid string, or a mapping; found 3"),
    ],
)
def test_what_a_run_file_may_not_say_of_plans_is_refused_before_training(
    plans: Any, message: str, tiny_base: Base, write_rows: Rows, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config(tiny_base(), tmp_path / "out", write_rows, JOBS, plans=plans)))  # which is YAML
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 2 and message in result.stderr.replace("\n", " "), result.stderr
    assert not (tmp_path / "out").exists()


def test_plans_may_change_when_a_run_goes_on(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    tree = config(tiny_base(), tmp_path / "out", write_rows, JOBS, dtype="float64")
    train({**tree, "output_dir": str(tmp_path / "whole")})
    train(tree, max_steps=1)
    train({**tree, "plans": "base-added"}, resume=True)
    for job in JOBS:
        assert distance(adapter(tmp_path / "out", job["name"]), adapter(tmp_path / "whole", job["name"])) < 1e-10
    assert {line["plan"] for line in chosen(tmp_path / "out")} == {named_plan("base-added").name}


@pytest.mark.soak
def test_microbatches_of_several_jobs_whose_boundaries_move_train_the_same_without_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under CUDA graphs: S is made again from the tables that the forward read."""
    monkeypatch.setattr(graph_runs, "MICROBATCHES", MICROBATCHES[:4])
    want = Run(None, shrink=4).train()
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(recorded, "LEAST_TOKENS", 64)
    run = Run(Pretended, Fixed(replace(ROUTED, keep_s=False)), shrink=4)
    got = run.train()
    assert not run.told and run.executor._recorder.recorded == 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
